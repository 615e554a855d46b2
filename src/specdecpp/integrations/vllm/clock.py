"""What the steps of a batch take, as running means by batch size: the cost model of a busy server.

A draft step and a target pass serve all requests of a batch at once, so a request is told the seconds of the whole batch's
step. Were they shared out evenly, every cost and every rate would be divided by the same number, and no rule would decide
otherwise (policies weigh seconds only against each other).

The pass of the target over candidates is a line in the mean number of positions per request, fitted by least squares in which a
round weighs (1 - MEMORY) times the next. A pass without any candidate is timed by itself: engines take another path for it, and
no line tells how long that is. Batch sizes are kept apart by powers of two. MEMORY and PAUSE are those of `costs.clock`.
"""

import math
from dataclasses import dataclass, field, replace

from specdecpp.costs import Costs
from specdecpp.costs.clock import MEMORY, PAUSE
from specdecpp.policies.cost_aware import BOUND, TRIAL, CostAware
from specdecpp.policies.gains import Gains

RIDGE = 0.5
"""Pulls the slope towards 0, in positions squared. Where rounds were nearly equally long the slope would be noise, and a rule
that believed in a steep one would keep them so; with a flat one it drafts more, and the slope is found out."""

PLAIN, AGAIN = 2, 64
"""Rounds without candidates that are made to be timed at first, and rounds with candidates after which one is made again."""
REGRET = CostAware.regret
"""The share of the time that may be lost by asking again whether drafting pays, in `TRIAL` rounds; as for one request."""


@dataclass
class Line:
    """Least squares of seconds over positions, older points fading."""

    weight: float = 0.0
    n: float = 0.0
    s: float = 0.0
    nn: float = 0.0
    ns: float = 0.0

    def add(self, n: float, seconds: float) -> None:
        if self.weight:
            seconds = min(seconds, PAUSE * self.at(n))
        for name, value in {"weight": 1.0, "n": n, "s": seconds, "nn": n * n, "ns": n * seconds}.items():
            setattr(self, name, (1 - MEMORY) * getattr(self, name) + value)

    def at(self, n: float) -> float:
        """Seconds at n positions. Never falling in n, and positive."""
        mean_n, mean_s = self.n / self.weight, self.s / self.weight
        spread = self.nn / self.weight - mean_n**2
        slope = (self.ns / self.weight - mean_n * mean_s) / (spread + RIDGE)
        slope = min(max(slope, 0.0), mean_s / mean_n)  # through the origin at the most
        return mean_s + slope * (n - mean_n)


@dataclass
class Mean:
    """A running mean of seconds, older ones fading."""

    seconds: float = 0.0
    num: int = 0

    def add(self, seconds: float) -> None:
        if self.num:
            seconds = min(seconds, PAUSE * self.seconds)
        self.num += 1
        self.seconds += max(1 / self.num, MEMORY) * (seconds - self.seconds)


@dataclass
class Worth:
    """What rounds with candidates have brought a batch: tokens per request beyond those that the target alone makes in their
    time, in the mean of all requests, older rounds fading.

    Requests cannot say it: each knows what it gains itself, while the batch waits for the draft of one who gains as for all.
    """

    gains: Gains = Gains()  # noqa: RUF009 (a tuple)
    num_without: int = 0
    """Rounds in which the batch was kept from drafting, since the last trial."""
    num_left: int = TRIAL
    """Rounds with candidates that are left of a trial."""

    def add(self, num_tokens: float, passes: float) -> None:
        """A round that made so many tokens per request in the time of so many passes of the target alone."""
        num, tokens, sum_passes, squares = ((1 - MEMORY) * x for x in self.gains)
        gain = num_tokens - passes
        self.gains = Gains(num + 1, tokens + num_tokens, sum_passes + passes, squares + gain * gain)
        self.num_left = max(0, self.num_left - 1)

    def drafts(self) -> bool:
        """Whether the coming round may have candidates: they pay, or may, or are on trial. A trial begins when what it may
        lose is `REGRET` of the time since the last one."""
        gains = self.gains
        if self.num_left or not gains.num or gains.mean + BOUND * math.sqrt(gains.variance / gains.num) >= 0:
            return True
        self.num_without += 1
        if TRIAL * -gains.mean <= REGRET * self.num_without:
            share = min(1.0, TRIAL / gains.num)  # what was before the trial weighs as much as the trial
            self.gains = Gains(*(share * x for x in gains))
            self.num_left, self.num_without = TRIAL, 0
        return bool(self.num_left)


