"""Costs of a step on this machine, timed with real steps: forwards, draws and the acceptance test; `known` keeps the figures.

Steps of practice come first (`practice`): real prompts, answered with steps of given lengths, which also show what is accepted.
Slow models, which no cache holds, are timed by these alone. Of quick ones cycles of turns follow: steps of one length in a row
on made-up tokens, shortest first, since a draft leaves little of the target in the processor's caches and a plain pass among
steps with draft tokens takes a third longer than in a row of its like. A machine's speed drifts by a third within a second, so
cycles are short, and lengths are compared with the plain passes of their cycle only.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from specdecpp.backends import Cache, Draws, ReadsBoth
from specdecpp.costs.practice import Practice, judge_name, practice_of, texts
from specdecpp.drafters import SuffixDrafter
from specdecpp.drafters.suffix import Match
from specdecpp.loading.pair import Pair
from specdecpp.policies import CostAware, Costs, Fixed, Policy
from specdecpp.policies.head import HeadPolicy
from specdecpp.policies.protocol import UNTAUGHT, Evidence, Given, Outcome, Rule
from specdecpp.sampling import Sampling, asked, streams
from specdecpp.session import Session, Step
from specdecpp.verify import TokenVerification, at

CANDIDATES, TURN = (0, 1, 2, 3, 4, 6, 8, 12, 16), 6
ALONE = 4
"""Times as many steps of the target alone: what it reads comes back to the processor's caches in ten passes."""
LONG, EVERY = 6, 3
"""Steps with so many draft tokens are in every third cycle."""
FEW, FOURS = (0, 0, 1, 4, 8, 1, 4), (4,) * 8
"""Lengths of the steps that answer a prompt of practice, of slow models and of others."""
PRACTISED = 0.3
"""Share of the budget for practice where cycles follow."""
GLANCE, SLOW_GLANCE = (16, 6, 4), (4, 2, 1)
"""Steps with no, 2 and 4 draft tokens by which a process checks kept costs. The first half of each does not count."""
GLANCE_S = 0.01
"""Seconds of a pass from which on a model is a slow one at that."""
ALONE_BETWEEN, STINT, VISITS = 16, 8, 2
"""Plain steps, steps with one draft token that follow, and how many of these visits are in a cycle, to time a switch and the
way back: after a single step with a draft token the target still finds most of what it reads in the caches."""
VISIT = ALONE_BETWEEN + STINT
MOST_SWITCH = 3
"""Passes of the target alone that a switch takes at most. It takes one to three; on a machine that was busy meanwhile it came
out as six, and requests without a seed then never began to draft."""
CONTEXT, CYCLES, BUDGET_S = 96, 9, 2.5


def glance(pair: Pair, *, is_judged: bool) -> list[Step]:
    """A few steps with no, 2 and 4 draft tokens in empty caches, which the head judges or not, to correct kept costs by."""
    backends, found = _backends(pair), []
    nums = SLOW_GLANCE if _least_s(pair, backends) > GLANCE_S else GLANCE
    for k, num in zip((0, 2, 4), nums, strict=True):
        if (session := _session(pair, backends, _always(pair, k, is_judged=is_judged), context=2)) is not None:
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
    """Steps that were timed within a moment."""

    turns: dict[int, list[Step]]
    """Settled steps by their number of draft tokens."""
    visits: list[Step]
    """Steps of which the last `STINT` in `VISIT` have a draft token; none where models are slow."""

    @property
    def plain_s(self) -> float:
        """Seconds of a pass of the target alone, the unit of the cycle's others."""
        return statistics.median(r.verify_s + r.other_s for r in self.turns[0])


def timed(pair: Pair, budget_s: float) -> tuple[list[Cycle], Practice]:
    """Steps, timed until the budget is spent: of practice, and of models that are quick cycles of turns."""
    started, backends = perf_counter(), _backends(pair)
    is_slow = 3 * TURN * LONG * _least_s(pair, backends) > budget_s
    exercises, practice = _practised(pair, backends, FEW if is_slow else FOURS, budget_s if is_slow else PRACTISED * budget_s)
    if is_slow:
        turns = [{k: [r for r in steps if r.num_drafted == k] for k in FEW} for steps in exercises]
        if whole := [Cycle(turn, []) for turn in turns if all(turn.values())]:
            return whole, practice
    return _cycles(pair, backends, budget_s - (perf_counter() - started)), practice


def _least_s(pair: Pair, backends: tuple[Cache, Cache]) -> float:
    """Seconds of a pass of the target alone in empty caches."""
    session = _session(pair, backends, Fixed(k=0), context=2)
    return math.inf if session is None else min(r.verify_s for r in _turn(session, 3))


def _practised(
    pair: Pair, backends: tuple[Cache, Cache], lengths: tuple[int, ...], budget_s: float
) -> tuple[list[list[Step]], Practice]:
    """Steps of these lengths behind the prompts of practice, in turn greedy and sampled; those of the first prompt come after
    two that warm the models up. Without a tokenizer behind made-up tokens, which teach nothing but times."""
    prompts = [] if isinstance(pair.draft, SuffixDrafter) else texts(pair)
    made_up = [[i % pair.target.vocab_size for i in range(16)]] * 2
    own = asked({}, pair.sampling)
    ways = Sampling(temperature=0.0), Sampling() if own.is_greedy else own
    is_calibrated = pair.head is None or pair.head.card.is_calibrated
    exercises: list[list[Step]] = []
    seen: list[tuple[bool, Step]] = []
    started, shortest_s = perf_counter(), math.inf
    for i, prompt in enumerate(2 * prompts or made_up):
        began, is_greedy, warm_up = perf_counter(), i % 2 == 0, () if i else (0, 4)
        policy = _LengthsInTurn(head=pair.head, lengths=(*warm_up, *lengths), max_tokens=max(lengths), calibrated=is_calibrated)
        session = _session(pair, backends, policy, prompt=prompt, sampling=ways[not is_greedy])
        if session is None:
            break
        steps = _turn(session, len(policy.lengths))
        exercises.append(steps[len(warm_up) :])
        if prompts:
            last = next((n for n, r in enumerate(steps) if {*r.tokens} & {*pair.ends}), len(steps))
            seen += [(is_greedy, r) for r in steps[:last]]  # what follows the end of a text is none
        ended = perf_counter()
        shortest_s = min(shortest_s, ended - began)
        if i and ended - started + shortest_s > budget_s:
            break  # another prompt would end too late
    return exercises, practice_of(seen, judge_name(CostAware(head=pair.head)) if is_calibrated else "")


