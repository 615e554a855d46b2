"""Rules that follow outcomes: each step of their memory, and that a step obeys it."""

import math

import pytest
import torch
from distributions import drafted as host_draft
from distributions import outcome

from specdecpp.lab import AcceptanceEMA, AdaptiveEntropy, ArgmaxLength, DraftVerify
from specdecpp.lab.adaptive import Drift
from specdecpp.lab.history import Counts
from specdecpp.policies import Costs, Policy
from specdecpp.policies.protocol import Evidence, Stop
from specdecpp.sampling import Sampling, streams
from specdecpp.step import Draft
from specdecpp.testing import TableModel

pytestmark = pytest.mark.lab

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
    policy = AcceptanceEMA(start_tokens=4, eta=0.25)
    memory, lengths = policy.start(), []
    for accepted in (4, 4, 5, 0, 0, 0, 0, 1):
        lengths.append(policy.limit(memory))
        memory = policy.learn(memory, outcome(lengths[-1], min(accepted, lengths[-1])))
    # the means before each step: 3, 3.25, 3.4375, 3.578, 2.68, 2.01, 1.51, 1.13
    assert lengths == [4, 4, 4, 5, 4, 3, 3, 2]
    assert policy.limit(2.5) == 4
    assert policy.limit(3.5) == 5


def test_the_mean_finds_a_length_and_leaves_it_again():
    """Catches a length that settles where everything is accepted, or below what is accepted."""
    policy = AcceptanceEMA()
    memory = policy.start()
    for _ in range(80):
        memory = policy.learn(memory, outcome(policy.limit(memory), policy.limit(memory)))
    assert policy.limit(memory) == policy.max_tokens
    for _ in range(40):
        memory = policy.learn(memory, outcome(policy.limit(memory), min(2, policy.limit(memory))))
    assert policy.limit(memory) == 3
    for _ in range(40):
        memory = policy.learn(memory, outcome(policy.limit(memory), 0))
    assert policy.limit(memory) == 1, "it never stops drafting for good"


def test_the_mean_stays_in_its_bounds_and_ignores_rounds_without_candidates():
    """Catches a length outside [min_tokens, max_tokens], and a last step without room that counts as a rejection."""
    policy = AcceptanceEMA(min_tokens=3, max_tokens=6)
    assert [policy.limit(memory) for memory in (0.0, 4.0, 19.0)] == [3, 5, 6]
    assert policy.learn(3.0, outcome(0, 0)) == 3.0


# The best length at the acceptance seen so far


def test_the_best_length_follows_the_counts():
    """Catches accepted over drafted, where all after the first rejection were never tested; and a prior that stays or is
    forgotten."""
    policy = ArgmaxLength(prior=0.5, prior_tokens=4)
    memory = policy.start()
    assert policy.acceptance(memory) == 0.5
    memory = policy.learn(memory, outcome(8, 2))
    assert policy.acceptance(memory) == pytest.approx((2 + 2) / (3 + 4))
    memory = policy.learn(memory, outcome(2, 2))
    assert policy.acceptance(memory) == pytest.approx((4 + 2) / (5 + 4))
    memory = policy.learn(memory, outcome(0, 0))
    assert policy.acceptance(memory) == pytest.approx((4 + 2) / (5 + 4))


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.55, 0.7, 0.8, 0.9, 0.97, 1.0])
@pytest.mark.parametrize("bounds", [{}, {"min_tokens": 0}, {"min_tokens": 3, "max_tokens": 5}])
def test_a_round_is_as_long_as_the_formula_says(acceptance: float, bounds: dict):
    """Catches a stop one draft token early or late, costs of another width, and bounds that the search leaves."""
    policy = ArgmaxLength(**bounds)
    memory = Counts(num_tested=1e9, num_accepted=acceptance * 1e9)

    def rate(g: int) -> float:
        return sum(acceptance**k for k in range(g + 1)) / (g * 0.2 + STEEP.verify_s(g + 1))

    best = max(range(policy.min_tokens, policy.max_tokens + 1), key=rate)
    assert length(policy, memory, costs=STEEP) == best


