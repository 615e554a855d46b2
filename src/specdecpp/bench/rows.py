"""From sums over prompts to the rows of a table: speed-ups, gains over the best fixed K, shares of the headroom.

Used for measurements and for replays: both give each setting's tokens and seconds per prompt, the prompts being the same for
all, so that every ratio is one of sums and its interval a paired bootstrap over prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from specdecpp.bench.results import Interval, Row, Setting
from specdecpp.decoder import Output
from specdecpp.metrics import Metrics
from specdecpp.replay.intervals import ratio_of_ratios

MIN_PROMPTS = 4  # fewer say nothing about their own spread


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Sums of P prompts under one setting: tokens and seconds of each, everything else in all."""

    tokens: Float[np.ndarray, " P"]
    seconds: Float[np.ndarray, " P"]
    num_steps: float
    num_drafted: float
    num_accepted: float
    time_shares: Mapping[str, float] | None = None

    @classmethod
    def of(cls, answers: Sequence[Sequence[Output]]) -> "Tally":
        """Sums of each prompt's answers."""
        prompts = [sum((answer.metrics for answer in of), Metrics()) for of in answers]
        total = sum(prompts, Metrics())
        return cls(
            tokens=np.array([float(m.num_tokens) for m in prompts]),
            seconds=np.array([m.elapsed_s for m in prompts]),
            num_steps=float(total.num_spec_steps),
            num_drafted=float(total.num_draft_tokens),
            num_accepted=float(total.num_accepted_draft_tokens),
            time_shares=total.time_shares,
        )

    @property
    def tokens_per_second(self) -> float:
        return float(self.tokens.sum() / self.seconds.sum())


@dataclass(frozen=True, kw_only=True)
class Entry(Setting):
    """One setting and what was measured."""

    tally: Tally


def rows_of(entries: Sequence[Entry], *, seed: int) -> tuple[Row, ...]:
    """The rows of all entries, compared within their data set and temperature."""
    return tuple(_row(entry, entries, seed=seed) for entry in entries)


def _row(entry: Entry, entries: Sequence[Entry], *, seed: int) -> Row:
    peers = [e for e in entries if (e.dataset, e.temperature) == (entry.dataset, entry.temperature)]
    target = next(e.tally for e in peers if e.role == "target")
    by_kind = {e.verification: e.tally for e in peers if e.role == "fixed" and e.chosen}
    fixed = by_kind.get("token") or by_kind.get("greedy") or by_kind.get(entry.verification)
    oracles = {e.policy: e.tally.tokens_per_second for e in peers if e.role == "oracle"}
    own, speed = entry.tally, entry.tally.tokens_per_second
    floor = None if fixed is None else fixed.tokens_per_second
    gains = None if fixed is None else ratio_interval(own, fixed, seed=seed)
    num_tokens = own.tokens.sum()
    return Row(
        **{name: value for name, value in vars(entry).items() if name != "tally"},
        tokens_per_second=speed,
        speedup=speed / target.tokens_per_second,
        speedup_interval=ratio_interval(own, target, seed=seed),
        gain_over_best_fixed=floor and speed / floor - 1,
        gain_interval=gains and (gains[0] - 1, gains[1] - 1),
        mean_acceptance_length=1 + own.num_accepted / own.num_steps,
        discard_rate=float((own.num_drafted - own.num_accepted) / num_tokens),
        verification_rate=float(own.num_steps / num_tokens),
        share_of_headroom={name: share_of_headroom(speed, floor, oracles.get(name)) for name in ("hindsight", "perfect")},
        time_shares=own.time_shares,
        num_prompts=len(own.tokens),
        num_tokens=round(num_tokens),
    )


def share_of_headroom(own: float, best_fixed: float | None, oracle: float | None) -> float | None:
    """How much of the way from the best fixed length to an oracle a policy has gone, in tokens per second: 1 is all of it;
    None where there is no way to go.

    >>> round(share_of_headroom(20.9, 19.1, 27.0), 3)
    0.228
    """
    if best_fixed is None or oracle is None or oracle <= best_fixed:
        return None
    return (own - best_fixed) / (oracle - best_fixed)


def ratio_interval(own: Tally, other: Tally, *, seed: int) -> Interval | None:
    """95 % interval of the ratio of tokens per second; None with fewer than four prompts, or against itself."""
    if own is other or len(own.tokens) < MIN_PROMPTS:
        return None
    found = ratio_of_ratios(own.tokens, own.seconds, other.tokens, other.seconds, seed=seed)
    return found.low, found.high
