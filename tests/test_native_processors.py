"""The compiled code for other processors: it compiles, and computes what transformers does where this one can run it."""

import ctypes
import functools
import os
import shutil
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from kinds import assert_same_bits, built, needs_compiler
from test_native_kinds import TEXT, near, pair

from specdecpp import cache_dir
from specdecpp.backends import NativeModel
from specdecpp.backends.native import compilation, library
from specdecpp.backends.native.weights import KINDS
from specdecpp.sampling import inverted

pytestmark = [pytest.mark.elsewhere, needs_compiler]
LEVELS = {"x86-64": ("x86_64", "")} | compilation.LEVELS
"""The processors that a wheel has code for, and the oldest."""
QUICK = ("F32", "Q8_0", "Q4_K", "x86-64", "x86-64-v3", "armv8-a")


def slow(names: Iterable[str]) -> list[Any]:
    """All of them, those that are not quick marked so."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in names]


@pytest.fixture(scope="module", params=slow(LEVELS))
def code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The library for a processor; skipped behind its compilation where this one cannot run it."""
    level = request.param
    kind, needed = LEVELS[level]
    path = tmp_path_factory.mktemp(level) / "native.so"
    with pytest.MonkeyPatch.context() as patch:
        if kind != os.uname().machine:
            if not (cross := shutil.which(f"{kind}-linux-gnu-g++")):
                pytest.skip(f"there is no {kind}-linux-gnu-g++")
            patch.setenv("CXX", cross)
        # -O1 takes half the time of a wheel's -O2
        assert compilation.compiled(path, *compilation.flags_of(level), *compilation.PORTABLE, "-O1") is None
    assert compilation.glibc(path) <= 28, "for systems of manylinux_2_28"
    if kind != os.uname().machine or not {*cache_dir.processor().split()}.issuperset(needed.split()):
        pytest.skip(f"this processor is not {level}: its code compiles, and cannot be run")
    return library._bound(ctypes.CDLL(str(path)))


@pytest.fixture(autouse=True)
def loaded(code: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_found", functools.cache(lambda: (code, "compiled for a test")))


@pytest.mark.parametrize("kind", slow(KINDS))
def test_another_processor_computes_the_same(kind: str, code: Any) -> None:
    """Catches registers of another width that read elsewhere, bytes of the wrong sign, and bits that depend on the pass."""
    is_coded = kind not in ("F32", "F16", "BF16")
    for activations in ("float32", "int16", "int8") if is_coded and code.native_has_dots() else ("float32",):
        eager, compiled = pair({"": kind}, activations=activations)
        near(compiled, eager)
        assert_same_bits(compiled, TEXT, [1] * 14, [5, 9], [13, 1], [7, 7], threads=2)


@pytest.mark.parametrize("variant", ["qwen2", "gemma3", "odd-widths"])
def test_families_and_draws_elsewhere(variant: str) -> None:
    """Catches the same of biases, windows and last panels, and a draw from another block."""
    native, points = NativeModel(built(variant), num_threads=1), (0.0, 0.25, 0.5, 0.999999)
    assert_same_bits(native, TEXT, [1] * 14, [5, 9], threads=2)
    for size in (5, 64, 65, 4096):
        p = torch.rand(size, generator=torch.Generator().manual_seed(size)) ** 8
        assert [native.draw(p, u) for u in points] == [inverted(p, u) for u in points]
