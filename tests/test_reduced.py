"""A draft whose vocabulary is reduced at load: q over a list and the text's own tokens, the output exact all the same."""

import random
from collections.abc import Callable
from copy import copy
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributions import distribution_of, finish, unchecked
from engine_cases import MANNERS, RULES, VOCAB, Models, models_of
from kinds import needs_compiler
from test_engines import same
from test_native_kinds import QUANTISED, pair
from test_real_models import exact_distribution

import specdecpp as sd
from specdecpp.backends import NativeModel
from specdecpp.backends.native.library import library
from specdecpp.backends.trimmed import TextTokens
from specdecpp.errors import BackendError
from specdecpp.loading import vocabulary
from specdecpp.policies import Fixed
from specdecpp.session import Session
from specdecpp.testing import save_tiny_pair, tiny_draft, tiny_model, tiny_tokenizer
from specdecpp.verify import TokenVerification

pytestmark = needs_compiler
LISTS = (range(8), range(3, 40, 2), range(VOCAB - 5))


class Small(TextTokens):
    """Short windows, so that a short text passes every bound."""

    MOST, WINDOW, FOREIGN = 3, 6, 2


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdecpp.backends.trimmed.TextTokens", Small)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_scored_depends_on_the_text_alone(seed: int) -> None:
    """Catches tokens that stay from a text that was rolled back, or that depend on the pieces in which it was read: then a seed
    would give another answer in a used cache."""
    rng, listed = random.Random(seed), bytes([1] * 4 + [0] * 8)
    text, used = [rng.randrange(12) for _ in range(40)], Small(listed)
    length = 0
    while length < 40:
        if length and rng.random() < 0.4:
            length = rng.randrange(length)
            used.rollback(length)
            text[length:] = [rng.randrange(12) for _ in range(40 - length)]
        end = rng.randint(length, 40)
        if rng.random() < 0.3:
            used = used.fork(length)
        start = rng.randint(0, length)  # what was read already may be shown again
        used.read(text[start:end], start)
        length = end
        fresh = Small(listed)
        fresh.read(text[:length], 0)
        for one in (used, fresh):
            one.settle()
        assert (used.ids, used.is_foreign) == (fresh.ids, fresh.is_foreign)


def test_new_tokens_are_scored_and_many_of_them_call_for_all() -> None:
    """Catches a token of the text that stays out, one too many that is kept, and a foreign text taken for none, or for ever."""
    text, length = Small(bytes([1] * 4 + [0] * 8)), 0
    for tokens, expected in (
        ([0, 1, 9, 2, 9, 3], ([9], False)),
        ([8, 7, 9, 6], ([6, 7, 8], True)),
        ([0, 1, 2, 3], ([6, 7, 8], False)),
    ):
        text.read(tokens, length)
        text.settle()
        length += len(tokens)
        assert (text.ids, text.is_foreign) == expected


@cache
def reduced(listed: range) -> Models:
    found = copy(models_of("native"))
    found.draft = found.draft.reduced([*listed])
    return found


@cache
def trimmed() -> Models:
    """The draft's own config names the tokens that it scores."""
    found, target = copy(models_of("native")), tiny_model("llama", seed=1, head_dim=16, vocab_size=VOCAB)
    draft = tiny_draft(target, noise=0.4)
    draft.config.output_ids = [*range(2, VOCAB, 3), 7]
    found.draft = NativeModel(draft, num_threads=1)
    return found


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("policy", "manner"), [case for i, case in enumerate(product(RULES, MANNERS)) if i % 4 == 0 or case[0] == "cost-aware"]
)
@pytest.mark.parametrize("made", [trimmed, *(partial(reduced, listed) for listed in LISTS)])
def test_steps_are_those_of_the_host(made: Callable[[], Models], policy: str, manner: str) -> None:
    """Catches a logit under another token, a draw in another order than that of the ids, a text's token that only one of both
    scores, and tokens of another request of the batch."""

    def session(seed: int, by_host: bool) -> Session:
        prompt = [3, 5, 70 - seed, 9, 69, 9]
        return made().session(RULES[policy], *MANNERS[manner], seed=seed, by_host=by_host, prompt=prompt)

    own, hosts = ([session(seed, by_host) for seed in range(3)] for by_host in (False, True))
    with unchecked():
        same(own, hosts)


@pytest.mark.usefixtures("small")
def test_texts_of_both_kinds_occur() -> None:
    """Catches cases above that are all foreign, or never."""
    seen: set[bool] = set()
    for listed, seed in product(LISTS, range(2)):
        session = reduced(listed).session(Fixed(3), sd.Sampling(), seed=seed, ends=())
        draft: Any = session.draft
        session.watch = lambda plan, result, draft=draft: seen.add(draft.is_reduced)
        finish(session)
    assert seen == {True, False}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *QUANTISED])
@pytest.mark.parametrize("activations", ["float32", "int16", "int8"])
def test_rows_that_are_copied_have_the_bits_of_the_whole_layer(kind: str, activations: str) -> None:
    """Catches a scale, level, code or higher bit that is copied from another row, or to another place."""
    if activations != "float32" and (kind not in QUANTISED or not library().native_has_dots()):
        pytest.skip("nothing is rounded there")
    _, model = pair({"": kind}, activations=activations, vocab_size=90)
    listed, prompt, rows = [0, 3, 4, 31, 32, 50, 66, 67, 88], [1, 7, 89, 20], []
    for draft in (model, model.reduced(listed)):
        models = copy(models_of("native"))
        models.target, models.draft = model, draft
        session = models.session(Fixed(1), sd.Sampling(), prompt=prompt, ends=())
        session.watch = lambda plan, result: rows.append(result.rows.q[0])
        session.prefill()
        session.step()
    whole, found = rows
    scored = sorted({*listed, *prompt})
    assert found.nonzero()[:, 0].tolist() == scored
    torch.testing.assert_close(found[scored], whole[scored] / whole[scored].sum(), rtol=2e-5, atol=0)


