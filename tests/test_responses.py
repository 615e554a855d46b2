"""Batched sampling: every answer is what the target says alone, in distribution and, greedily, to the token."""

from collections import Counter
from typing import Any

import pytest
import torch
from distributions import chi_square_tail
from kinds import CACHE, KINDS, model_of
from records import pooled_tail
from transformers import Cache, DynamicCache

from specdecpp import Sampling
from specdecpp.backends import EagerModel
from specdecpp.sampling import probabilities
from specdecpp.testing import tiny_model
from specdecpp.training.responses import RoomyLayer, draw, roomy_cache, sample_responses

NUM_TOKENS = 20
PROMPTS = [[5], [9, 8, 7], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29], [60, 3, 60, 3, 60]]
GREEDY = Sampling(temperature=0.0)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def own_greedy(kind: str, prompt: list[int], *, end: int | None = None, penalty: float = 1.0) -> list[int]:
    """The continuation by transformers' generate."""
    inputs = torch.tensor([prompt])
    out = model_of(kind).generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=end,
        pad_token_id=0,
        repetition_penalty=penalty,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_equal_generate(kind: str) -> None:
    """Catches padding that is attended to, positions that count it, rows mixed up when some leave, and tokens counted twice."""
    backend = EagerModel(model_of(kind))
    free = [own_greedy(kind, p) for p in PROMPTS]
    options: dict[str, Any] = {"sampling": GREEDY, "max_tokens": NUM_TOKENS, "generator": seeded()}
    assert sample_responses(backend, PROMPTS, ends=(), **options) == free
    end, told = free[0][2], list[int]()
    ended = [own_greedy(kind, p, end=end) for p in PROMPTS]
    assert sample_responses(backend, PROMPTS, ends=(end,), tick=told.append, **options) == ended
    assert sum(told) == sum(map(len, ended))
    assert min(map(len, ended)) <= 3, "no row leaves the batch early"
    for slots in (1, 3):  # the others wait, and take the places of those that have ended
        assert sample_responses(backend, PROMPTS * 2, ends=(end,), slots=slots, **options) == ended * 2


def test_the_repetition_penalty_follows_each_row() -> None:
    """Catches a penalty that forgets a prompt or an answer, or keeps the rows of those that left."""
    backend, penalised = EagerModel(model_of("llama")), Sampling(temperature=0.0, repetition_penalty=1.3)
    end = own_greedy("llama", PROMPTS[0], penalty=1.3)[1]
    options = {"sampling": penalised, "max_tokens": NUM_TOKENS, "ends": (end,), "generator": seeded()}
    for slots in (None, 2):
        answers = sample_responses(backend, PROMPTS, slots=slots, **options)
        assert answers == [own_greedy("llama", p, end=end, penalty=1.3) for p in PROMPTS]


@pytest.mark.parametrize("slots", [None, 1000])
@pytest.mark.parametrize("sampling", [Sampling(temperature=3.0), Sampling(temperature=4.0, top_k=5, top_p=0.9)])
def test_sampled_answers_follow_the_target(sampling: Sampling, slots: int | None) -> None:
    """Catches a temperature or a filter left out, draws that depend on each other across rows, and answers that are other ones
    where they begin late; each case alarms once in 1e6."""
    model = tiny_model("llama", vocab_size=8, seed=3)
    backend, prompts, end = EagerModel(model), [[2, 3, 4], [5]], 1
    num = 3000
    answers = sample_responses(
        backend, prompts * num, sampling=sampling, max_tokens=2, ends=(end,), generator=seeded(11), slots=slots
    )
    for i, prompt in enumerate(prompts):
        distribution: dict[tuple[int, ...], float] = {}
        first = _distribution(backend, prompt, sampling)
        for a, chance in enumerate(first):
            if a == end:
                distribution[(a,)] = chance
            else:
                distribution |= {(a, b): chance * c for b, c in enumerate(_distribution(backend, [*prompt, a], sampling))}
        assert pooled_tail(Counter(map(tuple, answers[i::2])), distribution) > 1e-6


def _distribution(backend: EagerModel, text: list[int], sampling: Sampling) -> list[float]:
    logits, _ = backend.new_cache().extend(text, rows=1)
    return probabilities(logits[0].double(), sampling).tolist()


def test_draws_follow_their_rows_and_never_what_is_impossible() -> None:
    """Catches rows that share one coin, and the boundary between two tokens; alarms once in 1e6."""
    p = torch.tensor([[0.0, 0.2, 0.0, 0.5, 0.3, 0.0], [0.7, 0.0, 0.1, 0.0, 0.0, 0.2]])
    drawn = draw(p, 20_000, seeded(4))
    for row, distribution in zip(drawn, p.tolist(), strict=True):
        counts = dict(enumerate(row.bincount(minlength=6).tolist()))
        assert not [t for t, n in counts.items() if n and distribution[t] == 0]
        possible = {t: x for t, x in enumerate(distribution) if x > 0}
        assert chi_square_tail({t: counts[t] for t in possible}, possible) > 1e-6
    both = torch.stack([drawn[0] == 3, drawn[1] == 0]).float()
    assert abs(float(torch.corrcoef(both)[0, 1])) < 5 / 20_000**0.5


def test_an_answer_ends_where_the_context_is_full() -> None:
    """Catches rows that share the room of the longest prompt, and one that overruns the positions."""
    backend = EagerModel(model_of("gpt2"))
    answers = sample_responses(backend, PROMPTS, sampling=GREEDY, max_tokens=9, ends=(), generator=seeded(), max_length=12)
    assert [len(a) for a in answers] == [9, 9, 2, 7]
    with pytest.raises(ValueError, match="no room for an answer in a context of 10"):
        sample_responses(backend, PROMPTS, sampling=GREEDY, max_tokens=9, ends=(), generator=seeded(), max_length=10)


def test_a_seed_gives_one_set_of_answers() -> None:
    """Catches randomness that does not come from the generator."""
    backend = EagerModel(model_of("llama"))
    runs = [
        sample_responses(backend, PROMPTS, sampling=Sampling(), max_tokens=8, ends=(), generator=seeded(seed))
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


@torch.inference_mode()
def test_the_roomy_cache_holds_what_a_plain_one_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches stale room being read, room that runs out, rows mixed up when some leave, and a cut that leaves a trace."""
    monkeypatch.setattr(RoomyLayer, "ROOM", 2)
    model = model_of("llama")
    roomy, plain = roomy_cache(), DynamicCache()
    ids = torch.randint(50, (3, 14), generator=seeded(1))
    at = 0
    for step, length in enumerate((4, 1, 1, 3, 1, 2)):
        a, b = (model(input_ids=ids[:, at : at + length], **{CACHE: cache}).logits for cache in (roomy, plain))
        torch.testing.assert_close(a, b)
        at += length
        if step == 2:
            kept = torch.tensor([2, 0])
            for cache in (roomy, plain):
                cache.batch_select_indices(kept)
            ids = ids[kept]
        if step == 3:
            for cache in (roomy, plain):
                cache.crop(-2)
            at -= 2
    assert isinstance(roomy, Cache)
