"""From label records to traces that `replay.replay` decodes again: what a policy may meet, and what heads think of it.

    records (with branches) + the terms they were collected on + heads -> traces -> replay, oracles

A trace carries the opinions of any number of heads, raw and calibrated, each under the head object itself, so that a policy
finds those of its own head. All but the opinions is the same for every head.

Shapes: as in `replay.replay`, and H hidden.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdecpp.errors import DataError
from specdecpp.head import AcceptanceHead, Calibration
from specdecpp.replay.trace import Opinion, Trace
from specdecpp.training.branches import Branches
from specdecpp.training.labels import Record
from specdecpp.training.scores import ScoreInputs, answer_evidence, branch_evidence, raw


@dataclass(frozen=True, kw_only=True)
class Terms:
    """When an answer of a collection ended: at one of the ids `ends`, after `max_tokens`, or where the context was full.

    `max_length` is that of the shorter of both contexts; None where no answer comes near it.
    """

    ends: Collection[int]
    max_tokens: int
    max_length: int | None = None

    @classmethod
    def of(cls, about: Mapping[str, Any], *, max_length: int | None = None) -> "Terms":
        """Read the terms from `collection.json` (`shards.about`). Raises `DataError` where it says nothing of it."""
        try:
            return cls(ends=about["pair"]["ends"], max_tokens=about["collect"]["max_tokens"], max_length=max_length)
        except KeyError as error:
            raise DataError(f"the collection does not say on what terms answers ended: {error} is missing") from error

    def num_places(self, num_prompt_tokens: int) -> int:
        """How many draft tokens fit after a prompt: one token less than the answer may have."""
        if self.max_length is None:
            return self.max_tokens - 1
        return min(self.max_tokens, self.max_length - num_prompt_tokens) - 1


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
    length, ends = branches.length, torch.tensor(sorted(terms.ends), dtype=torch.long)
    last = branches.token.gather(1, (length - 1).clamp(min=0).unsqueeze(1))[:, 0]
    is_ended = int(record.answer[-1]) in set(terms.ends)
    return Trace(
        source=record.source,
        tokens=_columns(record.answer, branches.token),
        odds=record.answer_odds.numpy(),
        overlap=record.overlap.numpy(),
        log_q=_columns(record.answer_log_q, branches.log_q),
        entropy=_columns(record.entropy, branches.entropy),
        gap=_columns(record.gap, branches.gap),
        branch_length=length.numpy(),
        is_closed=(torch.isin(last, ends) & (length > 0)).numpy(),
        is_ended=is_ended,
        num_places=terms.num_places(len(record.prompt)) if is_ended else len(record.answer) - 1,
        opinions=dict(pair for head in heads for pair in _opinions(head, record)),
        truth=_truth(record),
    )


def _opinions(head: AcceptanceHead, record: Record) -> Iterator[tuple[tuple[AcceptanceHead, bool], Opinion]]:
    """The raw opinion and the calibrated one, each under its key."""
    is_ahead, size = head.card.form == "look_ahead", _branches(record).token.shape[1]
    answer, branch = answer_evidence(record, is_ahead=is_ahead), branch_evidence(record, is_ahead=is_ahead)
    pairs = {name: (getattr(answer, name), getattr(branch, name)) for name in ScoreInputs.__dataclass_fields__}
    evidence = ScoreInputs(**{name: torch.cat([a.unsqueeze(1).to(b.dtype), b], 1) for name, (a, b) in pairs.items()})
    depths = range(1, size + 1) if "depth" in head.card.scalars else [1]
    with torch.inference_mode():
        logits = torch.stack([raw(head, evidence, torch.full_like(evidence.token, k)) for k in depths], 2).double().cpu()
    for is_calibrated in (False, True):
        calibration = head.card.calibration if is_calibrated else Calibration()
        yield (head, is_calibrated), Opinion(accept=calibration.apply(logits).sigmoid().float().numpy())


def _truth(record: Record) -> Opinion | None:
    """The target's opinion of every token: min(1, p/q), and 1 - TV of the position after it. The last has none after it."""
    branches = _branches(record)
    if record.answer_log_ratio is None or branches.log_ratio is None or branches.overlap is None:
        return None
    after = torch.cat([record.overlap[1:], torch.zeros(1)])
    accept = _columns(record.answer_log_ratio, branches.log_ratio)
    return Opinion(accept=np.exp(np.minimum(accept, 0))[..., None], next=_columns(after, branches.overlap)[..., None])


def _columns(answer: Tensor, branch: Tensor) -> np.ndarray:
    return torch.cat([answer.unsqueeze(1), branch], 1).numpy()


def _branches(record: Record) -> Branches:
    if record.branches is None:
        raise DataError(
            f"a record of {record.source} has no branches, so nobody knows what a policy meets after a rejection. Set "
            "collect.branches in the recipe and collect the split or source anew."
        )
    return record.branches
