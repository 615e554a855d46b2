"""From metrics of prompts to the rows of a table: speed-ups, gains over the best fixed K, shares of the headroom.

Used for measurements and for replays: both give each setting's metrics per prompt, the prompts being the same for all, so that
every ratio is one of sums and its interval a paired bootstrap over prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from specdecpp.bench.results import Interval, Row, Setting
from specdecpp.metrics import Metrics
from specdecpp.replay.intervals import ratio_of_ratios

MIN_PROMPTS = 4  # fewer say nothing about their own spread


@dataclass(frozen=True, kw_only=True)
class Entry(Setting):
    """One setting and what was measured."""

    prompts: Sequence[Metrics]
    """Metrics of each prompt, all its answers together."""
    repeats: int = 1
    """Answers to each."""

    @cached_property
    def total(self) -> Metrics:
        return sum(self.prompts, Metrics())


def rows_of(entries: Sequence[Entry], *, seed: int) -> tuple[Row, ...]:
    """The rows of all entries, compared within their data set and temperature."""
    return tuple(_row(entry, entries, seed=seed) for entry in entries)


def _row(entry: Entry, entries: Sequence[Entry], *, seed: int) -> Row:
    peers = [e for e in entries if (e.dataset, e.temperature) == (entry.dataset, entry.temperature)]
    target = next(e for e in peers if e.role == "target")
    by_kind = {e.verification: e for e in peers if e.role == "fixed" and e.chosen}
    fixed = by_kind.get("token") or by_kind.get("greedy") or by_kind.get(entry.verification)
    oracles = {e.policy: e.total.tokens_per_second for e in peers if e.role == "oracle"}
    own, speed = entry.total, entry.total.tokens_per_second
    floor = None if fixed is None else fixed.total.tokens_per_second
    gains = None if fixed is None else ratio_interval(entry, fixed, seed=seed)
    return Row(
        **{of.name: getattr(entry, of.name) for of in fields(Setting)},
        tokens_per_second=speed,
        speedup=speed / target.total.tokens_per_second,
        speedup_interval=ratio_interval(entry, target, seed=seed),
        gain_over_best_fixed=floor and speed / floor - 1,
        gain_interval=gains and (gains[0] - 1, gains[1] - 1),
        mean_acceptance_length=own.mean_acceptance_length,
        discard_rate=own.discard_rate,
        verification_rate=own.verification_rate,
        share_of_headroom={name: share_of_headroom(speed, floor, oracles.get(name)) for name in ("hindsight", "perfect")},
        time_shares=own.time_shares,
        num_prompts=len(entry.prompts),
        num_tokens=round(own.num_tokens / entry.repeats),
    )


def share_of_headroom(own: float, best_fixed: float | None, oracle: float | None) -> float | None:
    """Share of the way from the best fixed length to an oracle, in tokens/s, that a policy has gone; None without a way.

    >>> round(share_of_headroom(20.9, 19.1, 27.0), 3)
    0.228
    """
    if best_fixed is None or oracle is None or oracle <= best_fixed:
        return None
    return (own - best_fixed) / (oracle - best_fixed)


def ratio_interval(own: Entry, other: Entry, *, seed: int) -> Interval | None:
    """95 % interval of the ratio of tokens per second; None with fewer than four prompts, or against itself."""
    if own is other or len(own.prompts) < MIN_PROMPTS:
        return None
    tokens, seconds = ([[getattr(m, name) for m in e.prompts] for e in (own, other)] for name in ("num_tokens", "elapsed_s"))
    found = ratio_of_ratios(*map(np.array, (tokens[0], seconds[0], tokens[1], seconds[1])), seed=seed)
    return found.low, found.high
