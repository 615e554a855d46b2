"""The compiled code is found, compiled, checked and loaded; whatever is wrong with it costs time or speed, and nothing else."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from kinds import needs_compiler

from specdecpp import cache_dir
from specdecpp.backends import NativeModel
from specdecpp.backends.native import compilation, library
from specdecpp.errors import BackendError
from specdecpp.testing import tiny_model

pytestmark = needs_compiler
LOAD = "from specdecpp.backends.native import library; library.library(); print(library.origin())"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own; the process finds the code anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what is killed leaves its folders there
    monkeypatch.setattr(tempfile, "tempdir", None)
    for found_before in (library._found, cache_dir._temporary):
        found_before.cache_clear()
    yield tmp_path / "cache" / "specdecpp"
    for found_here in (library._found, cache_dir._temporary):
        found_here.cache_clear()


class Compiler:
    """A program in the place of the compiler; it counts how often it is called."""

    def __init__(self, folder: Path):
        self.path, self._calls = folder / "cxx", folder / "calls"

    def does(self, what: str) -> None:
        self.path.write_text(f"#!/bin/sh\necho >> {self._calls}\nfor out; do :; done\n{what}\n")
        self.path.chmod(0o755)

    @property
    def calls(self) -> int:
        return len(self._calls.read_text()) if self._calls.exists() else 0


@pytest.fixture
def compiler(compiled_code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Hands out copies of the compiled code; CXX names it with an argument, as in "ccache g++"."""
    made = Compiler(tmp_path)
    made.does(f'cp {compiled_code} "$out"')
    monkeypatch.setenv("CXX", f"{made.path} -m64")
    return made


def found() -> tuple[Any, str]:
    """The library, and where it is from or why there is none, as a new process would find it."""
    library._found.cache_clear()
    return library._found()


DAMAGES = {
    "cut at a page": lambda content: content[:4096],
    "empty": lambda content: b"",
    "one bit": lambda content: bytes([*content[:9000], content[9000] ^ 1, *content[9001:]]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_compiled_again(damage: str, compiler: Compiler, cache: Path) -> None:
    """Catches SIGBUS from a file that was cut short, and an error that only deleting the file by hand ends."""
    library.library()
    (kept,) = cache.glob("native-*")
    content = kept.read_bytes()
    kept.unlink()  # this process has it in its memory
    kept.write_bytes(DAMAGES[damage](content))
    assert subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=True).stdout == "compiled here\n"
    assert compiler.calls == 2
    assert kept.read_bytes() == content
    assert found()[0]
    assert compiler.calls == 2, "what is whole is used again"


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("echo 'panels are out of stock' >&2; exit 3", "panels are out of stock"),
        ("printf '\\377\\n' >&2; exit 1", "fails"),
        ("kill -9 $$", "exit status -9"),
        ("exit 0", "made no file"),
        ('echo text > "$out"', "invalid ELF header|file too short"),
        ("exec sleep 600", "took more than"),
    ],
)
def test_a_compiler_that_fails_is_quoted(
    does: str, told: str, compiler: Compiler, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a failed compilation that leaves something behind, has no reason, ends the default path, or is waited for."""
    monkeypatch.setattr(compilation, "LONGEST_S", 0.5)
    compiler.does(does)
    assert library.refusal() is None, "there is a compiler, and nothing was tried"
    with pytest.raises(BackendError, match=told):
        library.library()
    assert library.refusal()
    assert compiler.calls == 1, "tried once in a process"
    assert not cache.exists() or list(cache.iterdir()) == []


@pytest.mark.parametrize(("given", "told"), [("no-such-compiler", "is no program here"), ("text", "text cannot be run")])
def test_a_compiler_that_cannot_be_called_is_a_refusal(
    given: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a traceback of a name or a file that is no program."""
    (tmp_path / "text").write_text("not a program")
    (tmp_path / "text").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / given) if given == "text" else given)
    with pytest.raises(BackendError, match=told):
        library.library()


def test_a_full_disk_is_told(compiler: Compiler, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Catches an OSError on the default path."""
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(BackendError, match="No space left"):
        library.library()
    assert list(cache.iterdir()) == []


def test_killed_while_compiling(compiler: Compiler, compiled_code: Path, tmp_path: Path, cache: Path) -> None:
    """Catches half a library that the next process loads."""
    half = tmp_path / "half"
    compiler.does(f'head -c 20000 {compiled_code} > "$out"; echo $$ > {half}.new; mv {half}.new {half}; exec sleep 600')
    with subprocess.Popen([sys.executable, "-c", LOAD]) as process:
        while not half.exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
    os.kill(int(half.read_text()), signal.SIGKILL)
    assert list(cache.glob("native-*")) == []
    compiler.does(f'cp {compiled_code} "$out"')
    library.library()


@pytest.fixture
def shipped(compiled_code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel's code for a processor that this one is."""
    monkeypatch.setattr(library, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setitem(compilation.LEVELS, "here", (os.uname().machine, "fpu" if os.uname().machine == "x86_64" else "asimd"))
    path = tmp_path / "shipped" / compilation.named("here", compilation.digest(), compiled_code.read_bytes())
    cache_dir.write(path, compiled_code.read_bytes())
    return path


def test_without_a_compiler_the_code_of_the_wheel_is_taken(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches torch where compiled code lies ready, and code for another processor, of other sources, or damaged."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert library.refusal() is None
    assert library.origin() == "shipped for here"
    content = shipped.read_bytes()
    cache_dir.write(shipped, content[:5000])  # another file: this process has the first in its memory
    assert "it is damaged" in found()[1]
    assert shipped.exists(), "what pip installed is not ours to delete"
    cache_dir.write(shipped, content)
    monkeypatch.setitem(compilation.LEVELS, "here", (os.uname().machine, "fpu flying"))
    assert "no program here" in found()[1]
    monkeypatch.setitem(compilation.LEVELS, "here", (os.uname().machine, ""))
    assert found()[0]
    shipped.rename(shipped.with_name(compilation.named("here", compilation.digest("other sources"), content)))
    assert "no program here" in found()[1]


def test_nothing_is_compiled_where_the_wheel_has_code(shipped: Path, compiler: Compiler, cache: Path) -> None:
    """Catches a first start that waits for a compiler, and a wheel's damaged code that ends the default path."""
    assert library.origin() == "shipped for here"
    assert (compiler.calls, cache.exists()) == (0, False)
    cache_dir.write(shipped, b"damaged")
    assert found()[1] == "compiled here"
    assert compiler.calls == 1


def test_without_a_runtime_of_threads_there_is_one(
    compiled_code: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches code that needs OpenMP to load, or waits for threads that nobody started."""

    def logits() -> torch.Tensor:
        return NativeModel(tiny_model("llama", seed=1, head_dim=16), num_threads=2).new_cache().extend([1, 7, 3, 9], rows=4)[0]

    assert library._runtime() is not None, "torch has one"
    whole = logits()
    monkeypatch.setattr(library, "_runtime", lambda: None)
    library._found.cache_clear()
    assert torch.equal(whole, logits())
