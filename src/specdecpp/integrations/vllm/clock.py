"""What the steps of a batch take, as running means by batch size: the cost model of a busy server.

A draft step and a target pass serve all requests of a batch at once, so a request is told the seconds of the whole batch's
step. Were they shared out evenly, every cost and every rate would be divided by the same number, and no rule would decide
otherwise (policies weigh seconds only against each other).

The pass of the target is a line in the mean number of positions per request, fitted by least squares in which a round weighs
(1 - MEMORY) times the next. Batch sizes are kept apart by powers of two. MEMORY and PAUSE are those of `costs.clock`.
"""

from dataclasses import dataclass, field

from specdecpp.costs import Costs
from specdecpp.costs.clock import MEMORY, PAUSE

RIDGE = 0.5
"""Pulls the slope towards 0, in positions squared. Where rounds were nearly equally long the slope would be noise, and a rule
that believed in a steep one would keep them so; with a flat one it drafts more, and the slope is found out."""


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
class Pace:
    """Seconds of a draft step and of a target pass at one batch size."""

    draft_s: float = 0.0
    num_rounds: int = 0
    passes: Line = field(default_factory=Line)


class StepClock:
    """Costs by batch size. `ratio` is a draft step over a target pass, believed until both have been timed."""

    def __init__(self, *, ratio: float, max_tokens: int):
        self._guess = Costs.relative(ratio)
        self._max_tokens = max_tokens
        self._paces: dict[int, Pace] = {}

    def costs(self, num_rows: int) -> tuple[Costs, bool]:
        """Those of the nearest batch size that has been timed, and whether there is one."""
        timed = {size: p for size, p in self._paces.items() if p.num_rounds and p.passes.weight}
        if not timed:
            return self._guess, False
        bucket = _bucket(num_rows)
        pace = timed[min(timed, key=lambda size: abs(size - bucket))]
        widths = (1.0, self._max_tokens + 1.0)
        return Costs(draft_s=pace.draft_s, passes={int(n): pace.passes.at(n) for n in widths}), True

    def drafted(self, num_rows: int, num_steps: int, seconds: float) -> None:
        pace = self._pace(num_rows)
        took_s = seconds / num_steps
        if pace.num_rounds:
            took_s = min(took_s, PAUSE * pace.draft_s)
        weight = max(1 / (pace.num_rounds + 1), MEMORY)
        pace.draft_s += weight * (took_s - pace.draft_s)
        pace.num_rounds += 1

    def verified(self, num_rows: int, num_positions: float, seconds: float) -> None:
        """A target pass over `num_positions` positions per request, and all that belongs to a step but the drafting."""
        self._pace(num_rows).passes.add(num_positions, seconds)

    def _pace(self, num_rows: int) -> Pace:
        return self._paces.setdefault(_bucket(num_rows), Pace())


def _bucket(num_rows: int) -> int:
    """The power of two at or above, as an exponent."""
    return (num_rows - 1).bit_length()
