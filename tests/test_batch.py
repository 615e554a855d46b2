"""Requests that are decoded together get what they would get alone, to the bit."""

from dataclasses import replace
from time import perf_counter
from typing import Any

import pytest
from batched import PROMPTS, compiled_pair, session
from distributions import unchecked

from specdecpp import Decoder, Pair
from specdecpp.backends import LeanModel, native
from specdecpp.policies import CostAware, Costs, CumulativeConfidence, Fixed
from specdecpp.scheduler import shares, step
from specdecpp.session import Session
from specdecpp.testing import tiny_draft, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")

COSTS = Costs(draft_s=0.1, passes={1: 1.0, 17: 2.0}, switch_s=0.2)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.0},
    "nucleus": {"temperature": 0.7, "top_p": 0.9},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.3, "top_k": 9},
}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return compiled_pair()


def with_threads(pair: Pair, num: int) -> Pair:
    target: Any = pair.target
    draft: Any = pair.draft
    return replace(pair, target=target.with_threads(num), draft=draft.with_threads(num))


def together(sessions: list[Session]) -> list[list[int]]:
    """Answers of sessions that come one step after the other, and go when they have ended."""
    waiting, running = sessions[::-1], []
    while waiting or running:
        running += [waiting.pop()] if waiting else []
        step(running)
        running = [one for one in running if one.finish_reason is None]
    return [one.tokens[one.num_prompt_tokens :] for one in sessions]


def test_requests_of_two_decoders_share_passes(pair: Pair) -> None:
    """Catches a batch that needs one policy, or one way of sampling, for all."""
    ways = [
        (Fixed(k=2), "greedy"),
        (CumulativeConfidence(threshold=0.4), "nucleus"),
        (Fixed(k=0), "drawn"),
        (CostAware(), "penalised"),
    ]
    decoders = [Decoder(pair, policy=policy, costs=COSTS) for policy, _ in ways]

    def sessions() -> list[Session]:
        return [session(d, i, **SAMPLINGS[how]) for i, (d, (_, how)) in enumerate(zip(decoders, ways, strict=True))]

    assert together(sessions()) == [together([one])[0] for one in sessions()]


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_all_answers_in_the_order_of_their_prompts(at_once: int, pair: Pair) -> None:
    """Catches answers in the order in which they ended, and prompts that are forgotten."""
    decoder = Decoder(pair, policy=Fixed(k=2))
    options: dict[str, Any] = {"max_tokens": 20, "seed": 4}
    with unchecked():
        found = decoder.generate_all(PROMPTS, at_once=at_once, **options)
        assert [output.tokens for output in found] == [decoder.generate(prompt, **options).tokens for prompt in PROMPTS]
        assert decoder.generate_all([]) == []
    with pytest.raises(ValueError, match="at_once"):
        decoder.generate_all(PROMPTS, at_once=0)


def test_of_prompts_that_are_read_alone_one_is_read_in_a_step() -> None:
    """Catches a request that waits for all prompts of the others, and a prompt that is never read."""
    model = tiny_model("llama", seed=1)
    pair = Pair(target=LeanModel(model), draft=LeanModel(tiny_draft(model)), tokenizer=tiny_tokenizer(64))
    decoder = Decoder(pair, policy=Fixed(k=2))
    ready, first, second = (decoder.start(prompt, seed=0, max_tokens=9) for prompt in ([5], [8] * 6, [9] * 4))
    told = [[type(outcome).__name__ for outcome in step([ready, first, second], most=3)] for _ in range(4)]
    assert told[:2] == [["Step", "Reading", "NoneType"]] * 2
    assert told[2:] == [["Step", "Step", "Reading"], ["Step", "Step", "Step"]]


LONG = [[3 + (i * i + n) % 60 for i in range(length)] for n, length in enumerate((90, 1, 2, 33, 61, 5))]


@pytest.mark.parametrize("rows", [1, 7, 64, 256])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_prompts_are_read_in_the_same_passes(rows: int, num_threads: int, pair: Pair) -> None:
    """Catches bits that depend on other rows or on where a piece ends, pieces read twice or never, and other steps."""
    of = with_threads(pair, num_threads)
    decoder = Decoder(of, policy=CumulativeConfidence(threshold=0.3), costs=COSTS)
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 1.0, "ignore_eos": True}
    alone = [decoder.start(prompt, seed=i, **options) for i, prompt in enumerate(LONG)]
    together = [decoder.start(prompt, seed=i, **options) for i, prompt in enumerate(LONG)]
    num_beside = 0
    while reading := [session for session in together if session.num_unread]:
        on = [session for session in together if not session.num_unread and session.finish_reason is None]
        before = [session.num_unread for session in reading]
        step([*on, *reading], rows=rows)
        read = [num - session.num_unread for num, session in zip(before, reading, strict=True)]
        assert min(read) >= 1
        assert sum(read) <= max(rows, len(reading))
        num_beside += len(on) > 0
    assert num_beside
    for one, other in zip(alone, together, strict=True):
        one.prefill()
        while len(one.tokens) < len(other.tokens):
            one.step()
        assert one.tokens == other.tokens
        for model in ("target", "draft"):
            a, b = getattr(one, model), getattr(other, model)
            assert a.length == b.length
            for x, y in zip(a.extend([7], rows=1), b.extend([7], rows=1), strict=True):
                assert x.tolist() == y.tolist(), model
    assert all(session.prefill_s > 0 for session in together if session.num_prompt_tokens > 1)


