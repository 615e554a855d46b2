"""Measures against soft labels, the calibration of logits, and of a head on records."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from records import Process, random_head, records

from specdecpp.errors import DataError
from specdecpp.head import Calibration
from specdecpp.training.calibrate import calibrate_head, calibrated
from specdecpp.training.measures import auroc, auroc_over_answers, brier, ece, kl

N = 400


def points(seed: int = 0, num: int = N) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores with ties, soft labels that go with them, and weights."""
    rng = np.random.default_rng(seed)
    score = np.round(rng.normal(size=num), 1)
    label = 1 / (1 + np.exp(-score - rng.normal(size=num)))
    return score, label, rng.exponential(size=num)


def pairwise(score: np.ndarray, label: np.ndarray, weight: np.ndarray) -> float:
    """The AUROC by its definition, over all pairs."""
    above = (score[:, None] > score) + 0.5 * (score[:, None] == score)
    pairs = np.outer(weight * label, weight * (1 - label))
    return float((pairs * above).sum() / pairs.sum())


# Measures


def test_the_auroc_is_the_share_of_pairs_in_order():
    """Catches ties that depend on the order of the input, soft labels taken for hard ones, and weights left out."""
    score, label, weight = points()
    assert auroc(score, label, weight) == pytest.approx(pairwise(score, label, weight), abs=1e-12)
    assert auroc(score, label) == pytest.approx(pairwise(score, label, np.ones(N)), abs=1e-12)
    hard = np.array([0.0, 0.0, 1.0, 1.0])
    assert auroc(np.array([1.0, 2.0, 3.0, 4.0]), hard) == 1
    assert auroc(np.array([4.0, 3.0, 2.0, 1.0]), hard) == 0
    assert auroc(np.zeros(4), hard) == 0.5
    assert auroc(np.array([-np.inf, -np.inf, 0.0, 1.0]), hard) == 1


def test_a_soft_label_is_a_share_of_two_points():
    """Catches a soft label that is rounded: P accepted and 1 - P rejected must be two weighted points."""
    score, label, weight = points()
    twice = np.concatenate([score, score]), np.repeat([1.0, 0.0], N), np.concatenate([weight * label, weight * (1 - label)])
    assert auroc(*twice) == pytest.approx(auroc(score, label, weight), abs=1e-12)
    p = 1 / (1 + np.exp(-score))
    both = np.concatenate([p, p]), *twice[1:]
    for measure in (brier, ece):
        assert measure(*both) == pytest.approx(measure(p, label, weight), abs=1e-12)


def test_what_does_not_exist_is_nan():
    """Catches a division by zero, which is an error here, where all labels are alike or there are no points."""
    assert math.isnan(auroc(np.zeros(3), np.ones(3)))
    assert all(math.isnan(f(np.zeros(0), np.zeros(0))) for f in (auroc, brier, kl, ece))
    assert auroc_over_answers(np.zeros(3), np.ones(3), None, np.arange(3)).error is None


def test_the_jackknife_leaves_out_each_answer():
    """Catches pairs within an answer that are taken away twice."""
    score, label, weight = points()
    answer = np.sort(np.random.default_rng(1).integers(0, 7, N))
    found = auroc_over_answers(score, label, weight, answer)
    expected = [pairwise(*(x[answer != a] for x in (score, label, weight))) for a in range(7)]
    assert found.value == pytest.approx(pairwise(score, label, weight), abs=1e-12)
    np.testing.assert_allclose(found.left_out, expected, atol=1e-12)
    assert found.gain(found) == (0.0, 0.0)
    other = auroc_over_answers(-score, label, weight, answer)
    assert found.gain(other)[1] == pytest.approx(2 * found.error)


def test_the_error_of_the_jackknife_is_the_spread_over_answers():
    """Catches a standard error that is off by the root of the number of answers. The spread of 100 seeds is known to 7 %,
    so the ratio leaves the bounds, 4 standard errors away, about once in 1e4 choices of seeds; these are fixed."""
    found = [auroc_over_answers(*points(seed, num=240)[:2], None, np.repeat(np.arange(30), 8)) for seed in range(1, 101)]
    spread = np.std([f.value for f in found], ddof=1)
    assert 0.72 < np.mean([f.error for f in found]) / spread < 1.4


