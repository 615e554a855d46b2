"""What a distillation leaves when it cannot be finished: nothing is refused late, and nothing that was made is lost."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_distil import Killed, plan_of, weights
from typer.testing import CliRunner

from specdecpp.backends import EagerModel
from specdecpp.cli import app
from specdecpp.distillation import network, run, saving, text, writing
from specdecpp.distillation.network import Shape
from specdecpp.distillation.run import TEXT, distil
from specdecpp.distillation.target import Target
from specdecpp.distillation.training import Trainer
from specdecpp.distillation.writing import Writer
from specdecpp.errors import BackendError
from specdecpp.loading import gguf_writing
from specdecpp.loading.pair import REFERENCE
from specdecpp.loading.tokenizers import load_tokenizer
from specdecpp.testing import practice_prompts, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target in a file whose architecture has no room for scaled angles, and prompts."""
    return filled(tmp_path_factory.mktemp("distil"))


def filled(folder: Path) -> Path:
    tokenizer = load_tokenizer(REFERENCE / "target")
    model = tiny_model("qwen2", seed=1, layers=4, head_dim=16, vocab_size=len(tokenizer))
    gguf_writing.write(model, tokenizer, folder / "target.gguf", precision=gguf_writing.Precision.q8_0)
    rows = [json.dumps({"text": prompt[:40]}) for prompt in practice_prompts()]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    return folder


def plan(folder: Path, out: Path) -> Any:
    return plan_of(folder, out, target=str(folder / "target.gguf"), tokens=500)


def test_the_angles_of_the_target_stay_as_they_are(folder, tmp_path):
    """Catches a draft that shares its angles with the copy that is written in 16 bits: its file was refused after hours of
    training ("its rotary angles are scaled"), and the target was measured with rounded ones."""
    assert distil(plan(folder, tmp_path / "out"))["draft"]["files"] == ["draft.gguf", "draft"]
    target = Target(str(folder / "target.gguf"))
    draft, before = network.draft(target.model, Shape(kept=1, own=1)), target.model.model.rotary_emb.inv_freq.clone()
    saving.save(draft, target, Shape(kept=1, own=1), tmp_path, is_cut=True)
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
    monkeypatch.setattr(Writer, "pieces", lambda *_, **__: pytest.fail("written"))
    with pytest.raises(BackendError, match=r"cannot be written as a GGUF file: it is of another kind\. Name the target's"):
        distil(plan(folder, tmp_path / "out"))


def test_a_trained_draft_outlives_a_file_that_cannot_be_written(folder, tmp_path, monkeypatch):
    """Catches a training that is lost to its last step: a full disk, an error in a writer."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(saving, "cut", full)
        with pytest.raises(
            BackendError, match=r"No space left on device\). Nothing is lost: the draft is the checkpoint .*draft"
        ):
            distil(plan(folder, tmp_path / "out"))
    trained = weights(tmp_path / "out")
    monkeypatch.setattr(Trainer, "learn", lambda *_: pytest.fail("trained again"))
    assert distil(plan(folder, tmp_path / "out"))["draft"]["files"] == ["draft.gguf", "draft"]
    assert all(torch.equal(value, trained[name]) for name, value in weights(tmp_path / "out").items())


@pytest.mark.parametrize(("at", "words"), [("pieces", "nothing yet"), ("write", "nothing yet"), ("learn", "1 shard of text")])
def test_ctrl_c_says_what_is_kept_and_how_to_go_on(folder, tmp_path, monkeypatch, at, words):
    """Catches an interruption that says "Aborted!" and nothing of what it leaves."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    owner = {"pieces": Writer, "write": text, "learn": Trainer}[at]
    monkeypatch.setattr(owner, at, interrupted)
    given = ["--prompts", str(folder / "prompts.jsonl"), "--out", str(tmp_path), "--tokens", "1000", "--layers", "1+1"]
    result = CliRunner().invoke(app, ["distil", str(folder / "target.gguf"), *given, "--max-tokens", "12"])
    assert result.exit_code == 130
    assert f"interrupted. {tmp_path} keeps {words}" in result.stderr
    assert result.stderr.rstrip().endswith("Run the same command again to go on from there.")


@pytest.mark.parametrize("number", [1, 2, 4])
def test_shards_that_are_written_together_are_the_same_after_a_kill(folder, tmp_path, monkeypatch, number):
    """Catches a shard whose bytes depend on which others were there when a run went on: as transformers writes on a GPU, in
    groups of three shards whose answers share 24 places."""
    monkeypatch.setattr(writing, "TOGETHER", 3)
    monkeypatch.setattr(writing, "WIDE", 24)
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
        return {path.name: path.read_bytes() for path in (tmp_path / out / TEXT).iterdir()}

    whole = written("whole")
    assert len(whole) >= 4
    assert len(written("killed", killed_at=number)) == number - 1
    assert written("killed") == whole


def stopped(*_: Any) -> None:
    raise Killed
