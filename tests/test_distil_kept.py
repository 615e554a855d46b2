"""What a distillation leaves when it cannot be finished: nothing is refused late, and nothing that was made is lost."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_distil import Killed, filled, plan_of, weights
from typer.testing import CliRunner

from specdecpp.backends import EagerModel
from specdecpp.cli import app
from specdecpp.distillation import network, run, saving, text, training
from specdecpp.distillation.network import Shape
from specdecpp.distillation.run import TEXT, distil
from specdecpp.distillation.target import Target
from specdecpp.distillation.training import Trainer, _weight, rounded
from specdecpp.errors import BackendError
from specdecpp.loading import gguf_writing
from specdecpp.loading.gguf import GGUF
from specdecpp.loading.gguf_writing import Precision
from specdecpp.loading.models import load_model
from specdecpp.loading.pair import REFERENCE
from specdecpp.loading.tokenizers import load_tokenizer
from specdecpp.testing import tiny_model
from specdecpp.training.train import saved


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target in a file whose architecture has no room for scaled angles, and prompts."""
    return filled_with_file(filled(tmp_path_factory.mktemp("distil")))


def filled_with_file(folder: Path) -> Path:
    tokenizer = load_tokenizer(REFERENCE / "target")
    model = tiny_model("qwen2", seed=1, layers=4, head_dim=16, vocab_size=len(tokenizer))
    gguf_writing.write(model, tokenizer, folder / "target.gguf", precision=gguf_writing.Precision.q8_0)
    return folder


def plan(folder: Path, out: Path) -> Any:
    return plan_of(folder, out, target=str(folder / "target.gguf"), tokens=500)


def test_the_angles_of_the_target_stay_as_they_are(folder, tmp_path):
    """Catches a draft that shares its angles with the copy that is written in 16 bits: its file was refused after hours of
    training ("its rotary angles are scaled"), and the target was measured with rounded ones."""
    assert distil(plan(folder, tmp_path / "out"))["draft"]["files"] == ["draft.gguf", "draft"]
    target = Target(str(folder / "target.gguf"))
    draft, before = network.draft(target.model, Shape(kept=1, own=1)), target.model.model.rotary_emb.inv_freq.clone()
    saving.save(draft, target, tmp_path, kept=1)
    assert target.model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(target.model.model.rotary_emb.inv_freq, before)


def test_angles_of_another_processor_are_the_same_angles():
    """Catches a comparison to the bit: a GPU's powers differ in the last places, scaled angles by far more."""
    model = tiny_model("qwen2", seed=1)
    angles = model.model.rotary_emb.inv_freq
    angles.mul_(1 + 4e-6 * torch.rand(angles.shape, generator=torch.Generator().manual_seed(0)))
    assert gguf_writing.refusal(model) is None
    angles[-1] /= 1.01
    assert gguf_writing.refusal(model) == "its rotary angles are scaled"


def test_what_cannot_be_written_is_refused_before_anything_is(folder, tmp_path, monkeypatch):
    """Catches a refusal at the very end, when the draft is trained."""
    monkeypatch.setattr(gguf_writing, "refusal", lambda model: "it is of another kind")
    monkeypatch.setattr(text, "answered", lambda *_, **__: pytest.fail("written"))
    with pytest.raises(BackendError, match=r"cannot be written as a GGUF file: it is of another kind\. Name the target's"):
        distil(plan(folder, tmp_path / "out"))


def test_a_trained_draft_outlives_a_file_that_cannot_be_written(folder, tmp_path, monkeypatch):
    """Catches a training that is lost to its last step: a full disk, an error in a writer."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(gguf_writing, "cut", full)
        with pytest.raises(
            BackendError, match=r"No space left on device\). Nothing is lost: the draft is the checkpoint .*draft"
        ):
            distil(plan(folder, tmp_path / "out"))
    trained = weights(tmp_path / "out")
    monkeypatch.setattr(Trainer, "learn", lambda *_: pytest.fail("trained again"))
    assert distil(plan(folder, tmp_path / "out"))["draft"]["files"] == ["draft.gguf", "draft"]
    assert all(torch.equal(value, trained[name]) for name, value in weights(tmp_path / "out").items())


def test_ctrl_c_says_how_to_go_on(folder, tmp_path, monkeypatch):
    """Catches an interruption that says "Aborted!" and nothing of what it leaves."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "learn", interrupted)
    given = ["--prompts", str(folder / "prompts.jsonl"), "--out", str(tmp_path), "--tokens", "1000", "--layers", "1+1"]
    result = CliRunner().invoke(app, ["distil", str(folder / "target.gguf"), *given, "--max-tokens", "12"])
    assert result.exit_code == 130
    assert f"interrupted. Finished work stays in {tmp_path}; run the same command again to go on." in result.stderr
    assert len([*(tmp_path / TEXT).iterdir()]) > 0