def test_seconds_are_shared_by_rows(pair: Pair) -> None:
    """Catches a request that pays for the prompt of another, and seconds that are counted twice or lost."""
    decoder = Decoder(pair, policy=Fixed(k=2))
    on, reading = [session(decoder, i) for i in (0, 3)], decoder.start([3 + n % 60 for n in range(200)], max_tokens=9)
    started = perf_counter()
    steps: list[Any] = step([*on, reading])[:2]
    elapsed_s = perf_counter() - started
    spent_s = sum(r.draft_s + r.head_s + r.verify_s + r.other_s for r in steps) + reading.prefill_s
    assert 0 < spent_s <= elapsed_s
    assert reading.prefill_s > 66 * max(r.verify_s for r in steps)  # 199 rows beside two steps of three
    assert all(0 < r.forward_s <= r.draft_s + r.verify_s for r in steps)


def test_a_prompt_beside_a_draft_that_reads_nothing(pair: Pair) -> None:
    """Catches a draft that is fed although no draft token can be wanted, and one that has read pieces of a prompt only."""
    none, some = (Decoder(pair, policy=Fixed(k=k)).start(LONG[0], seed=1) for k in (0, 2))
    step([none, some], rows=40)
    assert [(s.target.length, s.draft.length) for s in (none, some)] == [(20, 0), (20, 20)]
    some.draft.rollback(5)
    step([some], rows=30)
    assert (some.target.length, some.draft.length) == (50, 35)


def test_a_draft_that_comes_late_reads_in_pieces(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a draft first asked behind a long text that has all others wait, and one that then decides otherwise."""
    monkeypatch.setattr("specdecpp.session.ROWS", 20)
    late, alone = (Decoder(pair, policy=Fixed(k=2)).start(LONG[0], seed=1, max_tokens=9) for _ in range(2))
    for one in (late, alone):
        one.prefill()
        one.draft.rollback(3)
    assert late.num_unread == 86
    pieces = []
    while late.num_unread:
        pieces.append(late.draft.length)
        step([late], rows=30)
    assert pieces == [3, 33, 63]
    assert [late.step().tokens for _ in range(2)] == [alone.step().tokens for _ in range(2)]
    none = Decoder(pair, policy=Fixed(k=0)).start(LONG[0], seed=1)
    assert none.prefill()


def test_rows_are_shared_evenly(pair: Pair) -> None:
    """Catches a long prompt that takes what belongs to short ones, rows that are not used, and a prompt that gets none."""
    sessions = [Decoder(pair, policy=Fixed(k=1)).start(prompt) for prompt in LONG]
    for rows, expected in [(60, [19, 0, 1, 18, 18, 4]), (3, [1, 0, 1, 1, 1, 1]), (999, [89, 0, 1, 32, 60, 4])]:
        assert [len(piece.target) for piece in shares(sessions, rows).values()] == expected


def test_a_share_of_what_steps_take_together() -> None:
    """Catches rows of others that are not paid for, and a request that is charged for the whole pass."""
    costs = Costs(draft_s=0.2, passes={1: 1.0, 2: 1.2, 3: 1.4}, start_s=0.1, switch_s=0.4)
    assert costs.shared(1).step_s(2) == pytest.approx(costs.step_s(2))
    share = costs.shared(2)
    assert share.pass_s(1) == pytest.approx(1.2 / 2)
    assert share.pass_s(3) == pytest.approx(2.0 / 2)
    assert (share.draft_s, share.start_s, share.switch_s) == pytest.approx((0.2 * 1.2 / 2, 0.05, 0.2))
    own = Costs(draft_s=0.2, passes={1: 1.0, 2: 1.2, 3: 1.4}, other_s=0.4).shared(2)
    assert own.pass_s(1) == pytest.approx((1.2 - 0.4) / 2 + 0.4)
    assert own.start_s == pytest.approx(0.2), "each has its own work with drafting, too"
    assert own.added_s(1) == pytest.approx(share.added_s(1))
