"""Costs that follow the clock: what steps take, told anew only when it has moved."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from specdecpp.costs.curve import Costs

MEMORY = 0.02
"""The weight of one step in what is known, once there were many."""
PAUSE = 4.0
"""How many times what is expected a step may take and still be a measurement; beyond that the machine was elsewhere."""
SETTLED, SETTLED_ALONE = 2, 12
"""Steps after a switch to those with draft tokens, and to those without, until the processor's caches hold what they need: what
the target reads comes back in ten passes, of which the first takes up to twice as long as the last. A trial of drafting
(`policies.cost_aware.TRIAL`) has steps beyond the first, or else nothing could correct costs that say that it does not
pay."""
TRUST = 0.25
"""Steps that a measurement counts for: it may be wrong by a factor, where other programs had the machine meanwhile."""
TOGETHER = 0.5
"""Of a step that the passes of the target alone move by, the others move by this share, and the other way round: a machine
that slows down slows all passes, and how they stand to each other is seen where both occur."""
STEP, FIRST, WAIT = 0.01, 4, 32
"""`now` follows after the first 4 steps, after 8 more, 16 more, and then every 32, if a step has moved by more than 1 %:
what a rule plans with costs is worked out anew for each `now`, and a busy machine moves the means all the time."""
WRONG = 1.25
"""Kept costs whose steps, in passes of the target alone, differ from those of the clock by this factor were measured
badly."""
LEAST = 0.05
"""Of the measured curve: the level of passes is never below that."""
LEAST_RISE = 0.5
"""Of the measured curve's: passes are never taken to rise less with their rows than by this share of it."""
KNOWN = 4
"""Passes of some width that lie off the curve are halfway believed after so many of them."""


@runtime_checkable
class Timed(Protocol):
    """A step as the clock reads it: `policies.Outcome` has it."""

    @property
    def num_drafted(self) -> int: ...
    @property
    def draft_s(self) -> float: ...
    @property
    def head_s(self) -> float: ...
    @property
    def verify_s(self) -> float: ...
    @property
    def other_s(self) -> float: ...
    @property
    def costs(self) -> Costs | None: ...


class Fit:
    """y = a u + b v by least squares over steps that fade. Before the first, a and b are what was measured, which counts for
    as much as steps with these sums of u^2 and v^2; they are never less than given."""

    def __init__(self, a: float, b: float, trust: tuple[float, float], least: tuple[float, float] = (0.0, 0.0)):
        self.a, self.b = self._before = a, b
        self._trust, self._least = trust, least
        self._sums = [0.0] * 5

    def add(self, steps: Any) -> None:
        """Counts of steps: how many had each (u, v, mean of y)."""
        fading = (1 - MEMORY) ** sum(num for num, *_ in steps)
        of = zip(*((num * u * u, num * u * v, num * v * v, num * u * y, num * v * y) for num, u, v, y in steps), strict=True)
        self._sums = [fading * before + sum(new) for before, new in zip(self._sums, of, strict=True)]
        (trust_a, trust_b), (a, b), (least_a, least_b) = self._trust, self._before, self._least
        uu, uv, vv, uy, vy = self._sums
        uu, vv, uy, vy = uu + trust_a, vv + trust_b, uy + trust_a * a, vy + trust_b * b
        by = uu * vv - uv * uv
        self.a, self.b = (vv * uy - uv * vy) / by, (uu * vy - uv * uy) / by
        if self.a < least_a:
            self.a, self.b = least_a, (vy - least_a * uv) / vv
        if self.b < least_b:
            self.a, self.b = max(least_a, (uy - least_b * uv) / uu), least_b


