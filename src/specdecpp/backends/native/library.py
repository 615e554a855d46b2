"""The compiled code: found or compiled, checked, loaded, and its signatures.

compiled before (`cache_dir`) -> compiled now -> shipped in the wheel: the first that is whole and has every function
"""

import ctypes
import os
import platform
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specdecpp import cache_dir
from specdecpp.backends.native import compilation
from specdecpp.errors import BackendError
from specdecpp.sampling import Sampling

_RUNTIME = re.compile(r"/lib(gomp|iomp5|omp)[-.]")
SHIPPED = Path(__file__).with_name("shipped")
"""Where a wheel has code for common processors. Nothing is there otherwise."""


class Head(ctypes.Structure):
    """The acceptance head, as `native.cpp` reads it."""

    _fields_ = [(name, ctypes.c_int32) for name in ("input", "scalars", "width", "blocks", "lags")]
    _fields_ += [("kinds", ctypes.c_int32 * 4)]
    _fields_ += [(name, ctypes.c_void_p) for name in ("weight", "table", "block", "block_bias", "output")]
    _fields_ += [(name, ctypes.c_double) for name in ("shift", "slope", "bias")]


class PassPart(ctypes.Structure):
    """The rows of a pass that are of one sequence."""

    _fields_ = [("sequence", ctypes.c_void_p), *((name, ctypes.c_int32) for name in ("start", "num", "rows", "row"))]


class Filters(ctypes.Structure):
    """How tokens are drawn, as `sampling.h` reads it."""

    _fields_ = [(name, ctypes.c_float) for name in ("temperature", "top_p", "min_p", "penalty")]
    _fields_ += [("top_k", ctypes.c_int32), ("seen", ctypes.c_void_p)]

    @classmethod
    def of(cls, sampling: Sampling, seen: torch.Tensor | None) -> "Filters":
        """Fill in these parameters; `seen` must live as long as this is used."""
        return cls(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            penalty=sampling.repetition_penalty,
            top_k=sampling.top_k or 0,
            seen=seen.data_ptr() if seen is not None and sampling.needs_seen else None,
        )


class Drafting(ctypes.Structure):
    """Arguments and results of `native_propose`: see there."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("unread", "ends", "uniforms", "least", "head")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("tokens", "rows", "confidence", "accept")]
    _fields_ += [(name, ctypes.c_double) for name in ("forward_s", "head_s", "value", "bias", "slope")]
    _fields_ += [(name, ctypes.c_int32) for name in ("why", "num_unread", "num_ends", "start", "limit", "evidence")]
    _fields_ += [(name, ctypes.c_int32) for name in ("judges_by_q", "scores")]
    _fields_ += [("sampling", Filters)]


class Verifying(ctypes.Structure):
    """Arguments and results of `native_verify`: see there."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("tokens", "uniforms", "q", "logits", "states", "raw", "overlaps")]
    _fields_ += [("next", ctypes.c_int64), ("forward_s", ctypes.c_double)]
    _fields_ += [(name, ctypes.c_int32) for name in ("num_accepted", "num_tokens", "num", "start", "verification")]
    _fields_ += [("sampling", Filters)]


class Found(NamedTuple):
    """The compiled code, and where it is from."""

    lib: Any
    origin: str


def library() -> Any:
    """The compiled code. Raises `BackendError` with the reasons, the compiler's words among them."""
    return _existing().lib


def origin() -> str:
    """Where the compiled code is from: "compiled here", or "shipped for" a kind of processor and why. Raises `BackendError`."""
    return _existing().origin


def _existing() -> Found:
    found = _found()
    if isinstance(found, str):
        raise BackendError(f"there is no compiled code: {found}")
    return found


def refusal() -> str | None:
    """Why there can be no compiled code; None where there is some, or may be: nothing is compiled to find out."""
    if _found.cache_info().currsize:
        return found if isinstance(found := _found(), str) else None
    return None if compilation.compiler() or next(_shipped(), None) else compilation.absence()


@cache
def _found() -> Found | str:
    """The code, or what stands against each way to have it; as it was the first time in this process."""
    troubles: list[str] = []
    for path, origin in _candidates(troubles):
        lib = _loaded(path, troubles)
        if lib is not None:
            return Found(lib, ", since ".join([origin, *troubles[:1]]) if origin.startswith("shipped") else origin)
    return "; ".join(dict.fromkeys(troubles))


def _candidates(troubles: list[str]) -> Iterator[tuple[Path, str]]:
    """Libraries in the order in which they are wanted, made when they are asked for; what failed is appended."""
    of = compilation.digest(str(compilation.compiler()), platform.machine(), cache_dir.processor())
    shipped = list(_shipped())
    if cache_dir.trouble() is None or not shipped:
        for path in sorted(cache_dir.folder().glob(f"native-{of}-*.so")):
            yield path, "compiled here"
        path = _made(of, troubles)
        if path is not None:
            yield path, "compiled here"
    else:  # every process would compile again
        troubles.append(f"compiled code cannot be kept here: {cache_dir.trouble()}")
    yield from shipped


