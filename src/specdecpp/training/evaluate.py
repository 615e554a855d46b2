"""Scores side by side on held-out labels: trained heads, and cumulative q, which costs nothing.

Per token, a score should tell draft tokens that will be accepted from those that will not. What decides when to stop is the
step as a whole, so the figures that count are those of the step: the product over its draft tokens against whether all of
them are accepted, over the exact steps of `scores.steps`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdecpp.errors import DataError
from specdecpp.head import AcceptanceHead
from specdecpp.training import shards
from specdecpp.training.labels import Record
from specdecpp.training.measures import Auroc, Points, auroc, auroc_over_answers, brier, ece, kl
from specdecpp.training.scores import Judged, Steps, head_logits, log_q, steps

RIVAL = "cumulative_q"
"""The free score: q(Y), and over a step the product of them."""
PRODUCT_FIGURES = ("auroc_product", "auroc_product_error", "ece_product", "brier_product")
Evaluation = dict[str, dict[str, dict[str, Any]]]


def head_score(head: AcceptanceHead) -> Callable[[Record], Judged]:
    """Logarithms of a head's probabilities under the calibration of its card."""
    return lambda record: head_logits(head, record).calibrated(head.card.calibration)


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
    sources: dict[str, dict[str, list[tuple[Judged, Steps | None]]]] = {}
    for record in records:
        played, by_score = steps(record), sources.setdefault(record.source, {name: [] for name in scores})
        for name, judge in scores.items():
            by_score[name].append((judge(record), played))
    if not sources:
        raise DataError("there are no records to evaluate on. Name a split and sources that the labels have.")
    return {source: _compared(by_score) for source, by_score in sources.items()}


def _compared(by_score: Mapping[str, Sequence[tuple[Judged, Steps | None]]]) -> dict[str, dict[str, Any]]:
    """Figures of each score, and how far it lies above the free one."""
    found = {name: figures(answers) for name, answers in by_score.items()}
    _, rival = found[RIVAL]
    for name, (values, product) in found.items():
        gain: tuple[float | None, float | None] = (None, None)
        if name != RIVAL and product is not None and rival is not None:
            gain = product.gain(rival)
        values.update(gain_product=gain[0], gain_product_error=gain[1])
    return {name: {key: known(value) for key, value in values.items()} for name, (values, _) in found.items()}


def known(value: Any) -> Any:
    """JSON has no nan."""
    return None if isinstance(value, float) and math.isnan(value) else value


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
            gain, error = figures["gain_product"], figures.get("gain_product_error")
            if gain is None:
                said.append(f"{source}: whether {name} beats cumulative q is unknown: the labels lack branches or rejections.")
                continue
            words = f"{name} {'beats' if gain > 0 else 'does not beat'} cumulative q"
            if gain > 0 and (error is None or gain < 2 * error):
                words = f"{name} and cumulative q are too close to call"
            spread = "" if error is None else f" ± {error:.3f}"
            said.append(f"{source}: {words} (AUROC {figures['auroc_product']:.3f}, {gain:+.3f}{spread}).")
    return said


def figures(answers: Sequence[tuple[Judged, Steps | None]]) -> tuple[dict[str, Any], Auroc | None]:
    """Figures of one score, whose `Judged` has logarithms of probabilities; the AUROC of the product with its jackknife."""
    evidence = ", ".join(sorted({judged.source for judged, _ in answers}))
    score, label, weight = joined([judged for judged, _ in answers])
    p = np.exp(score)
    values: dict[str, Any] = {"num_answers": len(answers), "evidence": evidence, "num_labels": len(label)}
    values |= {"auroc_token": auroc(score, label, weight), "ece_token": ece(p, label, weight)}
    values |= {"brier_token": brier(p, label, weight), "kl": kl(p, label, weight)}
    played = [(of, judged.table) for judged, of in answers if of is not None and judged.table is not None]
    products = [(of.scores(table), of.label, of.weight) for of, table in played]
    if not products:
        return values | dict.fromkeys(PRODUCT_FIGURES), None
    score, label, weight = (np.concatenate(column) for column in zip(*products, strict=True))
    answer = np.repeat(np.arange(len(products)), [len(of) for _, of, _ in products])
    product, p = auroc_over_answers(score, label, weight, answer), np.exp(score)
    found = (product.value, product.error, ece(p, label, weight), brier(p, label, weight))
    return values | dict(zip(PRODUCT_FIGURES, found, strict=True)), product


def joined(judged: Sequence[Judged]) -> tuple[Points, Points, Points]:
    """(score, label, weight) of all answers, in order."""
    score, label, weight = (np.concatenate([getattr(of, name) for of in judged]) for name in ("score", "label", "weight"))
    return score, label, weight
