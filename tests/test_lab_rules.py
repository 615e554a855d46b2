"""Rules of other papers, and rules made of rules, do what they say; test_law.py and test_replay.py show them exact."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
from distributions import Request, finish, outcome, random_head
from distributions import drafted as host_draft

from specdecpp import AcceptanceHead, Decoder, HeadError, Pair, lab
from specdecpp.head import Calibration
from specdecpp.lab.adaptive import Drift
from specdecpp.lab.controllers import fastest
from specdecpp.lab.history import Counts
from specdecpp.lab.meta import Gain
from specdecpp.policies import CostAware, Costs, CumulativeConfidence, Fixed, MaxConfidence, Policy, SpecDecPP
from specdecpp.policies.head import heads
from specdecpp.policies.learning import Experience
from specdecpp.policies.protocol import Evidence, Given, Stop, decide
from specdecpp.policies.score import by_q
from specdecpp.replay.replayed import ReplayedStep
from specdecpp.replay.trace import Trace
from specdecpp.sampling import Sampling, streams
from specdecpp.step import Draft
from specdecpp.testing import TableModel, tiny_tokenizer
from specdecpp.verify import TokenVerification

pytestmark = pytest.mark.lab

REFUSED: list[tuple[Callable[[], Policy], str]] = [
    (lambda: lab.AcceptanceEMA(start_tokens=0), "start_tokens of at least 1, got 0"),
    (lambda: lab.ArgmaxLength(prior=-0.1), r"ArgmaxLength\.prior .* got -0\.1"),
    (lambda: lab.ArgmaxLength(prior_tokens=0), "prior_tokens of at least 1, got 0"),
    (lambda: lab.DraftVerify(threshold=2.0), r"DraftVerify\.threshold .* got 2\.0"),
    (lambda: lab.DraftVerify(step=math.nan), "DraftVerify needs a step of at least 0, got nan"),
    (lambda: lab.AdaptiveEntropy(gamma=0.0), r"gamma > 0, got 0\.0"),
    (lambda: lab.AdaptiveEntropy(min_tokens=3, max_tokens=2), r"AdaptiveEntropy .* min_tokens=3"),
    (lambda: lab.Cascade(start_tokens=9), "Cascade needs"),
    (lambda: lab.Cascade(set_steps=0), "Cascade needs"),
    (lambda: lab.FrontierLength(min_tests=0), "min_tests of at least 1, got 4 and 0"),
    (lambda: lab.SkippingEMA(rise=2.0), "rise=2.0"),
    (lambda: lab.Bandit(arms=(Fixed(k=1),)), "two or more arms"),
    (
        lambda: lab.Bandit(arms=(Fixed(k=1), lab.AutoOff(policy=lab.Bandit(arms=(Fixed(k=1), Fixed(k=2)))))),
        "none of them a bandit",
    ),
    (lambda: lab.Bandit(arms=(Fixed(k=1), MaxConfidence(drop=True))), "some arms drop"),
    (lambda: lab.Bandit(arms=(Fixed(k=1), Fixed(k=2)), exploration=math.nan), "exploration of at least 0, got nan"),
    (lambda: lab.AutoOff(policy=Fixed(k=1), patience=0), "at least 1, got 0 and 16"),
    (lambda: lab.AutoOff(policy=Fixed(k=1), fading=1.5), r"AutoOff\.fading must lie in \[0, 1\]"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_bad_settings_are_refused(make: Callable[[], Policy], message: str) -> None:
    """Catches a rule that would stop never, always or at random, and parts that undo each other."""
    with pytest.raises(ValueError, match=message):
        make()


STEEP = Costs(draft_s=0.2, passes={1: 1.0, 3: 1.0, 4: 1.5, 9: 1.6})
FLAT = TableModel({(): [0.25] * 4}, depth=0)
"""A draft that says q = 0.25 and H = log 4 of every draft token."""


def drafted(*q: float) -> Draft:
    draft = Draft()
    for x in q:
        draft.append(0, q=torch.tensor([x, 1 - x], dtype=torch.float64))
    return draft


def length(policy: Policy, memory: object, *, costs: Costs | None = None) -> int:
    draft = host_draft(
        FLAT.new_cache(),
        [0, 1],
        policy=policy,
        memory=memory,
        sampling=Sampling(),
        randomness=streams(0)[0],
        room=30,
        costs=costs,
    )
    return draft.num_tokens


# A running mean of the accepted length


def test_the_length_is_one_more_than_was_accepted_lately():
    """Catches a mean that weighs the old by the share of the new, a length that cannot grow, and rounding to even."""
    policy = lab.AcceptanceEMA(start_tokens=4, eta=0.25)
    memory, lengths = policy.start(), []
    for accepted in (4, 4, 5, 0, 0, 0, 0, 1):
        lengths.append(policy.limit(memory))
        memory = policy.learn(memory, outcome(lengths[-1], min(accepted, lengths[-1])))
    # the means before each step: 3, 3.25, 3.4375, 3.578, 2.68, 2.01, 1.51, 1.13
    assert lengths == [4, 4, 4, 5, 4, 3, 3, 2]
    assert [policy.limit(memory) for memory in (2.5, 3.5)] == [4, 5]
    assert policy.learn(3.0, outcome(0, 0)) == 3.0, "a step without room is no rejection"
    policy = lab.AcceptanceEMA(min_tokens=3, max_tokens=6)
    assert [policy.limit(memory) for memory in (0.0, 4.0, 19.0)] == [3, 5, 6]


# The best length at the acceptance seen so far


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.55, 0.7, 0.8, 0.9, 0.97, 1.0])
@pytest.mark.parametrize("bounds", [{}, {"min_tokens": 0}, {"min_tokens": 3, "max_tokens": 5}])
def test_a_step_is_as_long_as_the_formula_says(acceptance: float, bounds: dict):
    """Catches a stop one draft token early or late, costs of another width, and bounds that the search leaves."""
    policy = lab.ArgmaxLength(**bounds)
    memory = Counts(num_tested=1e9, num_accepted=acceptance * 1e9)

    def rate(g: int) -> float:
        return sum(acceptance**k for k in range(g + 1)) / (g * 0.2 + STEEP.verify_s(g + 1))

    best = max(range(policy.min_tokens, policy.max_tokens + 1), key=rate)
    assert length(policy, memory, costs=STEEP) == best


# Thresholds that drift


def test_the_threshold_drifts_as_in_draft_and_verify():
    """Catches a step in the wrong direction, weights that are swapped, and steps that are not damped."""
    policy = lab.DraftVerify(threshold=0.5, step=0.1, max_tokens=6)
    memory = policy.start()
    assert memory == Drift(threshold=0.5, mean=0.0)
    expected, mean, seen = 0.5, 0.0, []
    for drafted_, accepted in ((4, 2), (4, 4), (4, 4), (5, 5), (5, 5), (6, 6), (2, 2), (4, 1)):
        mean = 0.5 * mean + 0.5 * accepted / drafted_
        goal = expected + 0.1 if mean < 0.9 else expected if drafted_ == 6 else expected - 0.1
        expected = 0.9 * expected + 0.1 * goal
        memory = policy.learn(memory, outcome(drafted_, accepted))
        assert (memory.threshold, memory.mean) == pytest.approx((expected, mean))
        seen.append(round(memory.threshold, 2))
    assert seen == [0.51, 0.52, 0.53, 0.52, 0.51, 0.51, 0.5, 0.51], "up, down, and still where the step was full"
    met = lab.DraftVerify(threshold=0.5, aim=0.5, step=0.1)
    assert met.learn(met.start(), outcome(4, 4)).threshold == pytest.approx(0.49), "the aim is met"


@pytest.mark.parametrize("make", [lab.DraftVerify, lab.AdaptiveEntropy])
def test_a_step_obeys_the_threshold_as_it_stands(make):
    """Catches a rule that drifts but goes by where it started; and one that stops an empty step."""
    policy = make(max_tokens=9)
    bound = 0.25 if make is lab.DraftVerify else 1 - math.sqrt(0.2 * math.log(4))
    assert length(policy, Drift(threshold=bound - 1e-6)) == 9
    assert length(policy, Drift(threshold=bound + 1e-6)) == 1


def test_what_the_drifting_rules_look_at():
    """Catches q of another draft token, or the upper bound of SVIP on the wrong side."""
    half = -(0.5 * math.log(0.5)) * 2
    bound = 1 - math.sqrt(0.3 * half)
    assert lab.DraftVerify().stop(drafted(0.4, 0.6), Drift(threshold=0.5)) is None
    assert lab.DraftVerify().stop(drafted(0.5), Drift(threshold=0.5)) is None  # equal is not below
    assert lab.DraftVerify().stop(drafted(0.6, 0.4), Drift(threshold=0.5)) == Stop("", Evidence.LAST_Q, 0.4, 0.5)
    policy = lab.AdaptiveEntropy(gamma=0.3)
    assert policy.stop(drafted(0.5, 1.0), Drift(threshold=0.9)) is None
    for threshold, is_over in ((bound - 1e-6, False), (bound + 1e-6, True)):
        assert (policy.stop(drafted(1.0, 0.5), Drift(threshold=threshold)) is not None) == is_over


RIVAL_COSTS = Costs.relative(0.3)


def step_of(num_drafted: int, num_accepted: int, judged: tuple[float, ...] = ()) -> ReplayedStep:
    seconds = RIVAL_COSTS.step_s(num_drafted)
    return ReplayedStep(num_accepted + 1, num_drafted, num_accepted, seconds, 0.0, 0.0, judged=judged, costs=RIVAL_COSTS)


def runs(policy: Policy, num_steps: int, accepted: Callable[[int], int]) -> list[tuple[int, int]]:
    """(Draft tokens, steps in a row) of a request of which `accepted(k)` of k draft tokens are accepted."""
    memory, found = policy.start(), []
    for _ in range(num_steps):
        rule = decide(policy, memory, RIVAL_COSTS, 99).rule
        assert rule is not None
        num = len(rule.least) - 1 if rule.least else policy.limit(memory)
        found.append(num)
        memory = policy.learn(memory, step_of(num, accepted(num)))
    return [(num, len(list(same))) for num, same in groupby(found)]


def test_cascade_tests_downhill_and_pauses_twice_as_long_each_time() -> None:
    """Catches a hopeless draft that is tried as often as a good one, and lengths that are tried in another order."""
    down = [(3, 4), (2, 4), (1, 4)]
    assert runs(lab.Cascade(), 100, lambda k: 0) == [(0, 1), *down, (0, 16), *down, (0, 32), *down, (0, 15)]


def test_cascade_stops_testing_where_lengths_are_alike_and_keeps_the_best() -> None:
    """Catches a test that goes on where it has nothing to find: all of 3 are worth 2.11, all of 4 worth 2.27, 8 % more."""
    assert runs(lab.Cascade(), 53, lambda k: k) == [(0, 1), (3, 4), (4, 24), (5, 24)]


def test_ucb_specstop_tries_every_length_once_and_then_the_fastest() -> None:
    """Catches a length that is never tried, a mean of ratios instead of a ratio of sums, and a bonus of the wrong sign."""
    policy = lab.UCBSpecStop(max_tokens=4, exploration=0.0)
    assert runs(policy, 12, lambda k: min(k, 2)) == [(1, 1), (2, 1), (3, 1), (4, 1), (2, 8)]
    curious = runs(lab.UCBSpecStop(max_tokens=4, exploration=3.0), 60, lambda k: min(k, 2))
    assert {k for k, _ in curious[4:]} >= {1, 2, 3}
    memory = policy.start()
    for num, accepted in ((1, 1), (1, 0), (1, 1), (2, 2), (3, 2), (4, 2)):
        memory = policy.learn(memory, step_of(num, accepted))
    assert (memory.tokens[1], memory.steps[1]) == (5, 3)
    assert memory.seconds[1] == pytest.approx(3 * 1.3)


def test_the_frontier_moves_by_one_place_at_a_time_and_probes_a_hopeless_draft_ever_more_seldom() -> None:
    """Catches a leap to the longest step, a place that is trusted too early, and probes that stay as frequent or end."""
    assert runs(lab.FrontierLength(min_tests=2, max_tokens=3), 20, lambda k: k) == [(0, 1), (1, 2), (2, 2), (3, 15)]
    waits = [3, 7, 15, 31, 63, 127, 255, 511, 511]
    probes = [one for wait in waits for one in ((0, wait), (1, 1))]
    assert runs(lab.FrontierLength(min_tests=2), 3 + sum(waits) + len(waits), lambda k: 0) == [(0, 1), (1, 2), *probes]
    found = runs(lab.FrontierLength(min_tests=2), 22, lambda k: min(k, 1))
    # 2 / 1.3 is the most; the second place counts as likely as the first until it has been tested twice
    assert found == [(0, 1), (1, 2), (2, 2), (1, 3), (2, 1), (1, 7), (2, 1), (1, 5)]


def test_the_frontier_learns_each_place_from_the_steps_that_reached_it() -> None:
    """Catches places behind a rejection that count as rejected, a mean that begins at 0, and survival without its product."""
    policy = lab.FrontierLength(fading=0.1)
    memory = policy.learn(policy.learn(policy.start(), step_of(3, 1)), step_of(3, 3))
    assert (memory.rates, memory.tested) == (pytest.approx((1.0, 0.1, 1.0)), (2, 2, 1))
    costs = Costs.relative(0.15)  # 1.5 / 1.15 = 1.304 tokens a pass of one draft token, 1.75 / 1.3 = 1.346 and 1.6 / 1.3 of two
    assert [fastest(chances, costs) for chances in ([0.5, 0.5], [0.5, 0.2], [0.1, 1.0], [])] == [2, 1, 0, 0]


def test_a_full_step_counts_one_more_and_a_hopeless_draft_is_skipped_but_for_probes() -> None:
    """Catches a full step that holds the length down, weights that are swapped, and a mean that cannot recover."""
    policy = lab.SkippingEMA(max_tokens=6)
    memory, lengths = policy.start(), []
    for accepted in (6, 2, 4, 0, 0, 0, *[0] * 15, 0, *[0] * 15, 2, 0):
        lengths.append(policy.limit(memory))
        memory = policy.learn(memory, outcome(lengths[-1], accepted))
    # the means: 7, 3.75, 1.3 * 5 - .3 * 3.75 = 5.375, 1.881, .658, .230, a probe .081, a probe 1.3 * 3 - .024 = 3.876
    assert lengths == [6, 6, 4, 6, 2, 1, *[0] * 15, 2, *[0] * 15, 2, 4]


def test_what_a_rejection_hides_is_not_counted_and_old_steps_fade() -> None:
    """Catches draft tokens behind a rejection that count as rejected: one of five accepted and one tested is half."""
    policy = lab.ArgmaxLength(fading=0.25)
    memory = policy.learn(policy.start(), step_of(5, 1))
    assert memory == Counts(num_tested=2.0, num_accepted=1.0)
    assert policy.learn(memory, step_of(2, 2)) == Counts(num_tested=3.5, num_accepted=2.75)
    assert policy.learn(memory, step_of(0, 0)) == memory
    assert lab.ArgmaxLength(prior=0.5, prior_tokens=4).acceptance(memory) == pytest.approx((1 + 2) / (2 + 4))


def test_the_online_estimator_takes_the_newton_step_of_one_slope_and_an_intercept_for_each_place() -> None:
    """Catches sums that lose a term, intercepts that are not eliminated, and damping on the wrong count."""
    rng, num = np.random.default_rng(0), 3
    policy = lab.OnlineLogistic(max_tokens=num, fit_every=80, damping=20.0)
    memory, rows, labels, places = policy.start(), [], [], []
    for _ in range(80):
        q = rng.uniform(0.05, 0.98, num)
        accepted = int(np.cumprod(rng.random(num) < q).sum())
        memory = policy.learn(memory, step_of(num, accepted, tuple(map(by_q, q))))
        for k in range(min(accepted + 1, num)):
            rows.append([math.log(q[k] / (1 - q[k])), *np.eye(num)[k]])
            labels.append(k < accepted)
            places.append(k)
    x, y = np.array(rows), np.array(labels, float)
    chance = 1 / (1 + math.exp(-1.5))
    counts = np.bincount(places, minlength=num)
    curve = chance * (1 - chance) * x.T @ x + 1e-3 * np.eye(num + 1)
    full = np.linalg.solve(curve, x.T @ (y - chance))
    slope = full[0] * len(y) / (len(y) + 20)
    assert memory.num_fits == 1
    assert memory.slope == pytest.approx(slope)
    at = np.array([(x[:, 1 + k] * (y - chance - chance * (1 - chance) * x[:, 0] * slope)).sum() for k in range(num)])
    steps = at / (chance * (1 - chance) * counts + 1e-3) * counts / (counts + 20)
    assert memory.intercepts == pytest.approx(1.5 + steps)
    assert memory.mean == pytest.approx(y.mean())


def test_the_online_estimator_drafts_whole_steps_until_it_is_fitted_and_hands_its_fit_on() -> None:
    """Catches trimming by coefficients that nobody has fitted, and a server that begins anew with each request."""
    policy = lab.OnlineLogistic(max_tokens=4, fit_every=2, warm_up=1)
    fit = policy.start()
    for _ in range(3):
        fit = policy.learn(fit, step_of(4, 1, (0.6, 0.6, 0.6, 0.6)))
    assert fit.num_fits == 1
    tried = lab.UCBSpecStop().learn(lab.UCBSpecStop().start(), step_of(2, 1))
    known = lab.FrontierLength().learn(lab.FrontierLength().start(), step_of(2, 1))
    for rule, memory in ((policy, fit), (lab.UCBSpecStop(), tried), (lab.FrontierLength(), known)):
        experience = Experience(rule)
        experience.add(memory)
        assert experience.begin() == memory
        assert rule.start(Given(past=json.loads(json.dumps(experience.past)))) == memory, "as a file has it"
        assert rule.start(Given(past={})) == rule.start()


def test_the_classifier_reads_the_last_draft_token() -> None:
    """Catches a sign, and a feature of another draft token."""
    from specdecpp.replay.replay import TraceView

    cells = np.array([[0.1, 0.0], [0.6, 0.0]])
    trace = Trace(
        tokens=np.zeros((2, 2), int),
        odds=np.ones(2),
        overlap=np.ones(2),
        log_q=np.log([[0.9, 0.5], [0.2, 0.5]]),
        branch_length=np.zeros(2, int),
        is_closed=np.zeros(2, bool),
        is_ended=True,
        num_places=2,
        entropy=cells,
        gap=cells,
    )
    view = TraceView(trace, None, RIVAL_COSTS, looks_ahead=False)
    view.begin(0, 2)
    policy = lab.Disco(threshold=0.5, bias=0.0, by_rest=-1.0, by_entropy=-2.0, by_gap=0.0, by_depth=0.0)
    assert policy.stop(view, None) is None
    view.num_tokens = 1
    assert policy.stop(view, None) is None, "log odds 2.3 - 0.2"
    view.num_tokens = 2
    assert policy.stop(view, None) == "classifier says 0.27 < 0.5", "log odds 0.22 - 1.2"


COSTS = Costs.relative(0.2)
GOOD = Request(
    target=TableModel.random(vocab_size=4, depth=2, seed=1, sparsity=0.0),
    draft=TableModel.random(vocab_size=4, depth=2, seed=1, sparsity=0.0),
    max_tokens=200,
    costs=COSTS,
)
HOPELESS = Request(
    target=TableModel({(): [0.0, 0.0, 0.5, 0.5]}, depth=0),
    draft=TableModel({(): [0.5, 0.5, 0.0, 0.0]}, depth=0),
    max_tokens=200,
    costs=COSTS,
)


@dataclass(frozen=True, kw_only=True)
class Diary(Policy):
    """Remembers the steps it learned from, and drafts one draft token."""

    max_tokens: int = 1

    def start(self, given: Any = None) -> tuple:
        return ()

    def learn(self, memory: tuple, outcome: Any) -> tuple:
        return (*memory, (outcome.num_drafted, outcome.num_accepted))


def calibrated_head(seed: int = 0, **card: Any) -> AcceptanceHead:
    return random_head(4, seed=seed, scale=1.0, calibration=Calibration(num_labels=1), **card)


def lengths_of(request: Request, policy: Policy, seed: int = 0) -> list[int]:
    return [r.num_drafted for r in finish(request.session(policy, TokenVerification(), streams(seed)))]


# The bandit


def test_the_bandit_tries_every_arm_and_then_the_one_with_the_largest_bound():
    """Catches a bound without exploration, with the logarithm of the arm's own steps, or from a mean of ratios."""
    policy = lab.Bandit(arms=(Fixed(k=1), Fixed(k=2), Fixed(k=3)), exploration=0.5)
    memory = policy.start()
    sums, steps = [[0, 0.0], [0, 0.0], [0, 0.0]], [0, 0, 0]
    for step in range(60):
        if step < 3:
            best = step
        else:
            rate = sum(t for t, _ in sums) / sum(s for _, s in sums)
            bounds = [t / s + 0.5 * rate * math.sqrt(2 * math.log(step) / n) for (t, s), n in zip(sums, steps, strict=True)]
            best = bounds.index(max(bounds))
        assert memory.chosen == best
        k = policy.limit(memory)
        assert k == best + 1
        accepted = (step * 7) % (k + 1)
        memory = policy.learn(memory, outcome(k, accepted, COSTS))
        sums[best][0] += accepted + 1
        sums[best][1] += COSTS.step_s(k)
        steps[best] += 1
    assert min(steps) > 3


