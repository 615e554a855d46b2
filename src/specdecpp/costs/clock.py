"""Costs that follow the clock: what rounds take, told anew only when it has moved."""

from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from specdecpp.costs.curve import Costs

MEMORY = 0.02
"""The weight of one round in what is known, once there were many."""
PAUSE = 4.0
"""How many times what is expected a round may take and still be a measurement; beyond that the machine was elsewhere."""
SETTLED = 4
"""Rounds after a switch between those with candidates and those without, until the processor's caches hold what they need."""
TOGETHER = 0.5
"""Of a step that the passes of the target alone move by, the others move by this share, and the other way round: a machine that
slows down slows all passes, and how they stand to each other is seen where both occur."""
STEP, WAIT = 0.01, 32
"""Every so many rounds `now` follows, if a round has moved by more than this share: what a rule plans with costs is worked out
anew for each `now`, and a busy machine moves the means all the time."""
LEAST = 0.05
"""Of the measured curve: the level of passes is never below that."""
LEAST_RISE = 0.5
"""Of the measured curve's: passes are never taken to rise less with their rows than by this share of it."""


@runtime_checkable
class Timed(Protocol):
    """What the clock reads of a round: `policies.Outcome` has it."""

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


@dataclass
class Fit:
    """y = a u + b v by least squares over rounds that fade. Before the first, a and b are what was measured, which counts for
    as much as rounds with these sums of u^2 and v^2; they are never less than given."""

    a: float
    b: float
    trust_a: float
    trust_b: float
    least_a: float = 0.0
    least_b: float = 0.0

    def __post_init__(self) -> None:
        self._before = self.a, self.b
        self._sums = [0.0] * 5

    def add(self, u: float, v: float, y: float) -> None:
        """One more round."""
        a, b = self._before
        self._sums = [(1 - MEMORY) * s + x for s, x in zip(self._sums, (u * u, u * v, v * v, u * y, v * y), strict=True)]
        uu, uv, vv, uy, vy = self._sums
        uu, vv, uy, vy = uu + self.trust_a, vv + self.trust_b, uy + self.trust_a * a, vy + self.trust_b * b
        by = uu * vv - uv * uv
        self.a, self.b = (vv * uy - uv * vy) / by, (uu * vy - uv * uy) / by
        if self.a < self.least_a:
            self.a, self.b = self.least_a, (vy - self.least_a * uv) / vv
        if self.b < self.least_b:
            self.a, self.b = max(self.least_a, (uy - self.least_b * uv) / uu), self.least_b


@dataclass
class CostClock:
    """Costs that follow the clock, round by round; shared by the requests of a decoder that nobody wants to repeat.

    A measurement is over in two seconds, and a machine that others use too is quick in one and slow in the next. So what the
    rounds of requests take wins over it: the passes over candidates have a level of their own and a rise with their rows
    beyond the measured one, drafting a start and a slope, and the target alone a level. Whether drafting pays hangs on the
    first and the last, how far on the second. `now` stays the same object for `WAIT` rounds and more, until a round has moved
    by more than `STEP`: a request looks at it every round, and finds its plans kept.
    """

    now: Costs
    _measured: Costs = field(init=False, repr=False)
    _alone: float = field(default=1.0, init=False, repr=False)
    """Level of the target alone, as a multiple of what was measured."""
    _others: float = field(default=1.0, init=False, repr=False)
    """What the target alone says of the level of the others."""
    _num_rounds: int = field(default=0, init=False, repr=False)
    _has_drafted: bool | None = field(default=None, init=False, repr=False)
    _num_unsettled: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self._measured = costs = self.now
        self._narrow_s = costs.pass_s(2)
        self._candidate_s = costs.draft_s or self._narrow_s
        rise = (costs.pass_s(12) - self._narrow_s) / self._narrow_s
        self._passes = Fit(1.0, 0.0, 2.0, 0.05, least_a=LEAST, least_b=(LEAST_RISE - 1) * rise)
        self._drafting = Fit(costs.start_s / self._candidate_s, costs.draft_s / self._candidate_s, 0.2, 1.0)

    def update(self, outcome: Timed) -> None:
        """Learn from the times of a round, unless it stands next to a switch (`Costs.switch_s`)."""
        num = outcome.num_drafted
        if self._has_drafted is not (num > 0):
            self._num_unsettled = 0 if self._has_drafted is None else SETTLED
            self._has_drafted = num > 0
        if self._num_unsettled:
            self._num_unsettled -= 1
            return
        expected_s = self._pass_s(num + 1)
        share = min((outcome.verify_s + outcome.other_s) / expected_s, PAUSE)
        step = MEMORY * (share - 1)
        if num:
            u, v = self._measured.pass_s(num + 1) / self._narrow_s, (num - 1) / 10
            self._passes.add(u, v, share * expected_s / (self._others * self._narrow_s))
            self._alone *= 1 + TOGETHER * step
            drafting = self._drafting
            most = PAUSE * max(drafting.a + drafting.b * num, 1.0)
            drafting.add(1.0, float(num), min((outcome.draft_s + outcome.head_s) / self._candidate_s, most))
        else:
            self._alone *= 1 + step
            self._others *= 1 + TOGETHER * step
        self._num_rounds += 1
        if self._num_rounds % WAIT == 0:
            told = self._told()
            if any(abs(told.round_s(k) / self.now.round_s(k) - 1) > STEP for k in range(3)):
                self.now = told

    def _pass_s(self, num_rows: int) -> float:
        """Of the target, as it is known by now."""
        measured_s = self._measured.pass_s(num_rows)
        if num_rows == 1:
            return self._alone * measured_s
        narrow_s, passes = self._narrow_s, self._passes
        seconds = passes.a * measured_s + passes.b * narrow_s * (num_rows - 2) / 10
        return self._others * max(seconds, passes.a * (narrow_s + LEAST_RISE * (measured_s - narrow_s)))

    def _told(self) -> Costs:
        start_s, draft_s = self._drafting.a * self._candidate_s, self._drafting.b * self._candidate_s
        widths = sorted({1, 2, 3, *self._measured.passes})
        return replace(self._measured, draft_s=draft_s, start_s=start_s, passes={n: self._pass_s(n) for n in widths})
