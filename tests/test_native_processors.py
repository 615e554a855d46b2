"""The compiled code for other processors than this: it compiles, and computes what the code for this one does.

What Python asks of the library here is recorded, and played by `native_driver.cpp` in a build for each processor that a wheel
has code for, and for the oldest of x86-64. ARM's runs in an emulator: Debian's packages are g++-aarch64-linux-gnu and
qemu-user-static.
"""

import ctypes
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantised import fabricated

from specdecpp import cache_dir
from specdecpp.backends import NativeModel
from specdecpp.backends.native import compilation, weights
from specdecpp.backends.native.weights import KINDS
from specdecpp.loading.gguf_reading import Stored
from specdecpp.testing import tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compilation.compiler() is None, reason="there is no C++ compiler"),
]
DRIVER = Path(__file__).with_name("native_driver.cpp")
TEXT = [1, 7, 3, 9, 12, 30, 2, 5, 41, 8, 8, 17, 60, 33]
CUTS = ([1] * 14, [5, 9], [13, 1], [7, 7])
PROBABILITIES = [torch.rand(size, generator=torch.Generator().manual_seed(size)) ** 8 for size in (5, 64, 65, 4096)]
POINTS = (0, 250_000, 500_000, 999_999)
LEVELS = {"x86-64": ("x86_64", "")} | compilation.LEVELS
"""The processors, as `compilation.LEVELS` has them."""


class Recorder:
    """The library, with its calls written down together with what their pointers point to."""

    def __init__(self, lib: Any):
        self._lib, self.records = lib, b""

    def record(self, name: str, *numbers: int, content: bytes = b"") -> None:
        head = struct.pack(f"<8sq{len(numbers)}q", name.encode(), len(numbers), *numbers)
        self.records += head + struct.pack("<q", len(content)) + content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)

    def native_new(self, shape: Any) -> Any:
        self.record("new", content=bytes(shape._obj))
        return self._lib.native_new(shape)

    def native_matrix(self, handle: Any, *given: Any) -> Any:
        layer, role, kind, rows, out, width, stride, bias, _ = given
        content = ctypes.string_at(rows, out * stride) + (ctypes.string_at(bias, out * 4) if bias else b"")
        self.record("matrix", layer, role, kind, out, width, stride, bool(bias), content=content)
        return self._lib.native_matrix(handle, *given)

    def native_norm(self, handle: Any, layer: int, role: int, weight: int, size: int) -> Any:
        self.record("norm", layer, role, size, content=ctypes.string_at(weight, size * 4))
        return self._lib.native_norm(handle, layer, role, weight, size)

    def native_layer(self, handle: Any, *given: int) -> None:
        self.record("layer", *given)
        self._lib.native_layer(handle, *given)


