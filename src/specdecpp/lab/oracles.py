"""Three oracles, in replay only: how far any rule, any score of sampled tokens, and any score before sampling could get.

| oracle | knows | decides |
|---|---|---|
| hindsight | the coins: which draft tokens will be accepted | drafts of those what pays, and none in vain |
| perfect probability | min(1, p/q) of every drawn draft token, and 1 - TV of the next position | the cost-aware rule |
| pre-sampling | 1 - TV of every position, not what was drawn there | the cost-aware rule, before each draw |

Always say which one. Hindsight is a bound on every policy, answer by answer, on the same coins. The other two follow the
cost-aware rule, S m > rho (t_draft + dt_verify), with rho the rate that they achieve. Where acceptance develops along a step
that rule is good and not quite the best: they are what perfect scores would bring to it, and not a bound.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from jaxtyping import Int

from specdecpp.costs.curve import is_switch
from specdecpp.lab.history import Priced
from specdecpp.policies import Costs, DraftSoFar
from specdecpp.policies.cost_aware import prices_of_more
from specdecpp.replay.replay import replay, thrown
from specdecpp.replay.replayed import Replayed, ReplayedStep, prices
from specdecpp.replay.trace import Opinion, Trace

STEPS_OF_SEARCH, CLOSE = 12, 1e-5
_TRUTH: Hashable = "truth"


def hindsight(
    traces: Sequence[Trace], costs: Costs, *, seed: int = 0, repeats: int = 1, max_tokens: int | None = None
) -> Replayed:
    """The least time any rule could take on the same coins: it knows them. None: steps of any length.

    A run of acceptable draft tokens is drafted in as many steps as pay, all in one where a pass takes the same at any width.
    """

    def played(trace: Trace, runs: Int[np.ndarray, "R N"]) -> Iterator[ReplayedStep]:
        return chain.from_iterable(_shortest(trace, run, costs, max_tokens) for run in runs.tolist())

    return Replayed.of(
        map(played, traces, thrown(traces, seed=seed, repeats=repeats)),
        sources=tuple(trace.source for trace in traces),
        costs=costs,
        repeats=repeats,
        is_priced=True,
    )


def perfect_probability(traces: Sequence[Trace], costs: Costs, **options: Any) -> Replayed:
    """The cost-aware rule with the truth about every drawn token: what a perfect head would bring. `options` as in `replay`.

    Raises ValueError for traces that do not know the truth beyond a rejection.
    """
    return _settled([_knowing(trace, _of_drawn) for trace in traces], costs, **options)


def pre_sampling(traces: Sequence[Trace], costs: Costs, **options: Any) -> Replayed:
    """The cost-aware rule with 1 - TV of every position in place of what was drawn there. `options` as in `replay`.

    Raises ValueError for traces that do not know the truth beyond a rejection.
    """
    return _settled([_knowing(trace, _of_positions) for trace in traces], costs, **options)


def _shortest(trace: Trace, runs: Sequence[int], costs: Costs, max_tokens: int | None) -> list[ReplayedStep]:
    """The steps of the least total time from the start to the end of an answer, found backwards from its end."""
    num = len(trace)
    most = num if max_tokens is None else min(max_tokens, num)
    seconds = prices(costs, most)
    left = np.zeros((num + 1, 2))  # by whether the step before had draft tokens: if not, the first of them takes a switch
    chosen = np.zeros((num, 2, 2), dtype=int)
    for at in range(num - 1, -1, -1):
        room = min(trace.num_places - at, most)
        longest = max(0, min(runs[at] - at, room))
        ways = [(k, k) for k in range(longest + 1)]
        if longest == 0 and room > 0:
            ways.append((1, 0))  # in vain, where that is less than a switch
        for before in (0, 1):
            took = [
                seconds[k][0] + costs.switch_s * is_switch(before, k) + left[min(at + accepted + 1, num), min(k, 1)]
                for k, accepted in ways
            ]
            left[at, before] = least = min(took)
            best = [way for way, each in zip(ways, took, strict=True) if each == least]
            chosen[at, before] = max(best, key=lambda way: (way[1], -way[0]))
    steps, at, before = [], 0, 1
    while at < num:
        k, accepted = chosen[at, before].tolist()
        steps.append(ReplayedStep(min(accepted + 1, num - at), k, accepted, *seconds[k]))
        at, before = at + accepted + 1, min(k, 1)
    return steps


@dataclass(frozen=True, kw_only=True)
class _CostRule(Priced):
    """Go on if j more draft tokens pay for some j >= 1 (see `policies.cost_aware`), with opinions that are right.

    `rate` in tokens/s; `mean` is what is expected of the draft tokens after the next one.
    """

    rate: float
    mean: float
    head: Hashable = _TRUTH
    calibrated: bool = True

    @property
    def looks_ahead(self) -> bool:
        return True

    def judge(self, draft: DraftSoFar, hidden: Any) -> None:
        raise NotImplementedError("an oracle is not asked: what it knows is recorded")

    def stop(self, draft: Any, memory: Any) -> str | None:
        costs, num = draft.costs, draft.num_tokens
        assert costs is not None, "replay gives costs"
        assert draft.next_acceptance is not None, "an oracle knows it"
        least = self.rate * prices_of_more(costs, self.max_tokens, self.mean)[num]
        return None if draft.survival * draft.next_acceptance > least else "does not pay"


def _settled(traces: Sequence[Trace], costs: Costs, *, max_tokens: int | None = None, **options: Any) -> Replayed:
    """The rule at the rate that it achieves on all traces together, by Dinkelbach's iteration from the target alone.

    Near its end the iteration may hover, since the rule is not exactly the best at each rate; the best replay counts.
    """
    most = traces[0].branch_size if max_tokens is None else max_tokens
    mean = float(np.concatenate([trace.overlap for trace in traces]).mean())  # 1 - TV of a position
    rule = _CostRule(rate=1 / costs.verify_s(1), mean=mean, max_tokens=most)
    best = replay(traces, rule, costs, **options)
    for _ in range(STEPS_OF_SEARCH):
        found = replay(traces, replace(rule, rate=best.tokens_per_second), costs, **options)
        if found.tokens_per_second <= best.tokens_per_second * (1 + CLOSE):
            break
        best = found
    return best


def _knowing(trace: Trace, knowledge: Callable[[Trace, Opinion], Opinion]) -> Trace:
    if trace.truth is None:
        raise ValueError(
            f"a trace of {trace.source or 'these answers'} does not know what the target makes of the discarded branches, and "
            "this oracle looks at it. Collect the labels with the target's odds of the branches (collect.branches.odds)."
        )
    return replace(trace, opinions={(_TRUTH, True): knowledge(trace, trace.truth)})


def _of_drawn(trace: Trace, truth: Opinion) -> Opinion:
    return replace(truth, first=trace.overlap)


def _of_positions(trace: Trace, truth: Opinion) -> Opinion:
    """The chance of a token is that of its position: for the answer's and the rejected one overlap, then what came before."""
    assert truth.next is not None, "the truth is known of what follows, too"
    own = trace.overlap[:, None, None]
    return Opinion(accept=np.concatenate([own, own, truth.next[:, 1:-1]], axis=1), next=truth.next, first=trace.overlap)


ORACLES = {
    "hindsight": ("hindsight", hindsight),
    "perfect": ("perfect probability", perfect_probability),
    "pre_sampling": ("pre-sampling", pre_sampling),
}
"""Oracles of the entry point `specdecpp.oracles`: labels and functions, by the names that results have."""
