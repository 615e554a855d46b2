"""From what was seen on practice prompts to the pace: passes of the target alone a token, of every fixed length, and
speed-ups.

    tokens a step: 1 + a_1 + a_1 a_2 + ..., a_d the acceptance at depth d      passes a step: by its length, linear between

Sums may be those of many resamples at once (trailing axes). Where a resample lacks something, `whole`, the sums over all
prompts, stands in for it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from specdecpp.bench.turns import LENGTHS, Sums
from specdecpp.costs import Costs

Figure = Any
"""A number, or one for each resample."""
Pace = Callable[[Sums], Figure]
MOST = 20
"""Draft tokens a step that are reckoned with on other machines."""


def step_of(sums: Sums, k: int, whole: Sums) -> Figure:
    """Time of a step with k draft tokens, in passes of the target alone."""
    known = [0, *(i for i, (num, *_) in enumerate(whole.lengths) if num and i)]
    above = next(i for i in known if LENGTHS[i] >= k)
    below = max(i for i in known if LENGTHS[i] <= k)
    share = 0.0 if above == below else (k - LENGTHS[below]) / (LENGTHS[above] - LENGTHS[below])
    ends = [1.0 if i == 0 else sum(parts(sums, i, whole)) for i in (below, above)]
    return (1 - share) * ends[0] + share * ends[1]


def parts(sums: Sums, i: int, whole: Sums) -> tuple[Figure, Figure]:
    """Seconds of drafting and of the pass of a measured length, in passes of the target alone; of length 0 (1, its
    seconds)."""
    num = whole.lengths[i, 0]
    draft, verify = (np.exp(over(sums.lengths[i, j], sums.lengths[i, 0], whole.lengths[i, j] / num)) for j in (1, 2))
    return draft, verify


def alone_s(sums: Sums, whole: Sums) -> Figure:
    """Seconds of a token of the target alone."""
    return parts(sums, 0, whole)[1]


def tokens_of(sums: Sums, k: int, whole: Sums) -> Figure:
    """Tokens of a step with k draft tokens. A depth that was never tested takes after the one before it."""
    tokens, survival, acceptance, known = 1.0, 1.0, 0.0, 0.0
    for depth in range(k):
        known = whole.depths[depth, 1] / whole.depths[depth, 0] if whole.depths[depth, 0] else known
        acceptance = over(sums.depths[depth, 1], sums.depths[depth, 0], known)
        survival = survival * acceptance
        tokens = tokens + survival
    return tokens


def fixed(k: int, whole: Sums) -> Pace:
    """Passes a token with k draft tokens a step."""
    return lambda sums: step_of(sums, k, whole) / tokens_of(sums, k, whole)


def default(whole: Sums) -> Pace:
    """Passes a token under the default rule."""
    tokens, expected, _, num, logs, _ = whole.default

    def passes(sums: Sums) -> Figure:
        ratio = np.exp(over(sums.default[4], sums.default[3], logs / num))
        return over(sums.default[1], sums.default[0], expected / tokens) * ratio

    return passes


def answers(pace: Pace, whole: Sums, *, num_tokens: int, read_along: float) -> Pace:
    """How many times as fast as the target alone whole answers of so many tokens are, whose prompts are read: of what drafting
    adds to that, a share `read_along` is done in the target's passes."""

    def speedup(sums: Sums) -> Figure:
        target, draft = (
            over(sums.reading[i, 1], sums.reading[i, 0], whole.reading[i, 1] / max(1.0, whole.reading[i, 0]))
            / alone_s(sums, whole)
            for i in (0, 1)
        )
        return (target + num_tokens) / (target + (1 - read_along) * draft + num_tokens * pace(sums))

    return speedup


def over(top: Figure, bottom: Figure, otherwise: float) -> Figure:
    """top / bottom, and `otherwise` where the bottom is nothing."""
    return np.divide(top, bottom, out=np.full(np.shape(top), otherwise, float), where=np.asarray(bottom) > 0)


def best_speedup(costs: Costs, depths: Sequence[float]) -> float:
    """The speed-up in decoding of the best fixed length at other costs; what lies deeper is accepted as the last depth."""
    acceptance = np.array([*depths, *[depths[-1]] * MOST][:MOST])
    tokens: Float[np.ndarray, " K"] = 1 + np.cumsum(np.cumprod(acceptance))
    speeds = [1.0, *(tokens[k - 1] / costs.round_s(k) * costs.verify_s(1) for k in range(1, MOST + 1))]
    return float(max(speeds))
