"""What a step costs on this machine, measured with real rounds and remembered.

A few rounds of fixed length are decoded on made-up tokens, shortest first and in turns, so that everything a round does is in
the figures: forwards, draws, the acceptance test. The time of a candidate and of a target pass by width are medians of rounds
that follow others of their length: a draft leaves little of the target in the caches of the processor, so that a plain pass
among rounds with candidates takes a third longer than in a row of its like. A machine's speed drifts by a third within a
second, so lengths are compared within a cycle of turns only, with the plain passes of that cycle, and cycles are short: the
longest rounds are in every third one. All begin behind the same context, which is read once; models that are slow have fewer
rounds of fewer widths, which say as much there.

The figures are kept for the pair and the machine (`machine.remember`), so that a later process weighs the same costs and a
seed gives the same answer there; those of a machine that was busy meanwhile only for ten minutes.
"""

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from specdecpp import machine
from specdecpp.drafters import SuffixDrafter
from specdecpp.drafters.suffix import Match
from specdecpp.loading.checks import code
from specdecpp.loading.pair import Pair
from specdecpp.policies import Costs, Fixed, Policy, SpecDecPP
from specdecpp.policies.protocol import Outcome
from specdecpp.policies.trees import CostAwareTree
from specdecpp.rounds.verification import TokenVerification
from specdecpp.runners import Draws, ReadsBoth, Runner, refusal_of_trees
from specdecpp.sampling import Sampling, streams
from specdecpp.session import Round, Session

CANDIDATES, TURN = (0, 1, 2, 3, 4, 6, 8, 12, 16), 6
ALONE = 4
"""Times as many rounds of the target alone: what it reads comes back to the processor's caches in ten passes. Twice as many
where models are slow, which no cache holds."""
LONG, EVERY = 6, 3
"""Rounds with so many candidates are in every third cycle."""
FEW_CANDIDATES, SHORT_TURN = (0, 1, 4, 16), 2
"""Where three cycles without the longest rounds would not be over in time."""
ALONE_BETWEEN, STINT, VISITS = 16, 8, 2
"""Rounds without candidates, those with one that follow, and how many of these in a cycle, to see what a switch and the way
back take: after a single round with a candidate the target still finds most of what it reads in the caches."""
VISIT = ALONE_BETWEEN + STINT
MOST_SWITCH = 3
"""Passes of the target alone that a switch takes at most. It takes one to three; on a machine that was busy meanwhile it came
out as six, and requests without a seed then never began to draft."""
ROWS = (1, 2, 4, 8)
"""Of the passes of a draft that are timed for trees."""
CONTEXT, CYCLES, BUDGET_S = 96, 9, 2.5
METHOD = 17
"""Counts up when the figures of an earlier way of measuring should no longer be believed."""


def measured(pair: Pair) -> Costs:
    """The costs of a pair on this machine: those of an earlier measurement, else measured now and kept."""
    if pair.target_fingerprint is None or pair.draft_fingerprint is None:
        return measure(pair)  # models that cannot be told apart
    of = _about(pair)
    if found := machine.recall("costs", of):
        try:
            return Costs.parse(found)
        except ValueError:
            pass  # of another version: measured again
    cycles = _cycles(pair, BUDGET_S)
    costs = _read_along(pair, _costs(cycles))
    figures = {name: getattr(costs, name) for name in ("draft_s", "head_s", "start_s", "switch_s", "other_s", "read_along")}
    figures["passes"] = {str(n): s for n, s in costs.passes.items()}
    is_steady = machine.is_steady([r.verify_s for cycle in cycles for r in cycle.turns.get(k, ())] for k in CANDIDATES)
    machine.remember("costs", of, figures, is_steady=is_steady)
    return costs


def measure(pair: Pair, *, budget_s: float = BUDGET_S) -> Costs:
    """Seconds of a candidate, of a round's start, of a target pass by width and, with a head, of its judgement; batch 1, at a
    context of about a hundred tokens. The head's time stands apart: `policies.head.costs_for` adds it.

    Stops after `budget_s`, once every width was seen; widths that the contexts of the models do not admit are left out. What is
    decoded depends on the time, unless the budget is infinite.
    """
    return _read_along(pair, _costs(_cycles(pair, budget_s)))


