"""Scores of a record: a head (logits), or the draft's own probabilities, which cost nothing.

A score judges every token that a step may meet: the drawn draft tokens (for figures per token), the answer's own tokens and
the tokens of the discarded branches (for figures per step, `training.steps`). A look-ahead head reads the clean prefix, so all
of them are exact. A lagged head reads the state *at* the token, and for the drawn draft tokens there are two sources:

    leaf      the draft token as a leaf on the clean prefix: what the head meets in use, exactly
    mixed     the draft token in the paper's mixed text, where its prefix is mostly drawn tokens too

Shapes: N tokens of the answer, C draft tokens a position, K drafted, D hidden, T points.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdecpp.errors import DataError
from specdecpp.head import AcceptanceHead, features
from specdecpp.training.labels import Record

LENGTH = 10  # draft tokens of a step: branches are recorded up to this length
Source = Literal["clean", "leaf", "mixed", "live"]
"""`live` is not of a record: see `training.live`."""


@dataclass(frozen=True, kw_only=True)
class ScoreInputs:
    """The draft's side of some tokens; the hidden state is the one that the form of the head reads."""

    hidden: Float[Tensor, "*rows D"]
    token: Int[Tensor, "*rows"]
    log_q: Float[Tensor, "*rows"]
    entropy: Float[Tensor, "*rows"]
    gap: Float[Tensor, "*rows"]

    def __getitem__(self, rows: Bool[Tensor, " N"] | tuple[slice | int, ...]) -> "ScoreInputs":
        return ScoreInputs(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__})

    @classmethod
    def joined(cls, parts: "Sequence[ScoreInputs]") -> "ScoreInputs":
        """All tokens of these parts, one after another."""
        last = dict.fromkeys(cls.__dataclass_fields__, -1) | {"hidden": -2}
        return cls(**{name: torch.cat([getattr(p, name).flatten(0, at) for p in parts]) for name, at in last.items()})


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One score on one record: T points per token with their labels, and the tokens of its steps.

    answer[i, k] is about X_i as draft token k of a step, branch[i, k, m] about token k of the branch at i when its first
    token is draft token m (both from 0). Padding of short branches has some value.
    """

    score: Float[np.ndarray, " T"]
    label: Float[np.ndarray, " T"]
    weight: Float[np.ndarray, " T"]
    source: Source
    answer: Float[np.ndarray, "N K"] | None = None
    branch: Float[np.ndarray, "N K K"] | None = None

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> "Judged":
        """Apply another function to the score."""
        names = ("score", "answer", "branch")
        return replace(self, **{n: None if getattr(self, n) is None else change(getattr(self, n)) for n in names})


def head_logits(head: AcceptanceHead, record: Record) -> Judged:
    """Raw logits of a head. Raises `DataError` for a lagged one where the record has no states that it reads."""
    source = _source(head, record)
    answer, branch = None, None
    if record.branches is not None:
        answer, branch = _step_logits(head, record, min(LENGTH, record.branches.token.shape[1]))
    return Judged(**_token_logits(head, record, source), source=source, answer=answer, branch=branch)


def log_q(record: Record) -> Judged:
    """log q of every token, the same at every depth: the score of cumulative q."""
    score, answer, branch = _flat(record.log_q), None, None
    if record.branches is not None:
        length = min(LENGTH, record.branches.token.shape[1])
        shape = (len(record.answer), length)
        answer = np.broadcast_to(_flat(record.answer_log_q)[:, None], shape)
        branch = np.broadcast_to(record.branches.log_q[:, :length].double().numpy()[..., None], (*shape, length))
    label = _flat(record.accept)
    return Judged(score=score, label=label, weight=np.ones_like(score), source="clean", answer=answer, branch=branch)


def raw(head: AcceptanceHead, evidence: ScoreInputs, depth: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """Raw logits of a head, where `depth` is each token's place in its step, from 1."""
    known = {"log_q": evidence.log_q, "entropy": evidence.entropy, "gap": evidence.gap, "depth": depth}
    device = head.output.weight.device
    scalars = features.recorded(head.card.scalars, known, like=evidence.log_q)
    return head(evidence.hidden.to(device), evidence.token.clamp(min=0).to(device), scalars.to(device))


