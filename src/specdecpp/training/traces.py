"""From label records to traces that `replay.replay` decodes again: what a policy may meet, and what heads think of it.

    records (with branches) + the terms they were collected on + heads -> traces -> replay, oracles

A trace carries the opinions of any number of heads, raw and calibrated, each under the head object itself, so that a policy
finds those of its own head. All but the opinions is the same for every head.

Shapes: as in `replay.replay`, and H hidden.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specdecpp.errors import DataError
from specdecpp.head import AcceptanceHead, Calibration
from specdecpp.replay.trace import Opinion, Trace
from specdecpp.training.branches import Branches
from specdecpp.training.labels import Record
from specdecpp.training.scores import along, step_inputs, step_logits


@dataclass(frozen=True, kw_only=True)
class Terms:
    """When an answer of a collection ended: at one of the ids `ends`, or after `max_tokens`."""

    ends: Collection[int]
    max_tokens: int

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> "Terms":
        """Read the terms from `collection.json` (`shards.about`). Raises `DataError` where it says nothing of it."""
        try:
            return cls(ends=about["pair"]["ends"], max_tokens=about["collect"]["max_tokens"])
        except KeyError as error:
            raise DataError(f"the collection does not say on what terms answers ended: {error} is missing") from error


def traces(records: Iterable[Record], terms: Terms, *, heads: Iterable[AcceptanceHead] = ()) -> list[Trace]:
    """A trace of every record, with the opinions of all heads. Records are let go as they come.

    Raises `DataError` for a record without branches.

    >>> terms = Terms.of(shards.about(folder))                                                    # doctest: +SKIP
    >>> recorded = traces(shards.read(folder, split="test"), terms, heads=[head])                 # doctest: +SKIP
    >>> replay(recorded, SpecDecPP.tuned(head, max_tokens=10), Costs.relative(0.22)).speed_up     # doctest: +SKIP
    """
    heads = list(heads)
    return [trace(record, terms, heads=heads) for record in records]


def trace(record: Record, terms: Terms, *, heads: Iterable[AcceptanceHead] = ()) -> Trace:
    """The trace of one record."""
    branches = _branches(record)
    inputs, length = step_inputs(record, branches, is_ahead=False), branches.length
    last = branches.token.gather(1, (length - 1).clamp(min=0).unsqueeze(1))[:, 0]
    is_closed = torch.isin(last, torch.tensor(sorted(terms.ends), dtype=torch.long)) & (length > 0)
    is_ended = int(record.answer[-1]) in set(terms.ends)
    return Trace(
        source=record.source,
        tokens=inputs.token.numpy(),
        odds=record.answer_odds.numpy(),
        overlap=record.overlap.numpy(),
        log_q=inputs.log_q.numpy(),
        entropy=inputs.entropy.numpy(),
        gap=inputs.gap.numpy(),
        branch_length=length.numpy(),
        is_closed=is_closed.numpy(),
        is_ended=is_ended,
        num_places=(terms.max_tokens if is_ended else len(record.answer)) - 1,
        opinions=dict(pair for head in heads for pair in _opinions(head, record)),
        truth=_truth(record, branches),
    )


def _opinions(head: AcceptanceHead, record: Record) -> Iterator[tuple[tuple[AcceptanceHead, bool], Opinion]]:
    """The raw opinion and the calibrated one, each under its key."""
    logits = torch.from_numpy(step_logits(head, record))
    for is_calibrated in (False, True):
        calibration = head.card.calibration if is_calibrated else Calibration()
        yield (head, is_calibrated), Opinion(accept=calibration.apply(logits).sigmoid().float().numpy())


def _truth(record: Record, branches: Branches) -> Opinion | None:
    """The target's opinion of every token: min(1, p/q), and 1 - TV of the position after it. The last has none after it."""
    if record.answer_log_ratio is None or branches.log_ratio is None or branches.overlap is None:
        return None
    accept = along(record.answer_log_ratio, branches.log_ratio).clamp(max=0).exp()
    after = along(torch.cat([record.overlap[1:], torch.zeros(1)]), branches.overlap)
    return Opinion(accept=accept[..., None].numpy(), next=after[..., None].numpy())


def _branches(record: Record) -> Branches:
    if record.branches is None:
        raise DataError(
            f"a record of {record.source} has no branches, so nobody knows what a policy meets after a rejection. Set "
            "collect.branches in the recipe and collect the split or source anew."
        )
    return record.branches