def test_the_kl_is_cross_entropy_minus_entropy():
    """Catches the two in the wrong order (the reference code adds the entropy), nats taken for bits, and an infinite figure for
    a wrong certainty, which JSON cannot hold."""
    p, label = np.array([0.2, 0.9]), np.array([0.5, 0.75])
    expected = [0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.8), 0.75 * math.log(0.75 / 0.9) + 0.25 * math.log(2.5)]
    assert kl(p, label) == pytest.approx(np.mean(expected), abs=1e-12)
    assert kl(label, label) == pytest.approx(0, abs=1e-12)
    assert 10 < kl(np.array([1.0, 0.0]), np.array([0.0, 1.0])) < 30
    assert kl(p, np.array([1.0, 0.0])) == pytest.approx(-(math.log(0.2) + math.log(0.1)) / 2, abs=1e-6)


def test_the_calibration_error_is_the_mean_gap_over_bins_of_equal_mass():
    """Catches bins of equal width or of equal numbers of points, and a constant score whose bins are filled in the order of the
    points, which invents an error."""
    rng = np.random.default_rng(2)
    p, weight = rng.uniform(size=3000) ** 3, rng.exponential(size=3000)
    assert ece(p, p**2, weight) == pytest.approx(np.average(p - p**2, weights=weight), abs=1e-9)
    assert ece(p, p, weight) == pytest.approx(0, abs=1e-12)
    assert ece(np.full(100, 0.5), np.repeat([0.0, 1.0], 50)) == 0
    order = np.argsort(p)
    place = np.empty(3000)
    place[order] = (weight[order].cumsum() - weight[order] / 2) / weight.sum()
    bins = [np.flatnonzero(np.floor(15 * place) == b) for b in range(15)]
    label = rng.uniform(size=3000).round()
    gaps = [abs((weight * (p - label))[at].sum()) / weight.sum() for at in bins]
    assert ece(p, label, weight) == pytest.approx(sum(gaps), abs=1e-12)


# Calibration of logits


@pytest.mark.parametrize(("w", "temperature", "bias"), [(1.0, 1.0, 0.0), (6.0, 1.0, 0.0), (6.0, 1.7, -0.4), (3.0, 0.6, 1.0)])
def test_a_known_distortion_is_undone(w: float, temperature: float, bias: float):
    """Catches a temperature that multiplies, a bias of the wrong sign, and a weight that is undone twice."""
    rng = np.random.default_rng(3)
    true = rng.normal(size=N) * 2
    label = 1 / (1 + np.exp(-true))
    raw = (true - bias) * temperature - math.log(w)
    found = calibrated(raw, label, rejection_weight=w, weight=rng.exponential(size=N))
    assert (found.rejection_weight, found.num_labels) == (w, N)
    assert found.temperature == pytest.approx(temperature, rel=1e-4)
    assert found.bias == pytest.approx(bias, abs=1e-4)
    back = found.apply(torch.tensor(raw)).sigmoid().numpy()
    assert kl(back, label) == pytest.approx(0, abs=1e-6)


def test_the_fit_is_a_minimum():
    """Catches a descent that stops early, and weights that do not reach the loss."""
    score, label, weight = points()
    found = calibrated(score, label, weight=weight)

    def loss(slope: float, bias: float) -> float:
        return kl(1 / (1 + np.exp(-(slope * score + bias))), label, weight)

    slope, best = 1 / found.temperature, loss(1 / found.temperature, found.bias)
    for ds, db in ((0.01, 0), (-0.01, 0), (0, 0.01), (0, -0.01)):
        assert best < loss(slope + ds, found.bias + db)
    unweighted = calibrated(score, label)
    assert abs(unweighted.bias - found.bias) > 1e-4