# Thresholds that drift


def test_the_threshold_drifts_as_in_draft_and_verify():
    """Catches a step in the wrong direction, weights that are swapped, and steps that are not damped."""
    policy = DraftVerify(threshold=0.5, step=0.1, max_tokens=6)
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
    met = DraftVerify(threshold=0.5, aim=0.5, step=0.1)
    assert met.learn(met.start(), outcome(4, 4)).threshold == pytest.approx(0.49), "the aim is met"


@pytest.mark.parametrize(("start", "accepted", "end"), [(0.5, 0, 1.0), (0.5, 4, 0.0)])
def test_a_drifting_threshold_stays_a_probability(start: float, accepted: int, end: float):
    """Catches a threshold that wanders off, so that it takes as many steps to come back."""
    policy = DraftVerify(threshold=start, step=1.0)
    memory = policy.start()
    for _ in range(30):
        memory = policy.learn(memory, outcome(4, accepted))
    assert memory.threshold == end
    assert policy.learn(memory, outcome(0, 0)) is memory


@pytest.mark.parametrize("make", [DraftVerify, AdaptiveEntropy])
def test_a_round_obeys_the_threshold_as_it_stands(make):
    """Catches a rule that drifts but goes by where it started; and one that stops an empty step."""
    policy = make(max_tokens=9)
    bound = 0.25 if make is DraftVerify else 1 - math.sqrt(0.2 * math.log(4))
    assert length(policy, Drift(threshold=bound - 1e-6)) == 9
    assert length(policy, Drift(threshold=bound + 1e-6)) == 1


def test_what_the_drifting_rules_look_at():
    """Catches q of another draft token, or the upper bound of SVIP on the wrong side."""
    half = -(0.5 * math.log(0.5)) * 2
    bound = 1 - math.sqrt(0.3 * half)
    assert DraftVerify().stop(drafted(0.4, 0.6), Drift(threshold=0.5)) is None
    assert DraftVerify().stop(drafted(0.5), Drift(threshold=0.5)) is None  # equal is not below
    assert DraftVerify().stop(drafted(0.6, 0.4), Drift(threshold=0.5)) == Stop("", Evidence.LAST_Q, 0.4, 0.5)
    policy = AdaptiveEntropy(gamma=0.3)
    assert policy.stop(drafted(0.5, 1.0), Drift(threshold=0.9)) is None
    for threshold, is_over in ((bound - 1e-6, False), (bound + 1e-6, True)):
        assert (policy.stop(drafted(1.0, 0.5), Drift(threshold=threshold)) is not None) == is_over


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AcceptanceEMA(eta=1.5), r"AcceptanceEMA\.eta must lie in \[0, 1\]"),
        (lambda: AcceptanceEMA(start_tokens=0), "start_tokens of at least 1, got 0"),
        (lambda: ArgmaxLength(prior=-0.1), r"ArgmaxLength\.prior .* got -0\.1"),
        (lambda: ArgmaxLength(prior_tokens=0), "prior_tokens of at least 1, got 0"),
        (lambda: DraftVerify(threshold=2.0), r"DraftVerify\.threshold .* got 2\.0"),
        (lambda: DraftVerify(aim=-1.0), r"DraftVerify\.aim .* got -1\.0"),
        (lambda: DraftVerify(step=math.nan), "DraftVerify needs a step of at least 0, got nan"),
        (lambda: AdaptiveEntropy(gamma=0.0), r"gamma > 0, got 0\.0"),
        (lambda: AdaptiveEntropy(min_tokens=3, max_tokens=2), r"AdaptiveEntropy .* min_tokens=3"),
    ],
)
def test_bad_configurations_are_refused(make, message: str):
    """Catches a value that would make a rule stop never, always or at random."""
    with pytest.raises(ValueError, match=message):
        make()
