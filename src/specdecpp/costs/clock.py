"""Costs that follow the clock: running means of what rounds take, told anew only when they have moved."""

from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from specdecpp.costs.curve import Costs

MEMORY = 0.02
"""The weight of one round in the running means."""
PAUSE = 4.0
"""How many times what is expected a round may take and still be a measurement; beyond that the machine was elsewhere."""
SETTLED = 4
"""Rounds after a switch between those with candidates and those without, until the processor's caches hold what they need."""
TOGETHER = 0.5
"""Of a step that the passes of the target alone move by, the others move by this share, and the other way round: a machine that
slows down slows all passes, and how they stand to each other is seen where both occur."""
STEP, WAIT = 0.01, 32
"""`now` follows a mean that has moved by more than this share, after so many rounds at the earliest: what a rule plans with
costs is worked out anew for each `now`, and a busy machine moves the means all the time."""


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
class CostClock:
    """Costs that follow the clock, round by round; shared by the requests of a decoder that nobody wants to repeat.

    The curve of passes has two levels, one of the target alone and one of passes over candidates: whether drafting pays
    hangs on their ratio, and the measurement has it from few rounds. `now` stays the same object for `WAIT` rounds and more,
    until the time of a draft token or a level has moved by more than `STEP`: a request looks at it every round, and finds its
    plans kept.
    """

    now: Costs
    _draft_s: float = field(init=False, repr=False)
    _levels: list[float] = field(default_factory=lambda: [1.0, 1.0], init=False, repr=False)
    """Of the target alone and of passes over candidates, as multiples of `now`'s."""
    _num_rounds: int = field(default=0, init=False, repr=False)
    _has_drafted: bool | None = field(default=None, init=False, repr=False)
    _num_unsettled: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self._draft_s = self.now.draft_s

    def update(self, outcome: Timed) -> None:
        """Take the times of a round into the means, unless it stands next to a switch (`Costs.switch_s`)."""
        num = outcome.num_drafted
        if self._has_drafted is not (num > 0):
            self._num_unsettled = 0 if self._has_drafted is None else SETTLED
            self._has_drafted = num > 0
        if self._num_unsettled:
            self._num_unsettled -= 1
            return
        of = int(num > 0)
        expected_s = self._levels[of] * self.now.pass_s(num + 1)
        if num:
            took_s = max(0.0, outcome.draft_s + outcome.head_s - self.now.start_s) / num
            self._draft_s += MEMORY * (min(took_s, PAUSE * max(self._draft_s, expected_s)) - self._draft_s)
        step = MEMORY * (min((outcome.verify_s + outcome.other_s) / expected_s, PAUSE) - 1)
        self._levels[of] *= 1 + step
        self._levels[1 - of] *= 1 + TOGETHER * step
        self._num_rounds += 1
        moved = abs(self._draft_s / self.now.draft_s - 1) if self.now.draft_s else float(self._draft_s > 0)
        if self._num_rounds >= WAIT and max(moved, *(abs(level - 1) for level in self._levels)) > STEP:
            self.now, self._levels, self._num_rounds = self._told(), [1.0, 1.0], 0

    def _told(self) -> Costs:
        alone, others = self._levels
        wider = {2: self.now.pass_s(2)} | {n: s for n, s in self.now.passes.items() if n > 1}  # 2: of a curve of one width too
        passes = {1: alone * self.now.pass_s(1)} | {n: others * s for n, s in wider.items()}
        return replace(self.now, draft_s=self._draft_s, passes=passes)
