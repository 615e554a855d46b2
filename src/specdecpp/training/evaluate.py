"""Scores side by side on held-out labels: trained heads, and cumulative q, which costs nothing.

Per token, a score should tell draft tokens that will be accepted from those that will not. What decides when to stop is the
step as a whole, so the figures that count are those of the step: the product over its draft tokens against whether all of
them are accepted, over the exact steps of `steps`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specdecpp.errors import DataError
from specdecpp.head import AcceptanceHead, Calibration
from specdecpp.training import shards
from specdecpp.training.labels import Record
from specdecpp.training.measures import Auroc, Points, auroc, auroc_over_answers, brier, ece, kl
from specdecpp.training.scores import Judged, head_logits, log_q
from specdecpp.training.steps import Steps, steps

RIVAL = "cumulative_q"
"""The free score: q(Y), and over a step the product of them."""
Evaluation = dict[str, dict[str, dict[str, Any]]]
Judge = Callable[[Record], Judged]


def head_score(head: AcceptanceHead) -> Judge:
    """Logarithms of a head's probabilities under the calibration of its card."""
    return lambda record: log_probabilities(head_logits(head, record), head.card.calibration)


def log_probabilities(judged: Judged, calibration: Calibration) -> Judged:
    """From raw logits to logarithms of calibrated probabilities."""

    def change(logit: np.ndarray) -> np.ndarray:
        calibrated = (logit + math.log(calibration.rejection_weight)) / calibration.temperature + calibration.bias
        return -np.logaddexp(0.0, -calibrated)

    return judged.map(change)


def evaluate(
    head: AcceptanceHead, records: Iterable[Record], *, others: Mapping[str, AcceptanceHead] | None = None
) -> Evaluation:
    """{source: {score: figures}}: `head`, the others by their names, and `cumulative_q` on the same labels.

    Figures per token stand on `evidence` (see `scores`); those of the step are None where no record has branches.
    `*_error` is a standard error, by a jackknife over answers; `gain_product` is the AUROC of the product above that of
    cumulative q, paired. Raises `DataError` without records, or where a lagged head finds no states to read.

    >>> figures = evaluate(head, shards.read(folder, split="test"))["gsm8k"]["head"]             # doctest: +SKIP
    >>> figures["auroc_product"], figures["ece_product"]                                         # doctest: +SKIP
    """
    others = dict(others or {})
    if taken := sorted(others.keys() & {"head", RIVAL}):
        raise ValueError(f"another head is called {taken[0]}, which is the name of a score. Give it another name.")
    scores = {name: head_score(of) for name, of in {"head": head, **others}.items()} | {RIVAL: log_q}
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
        for name in (name for name in scores if name != RIVAL):
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


PRODUCT_FIGURES = ("auroc_product", "auroc_product_error", "ece_product", "brier_product")


def figures(
    judged: Sequence[Judged], played: Sequence[Steps] | Sequence[Judged], products: Sequence[np.ndarray]
) -> tuple[dict[str, Any], Auroc | None]:
    """Figures of one score, and the AUROC of the product with its jackknife for comparisons.

    `judged` has its points per token, `products` its score of all the steps in `played`. Scores are logarithms of
    probabilities.
    """
    values: dict[str, Any] = {"num_answers": len(judged), "evidence": ", ".join(sorted({j.source for j in judged}))}
    score, label, weight = _joined(judged, [j.score for j in judged])
    p = np.exp(score)
    values |= {"num_labels": len(label), "auroc_token": auroc(score, label, weight)}
    values |= {"ece_token": ece(p, label, weight), "brier_token": brier(p, label, weight), "kl": kl(p, label, weight)}
    if not played:
        return values | dict.fromkeys(PRODUCT_FIGURES), None
    score, label, weight = _joined(played, products)
    answer = np.repeat(np.arange(len(played)), [len(of.label) for of in played])
    product = auroc_over_answers(score, label, weight, answer)
    p = np.exp(score)
    values |= {"auroc_product": product.value, "auroc_product_error": product.error}
    return values | {"ece_product": ece(p, label, weight), "brier_product": brier(p, label, weight)}, product


def _joined(parts: Sequence[Judged] | Sequence[Steps], scores: Sequence[np.ndarray]) -> tuple[Points, Points, Points]:
    """(score, label, weight) of all answers, in order."""
    label, weight = (np.concatenate([getattr(of, name) for of in parts]) for name in ("label", "weight"))
    return np.concatenate(scores), label, weight


class _Answers:
    """The answers of one source as every score sees them, until all are there to be measured."""

    def __init__(self, scores: Mapping[str, Judge]):
        self.scores = scores
        self.judged: dict[str, list[Judged]] = {name: [] for name in scores}
        self.products: dict[str, list[np.ndarray]] = {name: [] for name in scores}
        self.steps: list[Steps] = []

    def add(self, record: Record) -> None:
        played = None if record.branches is None else steps(record)
        if played is not None:
            self.steps.append(played)
        for name, judge in self.scores.items():
            judged = judge(record)
            if played is not None:
                self.products[name].append(played.scores(judged))
            self.judged[name].append(replace(judged, answer=None, branch=None))

    def figures(self) -> dict[str, dict[str, Any]]:
        found = {name: figures(judged, self.steps, self.products[name]) for name, judged in self.judged.items()}
        _, rival = found[RIVAL]
        for name, (values, product) in found.items():
            gain: tuple[float | None, float | None] = (None, None)
            if name != RIVAL and product is not None and rival is not None:
                gain = product.gain(rival)
            values.update(gain_product=gain[0], gain_product_error=gain[1])
        return {name: {key: _known(value) for key, value in values.items()} for name, (values, _) in found.items()}


def _known(value: Any) -> Any:
    """JSON has no nan."""
    return None if isinstance(value, float) and math.isnan(value) else value