def with_trees(pair: Pair, costs: Costs) -> Costs:
    """The same with what trees take on this machine (`Costs.node_s`, `Costs.draft_rows`): of an earlier measurement, or now.
    Where the runners take no trees there is nothing to measure."""
    if any(refusal_of_trees(runner) for runner in (pair.target, pair.draft)):
        return costs
    can_tell = pair.target_fingerprint is not None and pair.draft_fingerprint is not None
    of = _about(pair) | {"asked": "CostAwareTree"}
    found = machine.recall("tree-costs", of) if can_tell else None
    if found is None:
        found = _of_trees(pair, costs)
        if can_tell:
            machine.remember("tree-costs", of, found)
    rows = {int(n): float(times) for n, times in found["draft_rows"].items()}
    return replace(costs, node_s=float(found["node_s"]), draft_rows=rows)


class _Asked(CostAwareTree):
    """Chains, for which the rule is asked all that it is asked of a tree."""

    def open(self, tree: Any, memory: Any) -> Any:
        super().open(tree, memory)
        return tree.frontier

    def wants_child(self, tree: Any, node: int, memory: Any) -> bool:
        super().wants_child(tree, node, memory)
        return not tree.children(node)


def _of_trees(pair: Pair, costs: Costs) -> dict[str, Any]:
    """A chain of three that is asked node by node, in turns with one that is not, and passes of the draft by their rows."""
    started, num = perf_counter(), 8 if 16 * costs.round_s(3) < BUDGET_S / 2 else SHORT_TURN
    runners = pair.target.fresh(), pair.draft.fresh()
    found = [_session(pair, runners, policy, num, costs) for policy in (Fixed(k=3), _Asked(max_tokens=3))]
    sessions = [session for session in found if session is not None]
    if len(sessions) < len(found):
        return {"node_s": 0.0, "draft_rows": {}}
    took: list[list[float]] = [[], []]
    for _ in range(CYCLES):
        for session, seconds in zip(sessions, took, strict=True):
            seconds += [_seconds(r) for r in _turn(session, num)][num // 2 :]
        if perf_counter() - started > BUDGET_S:
            break
    node_s = max(0.0, (_typical(took[1]) - _typical(took[0])) / 3)
    draft: Any = runners[1]
    passes: dict[int, list[float]] = {n: [] for n in ROWS}
    for _ in range(num):
        for n, seconds in passes.items():
            draft.rollback(draft.length)
            began = perf_counter()
            draft.extend([i % draft.vocab_size for i in range(n)], rows=n, parents=[-1] * n)
            seconds.append(perf_counter() - began)
    draft.rollback(draft.length)
    one = _typical(passes[1])
    return {"node_s": node_s, "draft_rows": {str(n): max(1.0, _typical(seconds) / one) for n, seconds in passes.items()}}


@dataclass(frozen=True)
class Cycle:
    """What was timed within a moment: settled rounds by their number of candidates, and rounds of which `STINT` in `VISIT` have
    one, none where models are slow."""

    turns: dict[int, list[Round]]
    visits: list[Round]

    @property
    def plain_s(self) -> float:
        """Seconds of a pass of the target alone, in which the others of the cycle are told."""
        return _typical(r.verify_s + r.other_s for r in self.turns[0])


def _cycles(pair: Pair, budget_s: float) -> list[Cycle]:
    """Cycles of turns until the budget is spent."""
    started, shortest_s = perf_counter(), math.inf
    copies = isinstance(pair.draft, SuffixDrafter)
    runners = pair.target.fresh(), _Copies(pair.draft.vocab_size) if copies else pair.draft.fresh()
    sessions = {k: session for k in CANDIDATES if (session := _session(pair, runners, _always(pair, k), ALONE * TURN))}
    num, first = TURN, _turn(sessions[0], 2)
    least_s = min(r.verify_s for r in first)
    if 3 * TURN * LONG * least_s > budget_s:
        num, sessions = SHORT_TURN, {k: session for k, session in sessions.items() if k in FEW_CANDIDATES}
    visiting = _session(pair, runners, _Visits(), VISITS * VISIT) if num == TURN else None
    cycles: list[Cycle] = []
    for count in range(1, 2 + CYCLES):
        began, cycle, size = perf_counter(), Cycle({}, []), SHORT_TURN if count == 1 else num
        for k, session in sessions.items():
            if k < LONG or num == SHORT_TURN or count % EVERY == 0:
                alone = ALONE * size if num == TURN else 2 * size
                turn = _turn(session, alone if k == 0 else max(size // 2, 2) if k >= LONG else size)
                cycle.turns[k] = turn[len(turn) // 2 :]  # those after rounds of another length find other things in the caches
        if visiting is not None and count > 1:
            cycle.visits.extend(_turn(visiting, VISITS * VISIT))
        cycles.append(cycle)
        ended = perf_counter()
        shortest_s = min(shortest_s, ended - began) if count > 1 else math.inf
        if (count >= EVERY or num == SHORT_TURN) and ended - started + shortest_s > budget_s:
            break  # another cycle would end too late
    return cycles[1:] or cycles  # the first is a warm-up


def _turn(session: Session, num: int) -> list[Round]:
    """Some rounds behind the session's prompt, as if there had been none before."""
    del session.tokens[session.num_prompt_tokens :]
    session.finish_reason = None
    for runner in (session.target, session.draft):
        runner.rollback(min(runner.length, session.num_prompt_tokens - 1))
    session.prefill()
    return [session.step() for _ in range(num) if session.finish_reason is None]


def _costs(cycles: list[Cycle]) -> Costs:
    level = _typical(cycle.plain_s for cycle in cycles)

    def typical(seconds: Callable[[Round], float], k: int) -> float:
        """Of rounds with so many candidates: median over cycles of what stands to the plain passes beside it."""
        seen = [(cycle.plain_s, cycle.turns[k]) for cycle in cycles if k in cycle.turns]
        return level * _typical(_typical(map(seconds, rounds)) / plain_s for plain_s, rounds in seen)

    lengths = [k for k in CANDIDATES if any(k in cycle.turns for cycle in cycles)]
    start_s, draft_s = _line({k: typical(lambda r: r.draft_s, k) for k in lengths if k})
    rounds = [r for cycle in cycles for turn in cycle.turns.values() for r in turn]
    judged = [r for r in rounds if r.judged]
    head_s = _typical(r.head_s / len(r.judged) for r in judged) if judged else 0.0
    passes = _smooth({k + 1: typical(lambda r: r.verify_s + r.other_s, k) for k in lengths})
    costs = Costs(draft_s=draft_s, passes=passes, head_s=head_s, start_s=start_s, other_s=_typical(r.other_s for r in rounds))
    excess = [_excess_s(cycle) * level / cycle.plain_s for cycle in cycles if cycle.visits and 1 in cycle.turns]
    if not excess:
        return costs
    return replace(costs, switch_s=min(max(0.0, _typical(excess)), MOST_SWITCH * costs.verify_s(1)))


def _read_along(pair: Pair, costs: Costs) -> Costs:
    return replace(costs, read_along=pair.target.share_of(pair.draft) if isinstance(pair.target, ReadsBoth) else 0.0)


def _excess_s(cycle: Cycle) -> float:
    """Seconds that `VISIT` rounds, of which `STINT` have a candidate, take beyond as many that follow others of their kind."""
    alone_s, one_s = (_typical(map(_seconds, cycle.turns[k])) for k in (0, 1))
    visits = [cycle.visits[i : i + VISIT] for i in range(0, len(cycle.visits), VISIT)]
    return _typical(sum(map(_seconds, visit)) for visit in visits) - STINT * one_s - ALONE_BETWEEN * alone_s


def _seconds(r: Round) -> float:
    """Of a round; what a head took in it is not what a switch is about."""
    return r.draft_s + r.verify_s + r.other_s


def _typical(seconds: Iterable[float]) -> float:
    return statistics.median(seconds)


def _line(drafts: dict[int, float]) -> tuple[float, float]:
    """(start, slope) of the seconds of so many candidates: least squares with errors in proportion to the number."""
    if len(drafts) < 2:
        return 0.0, next((s / k for k, s in drafts.items()), 0.0)
    numbers, seconds = np.array(list(drafts)), np.array(list(drafts.values()))
    slope, start = np.polyfit(numbers, seconds, 1, w=1 / numbers)
    if start <= 0 or slope <= 0:
        return 0.0, float((seconds / numbers).mean())
    return float(start), float(slope)


def _smooth(passes: dict[int, float]) -> dict[int, float]:
    """One position as measured, from two on a curve through the others (least squares, errors in proportion to the seconds): a
    parabola if it bends upwards, for a pass is bound by memory first and by arithmetic later, else a straight line.

    The first step is often a step up, from a product with a vector to one with a matrix. Further ones are mostly noise, and
    a rule that believed in them would stop all its rounds in front of one.
    """
    widths = sorted(n for n in passes if n > 1)
    if len(widths) < 3:
        return passes
    seconds = np.array([passes[n] for n in widths])
    bend, *_ = fit = np.polyfit(widths, seconds, 2, w=1 / seconds)
    if len(widths) < 5 or bend < 0:
        slope, level = np.polyfit(widths, seconds, 1, w=1 / seconds)
        fit = (slope, level) if slope > 0 else (seconds.mean(),)
    return {1: passes[1]} | {n: max(passes[1], float(np.polyval(fit, n))) for n in widths}


class _Copies(SuffixDrafter):
    """Has as many candidates as it is asked for, once it has looked for them."""

    def copied(self, limit: int) -> Match:
        found = super().copied(limit)
        return found if found.tokens else Match([0] * limit, 1, 1)


@dataclass(frozen=True, kw_only=True)
class _Visits(Fixed):
    """The last `STINT` of every `VISIT` rounds have a candidate."""

    k: int = 1

    def start(self) -> int:
        return 0

    def learn(self, memory: int, outcome: Outcome) -> int:
        return memory + 1

    def limit(self, memory: int) -> int:
        return self.k if memory % VISIT >= ALONE_BETWEEN else 0


def _session(
    pair: Pair, runners: tuple[Runner, Runner], policy: Policy, num_rounds: int = TURN, costs: Costs | None = None
) -> Session | None:
    """A request for so many rounds under a policy; None where the contexts of the models are too short.

    The sessions share their `runners`, as they take turns.
    """
    target, draft = runners
    k = policy.max_tokens
    room = min((m for m in (target.max_length, draft.max_length) if m is not None), default=2**31)
    context = max(2, min(CONTEXT, room - 2 * (k + 2)))
    if k and context + 2 * (k + 2) > room:
        return None
    return Session(
        target=target,
        draft=draft,
        policy=policy,
        verification=TokenVerification(),
        sampling=Sampling(),
        prompt=[i % target.vocab_size for i in range(context)],
        max_tokens=num_rounds * (k + 2),
        randomness=streams(k, draw=draft.draw if isinstance(draft, Draws) else None),
        costs=costs,
    )


def _always(pair: Pair, k: int) -> Policy:
    """k candidates a round; with a head all are judged, and none stops a round."""
    judging = {"threshold": 1.0, "calibrated": False, "min_tokens": 0, "max_tokens": k}
    return Fixed(k=k) if pair.head is None else SpecDecPP(head=pair.head, **judging)


def _about(pair: Pair) -> dict[str, Any]:
    """What the figures depend on."""
    card = pair.head.card if pair.head else None
    runners = pair.target, pair.draft
    return {
        "method": METHOD,
        "head": card and [card.form, card.hidden_size, card.width, card.num_layers, card.scalars],
        "target": pair.target_fingerprint,
        "draft": pair.draft_fingerprint,
        "models": pair.identities,
        "code": code(),
        "runners": [[type(r).__name__, getattr(r, "num_threads", None), getattr(r, "activations", None)] for r in runners],
        "devices": [str(r.device) for r in runners],
        "dtypes": [str(getattr(getattr(r, "model", r), "dtype", None)) for r in runners],
        **machine.about(),
    }
