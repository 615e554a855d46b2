"""Stopping on paper. Everything is computed, nothing sampled, so nothing here has a false alarm.

What the module says is compared with what does not come from it: path by path enumeration, all plans of a small round, the
real session over exact tables, closed forms, the paper's printed figures, and the page that explains it.
"""

import doctest
import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from distributions import Request, distribution_of, unchecked
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from specdecpp.costs import Costs
from specdecpp.lab import mdp
from specdecpp.lab.mdp import Lattice, Process, StepTally, fixed, hindsight, optimum, threshold
from specdecpp.policies import Policy
from specdecpp.testing import TableModel
from specdecpp.verify import TokenVerification

pytestmark = pytest.mark.lab

TIGHT = {"rel": 1e-9, "abs": 1e-12}

chances = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0.01, 1.0))


@st.composite
def probabilities(draw, num):
    """Small whole weights make zeros and ties likely, floats everything else."""
    weights = draw(st.lists(st.one_of(st.integers(0, 2), st.floats(0.05, 1)), min_size=num, max_size=num).filter(any))
    return np.array(weights) / sum(weights)


@st.composite
def processes(draw, most_states=3):
    num = draw(st.integers(1, most_states))
    return Process(
        start=draw(probabilities(num)),
        transition=np.stack([draw(probabilities(num)) for _ in range(num)]),
        acceptance=np.array([draw(chances) for _ in range(num)]),
    )


@st.composite
def curves(draw):
    """A draft step against a pass of 1 s at the least, that may get slower with its width, evenly or with a jump."""
    rises = draw(st.lists(st.sampled_from([0.0, 0.0, 0.05, 0.4]), min_size=7, max_size=7))
    return Costs(draft_s=draw(st.floats(0.02, 1.2)), passes={n + 1: 1.0 + sum(rises[:n]) for n in range(8)})


flat = st.floats(0.02, 0.95).map(Costs.relative)


def rate(lattice, costs, plan):
    return lattice.tally(plan).tokens_per_second(costs)


def best_fixed(lattice, costs):
    """(K, tokens per second) by trying all."""
    return max(((k, rate(lattice, costs, fixed(lattice, k))) for k in range(lattice.max_tokens + 1)), key=lambda x: x[1])


def best_threshold(lattice, costs):
    """(h, tokens per second) by trying every h that makes a difference."""
    found = {float(1 - s) for layer in lattice.layers for s in layer.survival} | {-1.0}
    return max(((h, rate(lattice, costs, threshold(lattice, h))) for h in found), key=lambda x: x[1])


def paths(process, length):
    """All (states s_0..s_length, probability), one by one."""
    for states in itertools.product(range(len(process.acceptance)), repeat=length + 1):
        chance = process.start[states[0]]
        for a, b in itertools.pairwise(states):
            chance *= process.transition[a, b]
        if chance > 0:
            yield states, chance


def by_paths(process, max_tokens, goes):
    """The tally of a rule `goes(k, state, survival)`, path by path."""
    tokens, steps = 0.0, np.zeros(max_tokens + 1)
    for states, chance in paths(process, max_tokens):
        k, survival, made = 0, 1.0, 1.0
        while k < max_tokens and goes(k, states[k], survival):
            k += 1
            survival *= process.acceptance[states[k]]
            made += survival
        tokens, steps[k] = tokens + chance * made, steps[k] + chance
    return StepTally(num_tokens=tokens, steps=steps)


# --- the process and its lattice -------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(process=processes(), max_tokens=st.integers(0, 4), h=st.floats(0, 1))
def test_the_lattice_is_all_paths_merged(process, max_tokens, h):
    """Catches situations merged that differ, and mass or gain lost between layers."""
    lattice = Lattice.of(process, max_tokens=max_tokens)
    h += 1e-7  # away from ties, which rounding decides
    tally = lattice.tally(threshold(lattice, h))
    direct = by_paths(process, max_tokens, lambda k, state, survival: 1 - survival <= h)
    assert tally.num_tokens == pytest.approx(direct.num_tokens, **TIGHT)
    assert tally.steps == pytest.approx(direct.steps, **TIGHT)


