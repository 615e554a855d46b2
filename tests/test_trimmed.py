"""Output layers that score some of the tokens: the same logits in every backend, all others minus infinity.

A draft which can say few tokens keeps the target's distribution: test_law enumerates it ("draft-within-target"), and
test_reduced compares its compiled steps with those of the host."""

import json
from pathlib import Path

import pytest
import torch
from kinds import BACKENDS, each_backend, full_pass

import specdecpp as sd
from specdecpp.backends import EagerModel
from specdecpp.errors import BackendError
from specdecpp.loading.fingerprints import fingerprint
from specdecpp.policies import Fixed
from specdecpp.testing import save_tiny_pair, tiny_model

IDS = [3, 5, 8, 40, 41, 63]


def model_that_says(ids, **config):
    return tiny_model("llama", hidden_size=64, output_ids=ids, **config)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [64, 50])
@pytest.mark.parametrize("ids", [IDS, None])
@each_backend
def test_every_backend_scores_the_same_tokens(backend, ids, vocab_size, tied):
    """Catches rows put under other ids, logits of padding, which could be drawn, a cut vocabulary that shifts ids, and an
    embedding that is trimmed with its output."""
    whole = tiny_model("llama", hidden_size=64, tie_word_embeddings=tied)
    wanted, _ = full_pass(whole, [1, 62, 3, 9])
    made = model_that_says(ids, tie_word_embeddings=tied)
    found, _ = BACKENDS[backend](made, vocab_size=vocab_size).new_cache().extend([1, 62, 3, 9], rows=3)
    scored = [i for i in ids or range(64) if i < vocab_size]
    assert found.shape == (3, vocab_size)
    torch.testing.assert_close(found[:, scored], wanted[-3:, scored], rtol=1e-4, atol=1e-4)
    assert int(torch.isneginf(found).sum()) == 3 * (vocab_size - len(scored))
    with pytest.raises(BackendError, match=r"vocab_size=65 .* 64 rows"):
        BACKENDS[backend](whole, vocab_size=65)


def test_a_config_that_names_no_tokens_is_refused():
    """Catches a damaged config that is taken for an untrimmed model, or that ends in a traceback."""
    for ids in ([70, 71], "3,5", [1.5], [-1, 2], [True], 7, []):
        with pytest.raises(BackendError, match="output_ids"):
            EagerModel(model_that_says(ids))
    assert EagerModel(model_that_says(list(range(64)))).output_ids is None


def test_a_trimmed_model_is_another_model():
    """Catches a head, or costs, of the untrimmed draft that are taken for those of the trimmed one."""
    whole, some, turned = (fingerprint(model_that_says(ids)) for ids in (None, IDS, IDS[::-1]))
    assert whole != some == turned


def test_a_trimmed_checkpoint_loads_saves_and_decodes(tmp_path: Path):
    """Catches ids that are lost on the way to disk and back, and a trimmed draft that changes a greedy answer."""
    target, draft = save_tiny_pair(tmp_path)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"output_ids": IDS}))
    pair = sd.load_pair(target, draft=draft, backend="eager")
    assert pair.draft_fingerprint != sd.load_pair(target, draft=target).target_fingerprint
    logits, _ = pair.draft.new_cache().extend([1], rows=1)
    assert logits.isfinite().nonzero()[:, 1].tolist() == IDS
    options = {"max_tokens": 24, "temperature": 0.0}
    alone = sd.Decoder(pair, policy=Fixed(k=1)).generate([5, 6, 7], **options).tokens
    for backend in ("eager", "lean"):
        pair = sd.load_pair(target, draft=draft, backend=backend)
        assert sd.Decoder(pair, policy=Fixed(k=4)).generate([5, 6, 7], **options).tokens == alone
