"""Costs of a step on this machine: measured once with real steps, kept for later processes, corrected by the steps of requests.

A later process takes the same measured costs (`cache_dir.remember`), so that a seed gives the same answer there, and requests
without a seed begin with the costs that the clock has made of them (`CostClock`). Where the two differ by more than `WRONG` the
measurement was wrong: a later process takes the clock's for both, and a seed may then give another answer.

    practice   real prompts, answered with steps of given lengths, which also show what is accepted (`practice`)
    cycle      for quick models, which the processor's cache holds: a run of each length on made-up tokens, shortest first;
               then, of two models, a few switches from plain steps to steps with one draft token and back
    run        steps of one length in a row. A draft leaves little of the target in the processor's caches, and a plain pass
               among steps with draft tokens takes a third longer than in a row of its like

A machine's speed drifts by a third within a second, so cycles are short, and lengths are compared with the plain passes of
their cycle only. Slow models are timed by practice alone: each prompt is a cycle.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from specdecpp import cache_dir
from specdecpp.backends import Cache, Draws, ReadsBoth
from specdecpp.costs.clock import differ
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

METHOD = 23
"""Counts up when the figures of an earlier way of measuring should no longer be believed."""
BUDGET_S, CONTEXT = 2.5, 96
"""Seconds that a measurement takes, and tokens before its steps."""
CYCLES = 9
LENGTHS, RUN, ALONE = (0, 1, 2, 3, 4, 6, 8, 12, 16), 6, 4
"""Lengths of the runs of a cycle, steps of a run, and times as many of the target alone: what it reads comes back to the
processor's caches in ten passes."""
LONG, LONG_CYCLE = 6, 3
"""Runs with so many draft tokens are in every third cycle."""
NUM_PLAIN, NUM_DRAFTED, SWITCHES = 16, 8, 2
"""Steps of a switch without and then with one draft token, and switches of a cycle: after a single step with a draft token the
target still finds most of what it reads in the caches."""
MAX_SWITCH = 3
"""Passes of the target alone that a switch takes at most. It takes one to three; on a machine that was busy meanwhile it came
out as six, and requests without a seed then never began to draft."""
SLOW_PRACTICE, QUICK_PRACTICE = (0, 0, 1, 4, 8, 1, 4), (4,) * 8
"""Lengths of the steps that answer a prompt of practice, of slow models and of others."""
WIDE = 17
"""Positions of one more pass of slow models, as several requests share it: a line through narrower passes says too little."""
PRACTICE_SHARE = 0.3
"""Share of the budget for practice where cycles follow."""
CHECK, SLOW_CHECK, SLOW_S = (16, 6, 4), (4, 2, 1), 0.01
"""Steps with no, 2 and 4 draft tokens by which a process checks kept costs, of models whose pass takes less than 10 ms and of
others. The first half of each does not count."""
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
    """False where the machine was too restless for a measurement to be kept for good."""


def measured(pair: Pair) -> Costs:
    """The costs of a pair on this machine: those of an earlier measurement, else measured now and kept."""
    return known(pair).costs


def known(pair: Pair) -> Known:
    """Costs that an earlier process has kept of a pair, else measured now and kept; looked for once."""
    found: Known = pair.measured.get("known") or _kept_or_timed(pair)
    pair.measured["known"] = found
    return found


def _kept_or_timed(pair: Pair) -> Known:
    kept: Any = cache_dir.recall("costs", _about(pair)) if pair.is_identified else None
    try:
        costs, now, practice = Costs.parse(kept), Costs.parse(kept["now"]), Practice.parse(kept["practice"])
        is_steady = kept.get("is_steady") is not False
        is_changed = differ(costs, now)
        found = Known(costs=now if is_changed else costs, now=now, practice=practice, is_new=False, is_steady=is_steady)
    except (ValueError, KeyError, TypeError):  # there are none, or of another version, or damaged
        cycles, practice = timed(pair, BUDGET_S)
        costs, is_changed = costs_of(pair, cycles), True
        times = [[step.verify_s for cycle in cycles for step in cycle.runs.get(k, ())] for k in LENGTHS]
        found = Known(costs=costs, now=costs, practice=practice, is_steady=cache_dir.is_steady(times))
    if is_changed and pair.is_identified:
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


