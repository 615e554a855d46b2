"""Output layers that score some of the tokens: the same logits in every backend, all others minus infinity.

That a draft which can say few tokens keeps the target's distribution is enumerated in test_law ("draft-within-target")."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from distributions import chi_square_tail, unchecked

import specdecpp as sd
from specdecpp.backends import EagerModel, GraphModel, LeanModel
from specdecpp.backends.native import NativeModel, compiler
from specdecpp.errors import BackendError
from specdecpp.loading.fingerprints import fingerprint
from specdecpp.policies import Fixed
from specdecpp.testing import save_tiny_pair, tiny_draft, tiny_model, tiny_tokenizer
from specdecpp.verify import BlockVerification, TokenVerification

IDS = [3, 5, 8, 40, 41, 63]
KINDS = [EagerModel, LeanModel, GraphModel, NativeModel]
needs_compiler = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")


def model_that_says(ids, *, kind="llama", **config):
    model = tiny_model(kind, hidden_size=64, **config)
    model.config.output_ids = ids
    return model


@needs_compiler
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [64, 50])
def test_every_runner_scores_the_same_tokens(vocab_size, tied):
    """Catches rows put under other ids, a cut vocabulary that shifts them, and an embedding that is trimmed with its output."""
    whole = EagerModel(tiny_model("llama", hidden_size=64, tie_word_embeddings=tied), vocab_size=vocab_size).new_cache()
    wanted, _ = whole.extend([1, 62, 3, 9], rows=3)
    scored = [i for i in IDS if i < vocab_size]
    for kind in KINDS:
        backend = kind(model_that_says(IDS, tie_word_embeddings=tied), vocab_size=vocab_size)
        found, _ = backend.new_cache().extend([1, 62, 3, 9], rows=3)
        assert found.shape == (3, vocab_size)
        torch.testing.assert_close(found[:, scored], wanted[:, scored], rtol=1e-4, atol=1e-4)
        assert int(torch.isneginf(found).sum()) == 3 * (vocab_size - len(scored))


def test_a_config_that_names_no_tokens_is_refused():
    """Catches a damaged config that is taken for an untrimmed model, or that ends in a traceback."""
    for ids in ([70, 71], "3,5", [1.5], [-1, 2], [True], 7, []):
        with pytest.raises(BackendError, match="output_ids"):
            EagerModel(model_that_says(ids))
    assert EagerModel(model_that_says(list(range(64)))).output_ids is None


def test_a_trimmed_model_is_another_model():
    """Catches a head, or costs, of the untrimmed draft that are taken for those of the trimmed one."""
    model = tiny_model("llama")
    before = fingerprint(model)
    model.config.output_ids = IDS
    after = fingerprint(model)
    model.config.output_ids = list(reversed(IDS))
    assert len({before, after}) == 2
    assert fingerprint(model) == after


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


@needs_compiler
@pytest.mark.parametrize("verification", [TokenVerification(), BlockVerification()])
def test_compiled_rounds_keep_the_law(verification):
    """Catches a residual that leaves out what the draft cannot say. By chance it fails once in 10,000 runs of fixed seeds."""
    target = tiny_model("llama", seed=1, head_dim=16, vocab_size=24)
    draft = tiny_draft(target, noise=0.3)
    draft.config.output_ids = [2, 3, 5, 7, 11, 13, 17, 19, 23]
    backends = [NativeModel(model, num_threads=1) for model in (target, draft)]
    pair = sd.Pair(target=backends[0], draft=backends[1], tokenizer=tiny_tokenizer(24))
    decoder = sd.Decoder(pair, policy=Fixed(k=3), verification=verification)
    p = backends[0].new_cache().extend([4, 9], rows=1)[0][0].double().softmax(-1)
    with unchecked():
        counts = Counter(decoder.generate([4, 9], max_tokens=4, seed=seed).tokens[0] for seed in range(500))
    assert chi_square_tail(counts, dict(enumerate(p.tolist()))) > 1e-4
