"""Costs of a step: seconds of a draft token, and of a target pass by the number of positions it reads.

A cost model is a value: measured on the machine (`measuring.measure`), given by hand, or made up to ask about other hardware
(`Costs.relative`). Policies that weigh drafting against verification are given it (`Policy.rule`).
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

SAVED = 0.3
"""Target passes saved a token where drafting makes decoding 1.4 times as fast."""
ANSWER, LEAST_READ = 256, 256
"""Most tokens of an answer that count, and tokens of a text that are worth reading at any cost: with the last 256 the draft of
a real pair is accepted as often as with all of a text, but for summaries, .80 instead of .95 (`reading.json`)."""
_FIGURES = ("draft_s", "head_s", "start_s", "switch_s", "other_s", "read_along")


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of the parts of a step. Between the given widths `passes` is linear; past the last it goes on as between the last
    two. A wider pass is never taken to be cheaper than a narrower one, so that noise cannot make draft tokens pay.

    >>> Costs(draft_s=0.2, passes={1: 1.0, 5: 1.4}).verify_s(3)
    1.2
    >>> Costs.relative(0.22).step_s(4)
    1.88
    """

    draft_s: float
    """Seconds a draft token."""
    passes: Mapping[int, float]
    """Positions of a target pass (draft tokens + 1) -> its seconds."""
    head_s: float = 0.0
    """Seconds that a head's judgement adds to a draft token, for rules that ask one (`policies.head.costs_for`)."""
    start_s: float = 0.0
    """Further seconds of the first draft token of a step: cold caches and, of requests that share passes, each one's work."""
    switch_s: float = 0.0
    """Further seconds of the first step with draft tokens after plain steps, and of the plain steps after it."""
    other_s: float = 0.0
    """Seconds of every pass outside the model, which are not divided among requests that share the pass."""
    read_along: float = 0.0
    """Share of the draft's work on a prompt that the target's pass over it does (`backends.ReadsBoth`)."""
    num_together: int = 1
    """Requests that take the steps together; the seconds are one's share (`shared`)."""
    is_new_load: bool = False
    """True while the target alone has not been timed with so many requests at once (`clock.CostClock`)."""

    def __post_init__(self) -> None:
        figures, widths = [getattr(self, name) for name in _FIGURES], sorted(self.passes)
        is_finite = all(map(math.isfinite, (*figures, *self.passes.values())))
        if not (is_finite and min(figures) >= 0 and widths and widths[0] >= 1 and min(self.passes.values()) > 0):
            raise ValueError(
                "costs need finite figures of at least 0 and a positive time for at least one width from 1, got "
                f"{dict(zip(_FIGURES, figures, strict=True))} and passes={dict(self.passes)}"
            )
        rising = accumulate((float(self.passes[n]) for n in widths), max)
        object.__setattr__(self, "passes", dict(zip(widths, rising, strict=True)))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((*(getattr(self, name) for name in _FIGURES), *self._curve))

    @cached_property
    def _curve(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Widths and their seconds."""
        return tuple(self.passes), tuple(self.passes.values())

    @classmethod
    def relative(cls, c: float) -> "Costs":
        """The paper's machine in units of a target pass: a draft token costs c, a pass 1, however wide."""
        return cls(draft_s=c, passes={1: 1.0})

    @classmethod
    def parse(cls, values: Any) -> "Costs":
        """Read the JSON form, and pass over other keys. Raises ValueError for what are no costs.

        >>> Costs.parse({"draft_s": 0.02, "passes": {"1": 0.1, "5": 0.11}}).verify_s(5)
        0.11
        """
        try:
            passes = {int(n): float(s) for n, s in values["passes"].items()}
            seconds: dict[str, Any] = {name: float(values.get(name, 0)) for name in _FIGURES}
            seconds["draft_s"] = float(values["draft_s"])
            return cls(passes=passes, **seconds)
        except KeyError as error:
            raise ValueError(f"{error} is missing") from error
        except (AttributeError, TypeError) as error:
            raise ValueError(f"costs are an object with draft_s and passes, got {values!r}") from error

    def to_json(self) -> dict[str, Any]:
        """The inverse of `parse`."""
        return {name: getattr(self, name) for name in _FIGURES} | {"passes": {str(n): s for n, s in self.passes.items()}}

    def with_head(self) -> "Costs":
        """Costs where a head judges every draft token: its time is part of drafting."""
        return replace(self, draft_s=self.draft_s + self.head_s, head_s=0.0) if self.head_s else self

    @lru_cache(maxsize=256)  # noqa: B019 (a value, which others hold too)
    def shared(self, num: int) -> "Costs":
        """A request's share of what steps take where `num` requests take them together, all alike: their rows are in one pass,
        and each has its own `other_s`, in drafting once more.

        >>> Costs(draft_s=0.2, passes={1: 1.0, 2: 1.1}).shared(2).verify_s(1)
        0.55
        """
        own_s = min(self.other_s, self.pass_s(1)) * (1 - 1 / num)
        return replace(
            self,
            draft_s=self.draft_pass_s(num) / num,
            passes={n: self.pass_s(n * num) / num + own_s for n in (1, 2, 3, 5, 9, 17)},
            start_s=self.start_s / num + own_s,
            switch_s=self.switch_s / num,
            num_together=num,
        )

    @property
    def load(self) -> int:
        """`num_together` rounded up to a power of two. Statistics are kept by load, since the cost of a row depends on it."""
        return 1 << (self.num_together - 1).bit_length()

    def pass_s(self, num_positions: int) -> float:
        """Seconds of one target pass over the unread token and the draft tokens."""
        widths, seconds = self._curve
        if len(widths) == 1 or num_positions <= widths[0]:
            return seconds[0]
        i = min(bisect_right(widths, num_positions), len(widths) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (widths[i] - widths[i - 1])
        return seconds[i - 1] + slope * (num_positions - widths[i - 1])

    def verify_s(self, num_positions: int) -> float:
        """`pass_s`, and `start_s` if the pass holds draft tokens."""
        return self.pass_s(num_positions) + self.start_s * (num_positions > 1)

    def step_s(self, num_drafted: int) -> float:
        """Seconds of a step with so many draft tokens, after steps of its like."""
        return self.draft_s * num_drafted + self.verify_s(num_drafted + 1)

    def added_s(self, num_drafted: int) -> float:
        """Seconds that one more draft token adds to a step that has `num_drafted`: its draft step and the wider pass."""
        return self.draft_s + self.verify_s(num_drafted + 2) - self.verify_s(num_drafted + 1)

    def draft_pass_s(self, num_rows: int) -> float:
        """Seconds of a pass of the draft over so many rows, which rise as the target's do."""
        return self.draft_s if num_rows == 1 else self.draft_s * self.pass_s(num_rows) / self.pass_s(1)

    def worth_reading(self, num_tokens: int) -> int:
        """Most tokens of a text that a draft should read before an answer of up to `num_tokens`: reading them takes as long as
        drafting saves where it pays well, `SAVED` of a pass a token.

        >>> Costs(draft_s=2.0, passes={1: 20.0, 2: 21.0, 9: 100.0}).worth_reading(100)
        534
        """
        each_s = (self.draft_pass_s(LEAST_READ + 1) - self.draft_pass_s(1)) / LEAST_READ
        saved_s = SAVED * self.verify_s(1) * min(num_tokens, ANSWER)
        return max(LEAST_READ, math.ceil(saved_s / each_s)) if each_s > 0 else sys.maxsize

    @lru_cache(maxsize=1024)  # noqa: B019 (asked with what changes at most once a step)
    def best_length(self, acceptance: float, lengths: range) -> int:
        """The number of draft tokens that makes most tokens a second where each is accepted with one and the same probability.

        argmax_g (1 + a + ... + a^g)/(g t_d + t_t(g + 1)), the shortest of equals.

        >>> Costs.relative(0.22).best_length(0.8, range(21))
        4
        """
        return max(lengths, key=lambda k: chain_tokens(acceptance, k) / self.step_s(k))


def is_switch(before: int, now: int) -> bool:
    """Tell whether a step with `now` draft tokens, after one with `before`, is one that takes `Costs.switch_s` more."""
    return now > 0 and before == 0


def chain_tokens(acceptance: float, num_drafted: int) -> float:
    """1 + a + ... + a^k: the tokens a step makes on average where each of k draft tokens is accepted with probability a."""
    return sum(acceptance**k for k in range(num_drafted + 1))