def logits(head: AcceptanceHead, evidence: ScoreInputs, depth: Int[Tensor, "*rows"]) -> Float[np.ndarray, "*rows"]:
    """`raw`, without gradients, as numpy has them."""
    with torch.inference_mode():
        return raw(head, evidence, depth).double().cpu().numpy()


def token_evidence(record: Record, source: Source) -> ScoreInputs:
    """About the drawn draft tokens: [N, C] on the clean prefix, [N] as a leaf, [M] at the M mixed positions."""
    of = {"log_q": record.log_q, "token": record.candidate}
    about = {"entropy": record.entropy, "gap": record.gap}
    if source == "clean":
        wide = {name: values[:, None].expand_as(record.candidate) for name, values in about.items()}
        return ScoreInputs(hidden=record.states[:-1, None].expand(*record.candidate.shape, -1), **of, **wide)
    first = {name: values[:, 0] for name, values in of.items()}
    hidden = record.leaf if source == "leaf" else record.mixed
    assert hidden is not None, "the source was chosen because the record has it"
    evidence = ScoreInputs(hidden=hidden, **first, **about)
    return evidence if record.is_mixed is None or source == "leaf" else evidence[record.is_mixed]


def token_labels(record: Record, source: Source) -> tuple[Float[Tensor, "..."], Int[Tensor, "..."]]:
    """(accept, depth) of the draft tokens of `token_evidence`."""
    label, depth = record.accept, record.depth[:, None].expand_as(record.candidate)
    if source == "clean":
        return label, depth
    kept = slice(None) if source == "leaf" or record.is_mixed is None else record.is_mixed
    return label[kept, 0], depth[kept, 0]


def answer_evidence(record: Record, *, is_ahead: bool) -> ScoreInputs:
    """About the answer's own tokens [N]."""
    return ScoreInputs(
        hidden=record.states[:-1] if is_ahead else record.states[1:],
        token=record.answer,
        log_q=record.answer_log_q,
        entropy=record.entropy,
        gap=record.gap,
    )


def branch_evidence(record: Record, *, is_ahead: bool) -> ScoreInputs:
    """About the tokens of the discarded branches [N, K]."""
    branches = record.branches
    assert branches is not None, "only records with branches are asked"
    before = torch.cat([record.states[:-1, None], branches.state[:, :-1]], 1)
    return ScoreInputs(
        hidden=before if is_ahead else branches.state,
        token=branches.token,
        log_q=branches.log_q,
        entropy=branches.entropy,
        gap=branches.gap,
    )


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


def _token_logits(head: AcceptanceHead, record: Record, source: Source) -> dict[str, np.ndarray]:
    """score, label and weight of the points per token."""
    label, depth = token_labels(record, source)
    score = logits(head, token_evidence(record, source), depth).ravel()
    return {"score": score, "label": _flat(label), "weight": np.ones_like(score)}


def _step_logits(head: AcceptanceHead, record: Record, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(answer [N, K], branch [N, K, K]); one pass over the tokens does unless the head looks at the depth."""
    is_ahead = head.card.form == "look_ahead"
    answer = answer_evidence(record, is_ahead=is_ahead)
    branch = branch_evidence(record, is_ahead=is_ahead)[:, :length]
    shape = (len(record.answer), length)
    first = torch.zeros(shape, dtype=torch.long) + torch.arange(1, length + 1)
    if "depth" not in head.card.scalars:
        of_answer, of_branch = logits(head, answer, first[:, 0]), logits(head, branch, first)
        return np.broadcast_to(of_answer[:, None], shape), np.broadcast_to(of_branch[..., None], (*shape, length))
    of_answer = np.stack([logits(head, answer, first[:, k]) for k in range(length)], -1)
    of_branch = np.zeros((*shape, length))
    for m in range(length):  # past draft token K nothing is asked
        rows = slice(0, length - m)
        of_branch[:, rows, m] = logits(head, branch[:, rows], first[:, rows] + m)
    return of_answer, of_branch


def _flat(values: Tensor) -> np.ndarray:
    return values.double().reshape(-1).numpy()
