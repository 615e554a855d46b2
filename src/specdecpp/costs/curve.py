"""Costs of a step: seconds of a draft token, and of a target pass by the number of positions it reads.

A cost model is a value: measured on the machine (`measuring.measure`), given by hand, or made up to ask about other hardware
(`Costs.relative`). Policies that weigh drafting against verification read it from the draft they are shown.
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

SAVED = 0.3
"""Passes of the target alone that drafting saves a token where the target alone takes 1.4 times as long."""
ANSWER, LEAST_READ = 256, 256
"""Tokens of an answer that are counted with at most, and of a text that are worth reading whatever they cost: with the last
256 the draft of a real pair is accepted as often as with all of a text, but for summaries, .80 for .95 (`reading.json`)."""
_FURTHER = ("head_s", "start_s", "switch_s", "other_s", "read_along")


@dataclass(frozen=True, kw_only=True)
class Costs:
    """`draft_s` seconds a draft token; `passes` maps positions of a target pass (draft tokens + 1) to seconds; `start_s` is
    what the first draft token of a step takes beyond that, with the caches as the target left them; `head_s` what a head that
    judges it would add to a draft token: part of it for a rule that asks one (`policies.head.costs_for` sees to that).
    `switch_s` is what the first step with draft tokens after steps without any takes beyond the others, together with the plain
    steps after it: each model finds the processor's caches full of the other. `other_s` is the part of every pass that is no
    pass: what a request's step takes beside it, which no other request shares. `read_along` is the share of the draft's work on
    a prompt that the target's pass over it does (`backends.ReadsBoth`). `num_together` is how many requests take the steps
    together, of whose seconds this tells one's share (`shared`).

    Between the given widths the curve is linear; past the last it goes on as between the last two. A wider pass is never
    taken to be cheaper than a narrower one, so a noisy measurement cannot make draft tokens look better than free.

    >>> Costs(draft_s=0.2, passes={1: 1.0, 5: 1.4}).verify_s(3)
    1.2
    >>> Costs.relative(0.22).round_s(4)
    1.88
    """

    draft_s: float
    passes: Mapping[int, float]
    head_s: float = 0.0
    start_s: float = 0.0
    switch_s: float = 0.0
    other_s: float = 0.0
    read_along: float = 0.0
    num_together: int = 1

    def __post_init__(self) -> None:
        widths = sorted(self.passes)
        is_finite = all(map(math.isfinite, (*self._seconds(), *self.passes.values())))
        least = min(self._seconds())
        if not (is_finite and least >= 0 and widths and widths[0] >= 1 and min(self.passes.values()) > 0):
            raise ValueError(
                "costs need finite seconds: draft_s of at least 0 and a positive time for at least one width from 1, got "
                f"draft_s={self.draft_s} and passes={dict(self.passes)}"
            )
        rising = _rising(self.passes)
        object.__setattr__(self, "passes", rising)
        object.__setattr__(self, "_curve", (tuple(widths), tuple(rising.values())))
        object.__setattr__(self, "_hash", hash((*self._seconds(), tuple(rising.items()))))
        object.__setattr__(self, "_verify_s", {})

    def _seconds(self) -> Any:  # a tuple, of which a checker of types draws at random
        return self.draft_s, *(getattr(self, name) for name in _FURTHER)

    def __hash__(self) -> int:
        return self._hash  # pyright: ignore[reportAttributeAccessIssue]

    @classmethod
    def relative(cls, c: float) -> "Costs":
        """The paper's machine in units of a target pass: a draft token costs c, a pass 1, however wide."""
        return cls(draft_s=c, passes={1: 1.0})

    @classmethod
    def parse(cls, values: Any) -> "Costs":
        """From what JSON has of them; other keys are left aside. Raises ValueError for what are no costs.

        >>> Costs.parse({"draft_s": 0.02, "passes": {"1": 0.1, "5": 0.11}}).verify_s(5)
        0.11
        """
        try:
            seconds: dict[str, Any] = {name: float(values.get(name, 0)) for name in _FURTHER}
            passes = {int(n): float(s) for n, s in values["passes"].items()}
            return cls(draft_s=float(values["draft_s"]), passes=passes, **seconds)
        except KeyError as error:
            raise ValueError(f"{error} is missing") from error
        except (AttributeError, TypeError) as error:
            raise ValueError(f"costs are an object with draft_s and passes, got {values!r}") from error

    def with_head(self) -> "Costs":
        """Where a head judges every draft token: its time is part of drafting."""
        return replace(self, draft_s=self.draft_s + self.head_s, head_s=0.0) if self.head_s else self

    def shared(self, num: int) -> "Costs":
        """A request's share of what steps take where `num` requests take them together, all alike: their rows are in one pass,
        and each has its own `other_s`.

        >>> Costs(draft_s=0.2, passes={1: 1.0, 2: 1.1}).shared(2).verify_s(1)
        0.55
        """
        return _shared(self, num)

    @property
    def load(self) -> int:
        """1, 2, 4, 8, ...: requests together, up to so many, whose lessons are kept apart. What a row costs depends on it."""
        return 1 << (self.num_together - 1).bit_length()

    def verify_s(self, num_positions: int) -> float:
        """Seconds of one target pass over so many positions, the unread token and the draft tokens; with draft tokens, of the
        step's start too."""
        known = self._verify_s  # pyright: ignore[reportAttributeAccessIssue]
        if num_positions not in known:  # a policy asks for each draft token again
            known[num_positions] = self.pass_s(num_positions) + self.start_s * (num_positions > 1)
        return known[num_positions]

    def pass_s(self, num_positions: int) -> float:
        """Seconds of that pass by itself."""
        widths, seconds = self._curve  # pyright: ignore[reportAttributeAccessIssue]
        return _along(widths, seconds, num_positions)

    def round_s(self, num_drafted: int) -> float:
        """Seconds of a step with so many draft tokens, after steps of its like."""
        return self.draft_s * num_drafted + self.verify_s(num_drafted + 1)

    def draft_pass_s(self, num_rows: int) -> float:
        """Seconds of a pass of the draft over so many rows, which rise as the target's do."""
        if num_rows == 1:
            return self.draft_s
        return self.draft_s * self.pass_s(num_rows) / self.pass_s(1)

    def worth_reading(self, num_tokens: int) -> int:
        """Tokens of a text that a draft should read at most before an answer of up to `num_tokens`: those whose reading takes
        as long as drafting saves there where it pays well, `SAVED` of a pass a token.

        >>> Costs(draft_s=2.0, passes={1: 20.0, 2: 21.0, 9: 100.0}).worth_reading(100)
        534
        """
        each_s = (self.draft_pass_s(LEAST_READ + 1) - self.draft_pass_s(1)) / LEAST_READ
        saved_s = SAVED * self.verify_s(1) * min(num_tokens, ANSWER)
        return max(LEAST_READ, math.ceil(saved_s / each_s)) if each_s > 0 else sys.maxsize

    def step_s(self, num_drafted: int) -> float:
        """Seconds that one more draft token adds to a step that has `num_drafted`: its draft step and the wider pass."""
        return self.draft_s + self.verify_s(num_drafted + 2) - self.verify_s(num_drafted + 1)

    def best_length(self, acceptance: float, lengths: range) -> int:
        """The number of draft tokens that makes most tokens a second where each is accepted with one and the same probability.

        argmax_g (1 + a + ... + a^g)/(g t_d + t_t(g + 1)), the shortest of equals.

        >>> Costs.relative(0.22).best_length(0.8, range(21))
        4
        """
        return _best_length(self, acceptance, lengths)


