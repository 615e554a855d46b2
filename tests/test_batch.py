"""Requests that are decoded together get what they would get alone, to the bit; and a round that fails fails alone."""

import threading
from dataclasses import replace
from typing import Any

import pytest
from laws import unchecked

from specdecpp import Costs, Decoder, NativeRunner, Pair
from specdecpp.policies import CostAware, CumulativeConfidence, Entropy, Fixed, MaxConfidence, Policy
from specdecpp.rounds import Native
from specdecpp.rounds.verification import BlockVerification, CompareVerification
from specdecpp.runners import native
from specdecpp.serving.engine import End, Engine, Part, Step, Work
from specdecpp.serving.limits import Limits
from specdecpp.session import Session, advance
from specdecpp.testing import tiny_draft, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")

COSTS = Costs(draft_s=0.1, passes={1: 1.0, 17: 2.0}, switch_s=0.2)
PROMPTS = [[3], [5, 9, 11, 2], [7] * 30, [1, 2], [40, 41, 42]]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.0},
    "nucleus": {"temperature": 0.7, "top_p": 0.9},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.3, "top_k": 9},
}
POLICIES: dict[str, Policy] = {
    "fixed": Fixed(k=3),
    "alone": Fixed(k=0),
    "cumulative": CumulativeConfidence(threshold=0.2),
    "entropy": Entropy(threshold=0.5),
    "confidence": MaxConfidence(threshold=0.3),
    "cost-aware": CostAware(),
}


@pytest.fixture(scope="module")
def pair() -> Pair:
    model = tiny_model("llama", seed=1, head_dim=16)
    target, draft = (NativeRunner(of, num_threads=1) for of in (model, tiny_draft(model)))
    return Pair(target=target, draft=draft, tokenizer=tiny_tokenizer(64))


def session(decoder: Decoder, i: int, **options: Any) -> Session:
    started = decoder.start(PROMPTS[i], max_tokens=12 + 5 * i, seed=i, **options)
    started.prefill()
    return started


def together(sessions: list[Session]) -> list[list[int]]:
    """Answers of sessions that come one round after the other, and go when they have ended."""
    waiting, running = sessions[::-1], []
    while waiting or running:
        running += [waiting.pop()] if waiting else []
        advance(running)
        running = [one for one in running if one.finish_reason is None]
    return [one.tokens[one.num_prompt_tokens :] for one in sessions]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_gives_what_each_gives_alone(policy: str, sampling: str, pair: Pair) -> None:
    """Catches rows of two requests that are swapped, uniforms that are shared, a rollback of the wrong cache, a request that
    stops because another does, and lengths that follow the load although there is a seed."""
    decoder = Decoder(pair, policy=POLICIES[policy], costs=COSTS)
    options = SAMPLINGS[sampling]
    batch = together([session(decoder, i, **options) for i in range(5)])
    alone = [together([session(decoder, i, **options)])[0] for i in range(5)]
    assert batch == alone
    assert isinstance(session(decoder, 0, **options).engine, Native)


@pytest.mark.parametrize("verification", [BlockVerification(), CompareVerification()], ids=lambda v: type(v).__name__)
def test_other_verifications_in_a_batch(verification: Any, pair: Pair) -> None:
    """Catches uniforms of a verification that takes fewer of them."""
    decoder = Decoder(pair, policy=Fixed(k=3), verification=verification, costs=COSTS)
    batch = together([session(decoder, i, temperature=1.0) for i in range(5)])
    assert batch == [together([session(decoder, i, temperature=1.0)])[0] for i in range(5)]


def test_two_threads_decide_the_same(pair: Pair) -> None:
    """Catches requests whose draws and tests are shared out among threads, and overwrite each other."""
    two = replace(pair, target=pair.target.fresh(num_threads=2), draft=pair.draft.fresh(num_threads=2))
    found = [together([session(Decoder(of, policy=Fixed(k=3)), i, temperature=1.0) for i in range(5)]) for of in (pair, two)]
    assert found[0] == found[1]


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


def test_a_share_of_what_steps_take_together() -> None:
    """Catches rows of others that are not paid for, and a request that is charged for the whole pass."""
    costs = Costs(draft_s=0.2, passes={1: 1.0, 2: 1.2, 3: 1.4}, start_s=0.1, switch_s=0.4)
    assert costs.shared(1).round_s(2) == pytest.approx(costs.round_s(2))
    share = costs.shared(2)
    assert share.pass_s(1) == pytest.approx(1.2 / 2)
    assert share.pass_s(3) == pytest.approx(2.0 / 2)
    assert (share.draft_s, share.start_s, share.switch_s) == pytest.approx((0.2 * 1.2 / 2, 0.05, 0.2))


def test_without_a_seed_lengths_follow_the_load(pair: Pair) -> None:
    """Catches a rule that drafts for eight as it does for one, where rows are no longer free."""
    decoder = Decoder(pair, policy=CostAware(), costs=Costs(draft_s=0.01, passes={1: 1.0, 8: 1.0, 9: 2.0}))
    one, seeded = decoder.start([1, 2], max_tokens=30), decoder.start([1, 2], max_tokens=30, seed=1)
    costs = one.costs
    one.num_together = seeded.num_together = 8
    assert one.costs != costs
    assert one.costs.step_s(0) > 2 * costs.step_s(0)
    assert seeded.costs == costs


class Listener:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end: End | None = None
        self.is_over = threading.Event()

    def __call__(self, what: Step | End) -> None:
        if isinstance(what, End):
            self.end = what
            self.is_over.set()
        else:
            self.tokens += [piece.token for piece in what.round.pieces]


def served(decoder: Decoder) -> list[Listener]:
    """Five requests to a server at once."""
    engine, listeners = Engine(Limits(max_running=4)), [Listener() for _ in PROMPTS]
    engine.start()
    for i, (prompt, listener) in enumerate(zip(PROMPTS, listeners, strict=True)):
        part = Part(prompt=prompt, options={"max_tokens": 20, "seed": i})
        engine.submit(Work(decoder=decoder, parts=[part], tell=listener, timeout_s=60.0))
    for listener in listeners:
        assert listener.is_over.wait(60)
    engine.stop()
    return listeners


def test_the_server_decodes_together(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a server that still takes turns, and answers that depend on who else is there."""
    decoder, widths = Decoder(pair, policy=Fixed(k=2)), []
    verify = NativeRunner.verify
    monkeypatch.setattr(
        NativeRunner, "verify", staticmethod(lambda runners, tasks: widths.append(len(tasks)) or verify(runners, tasks))
    )
    alone = [list(decoder.generate(prompt, max_tokens=20, seed=i).tokens) for i, prompt in enumerate(PROMPTS)]
    widths.clear()
    assert [listener.tokens for listener in served(decoder)] == alone
    assert max(widths) == 4


def test_a_round_that_fails_together_is_run_again_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches one request that takes all others with it."""
    decoder, verify = Decoder(pair, policy=Fixed(k=2)), NativeRunner.verify

    def fails(runners: Any, tasks: Any) -> None:
        if any(runner.length > 30 for runner in runners):  # the long prompt's
            raise MemoryError("no room")
        verify(runners, tasks)

    monkeypatch.setattr(NativeRunner, "verify", staticmethod(fails))
    found = served(decoder)
    ends = [listener.end.refusal for listener in found if listener.end]
    assert [refusal is not None for refusal in ends] == [False, False, True, False, False]
    assert all(len(listener.tokens) == 20 for listener in found if listener is not found[2])