@dataclass
class Pace:
    """Seconds of the first draft step of a round, of its later ones, and of a target pass without candidates and with some, at
    one batch size."""

    first: Mean = field(default_factory=Mean)
    later: Mean = field(default_factory=Mean)
    plain: Mean = field(default_factory=Mean)
    passes: Line = field(default_factory=Line)
    worth: Worth = field(default_factory=Worth)
    num_since: int = 0
    """Rounds with candidates since the last one without."""

    @property
    def is_timed(self) -> bool:
        return bool(self.first.num and self.passes.weight)

    def costs(self, max_tokens: int, num_rows: int) -> Costs:
        """Of `num_rows` requests. A first step takes what a later one does until both were seen."""
        draft_s = self.later.seconds if self.later.num else self.first.seconds
        return Costs(
            draft_s=draft_s,
            start_s=max(0.0, self.first.seconds - draft_s),
            passes={1: self.plain.seconds or self.passes.at(1.0), **{n: self.passes.at(float(n)) for n in (2, max_tokens + 1)}},
            num_together=num_rows,
        )


class StepClock:
    """Costs by batch size. `ratio` is a draft step over a target pass, believed until both have been timed."""

    def __init__(self, *, ratio: float, max_tokens: int):
        self._guess = Costs.relative(ratio)
        self._max_tokens = max_tokens
        self._paces: dict[int, Pace] = {}

    def costs(self, num_rows: int) -> tuple[Costs, bool]:
        """Those of the nearest batch size that has been timed, and whether there is one."""
        timed = {size: p for size, p in self._paces.items() if p.is_timed}
        if not timed:
            return replace(self._guess, num_together=num_rows), False
        bucket = _bucket(num_rows)
        pace = timed[min(timed, key=lambda size: abs(size - bucket))]
        return pace.costs(self._max_tokens, num_rows), True

    def drafted(self, num_rows: int, first_s: float, later_s: float = 0.0, num_later: int = 0) -> None:
        """A round of drafting: its first step, in which the draft reads what the target brought, and the others together."""
        pace = self._pace(num_rows)
        pace.first.add(first_s)
        if num_later:
            pace.later.add(later_s / num_later)

    def verified(self, num_rows: int, num_positions: float, seconds: float) -> None:
        """A target pass over `num_positions` positions per request, and all that belongs to a step but the drafting."""
        pace = self._pace(num_rows)
        if num_positions > 1:
            pace.passes.add(num_positions, seconds)
            pace.num_since += 1
        else:
            pace.plain.add(seconds)
            pace.num_since = 0

    def made(self, num_rows: int, num_tokens: float, seconds: float) -> None:
        """A whole round with candidates, which made `num_tokens` per request."""
        pace = self._pace(num_rows)
        if pace.plain.num:
            pace.worth.add(num_tokens, min(seconds / pace.plain.seconds, PAUSE * num_tokens))

    def drafts(self, num_rows: int) -> bool:
        """Whether candidates are worth their time to so many requests together; of one alone its rule says it."""
        return num_rows == 1 or self._pace(num_rows).worth.drafts()

    def wants_plain(self, num_rows: int) -> bool:
        """Whether a round without candidates is due."""
        pace = self._pace(num_rows)
        return pace.plain.num < PLAIN or pace.num_since >= AGAIN

    def _pace(self, num_rows: int) -> Pace:
        return self._paces.setdefault(_bucket(num_rows), Pace())


def _bucket(num_rows: int) -> int:
    """The power of two at or above, as an exponent."""
    return (num_rows - 1).bit_length()