@dataclass(frozen=True, kw_only=True)
class Informed(Policy):
    """Stops by the true acceptance of what was drawn."""

    acceptance: np.ndarray
    before: int
    h: float

    def stop(self, draft, memory):
        tokens = [self.before, *draft.tokens]
        odds = [self.acceptance[a, b] for a, b in itertools.pairwise(tokens)]
        return "rejected" if 1 - np.prod(odds) > self.h else None


@pytest.mark.parametrize("seed", [0, 2, 3, 4])
def test_the_process_is_the_real_step(seed):
    """Catches a model of the step that is not the session's: the distribution of draft tokens and the mean, exactly."""
    target, draft = (TableModel.random(vocab_size=3, depth=1, seed=s) for s in (seed, seed + 50))
    request = Request(target=target, draft=draft, max_tokens=9)
    p, q = (np.array([model.distribution((a,)).tolist() for a in range(3)]) for model in (target, draft))
    odds = np.minimum(1, np.divide(p, q, out=np.zeros_like(p), where=q > 0))
    before = request.prompt[-1]
    process = Process(  # a state is a token with the one before it
        start=np.eye(9)[before], transition=_pairs(q), acceptance=odds.reshape(-1)
    )
    lattice = Lattice.of(process, max_tokens=3)
    tally = lattice.tally(threshold(lattice, 0.55))
    policy = Informed(acceptance=odds, before=before, h=0.55, max_tokens=3)

    def one_step(coins):
        session = request.session(policy, TokenVerification(), (coins, coins))
        session.prefill()
        outcome = session.step()
        return outcome.num_drafted, len(outcome.pieces)

    distribution = distribution_of(one_step)
    assert sum(chance * tokens for (_, tokens), chance in distribution.items()) == pytest.approx(tally.num_tokens, **TIGHT)
    drafted = [sum(chance for (n, _), chance in distribution.items() if n == k) for k in range(4)]
    assert tally.steps == pytest.approx(drafted, **TIGHT)
    assert max(drafted) < 1, "the rule decides nothing here"


def _pairs(q):
    """(a, b) -> (b, c) with probability q(c | b)."""
    transition = np.zeros((3, 3, 3, 3))
    for a, b in itertools.product(range(3), repeat=2):
        transition[a, b, b] = q[b]
    return transition.reshape(9, 9)


@pytest.mark.parametrize("wrong", [{"start": np.ones(2)}, {"transition": np.eye(3)}, {"acceptance": np.array([0.5, 1.1])}])
@unchecked()
def test_a_process_that_is_none_is_refused(wrong):
    """Catches rows that do not sum to 1, which would lose mass in silence."""
    good = {"start": np.eye(2)[0], "transition": np.eye(2), "acceptance": np.array([0.5, 1.0])}
    Process(**good)
    with pytest.raises(ValueError, match=r"a process over \d acceptances|must lie in"):
        Process(**(good | wrong))


# --- the optimum -----------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(process=processes(most_states=2), costs=curves())
@unchecked()
def test_no_plan_is_better_than_the_optimum(process, costs):
    """Catches any mistake in the dynamic programme or the iteration: all plans of a short step are tried."""
    lattice = Lattice.of(process, max_tokens=3)
    sizes = [len(layer.state) for layer in lattice.layers[:-1]]
    assume(sum(sizes) <= 9)
    best = 0.0
    for bits in itertools.product([False, True], repeat=sum(sizes)):
        plan = tuple(np.array(part, bool) for part in np.split(np.array(bits), np.cumsum(sizes)[:-1]))
        best = max(best, rate(lattice, costs, plan))
    assert optimum(lattice, costs).rate == pytest.approx(best, **TIGHT)


@settings(max_examples=40)
@given(process=processes(), costs=st.one_of(flat, curves()), max_tokens=st.integers(0, 6))
@unchecked()
def test_what_is_known_orders_what_is_possible(process, costs, max_tokens):
    """Catches an optimum that is not one, and a bound that is none: fixed and tuned <= optimum <= hindsight."""
    lattice = Lattice.of(process, max_tokens=max_tokens)
    best, slack = optimum(lattice, costs), 1 + 1e-9
    assert best_fixed(lattice, costs)[1] <= best.rate * slack
    assert best_threshold(lattice, costs)[1] <= best.rate * slack
    bound = hindsight(lattice, costs)
    assert best.rate <= bound.tokens_per_second(costs) * slack
    assert bound.num_tokens == pytest.approx(1 + bound.num_drafted, abs=1e-9)  # nothing is drafted in vain