def _cycles(pair: Pair, backends: tuple[Cache, Cache], budget_s: float) -> list[Cycle]:
    """Cycles of turns until the budget is spent."""
    started, shortest_s = perf_counter(), math.inf
    sessions = {k: session for k in CANDIDATES if (session := _session(pair, backends, _always(pair, k)))}
    visiting = _session(pair, backends, _Visits())
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
    level = statistics.median(cycle.plain_s for cycle in cycles)

    def typical(seconds: Callable[[Step], float], k: int) -> float:
        """Seconds of steps with so many draft tokens, by the median of their ratios to the plain passes beside them."""
        seen = [(cycle.plain_s, cycle.turns[k]) for cycle in cycles if k in cycle.turns]
        return level * statistics.median(statistics.median(map(seconds, steps)) / plain_s for plain_s, steps in seen)

    lengths = sorted({k for cycle in cycles for k in cycle.turns})
    drafts = {k: typical(lambda r: r.draft_s, k) for k in lengths if k}
    is_quick = any(cycle.visits for cycle in cycles)
    start_s, draft_s = (
        _line(drafts) if is_quick else (0.0, statistics.median(s / k for k, s in drafts.items()) if drafts else 0.0)
    )
    steps = [r for cycle in cycles for turn in cycle.turns.values() for r in turn]
    judged = [r.head_s / len(r.judged) for r in steps if r.judged and pair.head is not None]
    costs = Costs(
        draft_s=draft_s,
        passes=_smooth({k + 1: typical(lambda r: r.verify_s + r.other_s, k) for k in lengths}),
        head_s=statistics.median(judged) if judged else 0.0,
        start_s=start_s,
        other_s=statistics.median(r.other_s for r in steps),
        read_along=pair.target.share_of(pair.draft) if isinstance(pair.target, ReadsBoth) else 0.0,
    )
    excess = [_excess_s(cycle) * level / cycle.plain_s for cycle in cycles if cycle.visits and 1 in cycle.turns]
    if not excess:
        return costs
    return replace(costs, switch_s=min(max(0.0, statistics.median(excess)), MOST_SWITCH * costs.verify_s(1)))


def _excess_s(cycle: Cycle) -> float:
    """Seconds that `VISIT` steps, of which `STINT` have a draft token, take beyond as many that follow others of their kind."""
    alone_s, one_s = (statistics.median(map(_seconds, cycle.turns[k])) for k in (0, 1))
    visits = [cycle.visits[i : i + VISIT] for i in range(0, len(cycle.visits), VISIT)]
    return statistics.median(sum(map(_seconds, visit)) for visit in visits) - STINT * one_s - ALONE_BETWEEN * alone_s


def _seconds(r: Step) -> float:
    """Seconds of a step, the head's left out: a switch is not about them."""
    return r.draft_s + r.verify_s + r.other_s


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
    """One position as measured, often a step below the others; from two on a curve through them (least squares, errors in
    proportion to the seconds): a parabola if it bends upwards, for a pass is bound by memory first and by arithmetic later,
    else a straight line. Further steps are mostly noise, and a rule that believed in them would stop in front of one."""
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


def _backends(pair: Pair) -> tuple[Cache, Cache]:
    """Empty ones, of which the sessions take turns."""
    draft = _Copies(pair.draft.vocab_size) if isinstance(pair.draft, SuffixDrafter) else pair.draft.new_cache()
    return pair.target.new_cache(), draft


def _session(
    pair: Pair,
    backends: tuple[Cache, Cache],
    policy: Policy,
    *,
    context: int = CONTEXT,
    prompt: list[int] | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
) -> Session | None:
    """A request under a policy, behind a prompt or made-up tokens, in emptied caches that the sessions share; None where the
    contexts of the models are too short."""
    target, draft = backends
    k = policy.max_tokens
    room = min((m for m in (target.max_length, draft.max_length) if m is not None), default=2**31)
    context = max(2, min(context, room - 2 * (k + 2))) if prompt is None else len(prompt)
    if (k or prompt) and context + 2 * (k + 2) > room:
        return None
    for backend in backends:
        backend.rollback(0)
    return Session(
        target=target,
        draft=draft,
        policy=policy,
        verification=at(sampling, TokenVerification()),
        sampling=sampling,
        prompt=[i % target.vocab_size for i in range(context)] if prompt is None else prompt,
        max_tokens=VISITS * VISIT * (k + 2),
        randomness=streams(k, draw=draft.model.draw if isinstance(draft.model, Draws) else None),
    )


def _always(pair: Pair, k: int, *, is_judged: bool = True) -> Policy:
    """k draft tokens a step; a head, where there is one, judges all of them unless not `is_judged`."""
    if pair.head is None or not is_judged:
        return Fixed(k=k)
    return _LengthsInTurn(head=pair.head, lengths=(k,), max_tokens=k, calibrated=False)
