"""Costs that follow the clock: seconds of steps, taken over only when they have moved."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from specdecpp.costs.curve import Costs

if TYPE_CHECKING:
    from specdecpp.policies.protocol import Outcome

MEMORY = 0.02
"""The weight of one step in the means, once there were many."""
PAUSE = 4.0
"""A step's time is capped at this multiple of the expected one: more means that the machine did other work."""
WARM_UP, LONG_WARM_UP, QUICK_S = 2, 12, 0.01
"""Steps after a switch to those with draft tokens, and to those without or, where a pass takes less than 10 ms, behind a
prompt, until the processor's caches hold what they need: the first behind a prompt takes twice as long. A trial of drafting
(`policies.cost_aware.TRIAL`) is longer than two steps, or else nothing could correct costs by which it does not pay."""
TRUST = 0.25
"""Steps that a measurement counts for: it may be wrong by a factor, where other programs had the machine meanwhile."""
COUPLING = 0.5
"""Power of a move of plain passes by which the others move, and the other way round: a slow machine slows all."""
CHANGE, FIRST, WAIT = 0.01, 4, 32
"""`now` follows after the first 4 steps, after 8 more, 16 more, and then every 32, if a step has moved by more than 1 %: a rule
plans anew for each `now`, and a busy machine moves the means all the time."""
WRONG = 1.25
"""Kept steps that differ by this factor from those of the clock, in passes of the target alone, are wrong."""
HALF_KNOWN = 3
"""Steps of a length after which half is believed of the difference between their passes and the line through all lengths."""
SPREAD = 20.0
"""Steps next to the mean length after which half is believed of a slope of levels over lengths."""
Sums = list[float]
"""Of steps of a length: their number, seconds of their passes or sum of the levels of these, seconds of drafting."""


class CostClock:
    """Costs that follow the clock, step by step; shared by the requests of a decoder that have no seed.

    A measurement is over in two seconds, and a machine that others use too is quick in one and slow in the next, so the steps
    of requests win over it (`TRUST`). A *level* is the observed time of a pass over the measured one. The target alone has one,
    and passes over draft tokens have one for each number of them, because which widths are quick differs from process to
    process, with where the weights lie in memory. Drafting has a start and a slope.

    `now` stays the same object until a step has moved by more than `CHANGE`, so that a request finds its plans kept. Where
    draft tokens are copied (`is_copying`) no step is slow because of the one before.
    """

    def __init__(self, now: Costs, *, is_copying: bool = False):
        self.now, self._measured, self._is_copying, self._wait, self._num_updates = now, now, is_copying, FIRST, 0
        self._new: dict[int, Sums] = {}
        """Steps since `now` was last looked at, by their number of draft tokens."""
        self._plain: dict[int, Sums] = {}
        self._drafted: dict[int, Sums] = {}
        """All steps without draft tokens, and with some, fading."""
        self._alone = self._others = 1.0
        """Factors by which the other passes have moved those of the target alone, and the reverse."""
        self._loads: dict[int, tuple[Costs, CostClock]] = {}
        """By load: `now` at its first use, and a clock of as many requests, whose passes rise in their own way."""
        self._shared: dict[int, Costs] = {}
        """Costs of so many requests, until they change."""

    def shared(self, num: int) -> Costs:
        """A request's share of what `num` requests take together, as their steps have shown it."""
        if num == 1:
            return self.now
        if num not in self._shared:
            found, is_new = self.now.shared(num), True
            if found.load in self._loads:
                then, clock = self._loads[found.load]
                found, is_new = clock._costs(then.shared(num)), not clock._plain
            self._shared[num] = replace(found, is_new_load=is_new)
        return self._shared[num]

    def update(self, outcome: "Outcome", *, num_before: int = sys.maxsize, num_alike: int = sys.maxsize) -> None:
        """Learn from the times of a step behind so many others of its answer, of which the last so many are like it: with draft
        tokens, or without. Of requests that share a step one is enough, for their load. Nothing is learned next to a switch
        (`Costs.switch_s`) and, of quick models, close behind the prompt."""
        (num, pass_s, draft_s), costs, clock = _times(outcome), outcome.costs, self
        num_together, self._num_updates = costs.num_together if costs else 1, self._num_updates + 1
        if self._num_updates % num_together or (num_before < LONG_WARM_UP and self._measured.verify_s(1) < QUICK_S):
            return
        if num_alike < min(num_before, WARM_UP if num else LONG_WARM_UP) and not self._is_copying:
            return
        if costs is not None and num_together > 1:
            load = costs.load
            if load not in self._loads:
                self._loads[load] = self.now, CostClock(self.now.shared(load))
            then, clock = self._loads[load]
            if num_together < load:  # the clock is that of as many as the load has at most
                pass_s *= clock._measured.pass_s(num + 1) / then.shared(num_together).pass_s(num + 1)
                draft_s *= num_together / load
        if clock._add(num, pass_s, draft_s):
            self._shared = {}

    def correct_by(self, outcomes: Iterable["Outcome"]) -> None:
        """Learn from steps that were run to check the costs. They count double, to outweigh the measurement at once."""
        for one in 2 * list(outcomes):
            self._add(*_times(one))
        self._follow()

    def _add(self, num: int, pass_s: float, draft_s: float) -> bool:
        """Count a step with so many draft tokens. True where `now` has moved."""
        now, new = self.now, self._new.setdefault(num, [0.0, 0.0, 0.0])
        new[0] += 1.0
        new[1] += min(pass_s, PAUSE * now.verify_s(num + 1))
        if num:
            new[2] += min(draft_s, PAUSE * max(now.start_s + num * now.draft_s, now.verify_s(1)))
        if sum(count for count, *_ in self._new.values()) < self._wait:
            return False
        self._wait = min(2 * self._wait, WAIT)
        return self._follow()

    def _follow(self) -> bool:
        now, found = self.now, self._found()
        usual = (num for num, (count, *_) in self._drafted.items() if count > 1)
        if any(abs(found.step_s(k) / now.step_s(k) - 1) > CHANGE for k in {0, 1, 2, *usual}):
            self.now = found
        return self.now is found

    def _found(self) -> Costs:
        """Costs by all steps so far, with those since `now` was last looked at."""
        # The relative change of a level is used, not its value: steps that no curve fits would else correct it again and again.
        # The first steps correct what was measured, and say little of a slower machine.
        new, self._new, drafted = self._new, {}, self._drafted
        plain = {0: new.pop(0)} if 0 in new else {}
        self._others *= self._take_in(self._plain, plain, self._alone) ** COUPLING
        moved = self._take_in(drafted, new, self._others)
        self._alone *= moved ** (COUPLING * min(1.0, MEMORY * sum(count for count, *_ in drafted.values())))
        return self._costs(self._measured)

    def _costs(self, base: Costs) -> Costs:
        """Costs as they are known by now where these were measured, of as many requests or others of the load."""
        passes, drafted = {}, self._drafted
        longest, (middle, level, slope) = max(drafted, default=0), _levels(drafted)
        for n in sorted({2, 3, *base.passes, *(num + 1 for num in drafted)} - {1}):
            count, levels, _ = drafted.get(n - 1, (0.0, 0.0, 0.0))
            line = max(level / 4, level + slope * (min(n - 1, longest) - middle))  # further on they rise as was measured
            passes[n] = self._others * (HALF_KNOWN * line + levels) / (HALF_KNOWN + count) * base.pass_s(n)
        passes[1] = self._alone * _level(self._plain.values()) * base.pass_s(1)
        if drafted and not self._plain:
            passes[1] = min(passes[1], passes[2])  # none takes longer
        steps, measured = [(num, k, s) for k, (num, _, s) in drafted.items()], self._measured
        start_s, draft_s = _line(steps, self._others * measured.start_s, self._others * measured.draft_s)
        share = measured.num_together / base.num_together
        return replace(base, draft_s=share * draft_s, start_s=share * start_s, passes=passes)

    def _take_in(self, seen: dict[int, Sums], new: dict[int, Sums], by: float) -> float:
        """Add new steps to those seen, which fade; `by` is the level of others. The factor by which their own has moved."""
        before, fading = _level(seen.values()), (1 - MEMORY) ** sum(count for count, *_ in new.values())
        for num, sums in seen.items():
            seen[num] = [fading * x for x in sums]
        for num, (count, pass_s, draft_s) in new.items():
            more = count, pass_s / (by * self._measured.pass_s(num + 1)), draft_s
            seen[num] = [a + b for a, b in zip(seen.get(num, (0.0, 0.0, 0.0)), more, strict=True)]
        return _level(seen.values()) / before