@pytest.mark.usefixtures("small")
def test_a_row_knows_the_text_up_to_it() -> None:
    """Catches rows of one pass that score tokens which come later: a test of what was timed would see the future."""
    draft, text = models_of("native").draft.reduced([*range(20)]), [3, 50, 7, 60, 50, 61, 2]
    together = draft.new_cache().extend(text, rows=len(text))[0]
    cache = draft.new_cache()
    for row, token in zip(together, text, strict=True):
        assert torch.equal(cache.extend([token], rows=1)[0][0], row)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("listed", [[0, 2], [1, 3, 4]])
def test_the_output_has_the_targets_distribution(listed: list[int]) -> None:
    """Catches a q that is not what was drawn from: every outcome of two tokens after a text that has tokens off the list."""
    target = tiny_model("llama", seed=1, head_dim=16, vocab_size=6)
    p, q = (NativeModel(model, num_threads=1) for model in (target, tiny_draft(target, noise=0.5)))
    q, prompt = q.reduced(listed), [5, 0, 5]

    def run(coins):
        session = Session(
            target=p.new_cache(),
            draft=q.new_cache(),
            policy=Fixed(2),
            verification=TokenVerification(),
            sampling=sd.Sampling(),
            prompt=prompt,
            max_tokens=2,
            randomness=(coins, coins),
        )
        finish(session)
        return tuple(session.tokens[3:])

    expected = dict(np.ndenumerate(exact_distribution(target, prompt, 2)))
    assert distribution_of(run) == pytest.approx(expected, abs=1e-5)


def test_greedy_answers_and_seeds_stay_what_they_are() -> None:
    """Catches an answer at temperature 0 that changes with the list, and a seed's that changes with what was asked before."""
    models = models_of("native")
    plain, some = (
        sd.Pair(target=models.target, draft=draft, tokenizer=tiny_tokenizer(VOCAB))
        for draft in (models.draft, models.draft.reduced([*range(30)]))
    )
    prompt, options = [3, 5, 66, 9, 40], {"max_tokens": 40, "ignore_eos": True}
    answers = [sd.Decoder(pair, policy="fixed:4").generate(prompt, temperature=0, **options).tokens for pair in (plain, some)]
    assert answers[0] == answers[1]
    decoder = sd.Decoder(some, policy="fixed:4")
    first = decoder.generate(prompt, seed=3, **options)
    for seed in range(5):
        decoder.generate([*prompt, 50 + seed, 9, 8, 7, 6, 5, 4, 3, 2, 1, 60 + seed], seed=seed, **options)
    again = decoder.generate(prompt, seed=3, **options)
    assert [(step.num_drafted, step.tokens) for step in first.steps] == [
        (step.num_drafted, step.tokens) for step in again.steps
    ]


def loaded(names: tuple[Path, Path], *, backend: str = "native", draft_vocabulary: Any = "auto") -> Any:
    return sd.load_pair(names[0], draft=names[1], backend=backend, draft_vocabulary=draft_vocabulary)


def test_a_pair_is_loaded_with_a_reduced_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a list that is not taken, costs of another vocabulary, and "auto" that reduces what gains nothing."""
    names = save_tiny_pair(tmp_path, hidden_size=64)
    whole, some = loaded(names), loaded(names, draft_vocabulary=20)
    assert whole.draft.subset is None
    assert sum(some.draft.listed) == 20
    assert "q over 20 of 64 tokens" in some.backends
    assert some.identities != whole.identities
    assert loaded(names, draft_vocabulary=64).draft.subset is None
    monkeypatch.setattr(vocabulary, "LISTED", 30)
    assert vocabulary.listed(whole.tokenizer, 64) == [*range(64)]
    for share, is_taken in ((0.8, True), (0.95, False)):
        monkeypatch.setattr(vocabulary, "_share", lambda *_, share=share: share)
        assert (loaded(names).draft.subset is not None) == is_taken


def test_what_cannot_be_reduced_is_refused(tmp_path: Path) -> None:
    """Catches a number that is passed over in silence."""
    names = save_tiny_pair(tmp_path, hidden_size=64)
    with pytest.raises(BackendError, match="Name a draft"):
        loaded(names, backend="lean", draft_vocabulary=20)
    for wrong in (0, True, "all", 1.5):
        with pytest.raises(ValueError, match="draft_vocabulary"):
            loaded(names, draft_vocabulary=wrong)
    with pytest.raises(BackendError, match="already"):
        models_of("native").draft.reduced([1]).reduced([1])


def test_the_time_of_a_draft_token_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a measurement that each load repeats, and a share that is none."""
    draft = models_of("native").draft
    some, facts = draft.reduced([*range(20)]), {"draft": "tiny", "try": random.random()}
    share = vocabulary._share(draft, some, facts)
    assert share > 0
    monkeypatch.setattr(vocabulary, "_session", None)
    assert vocabulary._share(draft, some, facts) == share