def _made(of: str, troubles: list[str]) -> Path | None:
    """Compile the code for this processor and keep it."""
    try:
        with tempfile.TemporaryDirectory(prefix="specdecpp-") as folder:
            part = Path(folder) / "native.so"
            if reason := compilation.compiled(part, "-march=native"):
                troubles.append(reason)
                return None
            content = part.read_bytes()
        path = cache_dir.folder() / compilation.named("native", of, content)
        with cache_dir.whole(path) as part:
            part.write_bytes(content)
            part.chmod(0o700)
        return path
    except OSError as error:
        troubles.append(f"compiled code cannot be written ({error})")
        return None


def _shipped() -> Iterator[tuple[Path, str]]:
    """Libraries of the wheel for this processor, the best first."""
    features, of = set(cache_dir.processor().split()), compilation.digest()
    for level, (kind, needed) in compilation.LEVELS.items():
        if platform.machine() == kind and features.issuperset(needed.split()):
            yield from ((path, f"shipped for {level}") for path in SHIPPED.glob(f"{level}-{of}-*.so"))


def _loaded(path: Path, troubles: list[str]) -> Any:
    """A library, checked before its code is run; None where it is not as it should be. One of ours is deleted then."""
    is_ours = path.parent != SHIPPED
    try:
        found = path.stat()
        if is_ours and (found.st_uid != os.geteuid() or found.st_mode & 0o022):
            reason = "others can write to it"
        elif not compilation.is_whole(path):
            reason = "it is damaged"
        else:
            return _bound(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:  # AttributeError: a function that it does not have
        reason = str(error)
    troubles.append(f"{path} cannot be used: {reason}")
    if is_ours:
        with suppress(OSError):
            path.unlink()
    return None


def _bound(lib: Any) -> Any:
    """A library with its signatures, and the threads of torch."""
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    signatures = {
        "native_team": (None, [pointer] * 3),
        "native_has_dots": (ctypes.c_bool, []),
        "native_new": (pointer, [pointer]),
        "native_matrix": (ctypes.c_bool, [pointer, *[number] * 3, pointer, number, number, ctypes.c_int64, pointer, number]),
        "native_unpack": (ctypes.c_bool, [number, pointer, number, number, ctypes.c_int64, pointer, number]),
        "native_packed_bytes": (ctypes.c_int64, [number] * 3),
        "native_output_ids": (None, [pointer, pointer, number]),
        "native_norm": (ctypes.c_bool, [pointer, number, number, pointer, number]),
        "native_layer": (None, [pointer, *[number] * 3]),
        "native_angles": (None, [pointer, number, pointer, pointer]),
        "native_free": (None, [pointer]),
        "native_sequence": (pointer, []),
        "native_sequence_free": (None, [pointer]),
        "native_capacity": (number, [pointer]),
        "native_copy": (ctypes.c_bool, [pointer, pointer, pointer, number, number]),
        "native_distribution": (None, [pointer, number, pointer, pointer]),
        "native_pass": (None, [pointer, number, pointer, number, *[pointer] * 3, number, pointer]),
        "native_common": (number, [pointer, pointer]),
        "native_share": (None, [pointer, pointer, number]),
        "native_extend_both": (None, [pointer, number, pointer, pointer, number, pointer, pointer, *[number] * 3]),
        "native_propose": (None, [pointer, number, pointer, pointer, number, pointer]),
        "native_verify": (None, [pointer, number, pointer, pointer, number]),
        "native_judge": (ctypes.c_double, [pointer, pointer, ctypes.c_int64, number, pointer, pointer, number, ctypes.c_float]),
        "native_draw": (ctypes.c_int64, [pointer, ctypes.c_int64, ctypes.c_double]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    runtime = _runtime()
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    lib.native_team(*(ctypes.cast(getattr(runtime, name), pointer) if runtime else None for name in names))
    return lib


def _runtime() -> Any:
    """The OpenMP runtime that torch has loaded; None where none is to be found: one thread then."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        loaded = sorted({words[5] for line in lines if len(words := line.split(maxsplit=5)) == 6 and _RUNTIME.search(words[5])})
        of_torch = [path for path in loaded if Path(path).is_relative_to(Path(torch.__file__).parent)]
        runtime = ctypes.CDLL((of_torch or loaded)[0], mode=os.RTLD_NOLOAD)
        return runtime if hasattr(runtime, "GOMP_parallel") else None
    except (OSError, IndexError):
        return None