@settings(max_examples=40)
@given(process=processes(), costs=st.one_of(flat, curves()), max_tokens=st.integers(0, 6))
@unchecked()
def test_dinkelbach_rises_to_where_nothing_is_left(process, costs, max_tokens):
    """Catches an iteration that stops early or turns back."""
    lattice = Lattice.of(process, max_tokens=max_tokens)
    best = optimum(lattice, costs)
    assert best.rates[0] == pytest.approx(1 / costs.verify_s(1))
    assert all(a < b for a, b in itertools.pairwise(best.rates))
    assert len(best.rates) <= 10
    left = best.tally.num_tokens - best.rate * best.tally.seconds(costs)
    assert left == pytest.approx(0, abs=1e-9)


@settings(max_examples=50)
@given(acceptance=chances, costs=flat)
@example(acceptance=0.8, costs=Costs.relative(0.22))
@unchecked()
def test_constant_acceptance_asks_for_a_threshold(acceptance, costs):
    """Catches a rule and a theorem that disagree: optimum, best K by brute force, S m > rho t_draft, h* = 1 - c rho'/m."""
    lattice = Lattice.of(Process.constant(acceptance), max_tokens=20)
    best = optimum(lattice, costs)
    assert best.rate == pytest.approx(best_fixed(lattice, costs)[1], **TIGHT)
    c, ratio = costs.draft_s, best.tally.speed_up(costs)
    h = 1 - c * ratio / acceptance if acceptance else -1.0
    for k, go in enumerate(best.plan):
        chance = acceptance ** (k + 1)
        if abs(chance - c * ratio) > 1e-9:
            assert bool(go[0]) == (chance > c * ratio) == (1 - acceptance**k < h)


# --- hindsight -------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(process=processes(), costs=curves())
@example(process=Process.constant(0.9), costs=Costs(draft_s=0.1, passes={1: 1.0, 2: 1.0, 3: 3.0, 4: 3.0}))
@unchecked()
def test_hindsight_is_the_best_of_all_that_know_the_run(process, costs):
    """Catches hindsight that drafts the whole run where that does not pay: every map from L to draft tokens is tried."""
    distribution = np.zeros(4)
    for states, chance in paths(process, 3):
        reached = np.cumprod([1.0, *(process.acceptance[s] for s in states[1:]), 0.0])
        distribution -= chance * np.diff(reached)
    plans = itertools.product(*(range(length + 1) for length in range(4)))
    best = max((1 + distribution @ n) / (distribution @ [costs.step_s(k) for k in n]) for n in plans)
    assert hindsight(Lattice.of(process, max_tokens=3), costs).tokens_per_second(costs) == pytest.approx(best, **TIGHT)


# --- the page --------------------------------------------------------------------------------------------------------


def test_constant_acceptance_has_the_papers_figures():
    """Catches other figures than the page's: at acceptance .8 and c = .22 drafting stops after the fourth."""
    costs, lattice = Costs.relative(0.22), Lattice.of(Process.constant(0.8), max_tokens=20)
    best = optimum(lattice, costs)
    assert [round(rate, 3) for rate in best.rates] == [1.0, 1.703, 1.788]
    assert round(best.tally.num_drafted) == 4
    speeds = [lattice.tally(fixed(lattice, n)).speed_up(costs) for n in (3, 4, 5)]
    assert speeds == pytest.approx([1.778, 1.788, 1.757], abs=5e-4)
    assert hindsight(lattice, costs).speed_up(costs) == pytest.approx(2.649, abs=5e-4)


def test_the_examples_run():
    """Catches an example in a docstring that does not do what it shows."""
    outcome = doctest.testmod(mdp)
    assert outcome.attempted > 0
    assert outcome.failed == 0
