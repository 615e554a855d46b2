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

import identity  # pyright: ignore[reportMissingImports]
from peers import cells  # pyright: ignore[reportMissingImports]
from peers.cells import Cell, Setting  # pyright: ignore[reportMissingImports]
from peers.plan import SMOLLM2, Plan, settings, workers  # pyright: ignore[reportMissingImports]


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


@pytest.mark.parametrize(("pair", "dtype"), [("30m-2m", "int8"), ("30m-2m", "int4"), (SMOLLM2, "q4_1"), (SMOLLM2, "bf16")])
def test_every_engine_is_measured_on_packed_weights(pair: str, dtype: str):
    """Catches a stage in which ours or another engine is left out, or the default rule."""
    stages = [stage for stage in Plan.full().stages[pair] if stage.dtype == dtype]
    assert {stage.threads for stage in stages} == {1, 2}
    found = {(s.engine, s.backend): s for s in settings(pair, stages[0]) if s.name == "target alone"}
    assert {("ours", "native"), ("ours", "llama.cpp"), ("llama.cpp", None), ("openvino", None)} <= found.keys()
    names = {s.name for s in settings(pair, stages[0])}
    assert "cost-aware" in names


def test_a_cell_compares_with_the_target_and_with_the_others_at_their_best():
    """Catches a ratio upside down, a setting that is not the other engine's best, and prompts that only one answered."""
    ours, alone = (Setting(engine="ours", name=name) for name in (cells.DEFAULT, cells.ALONE))
    slow, best = (Setting(engine="llama.cpp", name=name) for name in ("target alone", "n-max 2"))
    runs = {
        ours: [(10, 1.0, 5), (10, 1.0, 5), (10, 8.0, 5)],
        alone: [(10, 2.0, 10), (10, 2.0, 10), (10, 16.0, 10)],
        slow: [(10, 8.0, 10), (10, 8.0, 10)],
        best: [(10, 4.0, 5), (10, 4.0, 5)],
    }
    found = cells.row(Cell(dataset="gsm8k", temperature=0.7, top_p=0.9, runs=runs), SimpleNamespace(prompts=3, other_prompts=2))
    assert found["default_over_target"][0] == 2.0
    assert found["others"] == {"llama.cpp": {"default_over": 4.0, "best": "n-max 2"}}
    assert [of["tokens_per_round"] for of in found["rows"]] == [2.0, 1.0, 1.0, 2.0]


def test_every_engine_is_asked_alike():
    """Catches an engine with another top_p or end, one that is not asked, and drawn tokens of those that write others."""
    asked: dict[str, list[Any]] = defaultdict(list)

    class Own:
        def run(self, request: Any) -> Any:
            asked["ours"].append(request)
            return SimpleNamespace(tokens=[1, 2], steps=1)

    class Other:
        def __init__(self, name: str):
            self.name = name

        def run(self, request: Any, *, limit_s: float) -> Any:
            asked[self.name].append(request)
            return {"tokens": [1, 2], "seconds": 0.5, "steps": 1}

    names = {worker for of in cells.OTHERS.values() for worker, _ in of.values()}
    assert names <= workers(names).keys()
    engines = {"ours": Own(), **{name: Other(name) for name in names}}
    given = SimpleNamespace(tokens=7, other_prompts=1)
    found = cells.measured(engines, list(cells.OTHERS), "gsm8k", [[1], [2]], [0, 2], given)
    for name, requests in asked.items():
        timed = [request for request in requests if request.max_tokens == 7]
        drawn = {(0.0, 1.0)} if name in ("openvino", "vllm, K = 1", "vllm, K = 2") else {*cells.SAMPLINGS}
        assert {(request.temperature, request.top_p) for request in timed} == drawn
        assert not any(request.ignore_eos or request.ends != [0, 2] for request in requests)
    for cell in found:
        nums = {setting.engine: len(runs) for setting, runs in cell.runs.items()}
        assert nums == {"ours": 2, **dict.fromkeys(cells.OTHERS, 1)}
