"""Scores side by side on held-out labels: trained heads, and what the draft's own probabilities say for nothing.

Per token, a score should tell draft tokens that will be accepted from those that will not. What decides when to stop is the
step as a whole, so the figures that count are those of the step: the score of all its draft tokens against whether all of
them are accepted, over the exact steps of `steps`. The free rival is cumulative q.

| score | per token | of a step |
|---|---|---|
| a head | calibrated probability | product |
| max_q | q(Y) | least: the rule stops at the first bad token |
| cumulative_q | q(Y) | product |
| entropy | -H(q), a rank and no probability | least |
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from specdecpp.errors import DataError
from specdecpp.head import AcceptanceHead, Calibration
from specdecpp.training import shards
from specdecpp.training.labels import Record
from specdecpp.training.measures import Auroc, auroc, auroc_over_answers, brier, ece, kl
from specdecpp.training.scores import Judged, head_logits, log_q, minus_entropy
from specdecpp.training.steps import Fold, Steps, steps

RIVAL = "cumulative_q"
Measure = Callable[[np.ndarray, np.ndarray, np.ndarray], float]
Evaluation = dict[str, dict[str, dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class ScoreFunction:
    """How a score judges a record, in logarithms where it is a probability, and how it adds up over a step."""

    judge: Callable[[Record], Judged]
    fold: Fold = "product"
    is_probability: bool = True


FREE = {
    "max_q": ScoreFunction(judge=log_q, fold="minimum"),
    RIVAL: ScoreFunction(judge=log_q),
    "entropy": ScoreFunction(judge=minus_entropy, fold="minimum", is_probability=False),
}


def head_score(head: AcceptanceHead) -> ScoreFunction:
    """The score of a head under the calibration of its card."""
    return ScoreFunction(judge=lambda record: log_probabilities(head_logits(head, record), head.card.calibration))


def log_probabilities(judged: Judged, calibration: Calibration) -> Judged:
    """From raw logits to logarithms of calibrated probabilities."""
    return judged.map(partial(_log_sigmoid, calibration=calibration))


def evaluate(
    head: AcceptanceHead, records: Iterable[Record], *, others: Mapping[str, AcceptanceHead] | None = None
) -> Evaluation:
    """{source: {score: figures}}: `head`, the others by their names, max_q, cumulative_q and entropy on the same labels.

    Figures per token stand on `evidence` (see `scores`); those of the step are None where no record has branches.
    `*_error` is a standard error, by a jackknife over answers; `gain_product` is the AUROC of the product above that of
    cumulative q, paired. Raises `DataError` without records, or where a lagged head finds no states to read.

    >>> figures = evaluate(head, shards.read(folder, split="test"))["gsm8k"]["head"]             # doctest: +SKIP
    >>> figures["auroc_product"], figures["ece_product"]                                         # doctest: +SKIP
    """
    others = dict(others or {})
    if taken := sorted(others.keys() & {"head", *FREE}):
        raise ValueError(f"another head is called {taken[0]}, which is the name of a score. Give it another name.")
    scores = {"head": head_score(head)} | {name: head_score(other) for name, other in others.items()} | FREE
    sources: dict[str, _Answers] = {}
    for record in records:
        sources.setdefault(record.source, _Answers(scores)).add(record)
    if not sources:
        raise DataError("there are no records to evaluate on. Name a split and sources that the labels have.")
    return {source: answers.figures() for source, answers in sources.items()}


def labels_for(heads: Iterable[AcceptanceHead], folder: Path | str) -> Iterator[Record]:
    """The records of a collection, once it is clear that they are about the pair these heads were made for.

    Raises `DataError` for labels that do not belong to a head, `HeadError` for a head of another width.
    """
    heads, pair = list(heads), shards.about(folder).get("pair", {})
    for card in (head.card for head in heads):
        for role in ("target", "draft"):
            made_for, given = getattr(card, role), pair.get(role)
            if None not in (made_for, given) and made_for != given:
                raise DataError(
                    f"the labels in {folder} are of another {role}: {shards.COLLECTION} says {given}, the head's card "
                    f"{made_for}. Name the labels of the pair that the head was made for."
                )
    for record in shards.read(folder):
        for head in heads:
            head.check(hidden_size=record.states.shape[1])
        yield record


def verdicts(evaluation: Evaluation) -> list[str]:
    """A line for each head and source: whether its product ranks steps better than the free rule's, and by how much."""
    said = []
    for source, scores in evaluation.items():
        for name in (name for name in scores if name not in FREE):
            figures = scores[name]
            if figures["gain_product"] is None:
                said.append(f"{source}: whether {name} beats cumulative q is unknown, as the labels have no branches.")
                continue
            gain, error = figures["gain_product"], figures["gain_product_error"]
            spread = "" if error is None else f" ± {error:.3f}"
            numbers = f"AUROC {figures['auroc_product']:.3f}, {gain:+.3f}{spread}"
            if gain > 0 and error is not None and gain < 2 * error:
                said.append(f"{source}: {name} and cumulative q are too close to call ({numbers}).")
            else:
                said.append(f"{source}: {name} {'beats' if gain > 0 else 'does not beat'} cumulative q ({numbers}).")
    return said


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Measurements as JSON, and the AUROC of the product with its jackknife for comparisons."""

    values: dict[str, Any]
    product: Auroc | None


def figures(
    judged: Sequence[Judged],
    played: Sequence[Steps] | Sequence[Judged],
    products: Sequence[np.ndarray],
    *,
    is_probability: bool = True,
) -> Figures:
    """Figures of one score: `judged` has its points per token, `products` its score of all the steps in `played`.

    Scores are logarithms of probabilities, or else ranks, for which only the AUROC has a meaning.
    """
    values: dict[str, Any] = {"num_answers": len(judged), "evidence": ", ".join(sorted({j.source for j in judged}))}
    token = _Points.joined(judged, [j.score for j in judged], is_probability=is_probability)
    values |= {"num_labels": len(token.label), "auroc_token": auroc(token.score, token.label, token.weight)}
    values |= {"ece_token": token.measure(ece), "brier_token": token.measure(brier), "kl": token.measure(kl)}
    steps = _Points.joined(played, products, is_probability=is_probability) if played else None
    product = None if steps is None else auroc_over_answers(steps.score, steps.label, steps.weight, steps.answer)
    if steps is None or product is None:
        return Figures(values=values | dict.fromkeys(PRODUCT_FIGURES), product=None)
    values |= {"auroc_product": product.value, "auroc_product_error": product.error}
    values |= {"ece_product": steps.measure(ece), "brier_product": steps.measure(brier)}
    return Figures(values=values, product=product)


PRODUCT_FIGURES = ("auroc_product", "auroc_product_error", "ece_product", "brier_product")


@dataclass(frozen=True, kw_only=True)
class _Points:
    """Scored points with their labels, weights and answers; p is None where the score is no probability."""

    score: Float[np.ndarray, " N"]
    p: Float[np.ndarray, " N"] | None
    label: Float[np.ndarray, " N"]
    weight: Float[np.ndarray, " N"]
    answer: Int[np.ndarray, " N"]

    @classmethod
    def joined(
        cls, parts: Sequence[Judged] | Sequence[Steps], scores: Sequence[np.ndarray], *, is_probability: bool
    ) -> "_Points":
        """The points of all answers, in order."""
        score = np.concatenate(scores)
        label, weight = (np.concatenate([getattr(of, name) for of in parts]) for name in ("label", "weight"))
        answer = np.repeat(np.arange(len(parts)), [len(of.label) for of in parts])
        p = np.exp(score) if is_probability else None
        return cls(score=score, p=p, label=label, weight=weight, answer=answer)

    def measure(self, measure: Measure) -> float | None:
        return None if self.p is None else measure(self.p, self.label, self.weight)


class _Answers:
    """The answers of one source as every score sees them, until all are there to be measured."""

    def __init__(self, scores: Mapping[str, ScoreFunction]):
        self.scores = scores
        self.judged: dict[str, list[Judged]] = {name: [] for name in scores}
        self.products: dict[str, list[np.ndarray]] = {name: [] for name in scores}
        self.steps: list[Steps] = []

    def add(self, record: Record) -> None:
        played = None if record.branches is None else steps(record)
        if played is not None:
            self.steps.append(played)
        for name, score in self.scores.items():
            judged = score.judge(record)
            if played is not None:
                self.products[name].append(played.scores(judged, score.fold))
            self.judged[name].append(judged.per_token())

    def figures(self) -> dict[str, dict[str, Any]]:
        found = {
            name: figures(self.judged[name], self.steps, self.products[name], is_probability=score.is_probability)
            for name, score in self.scores.items()
        }
        rival = found[RIVAL].product
        for name, of in found.items():
            gain: tuple[float | None, float | None] = (None, None)
            if name != RIVAL and of.product is not None and rival is not None:
                gain = of.product.gain(rival)
            of.values.update(gain_product=gain[0], gain_product_error=gain[1])
        return {name: {key: _known(value) for key, value in of.values.items()} for name, of in found.items()}


def _known(value: Any) -> Any:
    """JSON has no nan."""
    return None if isinstance(value, float) and math.isnan(value) else value


def _log_sigmoid(logit: np.ndarray, calibration: Calibration) -> np.ndarray:
    calibrated = (logit + math.log(calibration.rejection_weight)) / calibration.temperature + calibration.bias
    return -np.logaddexp(0.0, -calibrated)