def check_steps(pair: Pair, *, is_judged: bool) -> list[Step]:
    """A few steps with no, 2 and 4 draft tokens in empty caches, which the head judges or not, to correct kept costs by."""
    caches, found, head = _caches(pair), [], pair.head if is_judged else None
    for k, num in zip((0, 2, 4), SLOW_CHECK if _least_s(pair, caches) > SLOW_S else CHECK, strict=True):
        if session := _session(pair, caches, (k,), head=head, context=2):
            found += _run(session, num)[num // 2 :]
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

    runs: dict[int, list[Step]] = field(default_factory=dict)
    """By their number of draft tokens, without the first half of each run: it finds other things in the caches."""
    switches: list[Step] = field(default_factory=list)
    """`NUM_PLAIN` steps without and `NUM_DRAFTED` with one draft token, several times; none of slow models and of copies."""
    wide_s: float = 0.0
    """Seconds of a pass over `WIDE` positions; 0 where it was not measured."""

    @property
    def plain_s(self) -> float:
        """Seconds of a pass of the target alone, the unit of the cycle's others."""
        return median(map(_pass_s, self.runs[0]))


def timed(pair: Pair, budget_s: float) -> tuple[list[Cycle], Practice]:
    """Steps, timed until the budget is spent: of practice, and of models that are quick cycles of runs."""
    started, caches = perf_counter(), _caches(pair)
    if 3 * RUN * LONG * _least_s(pair, caches) <= budget_s:  # quick ones
        _, practice = _practised(pair, caches, QUICK_PRACTICE, PRACTICE_SHARE * budget_s)
        return _cycles(pair, caches, budget_s - (perf_counter() - started)), practice
    cycles, practice = _practised(pair, caches, SLOW_PRACTICE, budget_s)
    whole = [cycle for cycle in cycles if all(cycle.runs.values())]
    return whole or _cycles(pair, caches, budget_s - (perf_counter() - started)), practice


def _least_s(pair: Pair, caches: Caches) -> float:
    """Seconds of a pass of the target alone in empty caches."""
    session = _session(pair, caches, (0,), context=2)
    return min(step.verify_s for step in _run(session, 3)) if session else math.inf


def _wide_s(target: Cache) -> float:
    """Seconds of a pass over `WIDE` positions at the beginning of a text."""
    target.rollback(0)
    started = perf_counter()
    target.extend([0] * WIDE, rows=WIDE)[0][-1, 0].item()  # which waits for a device
    return perf_counter() - started


def _within(budget_s: float, *, least: int, most: int) -> Iterator[int]:
    """0, 1, ... until another turn, as short as the shortest but the first, would end too late; `least` to `most` numbers."""
    started, shortest_s = perf_counter(), math.inf
    for i in range(most):
        began = perf_counter()
        yield i
        ended = perf_counter()
        shortest_s = min(shortest_s, ended - began) if i else math.inf
        if i + 1 >= least and ended - started + shortest_s > budget_s:
            return


def _practised(pair: Pair, caches: Caches, lengths: tuple[int, ...], budget_s: float) -> tuple[list[Cycle], Practice]:
    """Steps of these lengths behind the prompts of practice, in turn greedy and sampled; those of the first prompt come after
    two that warm the models up. Without a tokenizer behind made-up tokens, which teach nothing but times."""
    prompts = [] if isinstance(pair.draft, SuffixDrafter) else 2 * texts(pair)
    behind = prompts or [[i % pair.target.vocab_size for i in range(16)]] * 2
    own, head = asked({}, pair.sampling), pair.default_head
    ways = Sampling(temperature=0.0), Sampling() if own.is_greedy else own
    cycles: list[Cycle] = []
    seen: tuple[list[Practised], list[Practised]] = [], []
    for i in _within(budget_s, least=2, most=len(behind)):
        warm_up = () if i else (0, 4)
        session = _session(pair, caches, warm_up + lengths, head=head, prompt=behind[i], sampling=ways[i % 2])
        if session is None:
            break
        steps = _run(session, len(warm_up + lengths))
        runs = {k: [step for step in steps[len(warm_up) :] if step.num_drafted == k] for k in lengths}
        cycles.append(Cycle(runs, wide_s=_wide_s(session.target) if lengths == SLOW_PRACTICE else 0.0))
        for step in steps if prompts else ():
            if {*step.tokens} & {*pair.ends}:
                break  # what follows the end of a text is none
            if 0 < step.num_drafted == len(step.judged):  # a lagged head has not judged the last
                seen[i % 2].append(Practised(step.num_accepted, tuple(step.judged), tuple(step.overlaps)))
    judge = judge_name(CostAware(head=head)) if head is None or head.card.is_calibrated else ""
    return cycles, Practice(greedy=tuple(seen[0]), sampled=tuple(seen[1]), judge=judge)


def _cycles(pair: Pair, caches: Caches, budget_s: float) -> list[Cycle]:
    """Cycles of runs until the budget is spent."""
    sessions = {k: session for k in LENGTHS if (session := _session(pair, caches, (k,), head=pair.head))}
    switching = None if isinstance(pair.draft, SuffixDrafter) else _session(pair, caches, (0,) * NUM_PLAIN + (1,) * NUM_DRAFTED)
    cycles: list[Cycle] = []
    for i in _within(budget_s, least=LONG_CYCLE, most=1 + CYCLES):
        cycle, size = Cycle(), RUN if i else 2
        for k, session in sessions.items():
            if k < LONG or (i + 1) % LONG_CYCLE == 0:
                run = _run(session, ALONE * size if k == 0 else max(size // 2, 2) if k >= LONG else size)
                cycle.runs[k] = run[len(run) // 2 :]
        if switching and i:
            cycle.switches.extend(_run(switching, SWITCHES * (NUM_PLAIN + NUM_DRAFTED)))
        cycles.append(cycle)
    return cycles[1:] or cycles  # the first is a warm-up


def costs_of(pair: Pair, cycles: list[Cycle]) -> Costs:
    """Costs of a pair from its steps."""
    level = median(cycle.plain_s for cycle in cycles)
    lengths = sorted({k for cycle in cycles for k in cycle.runs})

    def typical(seconds: Callable[[Step], float], k: int) -> float:
        """Seconds of steps with so many draft tokens, by the median of their ratios to the plain passes beside them."""
        return level * median(median(map(seconds, c.runs[k])) / c.plain_s for c in cycles if k in c.runs)

    wide = [cycle.wide_s / cycle.plain_s for cycle in cycles if cycle.wide_s]
    drafts = {k: typical(lambda step: step.draft_s, k) for k in lengths if k}
    is_quick = not {*lengths} <= {*SLOW_PRACTICE}
    start_s, draft_s = _line(drafts) if is_quick else (0.0, median(s / k for k, s in drafts.items()) if drafts else 0.0)
    steps = [step for cycle in cycles for run in cycle.runs.values() for step in run]
    judged = [step.head_s / len(step.judged) for step in steps if step.judged and pair.head is not None]
    return Costs(
        draft_s=draft_s,
        passes=_smooth({k + 1: typical(_pass_s, k) for k in lengths}) | ({WIDE: level * median(wide)} if wide else {}),
        head_s=median(judged) if judged else 0.0,
        start_s=start_s,
        switch_s=level * min(max(0.0, _switch(cycles)), MAX_SWITCH),
        other_s=median(step.other_s for step in steps),
        read_along=pair.target.share_of(pair.draft) if isinstance(pair.target, ReadsBoth) else 0.0,
    )


def _switch(cycles: list[Cycle]) -> float:
    """Passes that a switch takes over the same steps in runs of their like, by the median of each place: sums have pauses."""
    whole = [c for c in cycles if len(c.switches) == SWITCHES * (NUM_PLAIN + NUM_DRAFTED) and 1 in c.runs]
    if not whole:
        return 0.0
    took = [np.reshape([*map(_seconds, c.switches)], (SWITCHES, -1)) / c.plain_s for c in whole]
    alone, one = (median(median(map(_seconds, c.runs[k])) / c.plain_s for c in whole) for k in (0, 1))
    return float(np.median(np.concatenate(took), axis=0).sum() - NUM_PLAIN * alone - NUM_DRAFTED * one)


def _pass_s(step: Step) -> float:
    """Seconds of a step's pass."""
    return step.verify_s + step.other_s


def _seconds(step: Step) -> float:
    """Seconds of a step, the head's left out: a switch is not about them."""
    return step.draft_s + _pass_s(step)


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
    """Steps of given lengths, one after the other, that a head or q judges and nothing stops. Its memory counts steps."""

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
    prompt = prompt or [i % target.vocab_size for i in range(max(2, min(context, room)))]
    if k and len(prompt) > room:
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
        prompt=prompt,
        max_tokens=SWITCHES * (NUM_PLAIN + NUM_DRAFTED) * (k + 2),
        randomness=streams(k, draw=draft.model.draw if isinstance(draft.model, Draws) else None),
    )


def _run(session: Session, num: int) -> list[Step]:
    """Some steps behind the session's prompt, as if there had been none before."""
    del session.tokens[session.num_prompt_tokens :]
    session.finish_reason = None
    for cache in (session.target, session.draft):
        cache.rollback(min(cache.length, session.num_prompt_tokens - 1))
    session.prefill()
    return [session.step() for _ in range(num) if session.finish_reason is None]
