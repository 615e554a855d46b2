"""The choice of a draft's shape by predicted tokens/s: how many of the target's layers, and how many tokens it can say.

    costs of a draft step by its layers and tokens, timed; acceptance of each start in closed form, measured
    -> acceptance after training, expected -> the best length at these costs -> tokens/s of each shape -> the best

What training adds is not known beforehand. It was about `PER_DOUBLING` a doubling of the tokens (recipes/smollm2), from those
that the closed form is worth: an assumption, the same for all shapes, which the draft's own card replaces by what came out.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any

from specdecpp.backends import Model, NativeModel
from specdecpp.costs import Costs, chain_tokens
from specdecpp.distillation import measuring, network, start
from specdecpp.distillation.network import Shape
from specdecpp.distillation.target import Target
from specdecpp.distillation.text import TextPiece

PER_DOUBLING, WORTH = 0.04, 100_000
MOST = 0.95
LENGTHS, WIDTHS = range(1, 9), (1, 2, 3, 5, 9)
DEPTHS = (16, 10, 7, 5)
"""Numbers of the target's layers of which one is kept."""
TOKENS = (4096, 8192, 16384, 32768)
CONTEXT, REPEATS = 64, 12


def choose(
    target: Target, pieces: Sequence[TextPiece], *, passes: Mapping[int, float], num_tokens: int
) -> list[dict[str, Any]]:
    """All shapes that were tried, the best first, for so many tokens of training.

    `pieces` are a first text: three quarters of it fit the starts, the last quarter measures them. Facts of each: `step_s`,
    seconds of a draft step; `accepted` by its start, along the target's text; `expected` after training; `speed_up` over the
    target alone at the best `length`.
    """
    cut = max(1, 3 * len(pieces) // 4)
    texts, held = [piece.ids.tolist() for piece in pieces[:cut]], pieces[cut:] or pieces[:1]
    num = target.vocab_size
    share = measuring.sums(pieces, num)
    share /= share.sum()
    found = []
    for shape in shapes(len(target.model.model.layers)):
        draft = network.draft(target.model, shape)
        start.fit(draft, target.quick, texts, shape)
        draft.config.output_ids = None
        accepted = measuring.agreement(target.quick, draft, held)
        for tokens in (*(n for n in TOKENS if n < num / 2), None):
            ids = None if tokens is None else share.topk(tokens).indices.sort().values.tolist()
            draft.config.output_ids = ids
            covered = 1.0 if ids is None else float(share[ids].sum())
            (step_s,) = seconds(target.backend(draft, shape), (1,))
            begun = accepted * covered
            expected = max(begun, min(MOST, begun + PER_DOUBLING * math.log2(1 + num_tokens / WORTH)))
            facts = {"shape": asdict(replace(shape, tokens=tokens)), "step_s": step_s, "accepted": begun}
            found.append(facts | {"expected": expected} | predicted(expected, step_s, passes))
        draft.config.output_ids = None
    return sorted(found, key=lambda each: -each["speed_up"])


def shapes(num: int) -> list[Shape]:
    """Shapes to try for a target of so many layers, smallest first."""
    kept = sorted({max(0, min(round(num / depth), num - 2)) for depth in DEPTHS})
    return [Shape(kept=k, own=own) for k in kept for own in (1, 2) if k + own < num]


def predicted(accepted: float, step_s: float, passes: Mapping[int, float]) -> dict[str, Any]:
    """The `speed_up` over the target alone of a draft like this, at its best `length`; `passes` are seconds by rows."""
    costs = Costs(draft_s=step_s, passes=passes)
    length = costs.best_length(accepted, LENGTHS)
    return {"speed_up": chain_tokens(accepted, length) * costs.pass_s(1) / costs.step_s(length), "length": length}


def pass_seconds(target: Target) -> dict[int, float]:
    """Seconds of a pass of the target by its rows."""
    served = target.writer if isinstance(target.writer, NativeModel) else target.backend(target.model, None)
    return dict(zip(WIDTHS, seconds(served, WIDTHS), strict=True))


def seconds(backend: Model, widths: tuple[int, ...]) -> list[float]:
    """Seconds of a pass of each width in rows, behind a short text."""
    cache = backend.new_cache()
    cache.extend([0] * CONTEXT, rows=1)
    times: dict[int, list[float]] = {n: [] for n in widths}
    for _ in range(REPEATS):
        for n in widths:
            began = perf_counter()
            float(cache.extend([0] * n, rows=n)[0][0, 0])
            times[n].append(perf_counter() - began)
            cache.rollback(CONTEXT)
    return [statistics.median(sorted(found)[: REPEATS // 2]) for found in times.values()]
