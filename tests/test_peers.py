"""What the benchmarks beside other engines rest on: a file cut to its first layers, and which settings are measured on what."""

import sys
from pathlib import Path

import pytest
from gguf import GGUFReader

from specdecpp import Fixed
from specdecpp.decoder import Decoder
from specdecpp.loading import gguf_writing
from specdecpp.loading.gguf_reading import GGUFSource
from specdecpp.loading.models import load_tokenizer
from specdecpp.loading.pair import REFERENCE, load_pair
from specdecpp.testing import tiny_model

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from peers.plan import SMOLLM2, Plan, settings  # pyright: ignore[reportMissingImports]
from peers.smollm2 import cut  # pyright: ignore[reportMissingImports]


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
    """Catches a file that only looks right: it must load, and drafting with it must not change the text."""
    cut(whole, tmp_path / "cut.gguf", 1)
    assert len(GGUFSource(tmp_path / "cut.gguf").skeleton.model.layers) == 1
    pair = load_pair(whole, draft=tmp_path / "cut.gguf", runner="eager")
    texts = [
        Decoder(pair, policy=Fixed(k=k)).generate("Two and two", max_tokens=12, temperature=0, ignore_eos=True).tokens
        for k in (0, 3)
    ]
    assert texts[0] == texts[1]


def test_more_layers_than_there_are_cannot_be_cut(whole: Path, tmp_path: Path):
    """Catches a draft that is the whole target."""
    with pytest.raises(ValueError, match="has 3 layers, of which 3 were asked for"):
        cut(whole, tmp_path / "cut.gguf", 3)
    assert not (tmp_path / "cut.gguf").exists()


@pytest.mark.parametrize(("pair", "dtype"), [("30m-2m", "int8"), ("30m-2m", "int4"), (SMOLLM2, "q4_1"), (SMOLLM2, "bf16")])
def test_every_engine_is_measured_on_packed_weights(pair: str, dtype: str):
    """Catches a stage in which ours or another engine is left out, and rules that need a head where a pair has none."""
    stages = [stage for stage in Plan.full().stages[pair] if stage.dtype == dtype]
    assert {stage.threads for stage in stages} == {1, 2}
    found = {(s.engine, s.runner): s for s in settings(pair, stages[0]) if s.name == "target alone"}
    assert {("ours", "native"), ("ours", "llama.cpp"), ("llama.cpp", None), ("openvino", None)} <= found.keys()
    names = {s.name for s in settings(pair, stages[0])}
    assert ("cost-aware" in names) is (pair != SMOLLM2)