@pytest.mark.parametrize(("request_", "better"), [(GOOD, 4), (HOPELESS, 0)])
@pytest.mark.parametrize("arms", [(Fixed(k=0), Fixed(k=4)), (Fixed(k=4), Fixed(k=0))])
def test_the_bandit_ends_up_with_the_better_arm(request_: Request, better: int, arms: tuple[Policy, ...]):
    """Catches an arm that is rewarded with another's steps, and a bandit that goes by tokens without their time."""
    steps = lengths_of(request_, lab.Bandit(arms=arms))
    assert sum(k == better for k in steps[: -len(steps) // 3]) > 0.6 * len(steps[: -len(steps) // 3])
    assert {0, 4} <= set(steps), "each is tried"
    assert steps == lengths_of(request_, lab.Bandit(arms=arms)), "nothing is drawn"


def test_a_bandit_has_one_head_read_in_one_way():
    """Catches arms that would be shown another head's estimates, or raw scores where they ask for probabilities."""
    head, other = calibrated_head(), calibrated_head(seed=1)
    careful = SpecDecPP(head=head, calibrated=True)
    alike = lab.Bandit(arms=(Fixed(k=1), careful, lab.AutoOff(policy=CostAware(head=head))))
    assert heads(alike) == [head, head]
    for arms in (
        (careful, CostAware(head=other)),
        (SpecDecPP(head=head), CostAware(head=head)),
        (careful, lab.AutoOff(policy=SpecDecPP(head=other, calibrated=True))),
    ):
        with pytest.raises(ValueError, match="different heads"):
            lab.Bandit(arms=arms)


@pytest.mark.parametrize("form", ["lagged", "look_ahead"])
def test_the_head_judges_for_all_arms(form: str):
    """Catches a wrapper that asks no head, or asks it at the other of the two places."""
    head = calibrated_head(form=form, vocab_size=4 if form == "look_ahead" else None)
    sure = SpecDecPP(head=head, calibrated=True, threshold=1.0, max_tokens=3)
    for policy in (lab.Bandit(arms=(Fixed(k=3), sure)), lab.Bandit(arms=(sure, Fixed(k=3))), lab.AutoOff(policy=sure)):
        assert policy.looks_ahead == (form == "look_ahead")
        steps = finish(GOOD.session(policy, TokenVerification(), streams(0)))[:4]
        plain = finish(GOOD.session(sure, TokenVerification(), streams(0)))[:4]
        assert [r.judged for r in steps] == [r.judged for r in plain]
        assert all(len(r.judged) == r.num_drafted - (form == "lagged") for r in steps)


def test_a_wrapped_head_must_fit_the_pair():
    """Catches a head of the wrong width that hides in another rule until the first draft token."""
    target = TableModel.random(vocab_size=8, depth=1, seed=6)
    pair = Pair(target=target, draft=TableModel.random(vocab_size=8, depth=1, seed=7), tokenizer=tiny_tokenizer(8))
    wrong = SpecDecPP(head=calibrated_head())
    for policy in (wrong, lab.AutoOff(policy=wrong), lab.Bandit(arms=(Fixed(k=1), wrong))):
        with pytest.raises(HeadError, match="width 4"):
            Decoder(pair, policy=policy)


# Auto-off


def test_a_hopeless_draft_is_switched_off_and_probed():
    """Catches a switch that never falls, probes that do not come or come too often, and a gain that counts idle steps."""
    steps = lengths_of(HOPELESS, lab.AutoOff(policy=Fixed(k=3), patience=5, probe_every=10))
    assert steps[:5] == [3] * 5
    assert steps[5:-1] == (([0] * 10 + [3]) * 20)[: len(steps) - 6]


def test_the_gain_is_tokens_over_seconds_against_the_target_alone():
    """Catches a gain without the target's own time, or sums that do not fade."""
    policy = lab.AutoOff(policy=Fixed(k=4), patience=1, fading=0.5)
    memory = policy.start()
    for accepted in (4, 0, 0):
        memory = policy.learn(memory, outcome(4, accepted, Costs.relative(0.25)))
    assert memory == Gain(memory=None, num_tokens=5 / 4 + 1 / 2 + 1, seconds=2.0 * 1.75, num_steps=3)
    for target_s, is_off in ((1.27, True), (1.28, False)):  # 2.75 tokens in 3.5 s: as fast as one in 1.273 s
        assert policy.is_off(memory, target_s) == is_off
        reason = policy.stop(Draft(costs=Costs(draft_s=0.1, passes={1: target_s})), memory)
        assert str(reason) == ("gain 1.00 < 1" if is_off else "None")
    assert not policy.is_off(Gain(memory=None, num_tokens=2.0, seconds=2.0, num_steps=1), 1.0), "a gain of 1 is not below 1"


def test_the_inner_rule_is_asked_and_taught_only_while_it_is_followed():
    """Catches idle steps that an inner rule takes for its own, and its bounds being overruled."""
    policy = lab.AutoOff(policy=Diary(), patience=2, probe_every=2)
    memory = policy.start()
    for step in range(8):
        k = 0 if policy.is_off(memory, 1.0) else 1
        memory = policy.learn(memory, outcome(k, 0, COSTS))
        assert memory.memory == ((1, 0),) * sum((1, 1, 0, 0, 1, 0, 0, 1)[: step + 1])
    eager = lab.AutoOff(policy=CumulativeConfidence(threshold=1.0, min_tokens=3))
    assert set(lengths_of(GOOD, eager)[:-3]) == {3}
