"""Compiling the backend's code: the compiler, the processors that a wheel has code for, and the names of libraries.

Nothing here needs anything installed: the build of the wheel (`hatch_build.py`) loads this file alone.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

SOURCES = Path(__file__).with_name("cpp")
"""The unit that is compiled, native.cpp, and what it includes."""
FLAGS = ("-O2", "-fvect-cost-model=dynamic", "-std=c++17", "-shared", "-fPIC")
"""-O3 takes three times as long, for kernels that are unrolled by hand already."""
PORTABLE = ("-include", str(SOURCES / "portable.h"), "-s", "-Wl,-z,defs")
"""For other machines: names that older systems have too, and no symbols for debugging."""
_V3 = "avx2 fma f16c bmi1 bmi2 movbe abm"
_V4 = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"
LEVELS = {
    "x86-64-v4+avx512vnni": ("x86_64", f"{_V4} avx512_vnni"),
    "x86-64-v4": ("x86_64", _V4),
    "x86-64-v3+avxvnni": ("x86_64", f"{_V3} avx_vnni"),
    "x86-64-v3": ("x86_64", _V3),
    "armv8-a": ("aarch64", "asimd"),
}
"""Levels that a wheel has code for, the best first: their names for the compiler, the machine, and its flags in Linux."""
MOST = {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""Symbols that manylinux_2_28 promises, the oldest system that torch's own wheels run on."""
LONGEST_S = 600.0
"""Seconds that a compiler may take; here it takes 5 to 10."""


def compiler() -> tuple[str, ...] | None:
    """The C++ compiler and its arguments: that of CXX, else the first of c++, g++ and clang++ that is there."""
    given = shlex.split(os.environ.get("CXX", ""))
    for name, *rest in [given] if given else [["c++"], ["g++"], ["clang++"]]:
        if path := shutil.which(name):
            return (path, *rest)
    return None


def absence() -> str:
    """Reason why there is no compiler."""
    given = os.environ.get("CXX")
    return f"CXX={given} is no program here" if given else "there is no C++ compiler (set CXX, or install g++ or clang++)"


def compiled(path: Path, *flags: str) -> str | None:
    """Compile the library to `path` with more flags. The reason where that fails, in the compiler's words; else None."""
    if (own := compiler()) is None:
        return absence()
    command = [*own, *FLAGS, *flags, str(SOURCES / "native.cpp"), "-o", str(path)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LONGEST_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{shlex.join(command)} took more than {LONGEST_S:.0f} s"
    except OSError as error:
        return f"{own[0]} cannot be run ({error.strerror})"
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip()[:600]
        return f"{shlex.join(command)} fails: {words or f'exit status {done.returncode}'}"
    return None if path.is_file() else f"{shlex.join(command)} made no file"


def flags_of(level: str) -> list[str]:
    """The flags for a level: an architecture, and more that it has."""
    architecture, *more = level.split("+")
    return [f"-march={architecture}", *(f"-m{name}" for name in more)]


def glibc(path: Path) -> int:
    """The minor version of the glibc 2 that a library needs. Raises RuntimeError where its C++ runtime is newer than `MOST`."""
    found = re.findall(r"\b(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)", path.read_bytes().decode("latin-1"))
    wanted = {(name, tuple(map(int, number.split(".")))) for name, number in found}
    if newer := [pair for pair in wanted if pair[1] > MOST.get(pair[0], pair[1])]:
        raise RuntimeError(f"{path} needs {newer}, which systems of manylinux_2_28 do not have.")
    return max((number[1] for name, number in wanted if name == "GLIBC"), default=17)


def digest(*facts: str) -> str:
    """Digest of the sources, the flags and more, which stands in names."""
    files = [f"{at.name}\n{at.read_text(encoding='utf-8')}" for at in sorted(SOURCES.iterdir())]
    return hashlib.sha256("\0".join([*files, *FLAGS, *facts]).encode()).hexdigest()[:16]


def named(kind: str, of: str, content: bytes) -> str:
    """The name of a library: its kind, what it was made of, and the digest of all its bytes."""
    return f"{kind}-{of}-{hashlib.sha256(content).hexdigest()}.so"


def is_whole(path: Path) -> bool:
    """True where a library has the bytes that its name states: one cut short would kill the process that loads it."""
    return path.stem.rpartition("-")[2] == hashlib.sha256(path.read_bytes()).hexdigest()