def is_switch(before: int, now: int) -> bool:
    """Tell whether a step with `now` draft tokens, after one with `before`, is one that takes `Costs.switch_s` more."""
    return now > 0 and before == 0


def chain_tokens(acceptance: float, num_drafted: int) -> float:
    """1 + a + ... + a^k: the tokens a step makes on average where each of k draft tokens is accepted with probability a."""
    return sum(acceptance**k for k in range(num_drafted + 1))


def _rising(curve: Mapping[int, float]) -> dict[int, float]:
    """By width; no wider one takes less."""
    rising, most = {}, 0.0
    for width in sorted(curve):
        most = rising[width] = max(most, float(curve[width]))
    return rising


def _along(widths: Any, seconds: Any, num: int) -> float:  # sequences, of which a checker of types draws at random
    if len(widths) == 1 or num <= widths[0]:
        return seconds[0]
    i = min(bisect_right(widths, num), len(widths) - 1)
    slope = (seconds[i] - seconds[i - 1]) / (widths[i] - widths[i - 1])
    return seconds[i - 1] + slope * (num - widths[i - 1])


@lru_cache(maxsize=256)
def _shared(costs: Costs, num: int) -> Costs:
    own_s = min(costs.other_s, costs.pass_s(1)) * (1 - 1 / num)
    return replace(
        costs,
        draft_s=costs.draft_pass_s(num) / num,
        passes={n: costs.pass_s(n * num) / num + own_s for n in (1, 2, 3, 5, 9, 17)},
        start_s=costs.start_s / num,
        switch_s=costs.switch_s / num,
        num_together=num,
    )


@lru_cache(maxsize=1024)  # asked before every draft token, with what changes at most once a step
def _best_length(costs: Costs, acceptance: float, lengths: range) -> int:
    return max(lengths, key=lambda k: chain_tokens(acceptance, k) / costs.round_s(k))
