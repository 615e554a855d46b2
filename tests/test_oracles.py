"""Oracles: what is provable about them is proven, and the ladder they make is looked at once."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from distributions import unchecked
from records import Process, records

from specdecpp.lab import Heuristic, mdp, oracles
from specdecpp.lab.oracles import hindsight, perfect_probability, pre_sampling
from specdecpp.policies import Costs, CumulativeConfidence, Fixed
from specdecpp.replay.replay import replay
from specdecpp.replay.trace import Opinion, Trace
from specdecpp.training.traces import Terms, traces

pytestmark = pytest.mark.lab

FLAT = Costs.relative(0.22)
CURVE = Costs(draft_s=0.15, passes={1: 1.0, 2: 1.02, 3: 1.3, 5: 1.35, 6: 2.0, 9: 2.1})
TOKEN_DEPENDENT = Process.random(6, seed=3, noise=1.2)


@cache
def recorded(num: int = 30, num_tokens: int = 60) -> list[Trace]:
    """Answers of a process whose acceptance depends on the token."""
    made = records(TOKEN_DEPENDENT, num, num_tokens=num_tokens, seed=0, features=())
    return traces(made, Terms(ends=(), max_tokens=num_tokens))


def constant(acceptance: float, *, num: int, num_tokens: int, length: int = 10) -> list[Trace]:
    """Every draft token is accepted with the same probability, and nothing else is to be seen."""
    shape = (num_tokens, 1 + length)
    sure = np.full((*shape, 1), acceptance)
    trace = Trace(
        tokens=np.zeros(shape, int),
        odds=np.full(num_tokens, acceptance),
        overlap=np.full(num_tokens, acceptance),
        log_q=np.zeros(shape),
        entropy=np.zeros(shape),
        gap=np.zeros(shape),
        branch_length=np.full(num_tokens, length),
        is_closed=np.zeros(num_tokens, bool),
        is_ended=False,
        num_places=num_tokens - 1,
        truth=Opinion(accept=sure, next=sure),
    )
    return [trace] * num


@pytest.fixture
def quick() -> Iterator[None]:
    """For long replays, whose shapes are checked in the short ones."""
    with unchecked():
        yield


# Hindsight


def all_plans(trace: Trace, run: Sequence[int], costs: Costs, at: int = 0, before: int = 1) -> Iterator[float]:
    """The seconds of every way to decode an answer with at most one draft token in vain a step."""
    if at >= len(trace):
        yield 0.0
        return
    room = trace.num_places - at
    for k in range(min(run[at] - at + 1, room) + 1 if room >= 0 else 1):
        accepted, took = min(k, run[at] - at), costs.step_s(k) + costs.switch_s * (k > 0 and not before)
        yield from (took + rest for rest in all_plans(trace, run, costs, at + accepted + 1, min(k, 1)))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "costs",
    [FLAT, CURVE, Costs.relative(1.5), Costs.relative(0.0), replace(FLAT, switch_s=0.1), replace(FLAT, switch_s=2.0)],
    ids=["flat", "curve", "dear", "free", "a switch", "a dear switch"],
)
@pytest.mark.parametrize("is_ended", [False, True])
def test_hindsight_takes_the_least_time_there_is(costs: Costs, is_ended: bool) -> None:
    """Catches a greedy choice where passes get slower, and an end of text that is paid for with one more pass."""
    [trace] = constant(0.8, num=1, num_tokens=9)
    trace = replace(trace, is_ended=is_ended, num_places=12 if is_ended else 8)
    for seed in range(12):
        found = hindsight([trace], costs, seed=seed)
        [run] = trace.runs(np.random.default_rng([seed, 0]).random((1, 9))).tolist()
        assert found.seconds[0] == pytest.approx(min(all_plans(trace, run, costs)))
        assert (found.accepted == found.drafted).all() or costs.switch_s > 0
        assert found.tokens.sum() == 9


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("costs", [FLAT, CURVE, replace(FLAT, switch_s=1.0)], ids=["flat", "curve", "a switch"])
def test_no_policy_is_faster_than_hindsight_on_any_answer(costs: Costs) -> None:
    """Catches coins that differ between oracle and policy. Guaranteed for every answer, so there are no false alarms."""
    best = hindsight(recorded(), costs, repeats=3, max_tokens=10)
    rules = [*(Fixed(k=k) for k in range(11)), CumulativeConfidence(threshold=0.3, max_tokens=10), Heuristic(max_tokens=10)]
    for rule in rules:
        assert (replay(recorded(), rule, costs, repeats=3).seconds >= best.seconds - 1e-9).all()
    assert (perfect_probability(recorded(), costs, repeats=3).seconds >= best.seconds - 1e-9).all()
    assert (hindsight(recorded(), costs, repeats=3).seconds <= best.seconds + 1e-9).all()


# The others


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("acceptance", "costs"), [(0.8, FLAT), (0.6, FLAT), (0.9, Costs.relative(0.05)), (0.8, CURVE)])
def test_constant_acceptance_leaves_one_best_length(acceptance: float, costs: Costs) -> None:
    """Catches a rate that is not the fixed point, and costs that are read off by one: both oracles draft as many as the exact
    optimum. The rate is that of 30,000 tokens, and no seed was looked for."""
    best = mdp.optimum(mdp.Lattice.of(mdp.Process.constant(acceptance), max_tokens=10), costs)
    flat = constant(acceptance, num=10, num_tokens=3000)
    for oracle in (perfect_probability, pre_sampling):
        found = oracle(flat, costs)
        assert found.histogram.sum(0).argmax() == round(best.tally.num_drafted)
        assert found.tokens_per_second == pytest.approx(best.rate, rel=0.03)


def test_what_oracles_know_is_true() -> None:
    """Catches overlaps that are off by a token, where an oracle would know the wrong position."""
    process = TOKEN_DEPENDENT
    overlap = torch.minimum(process.p, process.q).sum(-1).numpy()
    for trace in recorded(num=3):
        after = overlap[trace.tokens]
        before = np.concatenate([[overlap[0]], after[:-1, 0]])
        for knowledge in (oracles._of_drawn, oracles._of_positions):
            [(_, known)] = oracles._knowing(trace, knowledge).opinions.items()
            assert known.next is not None
            np.testing.assert_allclose(known.next[:-1, :-1, 0], after[:-1, :-1], rtol=1e-6)
            np.testing.assert_allclose(known.first, before, rtol=1e-6)
        np.testing.assert_allclose(known.accept[:, 0, 0], before, rtol=1e-6)
        np.testing.assert_allclose(known.accept[:, 1, 0], before, rtol=1e-6)
        np.testing.assert_allclose(known.accept[:, 2:, 0], after[:, 1:-1], rtol=1e-6)
        assert trace.truth is not None
        last = np.concatenate([[0], trace.tokens[:-1, 0]])
        chance = process.accept.numpy()
        np.testing.assert_allclose(trace.truth.accept[:, 0, 0], chance[last, trace.tokens[:, 0]], rtol=1e-5)
        np.testing.assert_allclose(trace.truth.accept[:, 1, 0], chance[last, trace.tokens[:, 1]], rtol=1e-5)
        np.testing.assert_allclose(trace.truth.accept[:, 2:, 0], chance[trace.tokens[:, 1:-1], trace.tokens[:, 2:]], rtol=1e-5)


def test_oracles_refuse_recordings_that_do_not_know() -> None:
    """Catches an oracle that takes what it does not know for zero."""
    blind = [replace(trace, truth=None, source="old") for trace in recorded()]
    for oracle in (perfect_probability, pre_sampling):
        with pytest.raises(ValueError, match="of old does not know"):
            oracle(blind, FLAT)
    assert hindsight(blind, FLAT).tokens.sum() == 30 * 60
