"""Rules of other people's work do what their papers say; that they are exact is shown in test_law.py and test_replay.py."""

import json
import math
from collections.abc import Callable
from itertools import groupby

import numpy as np
import pytest

from specdecpp.lab import ArgmaxLength, Cascade, Disco, OnlineLogistic, UCBSpecStop
from specdecpp.lab.history import Counts
from specdecpp.policies import Costs, Policy
from specdecpp.policies.experience import Experience
from specdecpp.policies.protocol import decide
from specdecpp.policies.score import by_q
from specdecpp.replay.replayed import ReplayedStep
from specdecpp.replay.trace import Trace

pytestmark = pytest.mark.lab

COSTS = Costs.relative(0.3)


def step_of(num_drafted: int, num_accepted: int, judged: tuple[float, ...] = ()) -> ReplayedStep:
    return ReplayedStep(num_accepted + 1, num_drafted, num_accepted, COSTS.round_s(num_drafted), 0.0, 0.0, judged=judged)


def lengths(policy: Policy, num_steps: int, accepted: Callable[[int], int]) -> list[tuple[int, int]]:
    """(Draft tokens, steps in a row) of a request of which `accepted(k)` of k draft tokens are accepted."""
    memory, found = policy.start(), []
    for _ in range(num_steps):
        rule = decide(policy, memory, COSTS, 99).rule
        assert rule is not None
        num = len(rule.least) - 1 if rule.least else policy.limit(memory)
        found.append(num)
        memory = policy.learn(memory, step_of(num, accepted(num)))
    return [(num, len(list(same))) for num, same in groupby(found)]


def test_cascade_tests_downhill_and_pauses_twice_as_long_each_time() -> None:
    """Catches a hopeless draft that is tried as often as a good one, and lengths that are tried in another order."""
    down = [(3, 4), (2, 4), (1, 4)]
    assert lengths(Cascade(), 100, lambda k: 0) == [(0, 1), *down, (0, 16), *down, (0, 32), *down, (0, 15)]


def test_cascade_stops_testing_where_lengths_are_alike_and_keeps_the_best() -> None:
    """Catches a test that goes on where it has nothing to find: all of 3 are worth 2.11, all of 4 worth 2.27, 8 % more."""
    assert lengths(Cascade(), 53, lambda k: k) == [(0, 1), (3, 4), (4, 24), (5, 24)]


def test_cascade_turns_once_behind_a_maximum() -> None:
    """Catches a search that stops on the slope it went down: two of any number are accepted, so two are best."""
    assert lengths(Cascade(start_tokens=3), 30, lambda k: min(k, 2)) == [(0, 1), (3, 4), (4, 4), (2, 21)]


@pytest.mark.parametrize("wrong", [{"start_tokens": 0}, {"start_tokens": 9}, {"set_steps": 0}, {"trial_steps": 0}])
def test_cascade_refuses_phases_without_rounds(wrong: dict[str, int]) -> None:
    """Catches a phase that never ends."""
    with pytest.raises(ValueError, match="Cascade needs"):
        Cascade(**wrong)


def test_ucb_specstop_tries_every_length_once_and_then_the_fastest() -> None:
    """Catches a length that is never tried, a mean of ratios instead of a ratio of sums, and a bonus of the wrong sign."""
    policy = UCBSpecStop(max_tokens=4, exploration=0.0)
    assert lengths(policy, 12, lambda k: min(k, 2)) == [(1, 1), (2, 1), (3, 1), (4, 1), (2, 8)]
    curious = lengths(UCBSpecStop(max_tokens=4, exploration=3.0), 60, lambda k: min(k, 2))
    assert {k for k, _ in curious[4:]} >= {1, 2, 3}
    memory = policy.start()
    for num, accepted in ((1, 1), (1, 0), (1, 1), (2, 2), (3, 2), (4, 2)):
        memory = policy.learn(memory, step_of(num, accepted))
    assert (memory.tokens[1], memory.steps[1]) == (5, 3)
    assert memory.seconds[1] == pytest.approx(3 * 1.3)


def test_what_a_rejection_hides_is_not_counted_and_old_rounds_fade() -> None:
    """Catches draft tokens behind a rejection that count as rejected: one of five accepted and one tested is half."""
    policy = ArgmaxLength(fading=0.25)
    memory = policy.learn(policy.start(), step_of(5, 1))
    assert memory == Counts(num_tested=2.0, num_accepted=1.0)
    assert policy.learn(memory, step_of(2, 2)) == Counts(num_tested=3.5, num_accepted=2.75)
    assert policy.learn(memory, step_of(0, 0)) == memory


def test_the_online_estimator_takes_the_newton_step_of_one_slope_and_an_intercept_for_each_place() -> None:
    """Catches sums that lose a term, intercepts that are not eliminated, and damping on the wrong count."""
    rng, num = np.random.default_rng(0), 3
    policy = OnlineLogistic(max_tokens=num, fit_every=80, damping=20.0)
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


def test_the_online_estimator_drafts_whole_rounds_until_it_is_fitted_and_hands_its_fit_on() -> None:
    """Catches trimming by coefficients that nobody has fitted, and a server that begins anew with each request."""
    policy = OnlineLogistic(max_tokens=4, fit_every=2, warm_up=1)
    fit = policy.start()
    for _ in range(3):
        fit = policy.learn(fit, step_of(4, 1, (0.6, 0.6, 0.6, 0.6)))
    assert fit.num_fits == 1
    tried = UCBSpecStop().learn(UCBSpecStop().start(), step_of(2, 1))
    for rule, memory in ((policy, fit), (UCBSpecStop(), tried)):
        experience = Experience(rule)
        experience.add(memory)
        assert experience.begin() == memory
        assert rule.resume(json.loads(json.dumps(experience.past))) == memory, "as a file has it"
        assert rule.resume({}) == rule.start()


def test_the_classifier_reads_the_last_candidate() -> None:
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
    view = TraceView(trace, None, COSTS, looks_ahead=False)
    view.begin(0, 2)
    policy = Disco(threshold=0.5, bias=0.0, by_rest=-1.0, by_entropy=-2.0, by_gap=0.0, by_depth=0.0)
    assert policy.stop(view, None) is None
    view.num_tokens = 1
    assert policy.stop(view, None) is None, "log odds 2.3 - 0.2"
    view.num_tokens = 2
    assert policy.stop(view, None) == "classifier says 0.27 < 0.5", "log odds 0.22 - 1.2"
