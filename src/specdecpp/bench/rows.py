"""From sums over prompts to the rows of a table: speed-ups, gains over the best fixed K, shares of the headroom.

Used for measurements and for replays: both give each setting's tokens and seconds per prompt, the prompts being the same for
all, so that every ratio is one of sums and its interval a paired bootstrap over prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from specdecpp.bench.results import Interval, Role, Row
from specdecpp.metrics import Metrics
from specdecpp.replay.intervals import ratio, ratio_of_ratios
from specdecpp.verify import is_lossless, verifications

MIN_PROMPTS = 4  # fewer say nothing about their own spread


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Sums of P prompts under one setting: tokens and seconds of each, everything else in all."""

    tokens: Float[np.ndarray, " P"]
    seconds: Float[np.ndarray, " P"]
    num_steps: float
    num_drafted: float
    num_accepted: float
    drafted_histogram: Mapping[int, float] = field(default_factory=dict)
    time_shares: Mapping[str, float] | None = None
    tv: float = 0.0

    @classmethod
    def of(cls, runs: Sequence[Sequence[Metrics]]) -> "Tally":
        """From what each prompt's runs cost."""
        prompts = [sum(of, Metrics()) for of in runs]
        total = sum(prompts, Metrics())
        return cls(
            tokens=np.array([float(m.num_tokens) for m in prompts]),
            seconds=np.array([m.elapsed_s for m in prompts]),
            num_steps=float(total.num_spec_steps),
            num_drafted=float(total.num_draft_tokens),
            num_accepted=float(total.num_accepted_draft_tokens),
            drafted_histogram={k: float(n) for k, n in total.drafted_histogram.items()},
            time_shares=total.time_shares,
            tv=total.tv,
        )

    @property
    def tokens_per_second(self) -> float:
        return float(self.tokens.sum() / self.seconds.sum())


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One setting on one data set; `policy` and `label` as the file has them."""

    dataset: str
    temperature: float
    verification: str
    role: Role
    policy: str
    label: str
    is_chosen: bool
    tally: Tally


def rows_of(entries: Sequence[Entry], *, seed: int) -> tuple[Row, ...]:
    """The rows of all entries, compared within their data set and temperature."""
    return tuple(_row(entry, _Yardstick.of(entry, entries), seed=seed) for entry in entries)


def share_of_headroom(own: float, *, best_fixed: float, oracle: float) -> float:
    """How much of the way from the best fixed length to an oracle a policy has gone, in tokens per second: 1 is all of it.

    Raises ValueError where there is no way to go.

    >>> round(share_of_headroom(20.9, best_fixed=19.1, oracle=27.0), 3)
    0.228
    """
    if not oracle > best_fixed:
        raise ValueError(
            f"there is no headroom: the oracle makes {oracle:.4g} tokens/s and the best fixed length {best_fixed:.4g}"
        )
    return (own - best_fixed) / (oracle - best_fixed)


@dataclass(frozen=True, kw_only=True)
class _Yardstick:
    """Yardsticks of a setting: the target alone, the best fixed K, and the oracles by name."""

    target: Tally
    fixed: Tally | None
    oracles: Mapping[str, Tally]

    @classmethod
    def of(cls, entry: Entry, entries: Sequence[Entry]) -> "_Yardstick":
        peers = [e for e in entries if (e.dataset, e.temperature) == (entry.dataset, entry.temperature)]
        fixed = {e.verification: e.tally for e in peers if e.role == "fixed" and e.is_chosen}
        best = fixed.get("token") or fixed.get("greedy") or fixed.get(entry.verification)
        return cls(
            target=next(e.tally for e in peers if e.role == "target"),
            fixed=best,
            oracles={e.policy: e.tally for e in peers if e.role == "oracle"},
        )

    def share(self, own: Tally, oracle: str) -> float | None:
        """How much of the way from the best fixed K to an oracle."""
        if self.fixed is None or oracle not in self.oracles:
            return None
        floor, top = self.fixed.tokens_per_second, self.oracles[oracle].tokens_per_second
        return share_of_headroom(own.tokens_per_second, best_fixed=floor, oracle=top) if top > floor else None


def _row(entry: Entry, against: _Yardstick, *, seed: int) -> Row:
    own = entry.tally
    num_tokens = own.tokens.sum()
    gain = None if against.fixed is None else own.tokens_per_second / against.fixed.tokens_per_second - 1
    gains = None if against.fixed is None else ratio_interval(own, against.fixed, seed=seed)
    return Row(
        dataset=entry.dataset,
        temperature=entry.temperature,
        verification=entry.verification,
        role=entry.role,
        policy=entry.policy,
        label=entry.label,
        chosen=entry.is_chosen,
        tokens_per_second=own.tokens_per_second,
        speedup=own.tokens_per_second / against.target.tokens_per_second,
        speedup_interval=ratio_interval(own, against.target, seed=seed),
        gain_over_best_fixed=gain,
        gain_interval=gains and (gains[0] - 1, gains[1] - 1),
        mean_acceptance_length=1 + own.num_accepted / own.num_steps,
        discard_rate=float((own.num_drafted - own.num_accepted) / num_tokens),
        verification_rate=float(own.num_steps / num_tokens),
        share_of_headroom={name: against.share(own, name) for name in ("hindsight", "perfect")},
        time_shares=own.time_shares,
        drafted_histogram={str(k): round(n) for k, n in sorted(own.drafted_histogram.items())},
        num_prompts=len(own.tokens),
        num_tokens=round(num_tokens),
        rate_interval=rate_interval(own, seed=seed),
        lossless=is_lossless(verifications()[entry.verification]),
        mean_tv=float(own.tv / num_tokens),
    )


def rate_interval(own: Tally, *, seed: int) -> Interval | None:
    """95 % interval of tokens per second; None with fewer than four prompts."""
    if len(own.tokens) < MIN_PROMPTS:
        return None
    found = ratio(own.tokens, own.seconds, seed=seed)
    return found.low, found.high


def ratio_interval(own: Tally, other: Tally, *, seed: int) -> Interval | None:
    """95 % interval of the ratio of tokens per second; None with fewer than four prompts, or against itself."""
    if own is other or len(own.tokens) < MIN_PROMPTS:
        return None
    found = ratio_of_ratios(own.tokens, own.seconds, other.tokens, other.seconds, seed=seed)
    return found.low, found.high
