"""Costs of a step on this machine, timed with real steps; `known` keeps the figures.

Every part of a step is in the figures: forwards, draws, the acceptance test. Steps of practice come first (`practice`): real
prompts, answered with steps of given lengths, which also tell what is accepted. Slow models, which no cache holds, are timed
by these steps alone. Of quick ones steps of fixed length follow on made-up tokens, shortest first and in turns: the time of a
draft token and of a target pass by width are medians of steps that follow others of their length, since a draft leaves little
of the target in the caches of the processor, so that a plain pass among steps with draft tokens takes a third longer than in a
row of its like. A machine's speed drifts by a third within a second, so lengths are compared within a cycle of turns only, with
the plain passes of that cycle, and cycles are short: the longest steps are in every third one. All begin behind the same
context, which is read once.
"""

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import takewhile
from time import perf_counter
from typing import Any

import numpy as np

from specdecpp.backends import Cache, Draws, ReadsBoth
from specdecpp.costs.practice import Practice, judge_name, practice_of, texts
from specdecpp.drafters import SuffixDrafter
from specdecpp.drafters.suffix import Match
from specdecpp.loading.pair import Pair
from specdecpp.policies import CostAware, Costs, Fixed, Policy, SpecDecPP
from specdecpp.policies.head import HeadPolicy
from specdecpp.policies.protocol import UNTAUGHT, Evidence, Given, Outcome, Rule
from specdecpp.sampling import Sampling, asked, streams
from specdecpp.session import Session, Step
from specdecpp.verify import TokenVerification, at

CANDIDATES, TURN = (0, 1, 2, 3, 4, 6, 8, 12, 16), 6
ALONE = 4
"""Times as many steps of the target alone: what it reads comes back to the processor's caches in ten passes. Twice as many
where models are slow, which no cache holds."""
LONG, EVERY = 6, 3
"""Steps with so many draft tokens are in every third cycle."""
FEW, FOURS = (0, 0, 1, 4, 8, 1, 4), (4,) * 8
"""Lengths of the steps that answer a prompt of practice: of slow models, where three cycles without the longest steps would
not be over in time, and of others."""
PRACTISED = 0.3
"""Share of the budget for practice where cycles follow."""
GLANCE, SLOW_GLANCE = (16, 6, 4), (4, 2, 1)
"""Steps with no, 2 and 4 draft tokens, by which a process sees whether kept costs still hold. Half of each are not looked
at."""
GLANCE_S = 0.01
"""Passes that take longer are those of slow models."""
ALONE_BETWEEN, STINT, VISITS = 16, 8, 2
"""Steps without draft tokens, those with one that follow, and how many of these in a cycle, to see what a switch and the way
back take: after a single step with a draft token the target still finds most of what it reads in the caches."""
VISIT = ALONE_BETWEEN + STINT
MOST_SWITCH = 3
"""Passes of the target alone that a switch takes at most. It takes one to three; on a machine that was busy meanwhile it came
out as six, and requests without a seed then never began to draft."""
ROWS = (1, 2, 4, 8)
"""Of the passes of a draft that are timed for trees."""
CONTEXT, CYCLES, BUDGET_S = 96, 9, 2.5


