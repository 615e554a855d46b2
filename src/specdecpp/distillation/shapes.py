"""Which draft: how many of the target's layers, and how many tokens it can say, by predicted tokens/s.

    costs of a draft step by its layers and tokens, timed; acceptance of each start in closed form, measured
    -> acceptance after training, expected -> the best length at these costs -> tokens/s of each shape -> the best

What training adds is not known beforehand. It was about `PER_DOUBLING` a doubling of the tokens (recipes/smollm2), from those
that the closed form is worth: an assumption, the same for all shapes, which the draft's own card replaces by what came out.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from specdecpp.backends import Model
from specdecpp.costs import chain_tokens
from specdecpp.distillation import network, start
from specdecpp.distillation.network import Shape
from specdecpp.distillation.target import Target
from specdecpp.distillation.text import TextPiece

PER_DOUBLING, WORTH = 0.04, 100_000
MOST = 0.95
LENGTHS, WIDTHS = range(9), (1, 2, 3, 5, 9)
DEPTHS = (16, 10, 7, 5)
"""One layer in so many is kept."""
TOKENS = (4096, 8192, 16384, 32768)
CONTEXT, REPEATS = 64, 12


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A shape with what is known of it. Seconds are of a step of the draft."""

    shape: Shape
    step_s: float
    accepted: float
    """By its start in closed form, along the target's text."""
    expected: float
    """After training."""
    speed_up: float
    """Over the target alone, at the best length of those tried."""
    length: int


def choose(
    of: Target, pieces: Sequence[TextPiece], *, num_tokens: int, fixed: Shape | None = None, small: Target | None = None
) -> tuple[Candidate, list[Candidate]]:
    """The best shape and all that were tried, for so many tokens of training. `pieces` are a first text: three quarters of it
    fit the starts, the last quarter measures them. `fixed` is the only shape then, and with a small model to start from only
    its tokens are chosen."""
    target = of.model
    cut = max(1, 3 * len(pieces) // 4)
    texts, held = [piece.ids.tolist() for piece in pieces[:cut]], pieces[cut:] or pieces[:1]
    num = min(int(model.config.vocab_size) for model in (target, target if small is None else small.model))
    share = shares(pieces, int(target.config.vocab_size))[:num]
    passes = {n: s for n, s in zip(WIDTHS, _seconds(of.backend(target, None), WIDTHS), strict=True)}
    found = []
    for shape in [fixed] if fixed else shapes(target) if small is None else [small.shape]:
        draft = network.draft(target, shape) if small is None else small.model
        if small is None and start.can_fit(target):
            start.fit(draft, of.quick, texts, shape)
        accepted = agreement(of.quick, draft, held)
        for tokens in [shape.tokens] if fixed else [*(n for n in TOKENS if n < len(share) / 2), None]:
            ids = None if tokens is None else share.topk(tokens).indices.sort().values.tolist()
            draft.config.output_ids = ids
            (step_s,) = _seconds(of.backend(draft, shape) if small is None else small.backend(draft, None), (1,))
            covered = 1.0 if ids is None else float(share[ids].sum())
            found.append(_candidate(replace(shape, tokens=tokens), step_s, accepted * covered, passes, num_tokens))
        draft.config.output_ids = None
    return max(found, key=lambda candidate: candidate.speed_up), found


def shapes(target: Any) -> list[Shape]:
    """Those that are tried, smallest first."""
    num = len(target.model.layers)
    kept = sorted({max(0, min(round(num / depth), num - 2)) for depth in DEPTHS})
    return [Shape(kept=k, own=own) for k in kept for own in (1, 2) if k + own < num]


def shares(pieces: Sequence[TextPiece], vocab_size: int) -> torch.Tensor:
    """How much of the target's probability each token has, on average over a text [V]."""
    found = sums(pieces, vocab_size)
    return found / found.sum()


def sums(pieces: Sequence[TextPiece], vocab_size: int) -> torch.Tensor:
    """The target's probability of each token, summed over the tokens of a text [V]."""
    found = torch.zeros(vocab_size, dtype=torch.float64)
    for piece in pieces:
        found.index_add_(0, piece.top.flatten(), piece.log_p.exp().flatten().double())
    return found


@torch.inference_mode()
def agreement(target: Any, draft: Any, pieces: Sequence[TextPiece]) -> float:
    """1 - TV along the answers, at temperature 1, over all tokens: of an undecided target most of it is in the tail."""
    found = []
    for piece in pieces:
        ids = piece.ids[None, :-1].to(target.device)
        logits = [model(input_ids=ids).logits[0, piece.num_prompt - 1 :].float() for model in (target, draft)]
        num = min(rows.shape[-1] for rows in logits)  # of a small model the padding may be another
        p, q = (rows[:, :num].softmax(-1) for rows in logits)
        found.append(torch.minimum(p, q).sum(-1).cpu())
    return float(torch.cat(found).mean())


def _candidate(shape: Shape, step_s: float, accepted: float, passes: Mapping[int, float], num_tokens: int) -> Candidate:
    doublings = max(0.0, math.log2(1 + num_tokens / WORTH))
    expected = max(accepted, min(MOST, accepted + PER_DOUBLING * doublings))
    speeds = {k: chain_tokens(expected, k) * passes[1] / (k * step_s + _between(passes, k + 1)) for k in LENGTHS}
    length = max(speeds, key=lambda k: speeds[k])
    return Candidate(
        shape=shape, step_s=step_s, accepted=accepted, expected=expected, speed_up=speeds[max(1, length)], length=length
    )


def _between(passes: Mapping[int, float], rows: int) -> float:
    """Seconds of a pass, by a line between the nearest that were timed."""
    if rows in passes:
        return passes[rows]
    low, high = max(n for n in passes if n < rows), min(n for n in passes if n > rows)
    return passes[low] + (passes[high] - passes[low]) * (rows - low) / (high - low)


def _seconds(backend: Model, widths: tuple[int, ...]) -> list[float]:
    """Seconds of passes of so many rows, behind a short text."""
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