@pytest.mark.parametrize("number", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_shards_that_are_written_together_are_the_same_after_a_kill(folder, tmp_path, monkeypatch, number):
    """Catches a shard whose bytes depend on which others were there when a run went on: as transformers writes on a GPU, in
    groups of three shards whose answers share 24 places."""
    monkeypatch.setattr(text, "TOGETHER", 3)
    monkeypatch.setattr(text, "WIDE", 24)
    monkeypatch.setattr(Target, "writer", property(lambda self: EagerModel(self.quick)))
    asked = replace(plan(folder, tmp_path), tokens=5 * 64 * 12)

    def written(out: str, *, killed_at: int = 0) -> dict[str, bytes]:
        write, calls = text.write, 0

        def torn(*given: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == killed_at:
                raise Killed
            write(*given)

        with monkeypatch.context() as here:
            here.setattr(text, "write", torn)
            here.setattr(run, "_survey", stopped)
            with pytest.raises(Killed):
                distil(replace(asked, out=tmp_path / out))
        return {path.name: path.read_bytes() for path in (tmp_path / out / TEXT).glob("*")}

    whole = written("whole")
    assert len(whole) >= 4
    assert len(written("killed", killed_at=number)) == number - 1
    assert written("killed") == whole


def stopped(*_: Any) -> None:
    raise Killed


@pytest.mark.elsewhere
def test_everything_lies_on_the_device_of_the_target(tmp_path):
    """Catches a tensor that is made without a device, from choosing a shape to the file: on a GPU the training failed at its
    first step, when the text had been written. `toy_device.py` refuses what a GPU refuses."""
    filled_with_file(filled(tmp_path))
    command = [sys.executable, str(Path(__file__).with_name("toy_device.py")), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["draft", "draft.gguf draft"]


@pytest.mark.parametrize("precision", [Precision.q4_1, Precision.q8_0])
def test_the_values_are_those_of_the_file_to_the_bit(precision):
    """Catches another rounding of halves, scales that stay in four bytes, and blocks of zeros that become NaN."""
    gguf = pytest.importorskip("gguf")
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    weight[0] = 0
    weight[1, :32] = 0.25
    kind = gguf.GGMLQuantizationType[precision.upper()]
    stored = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)
    assert np.array_equal(rounded(weight, precision).numpy(), stored)


def test_gradients_pass_as_if_nothing_was_rounded():
    weight, given, odd = torch.randn(4, 64, requires_grad=True), torch.randn(4, 64), torch.randn(4, 40)
    (_weight(weight, Precision.q4_1, None) * given).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, given)
    assert rounded(odd, Precision.q4_1) is odd
    assert _weight(odd, None, None) is odd
    assert _weight(weight, Precision.q4_1, torch.bfloat16).dtype == torch.bfloat16


def test_what_is_trained_computes_as_the_file_does(folder, tmp_path):
    """Catches a training on weights that the file does not have, and a file in other bits than its training was told."""
    model = load_model(REFERENCE / "target", dtype=torch.float32, device=None, device_map=None)
    whole, out = tmp_path / "whole.gguf", tmp_path / "out"
    gguf_writing.write(model, load_tokenizer(REFERENCE / "target"), whole, precision=Precision.q4_1)
    shape = Shape(kept=2, own=1, tokens=500)
    distil(plan_of(folder, out, target=str(whole), shape=shape, tokens=1500, max_tokens=16))
    target, file = Target(str(whole)), Target(str(out / "draft.gguf"))
    assert target.precision is Precision.q4_1
    own = (w for name, w in GGUF(out / "draft.gguf").stored.items() if name.startswith("model.layers.2."))
    assert {w.kind for w in own if len(w.shape) == 2} == {"Q4_1"}
    draft = network.draft(target.model, shape)
    own_layers = training.own_weights(network.tail(draft, 2))
    with saved(out / training.STATE, otherwise="") as state:
        for parameter, value in zip(own_layers, state["own"], strict=True):
            parameter.data.copy_(value)
    some = list(text.pieces(next((out / "text").iterdir())))[:3]
    trained = training.hidden(network.tail(draft, 2), some, precision=Precision.q4_1)
    torch.testing.assert_close(trained, training.hidden(network.tail(file.model, 2), some), rtol=1e-5, atol=1e-5)
