"""From a trained head to probabilities: held-out labels undo the bias of the weighted loss and of training.

The closed form undoes the weight of rejections; what is left, a temperature and a bias of the logit, is fitted
on labels that the head was not trained on, in the evidence that it meets in use: `calibrate_head` has collected ones,
`calibrate_live` those of real steps on the backend that serves. All of it goes into the head's card, with the figures before
and after, per token and for the product over a step, which is what decides.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from specdecpp.decoder import Prompt
from specdecpp.errors import DataError
from specdecpp.head import AcceptanceHead, Calibration
from specdecpp.loading.pair import Pair
from specdecpp.sampling import Sampling
from specdecpp.training.evaluate import figures, log_probabilities
from specdecpp.training.labels import Record
from specdecpp.training.live import listen
from specdecpp.training.measures import Points
from specdecpp.training.scores import Judged, head_logits
from specdecpp.training.steps import Steps, steps

STAGES = ("raw", "debiased", "calibrated")
MIN_SLOPE, MAX_SLOPE = 0.01, 100.0  # of the logit: 1/temperature
_RIDGE = 1e-6  # keeps the optimum finite where labels are all alike or perfectly separated


def calibrated(logit: Points, label: Points, *, rejection_weight: float = 1.0, weight: Points | None = None) -> Calibration:
    """The calibration of raw logits [N] that minimises the cross-entropy against held-out soft labels [N].

    The closed form for `rejection_weight` comes first; then slope a = 1/temperature and bias b of
    logit P = a (logit s + log w) + b, a convex problem in two unknowns (Platt 1999, with soft labels), by Newton's method.
    A slope that is not positive says that the score ranks nothing: it is held at 0.01.

    Raises ValueError without labels or when a logit is not finite.

    >>> calibrated(np.array([-1.0, 0.0, 2.0]), np.array([0.1, 0.3, 0.8])).temperature < 1
    True
    """
    if len(logit) == 0 or not np.isfinite(logit).all():
        raise ValueError(f"a calibration needs labels and finite logits, got {len(logit)} logits. Check head and labels.")
    z = np.asarray(logit, float) + np.log(rejection_weight)
    mass = np.full(len(z), 1 / len(z)) if weight is None else weight / weight.sum()
    slope, bias = _fit(z, label, mass)
    if not MIN_SLOPE <= slope <= MAX_SLOPE:
        slope = min(max(slope, MIN_SLOPE), MAX_SLOPE)
        _, bias = _fit(z, label, mass, slope=slope)
    return Calibration(rejection_weight=rejection_weight, temperature=float(1 / slope), bias=float(bias), num_labels=len(z))


def calibrate_head(head: AcceptanceHead, records: Iterable[Record]) -> AcceptanceHead:
    """The head with its calibration fitted on these records, which it must not have been trained on.

    The card's notes get `calibration`: the figures of `evaluate.figures` raw, de-biased and calibrated.

    Raises `DataError` without records, or where a lagged head finds no states to read.

    >>> head = calibrate_head(head, shards.read(folder, split="dev"))                            # doctest: +SKIP
    """
    judged: list[Judged] = []
    played: list[Steps | None] = []
    for record in records:
        judged.append(head_logits(head, record))
        played.append(None if record.branches is None else steps(record))
    if not judged:
        raise DataError("there are no records to calibrate on. Name a split that the labels have.")

    def products(scored: list[Judged]) -> tuple[list[Steps], list[np.ndarray]]:
        pairs = [(of, of.scores(j)) for of, j in zip(played, scored, strict=True) if of is not None]
        return [of for of, _ in pairs], [product for _, product in pairs]

    after, stages = _fitted(head, judged, products)
    notes = {name: value for name, value in head.card.notes.items() if name != "calibrated_on"}
    return head.with_card(calibration=after, notes=notes | {"calibration": stages})


def calibrate_live(
    head: AcceptanceHead,
    pair: Pair,
    prompts: Iterable[Prompt],
    *,
    sampling: Sampling | None = None,
    max_tokens: int = 128,
    seed: int = 0,
) -> AcceptanceHead:
    """The head with its calibration fitted on real steps of the pair, which run as they will in service.

    `sampling` is that of the head's card unless given, and is written there. At temperature 0 draft tokens have odds of their
    own: what is fitted then becomes the card's `greedy`, with the notes `calibration_greedy`, and the other calibration stays.
    Beside the stages of `calibrate_head` the notes have `before`, where the card had a calibration: how well it serves here.
    The note `calibrated_on` names models, backends and prompts, which must be none that the head was trained on.

    Raises `DataError` where no draft token was judged, `HeadError` for a head of another pair.

    >>> head = calibrate_live(pair.head, pair, ["Why is the sky blue?"], max_tokens=64)          # doctest: +SKIP
    """
    sampling = sampling or Sampling(**head.card.sampling or {})
    heard = list(listen(pair, head, prompts, sampling=sampling, max_tokens=max_tokens, seed=seed))
    judged = [of.per_token() for of in heard]
    if not any(len(of.label) for of in judged):
        raise DataError(
            f"no draft token was judged in {len(heard)} answers of at most {max_tokens} tokens. Give more prompts, or longer "
            "answers."
        )
    is_greedy = sampling.is_greedy
    stages = {"before": head.card.calibration_at(is_greedy=is_greedy)} if head.card.is_calibrated else {}

    def products(scored: list[Judged]) -> tuple[list[Judged], list[np.ndarray]]:
        played = [of.per_step(j.score) for of, j in zip(heard, scored, strict=True)]
        return played, [of.score for of in played]

    after, stages = _fitted(head, judged, products, stages)
    about = {
        "runners": pair.backends,
        **pair.names,
        "num_prompts": len(heard),
        "num_rounds": int(sum((of.depth == 1).sum() for of in heard)),
        "max_tokens": max_tokens,
        "seed": seed,
    }
    notes = head.card.notes | {"calibration_greedy" if is_greedy else "calibration": stages, "calibrated_on": about}
    if is_greedy:
        return head.with_card(greedy=after, notes=notes)
    return head.with_card(calibration=after, sampling=asdict(sampling), notes=notes)


def _fitted(
    head: AcceptanceHead,
    judged: Sequence[Judged],
    products: Callable[[list[Judged]], tuple[list[Steps] | list[Judged], list[np.ndarray]]],
    stages: dict[str, Calibration] | None = None,
) -> tuple[Calibration, dict[str, Any]]:
    """The calibration fitted on these points, and the figures of each stage."""
    score, label, weight = (np.concatenate([getattr(j, name) for j in judged]) for name in ("score", "label", "weight"))
    debiased = Calibration(rejection_weight=head.card.calibration.rejection_weight)
    after = calibrated(score, label, rejection_weight=debiased.rejection_weight, weight=weight)
    raw, undone, last = STAGES
    stages = {raw: Calibration(), undone: debiased, **(stages or {}), last: after}
    scored = {name: [log_probabilities(j, calibration) for j in judged] for name, calibration in stages.items()}
    return after, {name: figures(of, *products(of))[0] for name, of in scored.items()}


def _fit(z: np.ndarray, label: np.ndarray, mass: np.ndarray, slope: float | None = None) -> tuple[float, float]:
    """(slope, bias) by damped Newton steps; with a slope given, the bias alone."""
    features = np.stack([z, np.ones_like(z)])
    free = [0, 1] if slope is None else [1]
    prior = np.array([1.0 if slope is None else slope, 0.0])
    x = prior.copy()

    def loss(x: np.ndarray) -> float:
        u = x @ features
        return float(mass @ (np.logaddexp(0.0, u) - label * u)) + _RIDGE / 2 * float(((x - prior) ** 2).sum())

    now = loss(x)
    for _ in range(100):
        s = 1 / (1 + np.exp(-np.clip(x @ features, -500, 500)))
        gradient = features @ (mass * (s - label)) + _RIDGE * (x - prior)
        hessian = (features * (mass * s * (1 - s))) @ features.T + _RIDGE * np.eye(2)
        step = np.zeros(2)
        step[free] = np.linalg.solve(hessian[np.ix_(free, free)], gradient[free])
        size = 1.0
        while size > 1e-8 and loss(x - size * step) > now:
            size /= 2
        x = x - size * step
        previous, now = now, loss(x)
        if previous - now < 1e-14:
            break
    return float(x[0]), float(x[1])
