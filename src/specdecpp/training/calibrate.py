"""From a trained head to probabilities: held-out labels undo the bias of the weighted loss and of training.

The closed form undoes the weight of rejections; what is left, a temperature and a bias of the logit, is fitted on labels that
the head was not trained on, in the evidence that it meets in use. All of it goes into the head's card, with the figures before
and after, per token and for the product over a step, which is what decides.

`calibrate_head` reads collected labels, whose states are of transformers. `calibrate_live` decodes with whatever serves:
llama.cpp, int8 weights, another temperature. The label is then min(1, p/q), which verification knows. A draft token counts as
much as it is likely that all before it are accepted, as only then its own acceptance decides anything; so weighted, the
prefix of a draft token is in distribution a text of the target's, like the clean prefix of collected labels.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdecpp.decoder import Decoder, Prompt, run
from specdecpp.errors import DataError
from specdecpp.head import AcceptanceHead, Calibration
from specdecpp.loading.pair import Pair
from specdecpp.policies.head import HeadPolicy
from specdecpp.sampling import Sampling
from specdecpp.session import Session
from specdecpp.step import Plan, Result
from specdecpp.training.evaluate import figures, joined, known
from specdecpp.training.labels import Record
from specdecpp.training.measures import Points
from specdecpp.training.scores import LENGTH, Judged, Steps, head_logits, steps
from specdecpp.verify import token_acceptance

_SUREST = 1e-15  # a raw score of a step is taken to lie this far from 0 and 1
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
    answers = [(head_logits(head, record), steps(record)) for record in records]
    if not answers:
        raise DataError("there are no records to calibrate on. Name a split that the labels have.")
    after, stages = _fitted(head, answers)
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
    if not any(len(judged.label) for judged, _ in heard):
        raise DataError(
            f"no draft token was judged in {len(heard)} answers of at most {max_tokens} tokens. Give more prompts, or longer "
            "answers."
        )
    is_greedy = sampling.is_greedy
    after, stages = _fitted(head, heard, head.card.calibration_at(is_greedy=is_greedy) if head.card.is_calibrated else None)
    about = {
        "runners": pair.backends,
        **pair.names,
        "num_prompts": len(heard),
        "num_rounds": int(sum((of.depth == 1).sum() for _, of in heard)),
        "max_tokens": max_tokens,
        "seed": seed,
    }
    notes = head.card.notes | {"calibration_greedy" if is_greedy else "calibration": stages, "calibrated_on": about}
    if is_greedy:
        return head.with_card(greedy=after, notes=notes)
    return head.with_card(calibration=after, sampling=asdict(sampling), notes=notes)


def listen(
    pair: Pair,
    head: AcceptanceHead,
    prompts: Iterable[Prompt],
    *,
    sampling: Sampling,
    max_tokens: int = 128,
    length: int = LENGTH,
    seed: int = 0,
) -> Iterator[tuple[Judged, Steps]]:
    """Answer each prompt in steps of up to `length` draft tokens, all of which the head judges and none of which it stops.

    `Judged` has the raw logits and labels, `Steps` a point for each step as far as it had come at each draft token. Answer i
    has the seed `seed + i`. At temperature 0 a label is 1 where the draft token is the target's choice, else 0.
    Raises `HeadError` for a head that does not fit the pair, `PromptError` for a prompt that it cannot read.

    >>> judged, steps = next(listen(pair, pair.head, ["Why is the sky blue?"], sampling=Sampling()))     # doctest: +SKIP
    >>> judged.label.mean()                                                                              # doctest: +SKIP
    """
    head = head.with_card().to(pair.draft.device)  # where `load_pair` has it
    num_unjudged = head.card.form == "lagged"  # the last draft token of a step, which the draft has not read
    decoder = Decoder(pair, policy=HeadPolicy(head=head, calibrated=False, max_tokens=length + num_unjudged))
    for i, prompt in enumerate(prompts):
        yield _heard(decoder.start(prompt, max_tokens=max_tokens, seed=seed + i, sampling=sampling))


def _heard(session: Session) -> tuple[Judged, Steps]:
    """Decode to the end, and note of each draft token what was said of it and what was true."""
    heard = list[tuple[float, float, int]]()

    def watch(plan: Plan, result: Result) -> None:
        if result.judged:
            true = _acceptance(plan, result).tolist()
            heard.extend((said, true[k], k + 1) for k, said in enumerate(result.judged))

    session.watch = watch
    for _ in run(session):
        pass
    said, label, depth = np.array(heard, float).reshape(-1, 3).T
    said = said.clip(_SUREST, 1 - _SUREST)
    return points(np.log(said) - np.log1p(-said), label, depth.astype(int))


def points(
    score: Float[np.ndarray, " T"], label: Float[np.ndarray, " T"], depth: Int[np.ndarray, " T"]
) -> tuple[Judged, Steps]:
    """The points of T judged draft tokens of an answer, where depth 1 begins a step."""

    def along(fold: np.ufunc, values: np.ndarray) -> np.ndarray:
        """Running sums or products, each step by itself."""
        return np.concatenate([fold.accumulate(part) for part in np.split(values, np.flatnonzero(depth == 1))])

    accepted = along(np.multiply, label)
    weight = np.where(depth == 1, 1.0, np.concatenate([[1.0], accepted])[: len(label)])
    judged = Judged(score=score, label=label, weight=weight, source="live", table=score)
    whole = Steps(depth=depth, label=accepted, weight=np.ones_like(label), scores=lambda table: along(np.add, table))
    return judged, whole


def _acceptance(plan: Plan, result: Result) -> Float[Tensor, " K"]:
    """min(1, p/q) of each draft token; under greedy drafting there is no q, and p is one-hot."""
    rows = result.rows
    assert rows is not None, "a session that is watched asks for them"
    tokens = torch.tensor(result.tokens, device=rows.p.device)
    if plan.request.sampling.is_greedy:
        return rows.p[:-1].gather(-1, tokens[:, None])[:, 0]
    return token_acceptance(rows.p[:-1], rows.q, tokens)


def _fitted(
    head: AcceptanceHead, answers: Sequence[tuple[Judged, Steps | None]], before: Calibration | None = None
) -> tuple[Calibration, dict[str, Any]]:
    """The calibration fitted on the points per token, and the figures of each stage."""
    score, label, weight = joined([judged for judged, _ in answers])
    debiased = Calibration(rejection_weight=head.card.calibration.rejection_weight)
    after = calibrated(score, label, rejection_weight=debiased.rejection_weight, weight=weight)
    stages = {"raw": Calibration(), "debiased": debiased, "before": before, "calibrated": after}
    return after, {
        name: {key: known(value) for key, value in figures([(judged.calibrated(by), of) for judged, of in answers])[0].items()}
        for name, by in stages.items()
        if by is not None
    }


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
