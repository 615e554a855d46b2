"""Replay against the real thing: the joint distribution of text and steps, enumerated, and against decoding a real pair."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from distributions import Request, finish, largest_difference
from policies_list import EXAMPLES, heads_for
from tables import COSTS, Recording, greedy_trace, of_replay, of_session

from specdecpp.head import AcceptanceHead
from specdecpp.lab import AutoOff, Bandit
from specdecpp.policies import (
    Costs,
    CumulativeConfidence,
    DraftSoFar,
    Entropy,
    Fixed,
    MaxConfidence,
    Outcome,
    Policy,
    SpecDecPP,
)
from specdecpp.policies.head import HeadPolicy
from specdecpp.replay.replay import Player, replay
from specdecpp.replay.replayed import Replayed
from specdecpp.replay.trace import Opinion, Trace
from specdecpp.sampling import Sampling
from specdecpp.testing import Enumerator, TableModel
from specdecpp.verify import GreedyVerification

HEADS = heads_for(3, 3)
AHEAD = HEADS.ahead


def table(seed: int, *, sparsity: float = 0.1, **more: Any) -> TableModel:
    return TableModel.random(vocab_size=3, depth=2, seed=seed, sparsity=sparsity, **more)


PLAIN = Request(target=table(10), draft=table(111), max_tokens=4)
SPARSE = Request(target=table(10, sparsity=0.25), draft=table(111, sparsity=0.25), max_tokens=4)
RECORDINGS = {
    name: Recording(request=request, length=length, heads=(HEADS.lagged, HEADS.deep, HEADS.ahead))
    for name, request, length in (
        ("length", replace(PLAIN, max_tokens=3), 3),
        ("end-of-text", replace(PLAIN, ends=(2,)), 3),
        ("two-ends", replace(SPARSE, ends=(0, 2), max_tokens=6), 4),
        ("short-branches", replace(SPARSE, target=table(21, sparsity=0.25), draft=table(121, sparsity=0.25)), 2),
        ("longer", Request(target=table(22, sparsity=0.25), draft=table(122, sparsity=0.25), ends=(2,), max_tokens=5), 2),
        ("draft-context", replace(PLAIN, draft=table(111, max_length=3), ends=(2,)), 3),
        ("target-context", replace(PLAIN, target=table(10, max_length=5), max_tokens=9), 2),
        ("one-token", replace(PLAIN, max_tokens=1), 2),
        ("as-people-sample", replace(PLAIN, sampling=Sampling(temperature=0.7, top_p=0.9), ends=(2,)), 3),
        ("few-are-left", replace(PLAIN, sampling=Sampling(temperature=0.7, top_p=0.6), ends=(2,), max_tokens=6), 4),
    )
}


POLICIES = [*EXAMPLES]


@dataclass(frozen=True, kw_only=True)
class Witness(HeadPolicy):
    """Writes down all that it is shown, and stops now and then."""

    seen: list[Any] = field(default_factory=list, compare=False)

    def start(self, given: Any = None) -> tuple[Any, ...]:
        return ()

    def learn(self, memory: tuple[Any, ...], outcome: Any) -> tuple[Any, ...]:
        assert isinstance(outcome, Outcome)
        judged = tuple(round(chance, 5) for chance in outcome.judged)
        return (*memory, (outcome.num_tokens, outcome.num_drafted, outcome.num_accepted, round(outcome.expected_s, 9), judged))

    def stop(self, draft: Any, memory: Any) -> str | None:
        assert isinstance(draft, DraftSoFar)
        num = draft.num_tokens
        each = [f(i) for f in (draft.confidence, draft.entropy, draft.gap) for i in (*range(num), *range(-num, 0))]
        numbers = [*draft.judged, draft.survival, draft.cumulative_confidence, *each]
        self.seen.append((memory, num, *draft.tokens, len(draft.judged), *(round(x, 5) for x in numbers), draft.costs is COSTS))
        return "enough" if sum(draft.tokens, num) % 4 == 3 else None

    def told(self, outcome: Any) -> Any:
        """An outcome, with what was seen on the way."""

        def both(*of: Any) -> Any:
            seen = tuple(self.seen)
            self.seen.clear()
            return outcome(*of), seen

        return both


def pairs() -> list[tuple[str, str]]:
    """Every second one, so that all recordings meet half of the policies and all policies half of the recordings."""
    return [(r, p) for i, r in enumerate(RECORDINGS) for j, p in enumerate(POLICIES) if (i + j) % 2 == 0]


# The coupling


@pytest.mark.parametrize(("recording", "policy"), pairs())
def test_replay_has_the_sessions_joint_distribution_of_text_and_steps(recording: str, policy: str) -> None:
    """Catches any difference: in the coupling, in what a rule is shown and when, in limits, ends, places left, memory."""
    recorded = RECORDINGS[recording]
    rule = EXAMPLES[policy].make(HEADS, recorded.length)
    distribution = recorded.session_distribution(rule, of_session)
    assert largest_difference(distribution, recorded.replay_distribution(rule, of_replay)) < 1e-12


@pytest.mark.parametrize("head", [HEADS.deep, AHEAD], ids=["lagged", "look-ahead"])
@pytest.mark.parametrize("recording", ["end-of-text", "longer", "as-people-sample"])
def test_a_rule_is_shown_what_the_session_shows_it(recording: str, head: AcceptanceHead) -> None:
    """Catches a view that is late, early or of the wrong token where no rule above happens to look: the joint distribution of
    all that is visible, at every question."""
    recorded = RECORDINGS[recording]
    witness = Witness(head=head, max_tokens=recorded.length)
    distribution = recorded.session_distribution(witness, witness.told(of_session))
    assert len(distribution) > 20
    assert largest_difference(distribution, recorded.replay_distribution(witness, witness.told(of_replay))) < 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_a_greedy_replay_drops_what_the_session_drops(seed: int) -> None:
    """Catches a dropped draft token that is verified or counted, or one that no time is paid for."""
    pair = {"target": table(seed), "draft": table(seed + 100)}
    greedy = Request(**pair, sampling=Sampling(temperature=0.0), max_tokens=12, ends=(2,), prompt=(seed % 3, 1))
    rule = MaxConfidence(threshold=0.6, drop=True, max_tokens=4)
    session = greedy.session(rule, GreedyVerification(), (Enumerator([]), Enumerator([])))
    steps = finish(session)
    text = tuple(session.tokens[2:])
    trace = greedy_trace(greedy, text, length=4)
    [run] = trace.runs(np.zeros((1, len(text)))).tolist()
    replayed = list(Player(trace, rule, COSTS).steps(run))
    assert of_replay(text, replayed) == of_session(session, steps)
    assert [r.num_dropped for r in replayed] == ["q =" in r.stop_reason for r in steps]
    found = Replayed.of([replayed], sources=("",), costs=COSTS, repeats=1, is_priced=False)
    paid = sum(COSTS.step_s(r.num_drafted) + COSTS.draft_s * ("q =" in r.stop_reason) for r in steps)
    assert found.seconds.tolist() == [pytest.approx(paid)]


# What is made of it


def synthetic(num_answers: int = 12, num_tokens: int = 40, *, source: str = "a", seed: int = 0) -> list[Trace]:
    """Answers with odds and scores at random, cut at their length, and branches of 8 tokens."""
    rng = np.random.default_rng(seed)
    shape = (num_tokens, 9)
    return [
        Trace(
            source=source,
            tokens=rng.integers(0, 9, shape),
            odds=rng.random(num_tokens) ** 0.3,
            overlap=np.full(num_tokens, 0.75),
            log_q=np.log(rng.random(shape)),
            entropy=rng.random(shape),
            gap=rng.random(shape),
            branch_length=np.full(num_tokens, 8),
            is_closed=np.zeros(num_tokens, bool),
            is_ended=False,
            num_places=num_tokens - 1,
        )
        for _ in range(num_answers)
    ]


def columns(replayed: Replayed) -> list[Any]:
    return [replayed.tokens.tolist(), replayed.accepted.tolist(), replayed.histogram.tolist()]


def test_all_policies_meet_the_same_coins() -> None:
    """Catches coins that depend on the policy: a rule that always stops after one draft token is `Fixed(k=1)`, step by step."""
    made = synthetic()
    one = replay(made, CumulativeConfidence(threshold=1.0, min_tokens=1, max_tokens=8), COSTS, repeats=3)
    assert columns(one) == columns(replay(made, Fixed(k=1), COSTS, repeats=3))
    assert columns(one) == columns(replay(made, Bandit(arms=(Fixed(k=1), Fixed(k=1))), COSTS, repeats=3))
    assert columns(one) != columns(replay(made, Fixed(k=1), COSTS, repeats=3, seed=1))
    twins = replay([made[0]] * 8, Fixed(k=1), COSTS, repeats=3)
    assert len(set(twins.accepted.tolist())) > 1, "answers have coins of their own"


def test_coins_are_fair() -> None:
    """Catches odds that are turned step or used twice. Two million odds: beyond five sigmas once in a million."""
    made = synthetic(num_answers=50)
    one = replay(made, Fixed(k=1), COSTS, repeats=1000)
    chance, spread = 0.0, 0.0
    for trace in made:  # at position i stands a draft token with this probability, as the one before it did not or was rejected
        met = 1.0
        for odds in trace.odds[:-1]:
            chance, spread = chance + met * odds, spread + met
            met = 1 - met * odds
    assert one.accepted.sum() / 1000 == pytest.approx(chance, abs=5 * (spread / 1000) ** 0.5)


def test_sums_agree_with_each_other_and_with_the_cost_identity() -> None:
    """Catches a rate over the wrong total, a repeat that is lost, seconds of other steps, and a draft token counted twice."""
    made = synthetic()
    found = replay(made, CumulativeConfidence(threshold=0.2, max_tokens=8), Costs.relative(0.22), repeats=5)
    assert found.tokens.tolist() == [5 * len(trace) for trace in made]
    assert (found.tokens == found.accepted + found.passes).all()
    assert found.drafted.sum() > found.accepted.sum()
    assert found.mean_acceptance_length == pytest.approx(1 / found.verification_rate)
    by_rates = 1 / (0.22 * (1 + found.discard_rate) + (1 - 0.22) * found.verification_rate)  # the paper's, section 3
    assert found.tokens_per_second == pytest.approx(by_rates) == pytest.approx(found.speed_up)
    alone = replay(made, Fixed(k=0), Costs.relative(0.22), repeats=5)
    assert alone.speed_up == pytest.approx(1)
    assert found.gain(alone).value == pytest.approx(found.speed_up)
    dear = Costs(draft_s=1.0, passes={1: 2.0, 9: 4.0})
    assert columns(found.at(dear)) == columns(found)
    assert found.at(dear).seconds.sum() == pytest.approx(
        sum(n * dear.step_s(k) for k, n in enumerate(found.histogram.sum(0).tolist()))
    )


def test_sources_can_be_told_apart() -> None:
    """Catches rows that belong to other answers."""
    both = synthetic(3, source="a") + synthetic(2, num_tokens=20, source="b", seed=1)
    found = replay(both, Fixed(k=2), COSTS)
    assert found.only("b").tokens.tolist() == [20, 20]
    assert found.only("a", "b").tokens.sum() == found.tokens.sum() == found.only("a").tokens.sum() + 40
    with pytest.raises(ValueError, match="no answers of c, only of a, b"):
        found.only("c")


def test_steps_can_be_bounded_from_outside() -> None:
    """Catches a bound that is forgotten, and steps beyond the recorded branches."""
    made = synthetic()
    bounded = replay(made, Entropy(threshold=0.3), COSTS, max_tokens=3)
    assert columns(bounded) == columns(replay(made, Entropy(threshold=0.3, max_tokens=3), COSTS))
    assert columns(replay(made, Fixed(k=2), COSTS, max_tokens=20)) == columns(replay(made, Fixed(k=2), COSTS))
    for options in ({}, {"max_tokens": 9}):
        with pytest.raises(ValueError, match="may draft 40 draft tokens and the recorded branches have 8"):
            replay(made, Entropy(), COSTS, **options)


@dataclass(frozen=True, kw_only=True)
class Greedy(Policy):
    """Wants more than it says it may."""

    def limit(self, memory: Any) -> int:
        return 30


@dataclass(frozen=True, kw_only=True)
class Judging(Policy):
    """Judges by itself."""

    def judge(self, draft: Any, hidden: Any) -> Any:
        return None


def test_what_cannot_be_exact_is_refused() -> None:
    """Catches a replay that guesses: steps past the branches, a head that did not judge, another reading of it, a dropped
    draft token under sampling, nothing to replay."""
    made = synthetic(2)
    ahead = SpecDecPP(head=AHEAD, calibrated=True, max_tokens=8)
    with pytest.raises(ValueError, match="Greedy may draft 30"):
        replay(made, Greedy(max_tokens=8), COSTS)
    with pytest.raises(ValueError, match="has not judged these traces"):
        replay(made, AutoOff(policy=ahead), COSTS)
    shape = made[0].tokens.shape
    known = [replace(t, opinions={(AHEAD, True): Opinion(accept=np.full((*shape, 1), 0.9))}) for t in made]
    assert replay(known, AutoOff(policy=ahead), COSTS).drafted.any()
    with pytest.raises(ValueError, match="calibrated=False"):
        replay(known, SpecDecPP(head=AHEAD, max_tokens=8), COSTS)
    with pytest.raises(ValueError, match="each of 8"):
        replay([replace(t, opinions={(AHEAD, True): Opinion(accept=np.ones((*shape, 3)))}) for t in made], ahead, COSTS)
    with pytest.raises(ValueError, match="attributes `head`"):
        replay(made, Judging(max_tokens=8), COSTS)
    with pytest.raises(ValueError, match="temperature 0"):
        replay(made, MaxConfidence(drop=True, max_tokens=8), COSTS)
    with pytest.raises(ValueError, match="looks at the costs"):
        replay(made, Bandit(arms=(Fixed(k=1), Fixed(k=2))), COSTS).at(Costs.relative(0.1))
    for traces, repeats in (([], 1), (made, 0)):
        with pytest.raises(ValueError, match="at least one repeat"):
            replay(traces, Fixed(k=1), COSTS, repeats=repeats)


def test_a_trace_that_says_too_little_is_refused() -> None:
    """Catches branches that are short for no reason, which would end steps early, and places past the end of a cut answer."""
    [trace] = synthetic(1)
    lengths = trace.branch_length.copy()
    lengths[5] = 3
    with pytest.raises(ValueError, match="branch at token 5 has 3 of 8"):
        replace(trace, branch_length=lengths)
    is_closed = trace.is_closed.copy()
    is_closed[5] = True
    replace(trace, branch_length=lengths, is_closed=is_closed)
    lengths[5], lengths[-3] = 8, 2
    replace(trace, branch_length=lengths)  # after it there is room for two
    lengths[5] = 0
    with pytest.raises(ValueError, match=r"odds are 0\."):
        replace(trace, branch_length=lengths)
    odds = trace.odds.copy()
    odds[5] = 1 - 1e-6
    replace(trace, branch_length=lengths, odds=odds)
    with pytest.raises(ValueError, match="may be draft tokens"):
        replace(trace, num_places=40)
