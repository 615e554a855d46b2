"""Scores of a record, per token and over steps: a head (logits), or the draft's own probabilities, which cost nothing.

A score per token is of the drawn draft tokens. A look-ahead head reads the clean prefix; a lagged head reads the state *at* the
token, for which there are two sources:

    leaf      the draft token as a leaf on the clean prefix: what the head meets in use, exactly
    mixed     the draft token in the paper's mixed text, where its prefix is mostly drawn tokens too

A step is judged without decoding, by the coupling of `replay.replay`. One that starts at position s of an answer X ~ p and has
accepted everything up to position i meets there, in distribution, X_i itself with probability b_i = min(1, q(X_i)/p(X_i)),
which is accepted, and otherwise a draw from norm((q_i - p_i)+), which is rejected; the draft goes on from it as the recorded
branch does. So at depth k the step from s is, with weight

    b_s ... b_{s+k-1}              X_s ... X_{s+k-1}, all accepted: label 1
    b_s ... b_{j-1} (1 - b_j)      X_s ... X_{j-1} and k - (j - s) tokens of the branch at j: label 0,   s <= j < s+k

A step starts at every position and has up to K draft tokens, none past the answer's end; a branch that ends its text ends the
step. The weights of a depth sum to 1 otherwise.

Shapes: N tokens of the answer, C draft tokens a position, K tokens of a branch, D hidden, T points, R steps at some depth.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdecpp.errors import DataError
from specdecpp.head import AcceptanceHead, Calibration, features
from specdecpp.training.branches import Branches
from specdecpp.training.labels import Record

LENGTH = 10  # draft tokens of a step: branches are recorded up to this length
Source = Literal["clean", "leaf", "mixed", "live"]
"""`live` is not of a record: see `calibrate.listen`."""


@dataclass(frozen=True, kw_only=True)
class ScoreInputs:
    """The draft's side of some tokens; the hidden state is the one that the form of the head reads."""

    hidden: Float[Tensor, "*rows D"]
    token: Int[Tensor, "*rows"]
    log_q: Float[Tensor, "*rows"]
    entropy: Float[Tensor, "*rows"]
    gap: Float[Tensor, "*rows"]

    @classmethod
    def joined(cls, parts: "Sequence[ScoreInputs]") -> "ScoreInputs":
        """All tokens of these parts, one after another."""
        return cls(**{field.name: torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One score on one answer: T points per token, and the score of every token that its steps may meet.

    table[i, 0, d] is about X_i and table[i, 1 + k, d] about token k of the branch at i, as draft token d of a step (from 0); a
    score that is the same at every depth has one d. Of `calibrate.listen` it is the score [T]. Padding has some value.
    """

    score: Float[np.ndarray, " T"]
    label: Float[np.ndarray, " T"]
    weight: Float[np.ndarray, " T"]
    source: Source
    table: Float[np.ndarray, "..."] | None = None

    def calibrated(self, calibration: Calibration) -> "Judged":
        """Logarithms of calibrated probabilities, from raw logits."""

        def change(logit: np.ndarray) -> np.ndarray:
            return torch.nn.functional.logsigmoid(calibration.apply(torch.tensor(logit))).numpy()

        return replace(self, score=change(self.score), table=None if self.table is None else change(self.table))


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of one answer: for each of R the depth it has reached (from 1), whether all was accepted, its weight.

    `scores` adds up, for each of them, the logarithms in a `Judged.table`.
    """

    depth: Int[np.ndarray, " R"]
    label: Float[np.ndarray, " R"]
    weight: Float[np.ndarray, " R"]
    scores: Callable[[np.ndarray], Float[np.ndarray, " R"]]


def steps(record: Record, *, length: int = LENGTH) -> Steps | None:
    """All steps of a record of at most `length` draft tokens; None without branches."""
    if record.branches is None:
        return None
    num_tokens, length = len(record.answer), min(length, record.branches.token.shape[1])
    at = np.arange(length)
    place = np.arange(num_tokens)[:, None] + at
    is_inside, place = place < num_tokens, np.minimum(place, num_tokens - 1)
    odds = record.answer_odds.double().numpy()[place]
    reached = np.cumprod(odds, axis=1)
    rejected = np.concatenate([np.ones((num_tokens, 1)), reached[:, :-1]], axis=1) * (1 - odds)
    m, k = np.triu_indices(length)  # a first rejection at m, seen at k
    whole = is_inside & (reached > 0)
    broken = is_inside[:, k] & (rejected[:, m] > 0) & (k - m < record.branches.length.numpy()[place[:, m]])

    def scores(table: np.ndarray) -> np.ndarray:
        depth = np.minimum(np.arange(2 * length), table.shape[2] - 1)
        accepted = table[place, 0, depth[at]].cumsum(axis=1)
        before = np.concatenate([np.zeros((num_tokens, 1)), accepted[:, :-1]], axis=1)
        discarded = table[:, 1 + at[:, None], depth[at[:, None] + at]].cumsum(axis=1)
        return np.concatenate([accepted[whole], (before[:, m] + discarded[place[:, m], k - m, m])[broken]])

    return Steps(
        depth=np.concatenate([np.broadcast_to(1 + at, whole.shape)[whole], np.broadcast_to(1 + k, broken.shape)[broken]]),
        label=np.repeat([1.0, 0.0], [whole.sum(), broken.sum()]),
        weight=np.concatenate([reached[whole], rejected[:, m][broken]]),
        scores=scores,
    )


def head_logits(head: AcceptanceHead, record: Record) -> Judged:
    """Raw logits of a head. Raises `DataError` for a lagged one where the record has no states that it reads."""
    source = _source(head, record)
    inputs, label, depth = token_inputs(record, source)
    with torch.inference_mode():
        score = raw(head, inputs, depth).double().cpu().numpy()
    table = None if record.branches is None else step_logits(head, record)
    return Judged(score=score, label=label.double().numpy(), weight=np.ones_like(score), source=source, table=table)


def log_q(record: Record) -> Judged:
    """log q of every token, the same at every depth: the score of cumulative q."""
    score, label = (values.double().flatten().numpy() for values in (record.log_q, record.accept))
    table = None
    if record.branches is not None:
        table = along(record.answer_log_q, record.branches.log_q)[..., None].double().numpy()
    return Judged(score=score, label=label, weight=np.ones_like(score), source="clean", table=table)


def raw(
    head: AcceptanceHead,
    inputs: ScoreInputs,
    depth: Int[Tensor, "*rows"],
    *,
    seen: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> Float[Tensor, "*rows"]:
    """Raw logits of a head, where `depth` is each token's place in its step, from 1. `seen` may change states and scalars."""
    hidden, scalars, device = inputs.hidden, scalars_of(head.card.scalars, inputs, depth), head.output.weight.device
    if seen is not None:
        hidden, scalars = seen(hidden, scalars)
    return head(hidden.to(device), inputs.token.clamp(min=0).to(device), scalars.to(device))


def scalars_of(names: Sequence[str], inputs: ScoreInputs, depth: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows S"]:
    """The scalars `names` of these tokens."""
    known = {"log_q": inputs.log_q, "entropy": inputs.entropy, "gap": inputs.gap, "depth": depth}
    return features.recorded(names, known, like=inputs.log_q)


def token_inputs(record: Record, source: Source) -> tuple[ScoreInputs, Float[Tensor, " T"], Int[Tensor, " T"]]:
    """(inputs, accept, depth) of drawn draft tokens: all on the clean prefix, the first of each position as a leaf, and in the
    mixed text where that has one."""
    hidden = {"clean": record.states[:-1], "leaf": record.leaf, "mixed": record.mixed}[source]
    assert hidden is not None, "the source was chosen because the record has it"
    num = record.candidate.shape[1] if source == "clean" else 1
    at = torch.arange(len(record.answer))
    if source == "mixed" and record.is_mixed is not None:
        at = at[record.is_mixed]
    at, drawn = at.repeat_interleave(num), torch.arange(num).repeat(len(at))
    inputs = ScoreInputs(
        hidden=hidden[at],
        token=record.candidate[at, drawn],
        log_q=record.log_q[at, drawn],
        entropy=record.entropy[at],
        gap=record.gap[at],
    )
    return inputs, record.accept[at, drawn], record.depth[at]


def step_inputs(record: Record, branches: Branches, *, is_ahead: bool) -> ScoreInputs:
    """Inputs for the answer's own token and those of the branch at every position [N, 1 + K]."""
    hidden = along(record.states[1:], branches.state)
    if is_ahead:
        before = record.states[:-1, None]
        hidden = torch.cat([before, before, branches.state[:, :-1]], 1)
    return ScoreInputs(
        hidden=hidden,
        token=along(record.answer, branches.token),
        log_q=along(record.answer_log_q, branches.log_q),
        entropy=along(record.entropy, branches.entropy),
        gap=along(record.gap, branches.gap),
    )


def step_logits(head: AcceptanceHead, record: Record) -> Float[np.ndarray, "N K1 d"]:
    """Raw logits of those tokens at every depth; a single one where the head does not look at it."""
    assert record.branches is not None, "only records with branches are asked"
    inputs = step_inputs(record, record.branches, is_ahead=head.card.form == "look_ahead")
    depths = range(1, inputs.token.shape[1]) if "depth" in head.card.scalars else [1]
    with torch.inference_mode():
        return torch.stack([raw(head, inputs, torch.full_like(inputs.token, k)) for k in depths], 2).double().cpu().numpy()


def along(answer: Tensor, branch: Tensor) -> Tensor:
    """Values of the answer's tokens [N, ...] before those of the branches [N, K, ...]."""
    return torch.cat([answer.unsqueeze(1), branch], 1)


def _source(head: AcceptanceHead, record: Record) -> Source:
    if head.card.form == "look_ahead":
        return "clean"
    if record.leaf is not None:
        return "leaf"
    if record.mixed is not None:
        return "mixed"
    raise DataError(
        f"a lagged head reads the state at the draft token, and the labels of {record.source} have no such states: neither "
        "leaf nor mixed among the features. Add one of them to the recipe and run collect again."
    )
