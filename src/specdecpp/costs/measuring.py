"""Costs of a step on this machine: measured once with real steps, kept for later processes, corrected by the steps of requests.

A later process takes the same measured costs (`cache_dir.remember`), so that a seed gives the same answer there, and requests
without a seed begin with the costs that the clock has made of them (`CostClock`). Where the two differ by more than `WRONG` the
measurement was wrong: a later process takes the clock's for both, and a seed may then give another answer.

Steps of practice come first (`practice`): real prompts, answered with steps of given lengths, which also show what is accepted.
Slow models, which no cache holds, are timed by these alone. Of quick ones cycles of turns follow: steps of one length in a row
on made-up tokens, shortest first, since a draft leaves little of the target in the processor's caches and a plain pass among
steps with draft tokens takes a third longer than in a row of its like. A machine's speed drifts by a third within a second, so
cycles are short, and lengths are compared with the plain passes of their cycle only.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from specdecpp import cache_dir
from specdecpp.backends import Cache, Draws, ReadsBoth
from specdecpp.costs.clock import differ, shares
from specdecpp.costs.practice import Practice, Practised, judge_name, texts
from specdecpp.drafters import SuffixDrafter
from specdecpp.drafters.suffix import Match
from specdecpp.loading.models import code
from specdecpp.loading.pair import Pair
from specdecpp.policies import CostAware, Costs
from specdecpp.policies.head import HeadPolicy
from specdecpp.policies.protocol import NO_PAST, Evidence, Given, Outcome, Rule
from specdecpp.sampling import Sampling, asked, streams
from specdecpp.session import Session, Step
from specdecpp.verify import TokenVerification, verification_for

METHOD = 20
"""Counts up when the figures of an earlier way of measuring should no longer be believed."""
LENGTHS, TURN = (0, 1, 2, 3, 4, 6, 8, 12, 16), 6
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
Caches = tuple[Cache, Cache]


@dataclass(frozen=True, kw_only=True)
class Known:
    """Costs and practice of a pair on this machine. Requests with a seed see `costs`, the others begin with `now`."""

    costs: Costs
    now: Costs
    practice: Practice = Practice()  # noqa: RUF009 (frozen)
    is_new: bool = True
    """True where it was measured just now."""
    is_steady: bool = True


def measured(pair: Pair) -> Costs:
    """The costs of a pair on this machine: those of an earlier measurement, else measured now and kept."""
    return known(pair).costs


def known(pair: Pair) -> Known:
    """Costs that an earlier process has kept of a pair, else measured now and kept."""
    kept = cache_dir.recall("costs", _about(pair)) if pair.is_identified else None
    try:
        if kept:
            found = Known(
                costs=Costs.parse(kept),
                now=Costs.parse(kept["now"]),
                practice=Practice.parse(kept["practice"]),
                is_new=False,
                is_steady=kept.get("is_steady") is not False,
            )
            if differ(shares(found.costs), shares(found.now)):
                found = replace(found, costs=found.now)
                keep(pair, found)
            return found
    except (ValueError, KeyError, TypeError):
        pass  # of another version, or damaged: measured again
    cycles, practice = timed(pair, BUDGET_S)
    costs = costs_of(pair, cycles)
    times = [[r.verify_s for cycle in cycles for r in cycle.turns.get(k, ())] for k in LENGTHS]
    found = Known(costs=costs, now=costs, practice=practice, is_steady=cache_dir.is_steady(times))
    if pair.is_identified:
        keep(pair, found)
    return found


def keep(pair: Pair, known: Known) -> None:
    """Keep it for later processes."""
    figures = known.costs.to_json() | {"now": known.now.to_json(), "practice": known.practice.to_json()}
    cache_dir.remember("costs", _about(pair), figures, is_steady=known.is_steady)


def _about(pair: Pair) -> dict[str, Any]:
    """Facts that the figures depend on."""
    card = pair.head.card if pair.head else None
    backends = pair.target, pair.draft
    return {
        "method": METHOD,
        "head": card and [card.form, card.hidden_size, card.width, card.num_layers, card.scalars],
        "target": pair.target_fingerprint,
        "draft": pair.draft_fingerprint,
        "models": pair.identities,
        "code": code(),
        "backends": [[type(r).__name__, getattr(r, "num_threads", None), getattr(r, "activations", None)] for r in backends],
        "devices": [str(r.device) for r in backends],
        "dtypes": [str(getattr(getattr(r, "model", r), "dtype", None)) for r in backends],
        **cache_dir.about(),
    }


def glance(pair: Pair, *, is_judged: bool) -> list[Step]:
    """A few steps with no, 2 and 4 draft tokens in empty caches, which the head judges or not, to correct kept costs by."""
    caches, found, head = _caches(pair), [], pair.head if is_judged else None
    nums = SLOW_GLANCE if _least_s(pair, caches) > GLANCE_S else GLANCE
    for k, num in zip((0, 2, 4), nums, strict=True):
        if session := _session(pair, caches, (k,), head=head, context=2):
            found += _turn(session, num)[num // 2 :]
    return found


def measure(pair: Pair, *, budget_s: float = BUDGET_S) -> Costs:
    """Seconds of a draft token, of a step's start, of a target pass by width and, with a head, of its judgement; batch 1, at a
    context of about a hundred tokens. The head's time stands apart: `policies.head.costs_for` adds it.

    Stops after `budget_s`, once every width was seen; widths that the contexts of the models do not admit are left out. The
    number of steps, and so which tokens come out, depends on times unless the budget is infinite.
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
        return median(map(_pass_s, self.turns[0]))

    @property
    def switch(self) -> float:
        """Extra time of a visit of `VISIT` steps, in target passes, over the same steps without a switch."""
        alone_s, one_s = (median(map(_seconds, self.turns[k])) for k in (0, 1))
        visits = [sum(map(_seconds, self.visits[i : i + VISIT])) for i in range(0, len(self.visits), VISIT)]
        return (median(visits) - STINT * one_s - ALONE_BETWEEN * alone_s) / self.plain_s


