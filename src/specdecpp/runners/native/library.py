"""The compiled code of the runner: found or compiled, checked, loaded, and its signatures."""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from specdecpp import machine
from specdecpp.errors import RunnerError

SOURCES = Path(__file__).with_name("cpp")
"""The unit that is compiled, native.cpp, and what it includes."""
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC")
_RUNTIME = re.compile(r"/lib(gomp|iomp5|omp)[-.]")


class Head(ctypes.Structure):
    """The acceptance head, as `native.cpp` reads it."""

    _fields_ = [(name, ctypes.c_int32) for name in ("input", "scalars", "width", "blocks")]
    _fields_ += [("kinds", ctypes.c_int32 * 4)]
    _fields_ += [(name, ctypes.c_void_p) for name in ("weight", "table", "block", "block_bias", "output")]
    _fields_ += [(name, ctypes.c_double) for name in ("shift", "slope", "bias")]


class Drafting(ctypes.Structure):
    """What `native_propose` is told and says: see there."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("unread", "ends", "uniforms", "least", "head")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("tokens", "rows", "confidence", "accept")]
    _fields_ += [(name, ctypes.c_double) for name in ("forward_s", "head_s")]
    _fields_ += [(name, ctypes.c_int32) for name in ("why", "num_unread", "num_ends", "start", "limit", "evidence")]
    _fields_ += [("temperature", ctypes.c_float)]


class Verifying(ctypes.Structure):
    """What `native_verify` is told and says: see there."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("tokens", "coins", "q", "logits", "states")]
    _fields_ += [("next", ctypes.c_int64), ("forward_s", ctypes.c_double)]
    _fields_ += [(name, ctypes.c_int32) for name in ("num_accepted", "num_tokens", "num", "start", "is_block")]
    _fields_ += [("temperature", ctypes.c_float)]


def compiler() -> str | None:
    """The C++ compiler: what CXX names, else the first of c++, g++ and clang++ that is there."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else ("c++", "g++", "clang++")
    return next((path for name in names if (path := shutil.which(name))), None)


@cache
def library() -> Any:
    """The compiled code, from `machine.folder()` or compiled now. Raises `RunnerError` with the compiler's words."""
    path = _binary()
    if not path.exists():
        _compile(path)
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise RunnerError(f"{path} cannot be loaded ({error}). Delete it, and it is compiled again.") from error
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    signatures = {
        "native_new": (pointer, [pointer]),
        "native_matrix": (ctypes.c_bool, [pointer, *[number] * 3, pointer, number, number, ctypes.c_int64, pointer]),
        "native_norm": (ctypes.c_bool, [pointer, number, number, pointer, number]),
        "native_layer": (None, [pointer, *[number] * 3]),
        "native_angles": (None, [pointer, number, pointer, pointer]),
        "native_free": (None, [pointer]),
        "native_sequence": (pointer, []),
        "native_sequence_free": (None, [pointer]),
        "native_capacity": (number, [pointer]),
        "native_grow": (ctypes.c_bool, [pointer, pointer, number, number]),
        "native_propose": (number, [pointer, number, pointer, pointer]),
        "native_verify": (None, [pointer, number, pointer, pointer]),
        "native_draw": (ctypes.c_int64, [pointer, ctypes.c_int64, ctypes.c_double]),
        "native_extend": (None, [pointer, number, pointer, pointer, number, number, number, *[pointer] * 2]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def _binary() -> Path:
    """Where the compiled code lies: its name changes with the source, the compiler and the processor."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(SOURCES.iterdir())]
    facts = [*sources, *FLAGS, *_openmp(), str(compiler()), platform.machine(), machine.processor()]
    return machine.folder() / f"native-{hashlib.sha256(chr(0).join(facts).encode()).hexdigest()[:16]}.so"


@cache
def _openmp() -> tuple[str, ...]:
    """How to use the OpenMP runtime that torch has loaded; nothing where there is none to be found: one thread then."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    loaded = sorted({path for line in lines if _RUNTIME.search(path := line.rpartition(" ")[2])})
    of_torch = [path for path in loaded if Path(path).is_relative_to(Path(torch.__file__).parent)]
    return (*(of_torch or loaded)[:1], "-fopenmp") if loaded else ()


def _compile(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    command = [str(compiler()), *FLAGS, "-march=native", str(SOURCES / "native.cpp"), *_openmp(), "-o", str(part)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunnerError(f"{' '.join(command)} fails: {done.stderr.strip()[:600]}")
    part.replace(path)
