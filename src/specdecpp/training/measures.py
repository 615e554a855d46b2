"""How good a score is: AUROC, Brier score, KL divergence and calibration error against soft labels.

A label P in [0, 1] is the probability that a draft token is accepted: its point counts P as accepted and 1 - P as rejected.
Points have weights (none: 1 each), and everything is float64. What does not exist, such as the AUROC of labels that are all
1, is nan. Used by `calibrate` and `evaluate`; the letters are N points, A answers, B bins.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

NUM_BINS = 15
EPSILON = 1e-9  # a probability is taken to lie in [EPSILON, 1 - EPSILON] where its logarithm is asked for
MIN_ANSWERS = 4  # fewer say nothing about their own spread

Points = Float[np.ndarray, " N"]


def auroc(score: Points, label: Points, weight: Points | None = None) -> float:
    """P(an accepted point scores above a rejected one), ties counting half: 0.5 is chance, 1 a perfect order."""
    accepted, rejected = _masses(label, weight)
    total = accepted.sum() * rejected.sum()
    return float((accepted * _mass_below(score, rejected)[0]).sum() / total) if total > 0 else math.nan


@dataclass(frozen=True, kw_only=True)
class Auroc:
    """An AUROC over the points of A answers, and what it would be without each of them: a jackknife over answers."""

    value: float
    left_out: Float[np.ndarray, " A"]

    @property
    def error(self) -> float | None:
        """Standard error; None with too few answers."""
        return _jackknife(self.left_out)

    def gain(self, over: "Auroc") -> tuple[float, float | None]:
        """How far it lies above another of the same answers, and the standard error of that difference (paired)."""
        return self.value - over.value, _jackknife(self.left_out - over.left_out)


def auroc_over_answers(score: Points, label: Points, weight: Points | None, answer: Int[np.ndarray, " N"]) -> Auroc:
    """`auroc` with its jackknife; `answer` [N] numbers the answer of each point, from 0 and never falling.

    Without answer a the pairs lose those with an accepted point in a, those with a rejected one, and get back those with
    both, which went twice: three sums that one sort of all points and one of each answer's give.
    """
    accepted, rejected = _masses(label, weight)
    rejected_below, accepted_below = _mass_below(score, rejected, accepted)
    wins = accepted * rejected_below
    losses = rejected * (accepted.sum() - accepted_below)
    ends = np.searchsorted(answer, np.arange(int(answer.max(initial=-1)) + 2))
    within = np.zeros(len(ends) - 1)
    for a, own in enumerate(map(slice, ends[:-1], ends[1:])):
        within[a] = (accepted[own] * _mass_below(score[own], rejected[own])[0]).sum()

    def by_answer(values: np.ndarray) -> np.ndarray:
        return np.bincount(answer, values, minlength=len(within))

    pairs = (accepted.sum() - by_answer(accepted)) * (rejected.sum() - by_answer(rejected))
    won = wins.sum() - by_answer(wins) - by_answer(losses) + within
    left_out = np.divide(won, pairs, out=np.full_like(won, np.nan), where=pairs > 0)
    total = accepted.sum() * rejected.sum()
    return Auroc(value=float(wins.sum() / total) if total > 0 else math.nan, left_out=left_out)


def brier(probability: Points, label: Points, weight: Points | None = None) -> float:
    """Mean squared distance between the probability and the coin with heads probability P (0 is perfect for hard labels)."""
    return _mean(label * (1 - probability) ** 2 + (1 - label) * probability**2, weight)


def kl(probability: Points, label: Points, weight: Points | None = None) -> float:
    """Mean KL(P || probability) in nats, cross-entropy *minus* the entropy of the labels: 0 for a perfect predictor.

    The reference code adds the entropy.
    """
    said, true = (np.clip(p, EPSILON, 1 - EPSILON) for p in (probability, label))
    return _mean(label * (np.log(true) - np.log(said)) + (1 - label) * (np.log1p(-true) - np.log1p(-said)), weight)


def ece(probability: Points, label: Points, weight: Points | None = None) -> float:
    """Expected calibration error: the mean absolute gap between prediction and label over bins of equal mass by probability.

    Equal probabilities share a bin.
    """
    weight = np.ones_like(label) if weight is None else weight
    total = weight.sum()
    if not total > 0:
        return math.nan
    bins = np.minimum((NUM_BINS * _mass_below(probability, weight)[0] / total).astype(int), NUM_BINS - 1)
    return float(np.abs(np.bincount(bins, weight * (probability - label))).sum() / total)


def _masses(label: Points, weight: Points | None) -> tuple[np.ndarray, np.ndarray]:
    """(accepted, rejected) mass of each point."""
    weight = np.ones_like(label) if weight is None else weight
    return weight * label, weight * (1 - label)


def _mass_below(score: Points, *masses: Points) -> list[np.ndarray]:
    """For each point and each mass: that of the points with a smaller score, plus half of those with an equal one."""
    order = np.argsort(score)
    rising = score[order]
    group = np.cumsum(np.concatenate([[False], rising[1:] != rising[:-1]])[: len(rising)])
    found = []
    for mass in masses:
        tied = np.bincount(group, mass[order])
        below = np.empty(len(score))
        below[order] = (np.cumsum(tied) - tied / 2)[group]
        found.append(below)
    return found


def _mean(values: np.ndarray, weight: Points | None) -> float:
    total = len(values) if weight is None else weight.sum()
    return float((values if weight is None else weight * values).sum() / total) if total > 0 else math.nan


def _jackknife(left_out: np.ndarray) -> float | None:
    """The standard error of a figure from its values without each answer (Tukey 1958)."""
    n = len(left_out)
    if n < MIN_ANSWERS or not np.isfinite(left_out).all():
        return None
    return float(np.sqrt((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum()))
