"""The length of a batch's steps, chosen before each step from the seconds and the acceptance of earlier ones.

Tokens per second are E[tokens] / E[seconds] of a step. The seconds are those between the outputs of two steps of the engine,
by load (requests together, in powers of two): the median by length, and for lengths with draft tokens a line through those.
With scheduling ahead of the device they hold the drafting of a step, the pass that verifies it, and the host's part. The tokens
follow from how often draft token j was accepted where j - 1 were. The best length is taken, 0 included. At a new load a few
steps without draft tokens, of a middle length and of the greatest are made to be timed. Where 0 is best, a few steps with draft
tokens are made as often as their loss stays below a hundredth of the time.
Where vLLM's adaptive verification leaves out draft tokens, more of them under load, those count as not accepted, by load.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from specdecpp.policies.cost_aware import TRIAL, CostAware

PRIOR, WEIGHT = CostAware.prior, 8.0
"""Acceptance before there is anything to go by, and the tests that it counts for."""
FADING = 1 / 256
"""Share of its weight that the acceptance of earlier tokens loses with each step of a request."""
SETTLE, TIMED_FOR = 2, 4
"""Steps of a length that are not timed after a change, and those that are, where it is timed for its own sake."""
AGAIN, MOST_AGAIN = 256, 4096
"""Steps with draft tokens after which one without is timed again; twice as many each time."""
KEPT = 32
"""Steps of a length whose median is its time, so that a pause of the machine in one of them does not count."""
MARGIN = 1.01
"""Least speed-up over no draft tokens of a length that is taken: measurements are no more exact than that."""


@dataclass
class Load:
    """Seconds of the last steps at one number of requests together, by length."""

    acceptance: "Acceptance"
    chosen: Counter[int] = field(default_factory=Counter)
    """Steps by their length, since `Lengths.report`."""
    times: dict[int, deque[float]] = field(default_factory=dict)
    medians: dict[int, float] = field(default_factory=dict)
    plan: deque[int] = field(default_factory=deque)
    """Lengths of the next steps, which are made to be timed."""
    num_off: int = 0
    """Steps without draft tokens since the last one with some."""
    num_on: int = 0
    """Steps with draft tokens since the last one without."""
    again: int = AGAIN

    def add(self, length: int, seconds: float) -> None:
        times = self.times.setdefault(length, deque(maxlen=KEPT))
        times.append(seconds)
        self.medians[length] = median(times)

    def seconds(self, length: int) -> float:
        """Seconds of a step: its median without draft tokens, else on a line through the medians, which never falls."""
        if not length and 0 in self.times:
            return self.medians[0]
        points = [(k, self.medians[k], len(times)) for k, times in self.times.items() if k]
        weight = sum(w for *_, w in points)
        middle, mean = (sum(w * point[i] for *point, w in points) / weight for i in (0, 1))
        spread = sum(w * (k - middle) ** 2 for k, _, w in points)
        slope = sum(w * (k - middle) * s for k, s, w in points) / spread if spread else 0.0
        return mean + min(max(slope, 0.0), mean / middle) * (length - middle)


class Acceptance:
    """Rates at which draft token j is accepted where all before it were."""

    def __init__(self, max_tokens: int):
        self._tested, self._accepted = [0.0] * max_tokens, [0.0] * max_tokens

    def add(self, num_drafted: int, num_accepted: int) -> None:
        for sums in (self._tested, self._accepted):
            sums[:] = [(1 - FADING) * x for x in sums]
        for j in range(min(num_drafted, num_accepted + 1)):
            self._tested[j] += 1
            self._accepted[j] += j < num_accepted

    def num_tokens(self, length: int) -> float:
        """Tokens that a step of that length makes in the mean."""
        mean = (sum(self._accepted) + PRIOR * WEIGHT) / (sum(self._tested) + WEIGHT)
        tokens, survival = 1.0, 1.0
        for tested, accepted in zip(self._tested[:length], self._accepted, strict=False):
            survival *= (accepted + mean * WEIGHT) / (tested + WEIGHT)
            tokens += survival
        return tokens


class Lengths:
    """Lengths by the number of requests, as vLLM's scheduler looks them up: of `choices`, which have graphs of the target."""

    def __init__(self, choices: Sequence[int], *, trims: bool = False):
        self._choices, self._trims = sorted(choices), trims
        self._acceptance = Acceptance(self._choices[-1])
        self._loads: dict[int, Load] = {}
        self._last: tuple[float, int, int, int] | None = None

    def __getitem__(self, num_reqs: int) -> int:
        """The length of the step that is being scheduled."""
        load = self._load(num_reqs)
        if not load.plan and not load.times:
            for k in dict.fromkeys((self._choices[0], self._choices[len(self._choices) // 2], self._choices[-1])):
                load.plan.extend([k] * (SETTLE + TIMED_FOR))
        if load.plan:
            return load.plan.popleft()
        if not any(load.times):  # the plan's steps with draft tokens are on their way
            return self._choices[len(self._choices) // 2]
        best = max(self._choices, key=lambda k: load.acceptance.num_tokens(k) / load.seconds(k) * (1 if k else MARGIN))
        return self._tried(load) if not best else self._timed(load, best)

    def _tried(self, load: Load) -> int:
        """0, or a trial with draft tokens where its loss is small enough."""
        load.num_off, load.num_on = load.num_off + 1, 0
        plain = load.seconds(0)
        k = max((k for k in self._choices if k), key=lambda k: load.acceptance.num_tokens(k) / load.seconds(k))
        loss = load.seconds(k) / plain - load.acceptance.num_tokens(k)
        if (SETTLE + TRIAL) * loss > CostAware.regret * load.num_off:
            return 0
        load.num_off = 0
        load.plan.extend([k] * (SETTLE + TRIAL - 1))
        return k

    def _timed(self, load: Load, best: int) -> int:
        """The best length, or the first of a few steps without draft tokens, to time those again."""
        load.num_on, load.num_off = load.num_on + 1, 0
        if load.num_on < load.again or 0 not in self._choices:
            return best
        load.num_on, load.again = 0, min(2 * load.again, MOST_AGAIN)
        load.plan.extend([0] * (SETTLE + 1))
        return 0

    def observe(self, now: float, num_reqs: int, length: int | None, steps: Sequence[tuple[int, int]]) -> None:
        """One step's output: the length it verified, None where requests differ or read prompts; (drafted, accepted)s."""
        load = self._load(num_reqs)
        for num_drafted, num_accepted in steps:
            load.acceptance.add(num_drafted, num_accepted)
        if length is not None:
            load.chosen[length] += 1
        last, streak = self._last, 0
        if last is not None and length is not None and last[1:3] == (num_reqs, length):
            streak = last[3] + 1
            if streak >= SETTLE:
                load.add(length, now - last[0])
        self._last = None if length is None else (now, num_reqs, length, streak)

    def report(self) -> str:
        """The lengths of the steps since the last report by load, with their seconds; "" if there were none."""
        parts = []
        for power, load in sorted(self._loads.items()):
            chosen, load.chosen = load.chosen, Counter()
            times = {k: f" of {1e3 * seconds:.1f} ms" for k, seconds in load.medians.items()}
            steps = [f"{k} in {num} steps{times.get(k, '')}" for k, num in sorted(chosen.items())]
            parts += [f"at up to {1 << power} requests {', '.join(steps)}"] if steps else []
        return "; ".join(parts)

    def _load(self, num_reqs: int) -> Load:
        power = (num_reqs - 1).bit_length()
        return self._loads.setdefault(power, Load(Acceptance(self._choices[-1]) if self._trims else self._acceptance))


def choices_up_to(max_tokens: int, num: int) -> list[int]:
    """The lengths that a batch may have, at most `num` of them: few, as the target is recorded for each.

    >>> choices_up_to(8, 32), choices_up_to(3, 32), choices_up_to(8, 3)
    ([0, 1, 2, 3, 4, 6, 8], [0, 1, 2, 3], [0, 4, 8])
    """
    every = [k for k in range(max_tokens + 1) if k < 5 or not k % 2 or k == max_tokens]
    if num >= len(every):
        return every
    return sorted({every[round(i * (len(every) - 1) / max(1, num - 1))] for i in range(num)} if num > 1 else {max_tokens})


def schedule_of(choices: Sequence[int], max_num_seqs: int) -> list[tuple[int, int, int]]:
    """A schedule by batch size in which every length occurs: vLLM records the target for those.

    >>> schedule_of([0, 2, 4], 32)
    [(1, 1, 0), (2, 2, 2), (3, 32, 4)]
    """
    last = len(choices)
    return [(i, max(i, max_num_seqs) if i == last else i, k) for i, k in enumerate(choices, 1)]
