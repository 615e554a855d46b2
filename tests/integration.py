"""Distributions by exact integration over uniforms: what is decided is constant between breakpoints that formulas say."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from specdecpp.sampling import Uniforms, inverted
from specdecpp.verify import block_acceptance, residual, token_acceptance

EDGE = 1e-5  # how near the ends of an interval of uniforms the outcome is looked up
Distribution = dict[tuple[int, ...], float]


class Given(Uniforms):
    """Uniforms of the test's choice, and then halves."""

    def __init__(self) -> None:
        self.points: list[float] = []
        self._draw = inverted

    def peek(self, num: int) -> list[float]:
        return (self.points + [0.5] * num)[:num]

    def take(self, num: int) -> list[float]:
        taken, self.points = self.peek(num), self.points[num:]
        return taken


def intervals(chances: Sequence[float]) -> Iterator[tuple[int, float, tuple[float, float]]]:
    """(outcome, its chance, two uniforms near the ends of its interval) of an inverted running sum."""
    start, total = 0.0, sum(chances)
    for i, chance in enumerate(c / total for c in chances):
        if chance > 0:
            margin = min(EDGE, chance / 4)
            yield i, chance, (start + margin, start + chance - margin)
        start += chance


Outcome = tuple[tuple[int, int], float, list[tuple[float, float]]]
"""((accepted, next token), its chance, the ends of the intervals of the uniforms in the order of the stream)."""


def outcomes(p: Tensor, q: Tensor, tokens: Tensor, kind: str) -> Iterator[Outcome]:
    """What may become of K draft tokens, by the formulas."""
    num = len(tokens)
    h, carry = token_acceptance(p[:num], q, tokens), torch.ones(num + 1, dtype=p.dtype)
    if kind == "block" and num:
        h, carry = block_acceptance(p, q, tokens)
    for coins in itertools.product((True, False), repeat=num):
        chance, ends = 1.0, []
        for heads, x in zip(coins, h.tolist(), strict=True):
            chance *= x if heads else 1 - x
            margin = min(EDGE, x / 4 if heads else (1 - x) / 4)
            ends.append((margin, x - margin) if heads else (x + margin, 1 - margin))
        if chance == 0:
            continue
        until_tails = (i for i, heads in enumerate(coins) if not heads)
        count = next(until_tails, num) if kind == "token" else max((i + 1 for i, heads in enumerate(coins) if heads), default=0)
        distribution = p[num] if count == num else residual(p[count], q[count], carry[count])
        for token, share, between in intervals(distribution.tolist()):
            yield (count, token), chance * share, [*ends, between]


def compared(p: Tensor, tokens: Tensor, count: int = 0) -> Iterator[Outcome]:
    """The same for verification by comparison."""
    for token, chance, between in intervals(p[count].tolist()):
        if count < len(tokens) and token == int(tokens[count]):
            for verdict, share, ends in compared(p, tokens, count + 1):
                yield verdict, chance * share, [between, *ends]
        else:
            yield (count, token), chance, [between]


def completed(distribution: Distribution, p: Callable[[tuple[int, ...]], Tensor], length: int) -> Distribution:
    """Answers cut or filled up by the target to one length: then a step's distribution must be the target's own."""
    out: Distribution = defaultdict(float)
    for answer, chance in distribution.items():
        if len(answer) >= length:
            out[answer[:length]] += chance
            continue
        for token, share in enumerate(p(answer).tolist()):
            for whole, c in completed({(*answer, token): chance * share}, p, length).items():
                out[whole] += c
    return out