def timed(pair: Pair, budget_s: float) -> tuple[list[Cycle], Practice]:
    """Steps, timed until the budget is spent: of practice, and of models that are quick cycles of turns."""
    started, caches = perf_counter(), _caches(pair)
    is_slow = 3 * TURN * LONG * _least_s(pair, caches) > budget_s
    exercises, practice = _practised(pair, caches, FEW if is_slow else FOURS, budget_s * (1 if is_slow else PRACTISED))
    turns = [{k: [r for r in steps if r.num_drafted == k] for k in FEW} for steps in exercises if is_slow]
    if whole := [Cycle(turn, []) for turn in turns if all(turn.values())]:
        return whole, practice
    return _cycles(pair, caches, budget_s - (perf_counter() - started)), practice


def _least_s(pair: Pair, caches: Caches) -> float:
    """Seconds of a pass of the target alone in empty caches."""
    session = _session(pair, caches, (0,), context=2)
    return min(r.verify_s for r in _turn(session, 3)) if session else math.inf


def _while_time(most: int, least: int, budget_s: float) -> Iterator[int]:
    """0, 1, ... up to `most`, until another turn, as short as the shortest but the first, would end too late; at least
    `least`."""
    started, shortest_s = perf_counter(), math.inf
    for i in range(most):
        began = perf_counter()
        yield i
        ended = perf_counter()
        shortest_s = min(shortest_s, ended - began) if i else math.inf
        if i + 1 >= least and ended - started + shortest_s > budget_s:
            return


def _practised(pair: Pair, caches: Caches, lengths: tuple[int, ...], budget_s: float) -> tuple[list[list[Step]], Practice]:
    """Steps of these lengths behind the prompts of practice, in turn greedy and sampled; those of the first prompt come after
    two that warm the models up. Without a tokenizer behind made-up tokens, which teach nothing but times."""
    prompts = [] if isinstance(pair.draft, SuffixDrafter) else 2 * texts(pair)
    behind = prompts or [[i % pair.target.vocab_size for i in range(16)]] * 2
    own = asked({}, pair.sampling)
    ways = Sampling(temperature=0.0), Sampling() if own.is_greedy else own
    exercises: list[list[Step]] = []
    seen: tuple[list[Practised], list[Practised]] = [], []
    for i in _while_time(len(behind), 2, budget_s):
        warm_up = () if i else (0, 4)
        session = _session(pair, caches, warm_up + lengths, head=pair.default_head, prompt=behind[i], sampling=ways[i % 2])
        if session is None:
            break
        steps = _turn(session, len(warm_up + lengths))
        exercises.append(steps[len(warm_up) :])
        for r in steps if prompts else ():
            if {*r.tokens} & {*pair.ends}:
                break  # what follows the end of a text is none
            if 0 < r.num_drafted == len(r.judged):  # a lagged head has not judged the last
                seen[i % 2].append(Practised(r.num_accepted, tuple(r.judged), tuple(r.overlaps)))
    head = pair.default_head
    judge = judge_name(CostAware(head=head)) if head is None or head.card.is_calibrated else ""
    return exercises, Practice(greedy=tuple(seen[0]), sampled=tuple(seen[1]), judge=judge)


