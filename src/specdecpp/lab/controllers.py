"""Rules of other engines that follow the outcomes of earlier steps and go on trying what they do not use.

They look at no draft token, so a step's length is known before it begins.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from specdecpp.lab.history import Priced
from specdecpp.policies.protocol import NO_PAST, Given, Policy, check_probability

if TYPE_CHECKING:
    from specdecpp.costs import Costs
    from specdecpp.policies.protocol import Outcome

SELDOM = 512
"""The most steps between two probes of `FrontierLength`."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Statistics of each place in a step, and the length of the coming one.

    `rates` [places] is the share of draft tokens that were accepted there when those before were, older ones fading, and
    `tested` [places] how many were tested. `best` is the length that the waiting time belongs to, `num_waited` the steps since
    the last probe, `probe_every` the steps from one to the next.
    """

    rates: tuple[float, ...] = ()
    tested: tuple[int, ...] = ()
    num_tokens: int = 0
    best: int = 0
    is_probe: bool = False
    num_waited: int = 0
    probe_every: int = 4


@dataclass(frozen=True, kw_only=True)
class FrontierLength(Priced):
    """The length that makes the most tokens a second by the acceptance at each place, one beyond the known places at most.

        n = argmax_n  (1 + a_1 + a_1 a_2 + ... + a_1 ... a_n) / t_step(n),    0 <= n <= frontier + 1

    The controller of Ollama's MLX runner (ollama/ollama#16791, `speculate_depth.go`). a_i is a moving average (weight .1) over
    the steps that tested place i; the frontier is the last place with 10 tests, and the next place counts as likely as that
    one, the first as certain. So the length grows by one place at a time, and is 0 where drafting does not pay. A probe of
    one more comes every 4 steps, half as often each time the best length stays, every 512 steps at the least. It goes on from
    request to request, as it does here where requests have no seed.

    Theirs measures t_step by the clock and first runs every length twice for that; here it is the cost model's, which knows
    all lengths, so that a seed gives the same steps again. Both begin without draft tokens.
    """

    short: ClassVar[str] = "frontier:probe_every"
    probe_every: int = 4
    fading: float = 0.1
    min_tests: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("FrontierLength.fading", self.fading)
        if min(self.probe_every, self.min_tests) < 1:
            raise ValueError(
                f"FrontierLength needs probe_every and min_tests of at least 1, got {self.probe_every} and {self.min_tests}"
            )

    def start(self, given: Given = NO_PAST) -> Places:
        past: dict[str, Any] = dict(given.past or {"probe_every": self.probe_every})
        past |= {name: tuple(past.get(name, ())) for name in ("rates", "tested")}
        return Places(**past)

    def carry(self, past: Mapping[str, Any] | None, memory: Places) -> Mapping[str, Any]:
        return asdict(memory)

    def limit(self, memory: Places) -> int:
        return max(self.min_tokens, memory.num_tokens)

    def learn(self, memory: Places, outcome: "Outcome") -> Places:
        assert outcome.costs is not None, "the session gives costs to a policy that needs them"
        rates, tested = list(memory.rates), list(memory.tested)
        for place in range(outcome.num_tested):
            is_accepted = float(place < outcome.num_accepted)
            if place == len(rates):
                rates.append(is_accepted)
                tested.append(0)
            rates[place] += self.fading * (is_accepted - rates[place])
            tested[place] += 1
        known = rates[: sum(num >= self.min_tests for num in tested)]  # no place was tested more often than one before it
        chances = [*known, known[-1] if known else 1.0][: self.max_tokens]
        memory = replace(memory, rates=tuple(rates), tested=tuple(tested))
        return self._planned(memory, fastest(chances, outcome.costs), len(chances))

    def _planned(self, memory: Places, best: int, most: int) -> Places:
        """The coming step: the best length, or a probe of one more."""
        every, waited = memory.probe_every, memory.num_waited + 1
        if best != memory.best:
            every, waited = self.probe_every, 1
        elif memory.is_probe:
            every = min(2 * every, SELDOM)
        is_due = waited >= every
        num = min(best + 1, most) if is_due else best
        return replace(
            memory, num_tokens=num, best=best, is_probe=num != best, num_waited=0 if is_due else waited, probe_every=every
        )


def fastest(chances: list[float], costs: "Costs") -> int:
    """The number of draft tokens that makes the most tokens a second; `chances` are of each, given that those before passed."""
    made = alive = 1.0
    best, speed = 0, 1 / costs.step_s(0)
    for num, chance in enumerate(chances, 1):
        alive *= chance
        made += alive
        if made / costs.step_s(num) > speed:
            best, speed = num, made / costs.step_s(num)
    return best


@dataclass(frozen=True, kw_only=True)
class Average:
    """Moving average of the accepted draft tokens, None before the first step with any; and the steps without since then."""

    mean: float | None = None
    num_skipped: int = 0


@dataclass(frozen=True, kw_only=True)
class SkippingEMA(Policy):
    """Draft as many tokens as were accepted lately, rounded up; none below `skip_below`, but for a probe.

    `dynamic_draft_tokens` of ExLlamaV3 (`generator.py`, `job.py`). A step that was accepted whole counts one token more than
    it had, as its length hid what would have followed. The mean follows a larger count with weight 1.3, which goes beyond it,
    a smaller one with .65. Below a mean of .3 every 16th step drafts two tokens and the others none. It knows no costs. A
    request begins with `max_tokens`, 4 in theirs.
    """

    short: ClassVar[str] = "ema-skip:max_tokens"
    max_tokens: int = 4
    rise: float = 1.3
    fall: float = 0.65
    skip_below: float = 0.3
    probe_every: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.rise < 2 and 0 < self.fall <= 1 and self.skip_below >= 0 and self.probe_every >= 1):
            raise ValueError(
                "SkippingEMA needs 0 < rise < 2, 0 < fall <= 1, skip_below >= 0 and probe_every >= 1, got "
                f"rise={self.rise}, fall={self.fall}, skip_below={self.skip_below}, probe_every={self.probe_every}"
            )

    def start(self, given: Given = NO_PAST) -> Average:
        return Average()

    def limit(self, memory: Average) -> int:
        if memory.mean is None:
            return self.max_tokens
        if memory.mean >= self.skip_below:
            num = max(1, math.ceil(memory.mean))
        else:
            num = 2 if memory.num_skipped + 1 >= self.probe_every else 0
        return max(self.min_tokens, min(num, self.max_tokens))

    def learn(self, memory: Average, outcome: "Outcome") -> Average:
        if not outcome.num_drafted:
            return replace(memory, num_skipped=memory.num_skipped + 1)
        num = outcome.num_accepted + (outcome.num_accepted == outcome.num_drafted)
        if memory.mean is None:
            return Average(mean=float(num))
        weight = self.rise if num > memory.mean else self.fall
        return Average(mean=weight * num + (1 - weight) * memory.mean)
