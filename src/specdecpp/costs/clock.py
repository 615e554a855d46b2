"""Costs that follow the clock: seconds of steps, taken over only when they have moved."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from specdecpp.costs.curve import Costs

MEMORY = 0.02
"""The weight of one step in the means, once there were many."""
PAUSE = 4.0
"""Times the expected seconds that a step counts with at most: beyond that the machine was elsewhere."""
SETTLED, SETTLED_ALONE = 2, 12
"""Steps after a switch to those with draft tokens, and to those without, until the processor's caches hold what they need. A
trial of drafting (`policies.cost_aware.TRIAL`) has steps beyond the first, or else nothing could correct costs by which it does
not pay."""
TRUST = 0.25
"""Steps that a measurement counts for: it may be wrong by a factor, where other programs had the machine meanwhile."""
TOGETHER = 0.5
"""Share of a move of plain passes by which the others move, and the other way round: a slow machine slows all."""
STEP, FIRST, WAIT = 0.01, 4, 32
"""`now` follows after the first 4 steps, after 8 more, 16 more, and then every 32, if a step has moved by more than 1 %: a rule
plans anew for each `now`, and a busy machine moves the means all the time."""
WRONG = 1.25
"""Kept steps that differ by this factor from those of the clock, in passes of the target alone, are wrong."""
LEAST, LEAST_RISE = 0.05, 0.5
"""Shares of the measured curve that the level of passes, and their rise with the rows, never fall below."""
KNOWN = 4
"""Passes of a width that lie off the curve after which half of the difference is believed."""


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
    """y = a u + b v by least squares over steps that fade. It begins with measured a and b, which count for as much as steps
    with `trust` as sums of u^2 and v^2; neither falls below `least`."""

    def __init__(self, a: float, b: float, trust: tuple[float, float], least: tuple[float, float] = (0.0, 0.0)):
        self.a, self.b = self._before = a, b
        self._trust, self._least = trust, least
        self._sums = [0.0] * 5

    def add(self, steps: Any) -> None:
        """Learn from steps, counted by their values: (count, u, v, mean of y)."""
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

    A measurement is over in two seconds, and a machine that others use too is quick in one and slow in the next, so the steps
    of requests win over it (`TRUST`). Passes over draft tokens have a level and a rise with their rows, drafting a start and a
    slope, the target alone a level. Widths that lie off that curve are known by themselves: which ones are quick changes from
    process to process, with the places of the weights in memory.

    `now` stays the same object until a step has moved by more than `STEP`, so that a request finds its plans kept. `keep` is
    called with `now` after 1, 4, 16, ... requests.
    """

    now: Costs
    keep: Callable[[Costs], None] | None = None
    _alone: float = field(default=1.0, init=False, repr=False)
    """Level of the target alone, by the other passes."""
    _others: float = field(default=1.0, init=False, repr=False)
    """Level of the other passes, by the target alone."""
    _seen: dict[int, list[float]] = field(default_factory=dict, init=False, repr=False)
    """Steps since the last look by their draft tokens: count, seconds of their passes, seconds of drafting."""
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
    """By the load: `now` when it was first seen, and a clock of as many requests, whose passes rise in their own way."""
    _shared: dict[int, Costs] = field(default_factory=dict, init=False, repr=False)
    """Costs of so many requests, until they change."""

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
        num, pass_s, draft_s = _times(outcome)
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
        """Learn from steps that were run to check the costs. They count double, to outweigh the measurement at once."""
        for one in 2 * list(outcomes):
            self._see(*_times(one))
        self._follow()

    def end(self) -> None:
        """A request has ended."""
        self._num_ended += 1
        if self.keep is not None and self._num_ended == self._due:
            self._due *= 4
            self.keep(self.now)

    def _see(self, num: int, pass_s: float, draft_s: float) -> bool:
        """Count a step with so many draft tokens. True where `now` has moved."""
        now, seen = self.now, self._seen.setdefault(num, [0.0, 0.0, 0.0])
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
        now, found = self.now, self._found()
        if any(abs(found.round_s(k) / now.round_s(k) - 1) > STEP for k in range(max(3, self._widest))):
            self.now = found
        return self.now is found

    def _found(self) -> Costs:
        """Costs by all steps so far."""
        self._learn()
        start_s, draft_s = self._drafting.a * self._draft_token_s, self._drafting.b * self._draft_token_s
        least, passes = 0.0, {}
        for n in sorted({1, 2, 3, self._widest, *self._measured.passes, *self._off}):
            passes[n] = least = max(self._pass_s(n), least if n > 2 else 0.0)
        return replace(self._measured, draft_s=draft_s, start_s=start_s, passes=passes)

    def _learn(self) -> None:
        """Fit the steps since the last look."""
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
        num_new = sum(count for count, *_ in steps.values())
        self._num_known += num_new
        settled = self._num_known / (self._num_known + 1 / MEMORY)
        self._alone *= (self._passes.a / level) ** (TOGETHER * settled)
        fading = (1 - MEMORY) ** num_new
        self._off = {rows: (fading * num, fading * seconds) for rows, (num, seconds) in self._off.items()}
        for n, (count, pass_s, _) in steps.items():
            num, seconds = self._off.get(n + 1, (0.0, 0.0))
            self._off[n + 1] = num + count, seconds + count * (pass_s / self._others - self._curve_s(n + 1))

    def _pass_s(self, num_rows: int) -> float:
        """Seconds of a pass of the target, as it is known by now."""
        if num_rows == 1:
            alone_s = self._alone * self._plain.a * self._measured.pass_s(1)
            return min(alone_s, self._pass_s(2)) if self._off and not self._has_plain else alone_s  # none takes longer
        curve_s = self._curve_s(num_rows)
        seen = max((rows for rows in self._off if rows <= num_rows), default=None)  # others lie off as narrower ones do
        num, seconds = (0.0, 0.0) if seen is None else self._off[seen]
        return self._others * max(curve_s + seconds / (num + KNOWN), LEAST * curve_s)

    def _curve_s(self, num_rows: int) -> float:
        """Seconds of a pass over draft tokens, but for the level of the target alone."""
        measured_s, narrow_s, passes = self._measured.pass_s(num_rows), self._narrow_s, self._passes
        seconds = passes.a * measured_s + passes.b * narrow_s * (min(num_rows, self._widest) - 2) / 10
        return max(seconds, passes.a * (narrow_s + LEAST_RISE * (measured_s - narrow_s)))


def _times(outcome: Timed) -> tuple[int, float, float]:
    """(draft tokens, seconds of the pass, seconds of drafting) of a step."""
    return outcome.num_drafted, outcome.verify_s + outcome.other_s, outcome.draft_s + outcome.head_s


def _in_proportion(now: Costs, before: Costs, own: Costs) -> Costs:
    """`own` as `now` differs from `before`, which are of another number of requests."""
    if now is before:
        return own
    if own.num_together == now.num_together:
        return now
    share = now.num_together / own.num_together
    passes = {n: own.pass_s(n) * seconds / before.pass_s(n) for n, seconds in now.passes.items()}
    return replace(own, draft_s=now.draft_s * share, start_s=now.start_s * share, passes=passes)


def differ(before: Sequence[float], now: Sequence[float]) -> bool:
    """Tell whether one of these `shares` differs from the other by a factor of `WRONG`."""
    return any(not 1 / WRONG <= a / b <= WRONG for a, b in zip(before, now, strict=True))


def shares(costs: Costs) -> list[float]:
    """Steps of one, two and four draft tokens, in passes of the target alone, which a slower machine leaves as they are."""
    return [costs.round_s(k) / costs.verify_s(1) for k in (1, 2, 4)]