def recorded(kind: str, family: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> tuple[bytes, np.ndarray]:
    """The calls for a model with weights of a kind, and the logits that this machine's code gives."""
    recorder = Recorder(weights.library())
    monkeypatch.setattr(weights, "library", lambda: recorder)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = tiny_model(family, seed=3, num_hidden_layers=1, **sizes)
    values = {}
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        data = parameter.detach().float().contiguous()
        plain = Stored("F32", tuple(data.shape), data.view(torch.uint8).numpy().reshape(len(data) if data.ndim > 1 else 1, -1))
        values[name] = plain if parameter.ndim < 2 else fabricated(kind, *parameter.shape, seed=seed)
    backend = NativeModel(model, stored=values, num_threads=1, probe=False, **more).new_cache()
    logits, _ = backend.extend(TEXT, rows=len(TEXT))
    for i, (cos, sin) in enumerate(backend.model.weights._tables):
        recorder.record("angles", i, content=cos.numpy().tobytes() + sin.numpy().tobytes())
    for cuts in ([len(TEXT)], *CUTS):
        recorder.record("sequence", len(TEXT))
        start = 0
        for num in cuts:
            tokens = np.array(TEXT[start : start + num], dtype="<i8").tobytes()
            recorder.record("extend", 1 if len(cuts) == 1 else 2, start, num, content=tokens)
            start += num
    for p in PROBABILITIES:
        for point in POINTS:
            recorder.record("draw", point, content=p.numpy().tobytes())
    return recorder.records, logits.numpy()


def results(path: Path) -> Iterator[Any]:
    """Logits [14, V] and states [14, D] of every way to cut the text, then what was drawn."""
    content, at = path.read_bytes(), 0

    def floats(rows: int, width: int) -> np.ndarray:
        nonlocal at
        found = np.frombuffer(content, "<f4", rows * width, at).reshape(rows, width)
        at += found.nbytes
        return found

    for cuts in ([len(TEXT)], *CUTS):
        parts = [(floats(num, 64), floats(num, 256)) for num in cuts]
        yield np.concatenate([logits for logits, _ in parts]), np.concatenate([states for _, states in parts])
    yield np.frombuffer(content, "<i8", -1, at)


@dataclass(frozen=True)
class Driver:
    """A program that plays a recording on a processor, and the processor."""

    level: str
    command: list[str]

    def played(self, records: bytes, folder: Path) -> list[Any]:
        """What the calls give: `results`."""
        (folder / "record").write_bytes(records)
        subprocess.run([*self.command, str(folder / "record"), str(folder / "results")], check=True)
        return list(results(folder / "results"))


@pytest.fixture(scope="session", params=list(LEVELS))
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Compiled for a processor; skipped after that where neither this one nor an emulator can run it."""
    level = request.param
    kind, needed = LEVELS[level]
    own, emulator = compilation.compiler() or (), []
    if kind != os.uname().machine:
        cross, found = (shutil.which(name) for name in (f"{kind}-linux-gnu-g++", f"qemu-{kind}-static"))
        if not cross or not found:
            pytest.skip(f"there is no {kind}-linux-gnu-g++, or no qemu-{kind}-static")
        own, emulator = (cross,), [found]
    path = tmp_path_factory.mktemp(level) / "driver"
    flags = [flag for flag in compilation.FLAGS if flag != "-shared"]
    flags += [*compilation.flags_of(level), "-static", "-pthread", f"-I{compilation.SOURCES}"]
    command = [*own, *flags, str(DRIVER), "-o", str(path)]
    subprocess.run(command, check=True)
    if not emulator and not {*cache_dir.processor().split()}.issuperset(needed.split()):
        pytest.skip(f"this processor is not {level}: its code compiles, and cannot be run")
    return Driver(level, [*emulator, str(path)])


@pytest.mark.parametrize(("kind", "family"), [*((kind, "llama") for kind in KINDS), ("BF16", "qwen2"), ("F16", "gemma3_text")])
def test_another_processor_computes_the_same(
    kind: str, family: str, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches code for another width of registers that reads another place, and rows whose bits depend on the pass there."""
    records, expected = recorded(kind, family, monkeypatch, activations="float32")
    (logits, states), *others, drawn = driver.played(records, tmp_path)
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
    for other in others:
        assert np.array_equal(other[0], logits)
        assert np.array_equal(other[1], states)
    draw = weights.library().native_draw
    assert drawn.tolist() == [draw(p.data_ptr(), len(p), point * 1e-6) for p in PROBABILITIES for point in POINTS]


@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_products_of_whole_numbers_are_the_same_elsewhere(
    kind: str, activations: str, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an instruction that takes signed bytes for unsigned ones, or saturates, and inputs in another order than
    codes."""
    if "avx2" not in LEVELS[driver.level][1] or not weights.library().native_has_dots():
        pytest.skip("it has no products of whole numbers")
    records, expected = recorded(kind, "llama", monkeypatch, activations=activations)
    (logits, _), *others, _ = driver.played(records, tmp_path)
    away = np.abs(logits - expected).max(axis=1) / np.abs(expected).max()
    assert away[0] < 1e-4
    # A last bit of a sum of another order may round an input to the next step, which are large in bytes.
    assert away.max() < (0.03 if activations == "int8" else 3e-4)
    assert all(np.array_equal(other[0], logits) for other in others)