def _cycles(pair: Pair, caches: Caches, budget_s: float) -> list[Cycle]:
    """Cycles of turns until the budget is spent."""
    sessions = {k: session for k in LENGTHS if (session := _session(pair, caches, (k,), head=pair.head))}
    visiting = _session(pair, caches, (0,) * ALONE_BETWEEN + (1,) * STINT)
    cycles: list[Cycle] = []
    for i in _while_time(1 + CYCLES, EVERY, budget_s):
        cycle, size = Cycle({}, []), TURN if i else 2
        for k, session in sessions.items():
            if k < LONG or (i + 1) % EVERY == 0:
                turn = _turn(session, ALONE * size if k == 0 else max(size // 2, 2) if k >= LONG else size)
                cycle.turns[k] = turn[len(turn) // 2 :]  # those after steps of another length find other things in the caches
        if visiting and i:
            cycle.visits.extend(_turn(visiting, VISITS * VISIT))
        cycles.append(cycle)
    return cycles[1:] or cycles  # the first is a warm-up


def _turn(session: Session, num: int) -> list[Step]:
    """Some steps behind the session's prompt, as if there had been none before."""
    del session.tokens[session.num_prompt_tokens :]
    session.finish_reason = None
    for cache in (session.target, session.draft):
        cache.rollback(min(cache.length, session.num_prompt_tokens - 1))
    session.prefill()
    return [session.step() for _ in range(num) if session.finish_reason is None]


def costs_of(pair: Pair, cycles: list[Cycle]) -> Costs:
    """Costs of a pair from its steps."""
    level = median(cycle.plain_s for cycle in cycles)
    lengths = sorted({k for cycle in cycles for k in cycle.turns})

    def typical(seconds: Callable[[Step], float], k: int) -> float:
        """Seconds of steps with so many draft tokens, by the median of their ratios to the plain passes beside them."""
        return level * median(median(map(seconds, c.turns[k])) / c.plain_s for c in cycles if k in c.turns)

    drafts = {k: typical(lambda r: r.draft_s, k) for k in lengths if k}
    is_quick = any(cycle.visits for cycle in cycles)
    start_s, draft_s = _line(drafts) if is_quick else (0.0, median(s / k for k, s in drafts.items()) if drafts else 0.0)
    steps = [r for cycle in cycles for turn in cycle.turns.values() for r in turn]
    judged = [r.head_s / len(r.judged) for r in steps if r.judged and pair.head is not None]
    switches = [cycle.switch for cycle in cycles if cycle.visits and 1 in cycle.turns]
    costs = Costs(
        draft_s=draft_s,
        passes=_smooth({k + 1: typical(_pass_s, k) for k in lengths}),
        head_s=median(judged) if judged else 0.0,
        start_s=start_s,
        other_s=median(r.other_s for r in steps),
        read_along=pair.target.share_of(pair.draft) if isinstance(pair.target, ReadsBoth) else 0.0,
    )
    switch_s = level * median(switches) if switches else 0.0
    return replace(costs, switch_s=min(max(0.0, switch_s), MOST_SWITCH * costs.verify_s(1)))


def _pass_s(r: Step) -> float:
    """Seconds of a step's pass."""
    return r.verify_s + r.other_s


def _seconds(r: Step) -> float:
    """Seconds of a step, the head's left out: a switch is not about them."""
    return r.draft_s + _pass_s(r)


def _line(drafts: dict[int, float]) -> tuple[float, float]:
    """(start, slope) of the seconds of so many draft tokens: least squares with errors in proportion to the number."""
    if not drafts:
        return 0.0, 0.0
    numbers, seconds = np.array(list(drafts)), np.array(list(drafts.values()))
    slope, start = np.polyfit(numbers, seconds, 1, w=1 / numbers) if len(drafts) > 1 else (0.0, 0.0)
    return (float(start), float(slope)) if start > 0 and slope > 0 else (0.0, float((seconds / numbers).mean()))


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
class _LengthsInTurn(HeadPolicy):
    """Steps of given lengths, one after the other, that a head or q judges and nothing stops."""

    head: Any = None
    lengths: tuple[int, ...] = ()

    def start(self, given: Given = NO_PAST) -> int:
        return 0

    def learn(self, memory: int, outcome: Outcome) -> int:
        return memory + 1

    def limit(self, memory: int) -> int:
        return self.lengths[memory % len(self.lengths)]

    def rule(self, memory: int, costs: Costs | None) -> Rule:
        return Rule(Evidence.SURVIVAL, (0.0,))


def _caches(pair: Pair) -> Caches:
    """Empty ones, of which the sessions take turns."""
    draft = _Copies(pair.draft.vocab_size) if isinstance(pair.draft, SuffixDrafter) else pair.draft.new_cache()
    return pair.target.new_cache(), draft


def _session(
    pair: Pair,
    caches: Caches,
    lengths: tuple[int, ...],
    *,
    head: Any = None,
    context: int = CONTEXT,
    prompt: list[int] | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
) -> Session | None:
    """A request with steps of these lengths, behind a prompt or made-up tokens, in emptied caches that the sessions share; None
    where the contexts of the models are too short."""
    (target, draft), k = caches, max(lengths)
    room = min((m for m in (target.max_length, draft.max_length) if m is not None), default=2**31) - 2 * (k + 2)
    context = max(2, min(context, room)) if prompt is None else len(prompt)
    if (k or prompt) and context > room:
        return None
    for cache in caches:
        cache.rollback(0)
    is_calibrated = head is None or head.card.is_calibrated
    return Session(
        target=target,
        draft=draft,
        policy=_LengthsInTurn(head=head, lengths=lengths, max_tokens=k, calibrated=is_calibrated),
        verification=verification_for(sampling, TokenVerification()),
        sampling=sampling,
        prompt=[i % target.vocab_size for i in range(context)] if prompt is None else prompt,
        max_tokens=VISITS * VISIT * (k + 2),
        randomness=streams(k, draw=draft.model.draw if isinstance(draft.model, Draws) else None),
    )