def _level(steps: Iterable[Sums]) -> float:
    """Mean level of passes; that of the measurement, 1, counts for `TRUST` steps."""
    num, levels = (sum(column) for column in zip((TRUST, TRUST), *((n, level) for n, level, _ in steps), strict=True))
    return levels / num


def _levels(drafted: dict[int, Sums]) -> tuple[float, float, float]:
    """(mean length, level there, slope) of levels over lengths, for lengths that were not seen: measured on a busy machine the
    shape may be wrong, and a rule that believes it never tries what would show that."""
    num, level = sum(count for count, *_ in drafted.values()), _level(drafted.values())
    middle = sum(count * k for k, (count, *_) in drafted.items()) / num if num else 0.0
    rise = sum((k - middle) * (levels - count * level) for k, (count, levels, _) in drafted.items())
    return middle, level, rise / (SPREAD + sum(count * (k - middle) ** 2 for k, (count, *_) in drafted.items()))


def _line(steps: Iterable[tuple[float, int, float]], start_s: float, draft_s: float) -> tuple[float, float]:
    """(start, slope) of drafting by least squares over (steps, their draft tokens, their seconds in all). What was measured
    counts for a few steps; neither falls below 0."""
    ones, between, squares = 0.2, 0.0, 1.0
    whole_s, by_num = ones * start_s, squares * draft_s
    for count, k, seconds in steps:
        ones, between, squares = ones + count, between + count * k, squares + count * k * k
        whole_s, by_num = whole_s + seconds, by_num + k * seconds
    start = (squares * whole_s - between * by_num) / (ones * squares - between**2)
    slope = (ones * by_num - between * whole_s) / (ones * squares - between**2)
    if start < 0:
        return 0.0, by_num / squares
    return (start, slope) if slope >= 0 else (whole_s / ones, 0.0)


def _times(outcome: "Outcome") -> tuple[int, float, float]:
    """(draft tokens, seconds of the pass, seconds of drafting) of a step."""
    return outcome.num_drafted, outcome.verify_s + outcome.other_s, outcome.draft_s + outcome.head_s


def differ(before: Costs, now: Costs) -> bool:
    """True where steps of 1, 2 or 4 draft tokens, in passes, differ `WRONG` times; a slower machine alone changes none."""
    steps = ([costs.step_s(k) / costs.verify_s(1) for k in (1, 2, 4)] for costs in (before, now))
    return any(not 1 / WRONG <= a / b <= WRONG for a, b in zip(*steps, strict=True))