def glance(pair: Pair, *, is_judged: bool) -> list[Step]:
    """A few steps with no, 2 and 4 draft tokens in empty caches, which the head judges or not, to correct kept costs by."""
    backends, found = _backends(pair), []
    first = _session(pair, backends, Fixed(k=0), 3, context=2)
    is_slow = first is None or min(r.verify_s for r in _turn(first, 3)) > GLANCE_S
    for k, num in zip((0, 2, 4), SLOW_GLANCE if is_slow else GLANCE, strict=True):
        policy = _always(pair, k) if is_judged else Fixed(k=k)
        if (session := _session(pair, backends, policy, num, context=2)) is not None:
            found += _turn(session, num)[num // 2 :]
    return found


def measure(pair: Pair, *, budget_s: float = BUDGET_S) -> Costs:
    """Seconds of a draft token, of a step's start, of a target pass by width and, with a head, of its judgement; batch 1, at a
    context of about a hundred tokens. The head's time stands apart: `policies.head.costs_for` adds it.

    Stops after `budget_s`, once every width was seen; widths that the contexts of the models do not admit are left out. What is
    decoded depends on the time, unless the budget is infinite.
    """
    return costs_of(pair, timed(pair, budget_s)[0])


@dataclass(frozen=True)
class Cycle:
    """Steps that were timed within a moment: settled steps by their number of draft tokens, and steps of which `STINT` in
    `VISIT` have one, none where models are slow."""

    turns: dict[int, list[Step]]
    visits: list[Step]

    @property
    def plain_s(self) -> float:
        """Seconds of a pass of the target alone, in which the others of the cycle are told."""
        return _typical(r.verify_s + r.other_s for r in self.turns[0])


def timed(pair: Pair, budget_s: float) -> tuple[list[Cycle], Practice]:
    """Steps, timed, until the budget is spent: of practice, and of models that are quick cycles of turns."""
    started, backends = perf_counter(), _backends(pair)
    first = _session(pair, backends, Fixed(k=0), 3, context=2)
    least_s = math.inf if first is None else min(r.verify_s for r in _turn(first, 3))
    is_slow = 3 * TURN * LONG * least_s > budget_s
    exercises, practice = _practised(pair, backends, FEW if is_slow else FOURS, budget_s if is_slow else PRACTISED * budget_s)
    if is_slow:
        turns = [{k: [r for r in steps if r.num_drafted == k] for k in FEW} for steps in exercises]
        whole = [turn for turn in turns if all(turn.values())]
        if whole:
            return [Cycle(turn, []) for turn in whole], practice
    return _cycles(pair, backends, budget_s - (perf_counter() - started)), practice


def _practised(
    pair: Pair, backends: tuple[Cache, Cache], lengths: tuple[int, ...], budget_s: float
) -> tuple[list[list[Step]], Practice]:
    """Steps of these lengths behind the prompts of practice, in turn greedy and sampled; those of the first prompt come after
    two that warm the models up. Without a tokenizer behind made-up tokens, which teach nothing but times."""
    prompts = [] if isinstance(pair.draft, SuffixDrafter) else texts(pair)
    made_up = [[i % pair.target.vocab_size for i in range(16)]] * 2
    asks = asked({}, pair.sampling)
    ways = Sampling(temperature=0.0), Sampling() if asks.is_greedy else asks
    exercises: list[list[Step]] = []
    seen: list[tuple[bool, Step]] = []
    started, shortest_s, before = perf_counter(), math.inf, []
    for i, prompt in enumerate(2 * prompts or made_up):
        began, is_greedy, warm_up = perf_counter(), i % 2 == 0, () if i else (0, 4)
        policy = _LengthsInTurn(
            head=pair.head, lengths=(*warm_up, *lengths), max_tokens=max(lengths), calibrated=_is_calibrated(pair)
        )
        common = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(before, prompt[:-1], strict=False)))
        session = _session(pair, backends, policy, len(lengths) + 2, prompt=prompt, kept=common, sampling=ways[not is_greedy])
        if session is None:
            break
        before, steps = prompt, _turn(session, len(policy.lengths))
        exercises.append(steps[len(warm_up) :])
        if prompts:
            last = next((n for n, r in enumerate(steps) if {*r.tokens} & {*pair.ends}), len(steps))
            seen += [(is_greedy, r) for r in steps[:last]]  # what follows the end of a text is none
        ended = perf_counter()
        shortest_s = min(shortest_s, ended - began)
        if i and ended - started + shortest_s > budget_s:
            break  # another prompt would end too late
    return exercises, practice_of(seen, judge_name(CostAware(head=pair.head)) if _is_calibrated(pair) else "")


