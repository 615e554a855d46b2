"""What benchmarks rest on: a file cut to its first layers, which settings are measured on what, a rule that none leaves out."""

import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import GGUFReader

from specdecpp import Fixed
from specdecpp.decoder import Decoder
from specdecpp.loading import gguf_writing
from specdecpp.loading.gguf import GGUF
from specdecpp.loading.gguf_writing import cut
from specdecpp.loading.models import load_tokenizer
from specdecpp.loading.pair import REFERENCE, load_pair
from specdecpp.policy_spec import parse_policy, policy_names
from specdecpp.testing import tiny_model

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import front  # pyright: ignore[reportMissingImports]
import identity  # pyright: ignore[reportMissingImports]
from peers import cells  # pyright: ignore[reportMissingImports]
from peers.cells import Cell, Setting  # pyright: ignore[reportMissingImports]
from peers.pool import QWEN_CODER, SMOLLM2, workers  # pyright: ignore[reportMissingImports]
from realpair.log import Log  # pyright: ignore[reportMissingImports]


def test_the_benchmark_of_identity_knows_every_rule() -> None:
    """Catches a rule that is new: the script would stop at it, an hour after it was started, or leave it out."""
    named = {spec.partition(":")[0] for spec in identity.rules()}
    assert named == {name.partition(":")[0] for name in policy_names()} - {"none"}
    assert all(parse_policy(spec) for spec in identity.rules())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers in Q4_1."""
    path, tokenizer = tmp_path_factory.mktemp("cut") / "whole.gguf", load_tokenizer(REFERENCE / "target")
    model = tiny_model("llama", vocab_size=len(tokenizer), layers=3, tie_word_embeddings=True)
    gguf_writing.write(model, tokenizer, path, precision=gguf_writing.Precision.q4_1)
    return path


def test_a_cut_file_has_the_same_bytes(whole: Path, tmp_path: Path):
    """Catches tensors that are packed anew or in another order of rows, and values of the file that are lost or stale."""
    cut(whole, tmp_path / "cut.gguf", 2)
    old, new = GGUFReader(whole), GGUFReader(tmp_path / "cut.gguf")
    tensors = {t.name: (t.tensor_type, t.data.tobytes()) for t in old.tensors}
    assert {t.name: (t.tensor_type, t.data.tobytes()) for t in new.tensors} == {
        name: found for name, found in tensors.items() if not name.startswith("blk.2.")
    }
    values, kept = ({n: f.contents() for n, f in reader.fields.items() if not n.startswith("GGUF.")} for reader in (old, new))
    del values[gguf_writing.FINGERPRINT]  # it is another model
    assert kept == values | {"llama.block_count": 2}


def test_a_cut_file_drafts_for_the_whole(whole: Path, tmp_path: Path):
    """Catches a file that only looks right: drafting with it must not change the text; and a draft that is the target."""
    with pytest.raises(ValueError, match="has 3 layers, of which 3 were asked for"):
        cut(whole, tmp_path / "cut.gguf", 3)
    cut(whole, tmp_path / "cut.gguf", 1)
    assert len(GGUF(tmp_path / "cut.gguf").skeleton.model.layers) == 1
    pair = load_pair(whole, draft=tmp_path / "cut.gguf", backend="eager")
    texts = [
        Decoder(pair, policy=Fixed(k=k)).generate("Two and two", max_tokens=12, temperature=0, ignore_eos=True).tokens
        for k in (0, 3)
    ]
    assert texts[0] == texts[1]


def test_a_cell_compares_with_the_target_and_with_the_others_at_their_best():
    """Catches a ratio upside down, a setting that is not the other engine's best, prompts that only one answered, and an engine
    that is compared with ours of another run."""
    ours, alone = (Setting(engine="ours", name=name) for name in (cells.DEFAULT, cells.ALONE))
    slow, best = (Setting(engine="llama.cpp", name=name) for name in ("target alone", "n-max 2"))
    later = Setting(engine="vllm", name="target alone")
    runs = {
        ours: [(10, 1.0, 5), (10, 1.0, 5), (10, 8.0, 5)],
        alone: [(10, 2.0, 10), (10, 2.0, 10), (10, 16.0, 10)],
        slow: [(10, 8.0, 10), (10, 8.0, 10)],
        best: [(10, 4.0, 5), (10, 4.0, 5)],
    }
    runs_later = {ours: [(10, 2.0, 5)], alone: [(10, 4.0, 10)], later: [(10, 6.0, 0)]}
    found = cells.row([Cell(dataset="gsm8k", temperature=0.7, top_p=0.9, runs=of) for of in (runs_later, runs)])
    assert found["default_over_target"][0] == 2.0
    assert found["others"] == {
        "vllm": {"default_over": 3.0, "best": "target alone", "default_beside": 5.0},
        "llama.cpp": {"default_over": 4.0, "best": "n-max 2", "default_beside": 10.0},
    }
    assert [(of["engine"], of["tokens_per_round"]) for of in found["rows"]] == [
        *(("ours", 2.0), ("ours", 1.0), ("vllm", None), ("llama.cpp", 1.0), ("llama.cpp", 2.0))
    ]


def _asked(pair: str, log: Log, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """The requests that every worker gets."""
    asked: dict[str, list[Any]] = defaultdict(list)

    class Own:
        pair = SimpleNamespace(ends=(0, 2), head="a head", target_fingerprint="p", draft_fingerprint="q", backends="none")

        def run(self, request: Any) -> Any:
            asked["ours"].append(request)
            return SimpleNamespace(tokens=[1, 2], steps=1)

    class Other:
        def __init__(self, name: str):
            self.name = name

        def run(self, request: Any, *, limit_s: float) -> Any:
            asked[self.name].append(request)
            return {"tokens": [1, 2], "seconds": 0.5, "steps": 1}

    own: Any = Own()
    others = [Setting(engine=engine, name=name) for engine, of in cells.OTHERS.items() for name in of]
    others = [of for of in others if of.name not in cells.LEFT_OUT[pair]]
    names = {cells.OTHERS[of.engine][of.name][0] for of in others}
    assert names <= workers(names).keys()
    monkeypatch.setattr(cells, "prompts", lambda *_: {name: [[1], [2]] for name in cells.BENCHMARKS})
    monkeypatch.setattr(cells, "encode", lambda _, prompt: prompt)
    args: Any = SimpleNamespace(pair=pair, prompts=2, other_prompts=1, tokens=70, data=None, ours=None, threads=2, backend=None)
    cells.answers(log, {"ours": own, **{name: Other(name) for name in names}}, others, args)
    log.add(pair=pair, part="sitting", setting=cells._sitting(others), about={"versions": {}, "missing": {}})
    assert cells.told(log, own.pair, 0.1, args)["plan"]["other_prompts"] == 1
    return asked


@pytest.mark.parametrize("pair", [SMOLLM2, QWEN_CODER])
def test_every_engine_is_asked_alike(pair: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches an engine with another top_p or end, one that is not asked, drawn tokens of those that write others, and answers
    that are asked again after a kill."""
    log = Log(tmp_path / "log.jsonl")
    for name, requests in _asked(pair, log, monkeypatch).items():
        timed = [request for request in requests if request.max_tokens == 70]
        drawn = {(0.0, 1.0)} if name in ("openvino", "vllm, K = 1", "vllm, K = 2") else {*cells.SAMPLINGS[pair]}
        assert {(request.temperature, request.top_p) for request in timed} == drawn
        assert not any(request.ignore_eos or request.ends != [0, 2] for request in requests)
        assert {request.seed for request in timed} == ({0} if name == "ours" else {1})
    for sampling in cells.SAMPLINGS[pair]:
        sitting = "ours, llama.cpp, openvino, transformers, vllm"
        nums = {of.engine: len(runs) for of, runs in cells.cell_of(log, pair, sitting, "gsm8k", *sampling).runs.items()}
        assert nums == {"ours": 2, **dict.fromkeys(cells.OTHERS, 1)}
    assert not _asked(pair, Log(log.path), monkeypatch)


def test_the_table_of_the_readme_takes_the_best_and_leaves_out_who_was_not_asked():
    """Catches a row of dashes, the rule's old name and a setting that is not the best."""
    rows = [("ours", "target", 20.0), ("ours", "fixed:1", 30.0), ("ours", "fixed:4", 40.0), ("ours", "default", 50.0)]
    rows += [("openvino", "target alone", 1.0)]
    cell = {"temperature": 0, "top_p": 1, "default_over_target": [2.5]}
    cell["rows"] = [{"engine": e, "setting": name, "tokens_per_second": [rate]} for e, name, rate in rows]
    plan = {"prompts": 2, "other_prompts": 1, "tokens": 8, "threads": 2}
    lines = front.table({"cells": [cell], "plan": plan, "machine": {"cpu": "a"}, "date": "today"}, "Two files").splitlines()
    assert lines[0].startswith("Two files")
    assert lines[4:8] == [
        "| OpenVINO: no draft / the same draft | 1.0 / - |",
        "| ours, no draft | 20 |",
        "| ours, best fixed K | 40 |",
        "| **ours, the default rule** | 50 |",
    ]
