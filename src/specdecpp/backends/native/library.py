"""The compiled code: found or compiled, checked, loaded, and its signatures.

shipped in the wheel -> compiled before (`cache_dir`) -> compiled now: the first that is whole and has every function

The wheel's code for a level of processors has all that the sources distinguish; compiled for this very one it is no
faster (by hand, x86-64-v3; not measured on AVX-512 and ARM).
"""

import ctypes
import logging
import os
import platform
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from specdecpp import cache_dir
from specdecpp.backends.native import compilation
from specdecpp.errors import BackendError
from specdecpp.sampling import Sampling

log = logging.getLogger("specdecpp.loading")
SHIPPED = Path(__file__).with_name("shipped")
"""Where a wheel has code for common processors. Nothing is there otherwise."""
_TYPES = {
    "pointer": ctypes.c_void_p,
    "int": ctypes.c_int32,
    "long": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "bool": ctypes.c_bool,
    "void": None,
}
_SIGNATURES = {
    "native_team": "void: pointer pointer pointer",
    "native_has_dots": "bool:",
    "native_new": "pointer: pointer",
    "native_matrix": "bool: pointer int int int pointer int int long pointer int",
    "native_unpack": "bool: int pointer int int long pointer int",
    "native_output_ids": "void: pointer pointer int",
    "native_subset": "pointer: pointer pointer int",
    "native_subset_free": "void: pointer",
    "native_norm": "bool: pointer int int pointer int",
    "native_layer": "void: pointer int int int",
    "native_angles": "void: pointer int pointer pointer",
    "native_free": "void: pointer",
    "native_sequence": "pointer:",
    "native_sequence_free": "void: pointer",
    "native_capacity": "int: pointer",
    "native_copy": "bool: pointer pointer pointer int int",
    "native_pass": "void: pointer int pointer int pointer pointer pointer int pointer",
    "native_common": "int: pointer pointer",
    "native_share": "void: pointer pointer int",
    "native_extend_both": "void: pointer int pointer pointer int pointer pointer int int int",
    "native_propose": "void: pointer int pointer int pointer",
    "native_verify": "void: pointer int pointer int",
    "native_draw": "long: pointer long double",
    "native_distribution": "void: pointer int pointer pointer",
    "native_judge": "double: pointer pointer long int pointer pointer int float",
}
"""Results and arguments of the functions in `native.cpp` and `step.h`."""


def _fields(kind: str, names: str) -> list[tuple[str, Any]]:
    return [(name, _TYPES[kind]) for name in names.split()]


ON, STOPPED, ENDED, UNSCORED = range(4)
"""Reasons of `step.h` why drafting ended: the limit, the rule, the end of the text, or a grammar that allows nothing that the
draft scores."""


class Head(ctypes.Structure):
    """The acceptance head (`step.h`)."""

    _fields_ = [*_fields("int", "input scalars width blocks lags rows"), ("kinds", ctypes.c_int32 * 4)]
    _fields_ += _fields("pointer", "weight table block block_bias output") + _fields("double", "shift slope bias")


class PassPart(ctypes.Structure):
    """The rows of a pass that are of one sequence (`model.h`)."""

    _fields_ = _fields("pointer", "sequence") + _fields("int", "start num rows row")


class Filters(ctypes.Structure):
    """Parameters of the draw of a token (`sampling.h`)."""

    _fields_ = [*_fields("float", "temperature top_p min_p penalty"), *_fields("int", "top_k"), *_fields("pointer", "seen")]

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
    """Inputs and outputs of `native_propose` (`step.h`)."""

    _fields_ = _fields("pointer", "seq unread ends uniforms least head more allowed follow tokens rows confidence accept")
    _fields_ += _fields("double", "forward_s head_s value bias slope")
    _fields_ += _fields("int", "why num drawn read num_unread num_ends start limit most evidence judges_by_q scores")
    _fields_ += [("sampling", Filters)]


class Verifying(ctypes.Structure):
    """Inputs and outputs of `native_verify` (`step.h`)."""

    _fields_ = _fields("pointer", "seq tokens uniforms q allowed logits overlaps") + _fields("long", "next")
    _fields_ += _fields("double", "forward_s") + _fields("int", "num_accepted num_tokens num start verification")
    _fields_ += [("sampling", Filters)]