def _cycles(pair: Pair, backends: tuple[Cache, Cache], budget_s: float) -> list[Cycle]:
    """Cycles of turns until the budget is spent."""
    started, shortest_s = perf_counter(), math.inf
    sessions = {k: session for k in CANDIDATES if (session := _session(pair, backends, _always(pair, k), ALONE * TURN))}
    visiting = _session(pair, backends, _Visits(), VISITS * VISIT)
    cycles: list[Cycle] = []
    for count in range(1, 2 + CYCLES):
        began, cycle, size = perf_counter(), Cycle({}, []), 2 if count == 1 else TURN
        for k, session in sessions.items():
            if k < LONG or count % EVERY == 0:
                turn = _turn(session, ALONE * size if k == 0 else max(size // 2, 2) if k >= LONG else size)
                cycle.turns[k] = turn[len(turn) // 2 :]  # those after steps of another length find other things in the caches
        if visiting is not None and count > 1:
            cycle.visits.extend(_turn(visiting, VISITS * VISIT))
        cycles.append(cycle)
        ended = perf_counter()
        shortest_s = min(shortest_s, ended - began) if count > 1 else math.inf
        if count >= EVERY and ended - started + shortest_s > budget_s:
            break  # another cycle would end too late
    return cycles[1:] or cycles  # the first is a warm-up


def _turn(session: Session, num: int) -> list[Step]:
    """Some steps behind the session's prompt, as if there had been none before."""
    del session.tokens[session.num_prompt_tokens :]
    session.finish_reason = None
    for backend in (session.target, session.draft):
        backend.rollback(min(backend.length, session.num_prompt_tokens - 1))
    session.prefill()
    return [session.step() for _ in range(num) if session.finish_reason is None]


def costs_of(pair: Pair, cycles: list[Cycle]) -> Costs:
    """Costs of a pair from its steps."""
    read_along = pair.target.share_of(pair.draft) if isinstance(pair.target, ReadsBoth) else 0.0
    return replace(_costs(cycles, has_head=pair.head is not None), read_along=read_along)


def _costs(cycles: list[Cycle], *, has_head: bool = False) -> Costs:
    level = _typical(cycle.plain_s for cycle in cycles)

    def typical(seconds: Callable[[Step], float], k: int) -> float:
        """Ratio of steps with so many draft tokens: median over cycles of what stands to the plain passes beside it."""
        seen = [(cycle.plain_s, cycle.turns[k]) for cycle in cycles if k in cycle.turns]
        return level * _typical(_typical(map(seconds, steps)) / plain_s for plain_s, steps in seen)

    lengths = sorted({k for cycle in cycles for k in cycle.turns})
    drafts = {k: typical(lambda r: r.draft_s, k) for k in lengths if k}
    is_quick = any(cycle.visits for cycle in cycles)
    start_s, draft_s = _line(drafts) if is_quick else (0.0, _typical(s / k for k, s in drafts.items()) if drafts else 0.0)
    steps = [r for cycle in cycles for turn in cycle.turns.values() for r in turn]
    judged = [r for r in steps if r.judged and has_head]
    head_s = _typical(r.head_s / len(r.judged) for r in judged) if judged else 0.0
    passes = _smooth({k + 1: typical(lambda r: r.verify_s + r.other_s, k) for k in lengths})
    costs = Costs(draft_s=draft_s, passes=passes, head_s=head_s, start_s=start_s, other_s=_typical(r.other_s for r in steps))
    excess = [_excess_s(cycle) * level / cycle.plain_s for cycle in cycles if cycle.visits and 1 in cycle.turns]
    if not excess:
        return costs
    return replace(costs, switch_s=min(max(0.0, _typical(excess)), MOST_SWITCH * costs.verify_s(1)))


def _excess_s(cycle: Cycle) -> float:
    """Seconds that `VISIT` steps, of which `STINT` have a draft token, take beyond as many that follow others of their kind."""
    alone_s, one_s = (_typical(map(_seconds, cycle.turns[k])) for k in (0, 1))
    visits = [cycle.visits[i : i + VISIT] for i in range(0, len(cycle.visits), VISIT)]
    return _typical(sum(map(_seconds, visit)) for visit in visits) - STINT * one_s - ALONE_BETWEEN * alone_s


def _seconds(r: Step) -> float:
    """Seconds of a step, the head's left out: a switch is not about them."""
    return r.draft_s + r.verify_s + r.other_s


def _typical(seconds: Iterable[float]) -> float:
    return statistics.median(seconds)


def _line(drafts: dict[int, float]) -> tuple[float, float]:
    """(start, slope) of the seconds of so many draft tokens: least squares with errors in proportion to the number."""
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
    a rule that believed in them would stop all its steps in front of one.
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
    """Has as many draft tokens as it is asked for, once it has looked for them."""

    def copied(self, limit: int) -> Match:
        found = super().copied(limit)
        return found if found.tokens else Match([0] * limit, 1, 1)


@dataclass(frozen=True, kw_only=True)
class _Visits(Fixed):
    """The last `STINT` of every `VISIT` steps have a draft token."""

    k: int = 1

    def start(self, given: Given = UNTAUGHT) -> int:
        return 0

    def learn(self, memory: int, outcome: Outcome) -> int:
        return memory + 1

    def limit(self, memory: int) -> int:
        return self.k if memory % VISIT >= ALONE_BETWEEN else 0


@dataclass(frozen=True, kw_only=True)
class _LengthsInTurn(HeadPolicy):
    """Steps of given lengths, one after the other, that a head or q judges and nothing stops."""

    head: Any = None
    lengths: tuple[int, ...] = ()

    def start(self, given: Given = UNTAUGHT) -> int:
        return 0

    def learn(self, memory: int, outcome: Outcome) -> int:
        return memory + 1

    def limit(self, memory: int) -> int:
        return self.lengths[memory % len(self.lengths)]

    def rule(self, memory: int, costs: Costs | None) -> Rule:
        return Rule(Evidence.SURVIVAL, (0.0,))


def _is_calibrated(pair: Pair) -> bool:
    return pair.head is None or pair.head.card.is_calibrated


def _backends(pair: Pair) -> tuple[Cache, Cache]:
    """Empty ones, of which the sessions take turns."""
    draft = _Copies(pair.draft.vocab_size) if isinstance(pair.draft, SuffixDrafter) else pair.draft.new_cache()
    return pair.target.new_cache(), draft


def _session(
    pair: Pair,
    backends: tuple[Cache, Cache],
    policy: Policy,
    num_steps: int = TURN,
    costs: Costs | None = None,
    *,
    context: int = CONTEXT,
    prompt: list[int] | None = None,
    kept: int = 0,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
) -> Session | None:
    """A request for so many steps under a policy, behind a prompt or made-up tokens; None where the contexts of the models
    are too short.

    The sessions share their `backends`, as they take turns. Of what those have read only `kept` tokens stay.
    """
    target, draft = backends
    k = policy.max_tokens
    room = min((m for m in (target.max_length, draft.max_length) if m is not None), default=2**31)
    context = max(2, min(context, room - 2 * (k + 2))) if prompt is None else len(prompt)
    if (k or prompt) and context + 2 * (k + 2) > room:
        return None
    for backend in backends:
        backend.rollback(min(backend.length, kept))
    return Session(
        target=target,
        draft=draft,
        policy=policy,
        verification=at(sampling, TokenVerification()),
        sampling=sampling,
        prompt=[i % target.vocab_size for i in range(context)] if prompt is None else prompt,
        max_tokens=num_steps * (k + 2),
        randomness=streams(k, draw=draft.model.draw if isinstance(draft.model, Draws) else None),
        costs=costs,
    )


def _always(pair: Pair, k: int) -> Policy:
    """k draft tokens a step; with a head all are judged, and none stops a step."""
    judging = {"threshold": 1.0, "calibrated": False, "min_tokens": 0, "max_tokens": k}
    return Fixed(k=k) if pair.head is None else SpecDecPP(head=pair.head, **judging)