@dataclass
class CostClock:
    """Costs that follow the clock, step by step; shared by the requests of a decoder that nobody wants to repeat.

    A measurement is over in two seconds, and a machine that others use too is quick in one and slow in the next. So what the
    steps of requests take wins over it: the passes over draft tokens have a level of their own and a rise with their rows
    beyond the measured one, drafting a start and a slope, and the target alone a level. Whether drafting pays hangs on the
    first and the last, how far on the second. Where passes of some width lie off that curve (which of them are quicker than
    their neighbours changes from process to process, with the places of the weights in memory) they are known by themselves.
    `now` stays the same object until a step has moved by more than `STEP`, and after many steps for `WAIT` of them: a request
    looks at it every step, and finds its plans kept. What was measured counts for `TRUST` steps only, so that costs that are
    wrong by a factor are right again within a request. `keep` is called with `now` after 1, 4, 16, ... requests.
    """

    now: Costs
    keep: Callable[[Costs], None] | None = None
    _alone: float = field(default=1.0, init=False, repr=False)
    """What the others say of the level of the target alone."""
    _others: float = field(default=1.0, init=False, repr=False)
    """What the target alone says of the level of the others."""
    _seen: dict[int, list[float]] = field(default_factory=dict, init=False, repr=False)
    """Steps since the last look, by their draft tokens: how many, seconds of their passes and of drafting."""
    _num_seen: int = field(default=0, init=False, repr=False)
    _has_plain: bool = field(default=False, init=False, repr=False)
    """Tell whether steps without draft tokens were seen."""
    _wait: int = field(default=FIRST, init=False, repr=False)
    _num_ended: int = field(default=0, init=False, repr=False)
    _due: int = field(default=1, init=False, repr=False)
    _num_known: float = field(default=0.0, init=False, repr=False)
    """Steps with draft tokens that have been learned from."""
    _widest: int = field(default=2, init=False, repr=False)
    """Rows of the widest passes of which there were several between two looks: wider ones rise as was measured."""
    _off: dict[int, tuple[float, float]] = field(default_factory=dict, init=False, repr=False)
    """By rows: steps that fade, and the sum of seconds by which their passes lay off the curve."""
    _has_drafted: bool | None = field(default=None, init=False, repr=False)
    _num_unsettled: int = field(default=0, init=False, repr=False)
    _together: "dict[int, tuple[Costs, CostClock]]" = field(default_factory=dict, init=False, repr=False)
    """By the load, of as many requests, with what `now` was when they were first seen: no step of one alone can say how
    passes rise with their rows there, and what it takes that some requests wait for others with more draft tokens."""
    _shared: dict[int, Costs] = field(default_factory=dict, init=False, repr=False)
    """What is told of so many requests, until that changes."""

    def __post_init__(self) -> None:
        self._measured = costs = self.now
        self._narrow_s = costs.pass_s(2)
        self._draft_token_s = costs.draft_s or self._narrow_s
        least = LEAST, (LEAST_RISE - 1) * (costs.pass_s(12) / self._narrow_s - 1)
        self._plain = Fit(1.0, 0.0, (TRUST, 1.0))
        self._passes = Fit(1.0, 0.0, (TRUST, 0.02), least)
        self._drafting = Fit(costs.start_s / self._draft_token_s, costs.draft_s / self._draft_token_s, (0.2, 1.0))

    def shared(self, num: int) -> Costs:
        """A request's share of what `num` requests take together, as their steps have shown it."""
        if num == 1:
            return self.now
        found = self._shared.get(num)
        if found is None:
            found = self.now.shared(num)
            if together := self._together.get(found.load):
                then, clock = together
                found = _in_proportion(clock.now, clock._measured, then.shared(num))
            self._shared[num] = found
        return found

    def update(self, outcome: Timed) -> None:
        """Learn from the times of a step: of several requests for their load, of one alone unless it stands next to a switch
        (`Costs.switch_s`)."""
        num, pass_s, draft_s = outcome.num_drafted, outcome.verify_s + outcome.other_s, outcome.draft_s + outcome.head_s
        if outcome.costs is not None and outcome.costs.num_together > 1:
            load, num_together = outcome.costs.load, outcome.costs.num_together
            if load not in self._together:
                self._together[load] = self.now, CostClock(now=self.now.shared(load))
            then, clock = self._together[load]
            if num_together < load:  # the clock is that of as many as the load has at most
                pass_s *= clock._measured.pass_s(num + 1) / then.shared(num_together).pass_s(num + 1)
                draft_s *= num_together / load
            if clock._see(num, pass_s, draft_s):
                self._shared = {}
            return
        if self._has_drafted is not (num > 0):
            self._num_unsettled = 0 if self._has_drafted is None else SETTLED if num else SETTLED_ALONE
            self._has_drafted = num > 0
        if self._num_unsettled:
            self._num_unsettled -= 1
        elif self._see(num, pass_s, draft_s):
            self._shared = {}

    def look(self, outcomes: Iterable[Timed]) -> None:
        """Learn from steps that were run to see whether the costs still hold. They count double, so as to outweigh what was
        measured (`TRUST`) at once."""
        for one in 2 * list(outcomes):
            self._see(one.num_drafted, one.verify_s + one.other_s, one.draft_s + one.head_s)
        self._follow()

    def end(self) -> None:
        """A request has ended."""
        self._num_ended += 1
        if self.keep is not None and self._num_ended == self._due:
            self._due *= 4
            self.keep(self.now)

    def _see(self, num: int, pass_s: float, draft_s: float) -> bool:
        """A step with so many draft tokens. Whether `now` has moved."""
        now, seen = self.now, self._seen.get(num)
        if seen is None:
            seen = self._seen[num] = [0.0, 0.0, 0.0]
        seen[0] += 1.0
        seen[1] += min(pass_s, PAUSE * now.verify_s(num + 1))
        if num:
            seen[2] += min(draft_s, PAUSE * max(now.start_s + num * now.draft_s, now.verify_s(1)))
        self._num_seen += 1
        if self._num_seen < self._wait:
            return False
        self._wait = min(2 * self._wait, WAIT)
        return self._follow()

    def _follow(self) -> bool:
        now, told = self.now, self._told()
        if any(abs(told.round_s(k) / now.round_s(k) - 1) > STEP for k in range(max(3, self._widest))):
            self.now = told
        return self.now is told

    def _learn(self) -> None:
        """From the steps since the last look."""
        steps = {num: (count, pass_s / count, draft_s / count) for num, (count, pass_s, draft_s) in self._seen.items()}
        self._seen, self._num_seen = {}, 0
        if found := steps.pop(0, None):
            level, self._has_plain = self._plain.a, True
            self._plain.add([(found[0], 1.0, 0.0, found[1] / (self._alone * self._measured.pass_s(1)))])
            self._others *= (self._plain.a / level) ** TOGETHER
        if not steps:
            return
        by, measured_s = self._others * self._narrow_s, self._measured.pass_s
        self._widest = max([self._widest, *(num + 1 for num, (count, *_) in steps.items() if count > 1)])
        level = self._passes.a
        self._passes.add(
            [(count, measured_s(n + 1) / self._narrow_s, (n - 1) / 10, pass_s / by) for n, (count, pass_s, _) in steps.items()]
        )
        self._drafting.add([(count, 1.0, float(n), draft_s / self._draft_token_s) for n, (count, _, draft_s) in steps.items()])
        # By how the level has moved and not by what was seen: where no curve fits the steps, they differ from it for ever. A
        # move and its way back cancel out. The first steps correct what was measured, and say little of a slower machine.
        self._num_known += sum(count for count, *_ in steps.values())
        settled = self._num_known / (self._num_known + 1 / MEMORY)
        self._alone *= (self._passes.a / level) ** (TOGETHER * settled)
        fading = (1 - MEMORY) ** sum(count for count, *_ in steps.values())
        self._off = {rows: (fading * num, fading * seconds) for rows, (num, seconds) in self._off.items()}
        for n, (count, pass_s, _) in steps.items():
            num, seconds = self._off.get(n + 1, (0.0, 0.0))
            self._off[n + 1] = num + count, seconds + count * (pass_s / self._others - self._curve_s(n + 1))

    def _pass_s(self, num_rows: int) -> float:
        """Seconds of the target, as it is known by now."""
        if num_rows == 1:
            alone_s = self._alone * self._plain.a * self._measured.pass_s(1)
            return min(alone_s, self._pass_s(2)) if self._off and not self._has_plain else alone_s  # none takes longer
        curve_s = self._curve_s(num_rows)
        return self._others * max(curve_s + self._off_s(num_rows), LEAST * curve_s)

    def _curve_s(self, num_rows: int) -> float:
        """Seconds of a pass over draft tokens, but for the level of the target alone."""
        measured_s, narrow_s, passes = self._measured.pass_s(num_rows), self._narrow_s, self._passes
        seconds = passes.a * measured_s + passes.b * narrow_s * (min(num_rows, self._widest) - 2) / 10
        return max(seconds, passes.a * (narrow_s + LEAST_RISE * (measured_s - narrow_s)))

    def _off_s(self, num_rows: int) -> float:
        """How far such passes lie off the curve; those that were not seen as far as the nearest narrower ones that were."""
        seen = max((rows for rows in self._off if rows <= num_rows), default=None)
        if seen is None:
            return 0.0
        num, seconds = self._off[seen]
        return seconds / (num + KNOWN)

    def _told(self) -> Costs:
        self._learn()
        start_s, draft_s = self._drafting.a * self._draft_token_s, self._drafting.b * self._draft_token_s
        widths = sorted({1, 2, 3, self._widest, *self._measured.passes, *self._off})
        least, passes = 0.0, {}
        for n in widths:
            passes[n] = least = max(self._pass_s(n), least if n > 2 else 0.0)
        return replace(self._measured, draft_s=draft_s, start_s=start_s, passes=passes)


def _in_proportion(now: Costs, before: Costs, own: Costs) -> Costs:
    """`own` as `now` differs from `before`, which are of another number of requests."""
    if now is before:
        return own
    if own.num_together == now.num_together:
        return now
    share = now.num_together / own.num_together
    passes = {n: own.pass_s(n) * seconds / before.pass_s(n) for n, seconds in now.passes.items()}
    return replace(own, draft_s=now.draft_s * share, start_s=now.start_s * share, passes=passes)


def are_wrong(kept: Costs, now: Costs) -> bool:
    """Tell whether steps stand to the target alone otherwise than in `kept`; a slower machine, which slows all, changes
    nothing."""
    return differ(shares(kept), shares(now))


def differ(before: Sequence[float], now: Sequence[float]) -> bool:
    """Tell whether one of these `shares` differs from the other by a factor of `WRONG`."""
    return any(not 1 / WRONG <= a / b <= WRONG for a, b in zip(before, now, strict=True))


def shares(costs: Costs) -> list[float]:
    """Steps of one, two and four draft tokens, in passes of the target alone."""
    return [costs.round_s(k) / costs.verify_s(1) for k in (1, 2, 4)]