@pytest.mark.parametrize(
    ("logit", "label", "says"),
    [
        (np.linspace(-1, 1, 50), np.ones(50), lambda p: p.min() > 0.999),
        (np.linspace(-1, 1, 50), np.zeros(50), lambda p: p.max() < 0.001),
        (np.linspace(-1, 1, 50), (np.linspace(-1, 1, 50) > 0) * 1.0, lambda p: ((p > 0.5) == (np.arange(50) >= 25)).all()),
        (np.linspace(-1, 1, 50), np.linspace(0.9, 0.1, 50), lambda p: np.ptp(p) < 0.02 and abs(p.mean() - 0.5) < 0.01),
        (np.zeros(50), np.full(50, 0.3), lambda p: abs(p - 0.3).max() < 1e-3),
        (np.linspace(-300, 300, 50), np.linspace(0.4, 0.6, 50), lambda p: abs(p.mean() - 0.5) < 0.05),
    ],
    ids=["all accepted", "all rejected", "separable", "against the order", "constant", "wild"],
)
def test_labels_without_an_optimum_still_give_a_calibration(
    logit: np.ndarray, label: np.ndarray, says: Callable[[np.ndarray], bool]
):
    """Catches a temperature of 0 or below, an overflow, and an endless search."""
    found = calibrated(logit, label)
    assert says(found.apply(torch.tensor(logit)).sigmoid().numpy())


@pytest.mark.parametrize("logit", [np.zeros(0), np.array([0.0, np.nan]), np.array([np.inf, 0.0])])
def test_nothing_to_fit_on_is_refused(logit: np.ndarray):
    """Catches a calibration made of nan."""
    with pytest.raises(ValueError, match="needs labels and finite logits"):
        calibrated(logit, np.zeros(len(logit)))


# Calibration of a head


def test_a_calibrated_head_keeps_its_weights_and_gains_a_card():
    """Catches figures that are missing per token or for the product, and notes that are lost."""
    process = Process.random(6, seed=1)
    card = {"scalars": ("log_q", "depth"), "calibration": Calibration(rejection_weight=6.0), "notes": {"loss": 0.5}}
    head = random_head(process, seed=4, scale=0.7, form="look_ahead", **card)
    dev = records(process, 12, num_tokens=40, seed=2)
    found = calibrate_head(head, dev)
    assert all(torch.equal(v, found.state_dict()[k]) for k, v in head.state_dict().items())
    assert found.card.is_calibrated
    assert not head.card.is_calibrated
    assert found.card.calibration.num_labels == 12 * 40 * 4
    assert found.card.notes["loss"] == 0.5
    raw, debiased, after = found.card.notes["calibration"].values()
    for name in ("ece_token", "brier_token", "kl", "ece_product", "brier_product"):
        assert after[name] < raw[name]
    assert after["kl"] <= debiased["kl"]
    assert after["auroc_token"] == pytest.approx(raw["auroc_token"], abs=1e-9)
    assert after["auroc_product"] is not None
    assert after["evidence"] == "clean"
    assert calibrate_head(found, dev).card == found.card, "not on top of the first"


@pytest.mark.parametrize(
    ("features", "has_branches", "evidence"),
    [(("mixed", "leaf"), True, "leaf"), (("mixed",), True, "mixed"), (("mixed",), False, "mixed")],
)
def test_a_lagged_head_is_calibrated_on_what_it_meets_in_use(features: tuple[str, ...], has_branches: bool, evidence: str):
    """Catches a calibration on the mixed prefix although the labels have the evidence of use."""
    process = Process.random(5, seed=1)
    dev = records(process, 6, num_tokens=30, seed=2, features=features, branches=has_branches)
    notes = calibrate_head(random_head(process), dev).card.notes["calibration"]
    assert {stage["evidence"] for stage in notes.values()} == {evidence}
    assert (notes["calibrated"]["auroc_product"] is None) == (not has_branches)


def test_labels_a_head_cannot_read_are_refused():
    """Catches a lagged head that is judged on states it never sees, and a calibration on nothing."""
    process = Process.random(5, seed=1)
    with pytest.raises(DataError, match="neither leaf nor mixed among the features"):
        calibrate_head(random_head(process), records(process, 1, num_tokens=5, seed=2, features=(), branches=False))
    with pytest.raises(DataError, match="no records to calibrate on"):
        calibrate_head(random_head(process), [])
