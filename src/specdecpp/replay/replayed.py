"""Results of a replayed policy: steps, their sums for every answer, and the rates that follow."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int

from specdecpp.policies import Costs
from specdecpp.replay.intervals import Interval, ratio_of_ratios


class ReplayedStep(NamedTuple):
    """Outcome of a replayed step: `policies.Outcome`. Seconds are those of the cost model."""

    num_tokens: int
    num_drafted: int
    num_accepted: int
    expected_s: float
    draft_s: float
    verify_s: float
    num_dropped: int = 0
    head_s: float = 0.0
    other_s: float = 0.0
    judged: Sequence[float] = ()
    extra: Any = None
    costs: Costs | None = None
    overlaps: Sequence[float] = ()

    @property
    def num_tested(self) -> int:
        return min(self.num_accepted + 1, self.num_drafted)


def prices(costs: Costs, max_tokens: int) -> list[tuple[float, float, float]]:
    """expected_s, draft_s and verify_s of a step with 0..max_tokens draft tokens."""
    return [(costs.step_s(k), costs.draft_s * k, costs.verify_s(k + 1)) for k in range(max_tokens + 1)]


R = TypeVar("R", bound="Rates")


@dataclass(frozen=True, kw_only=True, eq=False)
class Rates:
    """Rates of a rule on each of A answers, summed over repeats, and the rates that follow."""

    sources: tuple[str, ...]
    costs: Costs
    tokens: Int[np.ndarray, " A"]
    is_priced: bool = False
    """Tell whether the rule looked at the costs, so that others would have made it act differently."""

    @property
    def seconds(self) -> Float[np.ndarray, " A"]:
        """Seconds of all steps, by the costs."""
        raise NotImplementedError

    @property
    def passes(self) -> Int[np.ndarray, " A"]:
        """Passes of the target."""
        raise NotImplementedError

    @property
    def tokens_per_second(self) -> float:
        return float(self.tokens.sum() / self.seconds.sum())

    @property
    def speed_up(self) -> float:
        """Over the target alone."""
        return self.tokens_per_second * self.costs.verify_s(1)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens of a target pass."""
        return float(self.tokens.sum() / self.passes.sum())

    def gain(self, over: "Rates") -> Interval:
        """Tokens per second over those of another rule on the same answers, with 95 % over prompts: 1 is no gain."""
        return ratio_of_ratios(self.tokens, self.seconds, over.tokens, over.seconds)

    def only(self: R, *sources: str) -> R:
        """The answers of some sources. Raises ValueError for a source without any."""
        if missing := set(sources) - set(self.sources):
            raise ValueError(
                f"there are no answers of {', '.join(sorted(missing))}, only of {', '.join(sorted(set(self.sources)))}"
            )
        chosen = [i for i, source in enumerate(self.sources) if source in sources]
        columns = {name: of for name, of in vars(self).items() if isinstance(of, np.ndarray)}
        lists = {name: of for name, of in vars(self).items() if isinstance(of, tuple)}
        kept = {name: of[chosen] for name, of in columns.items()}
        return replace(self, **kept, **{name: tuple(of[i] for i in chosen) for name, of in lists.items()})

    def at(self: R, costs: Costs) -> R:
        """Steps at other costs. Raises ValueError for a rule that would have acted differently there."""
        if self.is_priced:
            raise ValueError("this rule looks at the costs: replay it again at the others")
        return replace(self, costs=costs)


@dataclass(frozen=True, kw_only=True, eq=False)
class Replayed(Rates):
    """Chains replayed, summed over `repeats` runs.

    `histogram[a, k]` counts the steps of answer a with k draft tokens, of which most else is made; `switches` the steps
    with draft tokens that came after one without.
    """

    repeats: int
    accepted: Int[np.ndarray, " A"]
    dropped: Int[np.ndarray, " A"]
    switches: Int[np.ndarray, " A"]
    histogram: Int[np.ndarray, "A K1"]

    @classmethod
    def of(
        cls, played: Iterable[Iterable[ReplayedStep]], *, sources: tuple[str, ...], costs: Costs, repeats: int, is_priced: bool
    ) -> "Replayed":
        """Add up the steps of every answer."""
        sums, histograms = [], []
        for steps in played:
            rows = np.array([(r.num_tokens, r.num_accepted, r.num_dropped, r.num_drafted) for r in steps])
            drafted = rows[:, 3]
            num_switches = int(((drafted > 0) & (np.r_[1, drafted[:-1]] == 0)).sum())
            sums.append((*rows[:, :3].sum(0), num_switches))
            histograms.append(np.bincount(drafted))
        histogram = np.zeros((len(histograms), max(map(len, histograms))), dtype=np.int64)
        for row, counts in zip(histogram, histograms, strict=True):
            row[: len(counts)] = counts
        columns = dict(zip(("tokens", "accepted", "dropped", "switches"), np.array(sums).T, strict=True))
        return cls(sources=sources, costs=costs, repeats=repeats, histogram=histogram, is_priced=is_priced, **columns)

    @property
    def drafted(self) -> Int[np.ndarray, " A"]:
        return self.histogram @ np.arange(self.histogram.shape[1])

    @property
    def passes(self) -> Int[np.ndarray, " A"]:
        return self.histogram.sum(1)

    @property
    def seconds(self) -> Float[np.ndarray, " A"]:
        each = [self.costs.step_s(k) for k in range(self.histogram.shape[1])]
        return self.histogram @ np.array(each) + self.costs.draft_s * self.dropped + self.costs.switch_s * self.switches

    @property
    def discard_rate(self) -> float:
        """R_d: draft tokens that do not end in the output, per token."""
        return float((self.drafted - self.accepted).sum() / self.tokens.sum())

    @property
    def verification_rate(self) -> float:
        """R_v: target passes per token."""
        return float(self.passes.sum() / self.tokens.sum())
