"""Requests that share passes on a device, by the same code on a CPU in float32."""

import time
from typing import Any

import pytest
import torch
from distributions import unchecked
from engine_cases import VOCAB

from specdecpp import Decoder, Pair
from specdecpp.backends import GraphModel
from specdecpp.backends.graphs import engine
from specdecpp.backends.graphs.slots import Slots
from specdecpp.policies import CostAware, CumulativeConfidence, Fixed, MaxConfidence
from specdecpp.scheduler import step
from specdecpp.session import Session
from specdecpp.testing import tiny_draft, tiny_model, tiny_tokenizer
from specdecpp.verify import BlockVerification, CompareVerification

PROMPTS = [[3 + (7 * j + i) % 60 for j in range(n)] for i, n in enumerate((4, 1, 30, 9, 2, 215, 60, 5))]
RULES: list[tuple[Any, Any]] = [
    (Fixed(k=3), None),
    (CumulativeConfidence(threshold=0.4), BlockVerification()),
    (Fixed(k=0), None),
    (MaxConfidence(threshold=0.5, drop=True), CompareVerification()),
]


def pair_of() -> Pair:
    target = tiny_model("llama", seed=1, head_dim=16, vocab_size=VOCAB, max_position_embeddings=1024)
    models = [GraphModel(model) for model in (target, tiny_draft(target, noise=0.4))]
    return Pair(target=models[0], draft=models[1], tokenizer=tiny_tokenizer(VOCAB))


@pytest.fixture(scope="module")
def pair() -> Pair:
    return pair_of()


def started(pair: Pair, num: int, *, has_seed: bool = False, **options: Any) -> list[Session]:
    """Requests of different rules, prompts and lengths; that of the longest prompt outgrows its cache. Without `has_seed` they
    do not ask for the same answer again, and share passes."""
    found = []
    for i in range(num):
        policy, verification = RULES[i % len(RULES)]
        decoder = Decoder(pair, policy=policy, reuses=False, **({"verification": verification} if verification else {}))
        found.append(decoder.start(PROMPTS[i], seed=i, max_tokens=24, ignore_eos=True, **options))
        for stream in found[-1]._uniforms:
            stream.has_seed = has_seed
    return found


def told(sessions: list[Session]) -> list[list[int]]:
    """Answers of requests that take their steps together."""
    while on := [session for session in sessions if session.finish_reason is None]:
        for outcome in step(on):
            if isinstance(outcome, Exception):
                raise outcome
    return [session.tokens[session.num_prompt_tokens :] for session in sessions]


HOW: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0},
    "cut and penalised": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("how", list(HOW))
@pytest.mark.parametrize("num", [3, 8])
def test_requests_say_together_what_they_say_alone(num: int, how: str, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows, caches, records and uniforms of another request, a cache that grows beside others, a rule that drops, and
    requests that stop at different draft tokens. The same passes make the same tokens, and they are shared."""
    shared = []
    monkeypatch.setattr(engine, "together", lambda turns, plain=engine.together: shared.append(len(turns)) or plain(turns))
    with unchecked():
        expected = [told([session])[0] for session in started(pair, num, **HOW[how])]
        assert not shared
        assert told(started(pair, num, **HOW[how])) == expected
    assert max(shared) == num


def test_a_seed_gives_its_answer_whoever_else_is_there(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a request with a seed in a pass whose products round otherwise, costs of company where none shares a pass, and
    passes of operations of torch that were recorded over one cache."""
    monkeypatch.setattr(engine, "together", lambda _: pytest.fail("shared"))
    other = started(pair, 1, temperature=1.0)
    with unchecked():
        told([*started(pair, 3, has_seed=True, temperature=1.0), *other])
        assert other[0].num_together == 1
        monkeypatch.setattr(pair.draft, "can_share", False)
        told(started(pair, 3, temperature=1.0))


def test_logits_of_ragged_parts_are_those_of_each(pair: Pair) -> None:
    """Catches a slot's row in the place of another, more parts than slots, and a long part beside short ones. The largest
    difference of logits is that of rounding: products over more rows."""
    lengths = [(40, 3), (1, 1), (300, 33), (7, 2), (2, 5), (90, 1), (5, 9), (3, 3), (64, 4), (8, 1)]
    with unchecked():
        alone, together = ([pair.target.new_cache() for _ in lengths] for _ in range(2))
        for caches in (alone, together):
            for cache, (n, _) in zip(caches, lengths, strict=True):
                cache.extend([3 + j % 60 for j in range(n)], rows=1)
        texts = [[5 + j % 50 for j in range(n)] for _, n in lengths]
        expected = torch.cat([cache.extend(text, rows=1)[0] for cache, text in zip(alone, texts, strict=True)])
        found, hidden = pair.target.forward(list(zip(together, texts, strict=True)), rows=1)
        assert (found - expected).abs().max() < 1e-4
        assert hidden.shape == (len(lengths), pair.target.hidden_size)
        assert [cache.length for cache in together] == [cache.length for cache in alone]
        long = pair.target.forward([(together[0], [4] * 50), (together[1], [4])], rows=1)[0]
        assert len(long) == 2


def test_a_request_that_goes_leaves_the_others_as_they_are(pair: Pair) -> None:
    """Catches a cancelled request whose slot is read on, a place kept for who has left, and one that comes later."""
    with unchecked():
        expected = [told([session])[0] for session in started(pair, 4, temperature=1.0)]
        first, gone, *others = started(pair, 4, temperature=1.0)
        for _ in range(5):
            step([first, gone, others[0]])
        del gone
        assert told([others[1], first, others[0]]) == [expected[3], expected[0], expected[2]]


def test_what_fails_in_a_shared_pass_is_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches uniforms that are used up by a step that nobody sees."""
    pair = pair_of()
    with unchecked():
        expected = [told([session])[0] for session in started(pair, 3, temperature=1.0)]
        plain, calls = Slots.place, []

        def place(self: Slots, caches: Any) -> None:
            calls.append(self)
            if len(calls) % 4 == 0:  # the target's pass, in every second step
                raise RuntimeError("out of memory")
            plain(self, caches)

        monkeypatch.setattr(Slots, "place", place)
        assert told(started(pair, 3, temperature=1.0)) == expected
    assert len(calls) > 8


def test_seconds_are_shared(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a request that pays for all, policies that weigh costs without knowing of others, and learning that is free."""
    decoder = Decoder(pair, policy=CostAware())
    with unchecked():
        outputs = decoder.generate_all(PROMPTS[:3], max_tokens=20, ignore_eos=True)
    steps = [one for output in outputs for one in output.steps]
    assert all(one.verify_s > 0 for one in steps)
    assert any(one.costs is not None and one.costs.num_together == 3 for one in steps)
    monkeypatch.setattr(CostAware, "learn", lambda self, memory, outcome: time.sleep(0.01) or memory)
    assert all(one.other_s >= 0.01 for one in decoder.generate(PROMPTS[0], max_tokens=20, ignore_eos=True).steps[1:])