def library() -> Any:
    """The compiled code. Raises `BackendError` with the reasons, the compiler's words among them."""
    lib, words = _found()
    if lib is None:
        raise BackendError(f"there is no compiled code: {words}")
    return lib


def origin() -> str:
    """Where the compiled code is from: "compiled here", or "shipped for" a kind of processor. Raises `BackendError`."""
    library()
    return _found()[1]


def refusal() -> str | None:
    """Reason why there can be no compiled code; None where there is some, or may be: nothing is compiled to find out."""
    if _found.cache_info().currsize:
        lib, words = _found()
        return words if lib is None else None
    return None if compilation.compiler() or next(_shipped(), None) else compilation.absence()


@cache
def _found() -> tuple[Any, str]:
    """The code and its origin, or None and the reasons; as it was the first time in this process."""
    reasons: list[str] = []
    for path, from_where in _candidates(reasons):
        try:
            if compilation.is_whole(path):
                return _bound(ctypes.CDLL(str(path))), from_where
            reasons.append(f"{path} cannot be used: it is damaged")
        except (OSError, AttributeError) as error:  # AttributeError: a function that it does not have
            reasons.append(f"{path} cannot be used: {error}")
        if path.parent != SHIPPED:
            with suppress(OSError):
                path.unlink()
    return None, "; ".join(dict.fromkeys(reasons))


def _candidates(reasons: list[str]) -> Iterator[tuple[Path, str]]:
    """Libraries in the order in which they are wanted, made when they are asked for; what failed is appended."""
    yield from _shipped()
    of = compilation.digest(str(compilation.compiler()), platform.machine(), cache_dir.processor())
    yield from ((path, "compiled here") for path in sorted(cache_dir.folder().glob(f"native-{of}-*.so")))
    if path := _made(of, reasons):
        yield path, "compiled here"


def _made(of: str, reasons: list[str]) -> Path | None:
    """Compile the code for this processor and keep it."""
    try:
        with tempfile.TemporaryDirectory(prefix="specdecpp-") as folder:
            part = Path(folder) / "native.so"
            log.info("compiling for this processor, which is done once")
            if reason := compilation.compiled(part, "-march=native"):
                reasons.append(reason)
                return None
            content = part.read_bytes()
        path = cache_dir.folder() / compilation.named("native", of, content)
        cache_dir.write(path, content)
        return path
    except OSError as error:
        reasons.append(f"compiled code cannot be written ({error})")
        return None


def _shipped() -> Iterator[tuple[Path, str]]:
    """Libraries of the wheel for this processor, the best first."""
    features, of = set(cache_dir.processor().split()), compilation.digest()
    for level, (kind, needed) in compilation.LEVELS.items():
        if platform.machine() == kind and features.issuperset(needed.split()):
            yield from ((path, f"shipped for {level}") for path in SHIPPED.glob(f"{level}-{of}-*.so"))


def _bound(lib: Any) -> Any:
    """A library with its signatures, and the threads of torch."""
    for name, signature in _SIGNATURES.items():
        result, arguments = signature.split(":")
        function = getattr(lib, name)
        function.restype, function.argtypes = _TYPES[result], [_TYPES[one] for one in arguments.split()]
    runtime = _runtime()
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    lib.native_team(*(ctypes.cast(getattr(runtime, name), ctypes.c_void_p) if runtime else None for name in names))
    return lib


def _runtime() -> Any:
    """The OpenMP runtime that torch has loaded; None where none is to be found: one thread then."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        loaded = sorted(set(re.findall(r"/.*/lib(?:gomp|iomp5|omp)[-.].*", maps)))
        of_torch = [path for path in loaded if Path(path).is_relative_to(Path(torch.__file__).parent)]
        runtime = ctypes.CDLL((of_torch or loaded)[0], mode=os.RTLD_NOLOAD)
        return runtime if hasattr(runtime, "GOMP_parallel") else None
    except (OSError, IndexError):
        return None
