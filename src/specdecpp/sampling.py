"""Probabilities of logits, and draws of tokens from them.

The same `Sampling` is applied to the draft's logits (giving q) and to the target's (giving p), so that speculative
decoding keeps the distribution of *sampled* decoding: Leviathan et al. 2023, appendix A.1. The order of the processors and
their meaning are those of transformers: repetition penalty, temperature, top-k, top-p, min-p.

Shapes: V vocabulary; leading axes are rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_BLOCK, _FIRST = 64, 128


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Parameters of a draw. `temperature=0` is greedy.

    >>> Sampling(temperature=0.7, top_p=0.9).is_greedy
    False
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            object.__setattr__(self, name, number(name, getattr(self, name)))
        if self.top_k is not None:
            object.__setattr__(self, "top_k", whole("top_k", self.top_k))
        checks = {
            "temperature": (0 <= self.temperature < inf, "be a finite number of at least 0", "0 for greedy decoding"),
            "top_k": (self.top_k is None or self.top_k >= 1, "be at least 1", "None (0 in a request) to keep every token"),
            "top_p": (0 < self.top_p <= 1, "lie in (0, 1]", "1.0 to keep every token"),
            "min_p": (0 <= self.min_p <= 1, "lie in [0, 1]", "0.0 to keep every token"),
            "repetition_penalty": (0 < self.repetition_penalty < inf, "be positive and finite", "1.0 for none"),
        }
        for name, (is_fine, bound, advice) in checks.items():
            if not is_fine:
                raise ValueError(f"{name} must {bound}, got {getattr(self, name)}; use {advice}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def needs_seen(self) -> bool:
        """Tell whether the tokens already in the context matter (repetition penalty)."""
        return self.repetition_penalty != 1.0


def asked(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> Sampling:
    """The sampling of a request: `sampling` whole, or parameters by name over those of a model.

    >>> asked({"temperature": 0.7, "top_k": 0}, {"top_k": 20, "top_p": 0.8})
    Sampling(temperature=0.7, top_k=None, top_p=0.8, min_p=0.0, repetition_penalty=1.0)
    """
    names = Sampling.__dataclass_fields__
    given = {name: options[name] for name in names if options.get(name) is not None}
    if (all_of_it := options.get("sampling")) is not None:
        if given:
            raise ValueError(f"sampling says all of it, and {', '.join(given)} were given too. Give one or the other.")
        if not isinstance(all_of_it, Sampling):
            raise ValueError(f"sampling must be a Sampling, got {all_of_it!r}. Give Sampling(temperature=..., top_p=...).")
        return all_of_it
    chosen: dict[str, Any] = {name: defaults[name] for name in names if name in defaults} | given
    if chosen.get("top_k") is not None:
        chosen["top_k"] = whole("top_k", chosen["top_k"]) or None
    return Sampling(**chosen)


def number(name: str, value: Any) -> float:
    """A value as a number. Raises ValueError where it is none, a truth value included."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def whole(name: str, value: Any) -> int:
    """A value as a whole number. Raises ValueError where it is none, a truth value included."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return int(value)


def at_least_float32(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """bf16 and fp16 are widened; float32 and float64 stay."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def penalised(
    logits: Float[Tensor, "*rows V"], sampling: Sampling, seen: Bool[Tensor, "*rows V"] | None = None
) -> Float[Tensor, "*rows V"]:
    """Logits after the repetition penalty (Keskar et al. 2019): the only processor that affects greedy decoding."""
    logits = at_least_float32(logits)
    if seen is None or not sampling.needs_seen:
        return logits
    penalty = sampling.repetition_penalty
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def probabilities(
    logits: Float[Tensor, "*rows V"], sampling: Sampling, seen: Bool[Tensor, "*rows V"] | None = None
) -> Float[Tensor, "*rows V"]:
    """The distribution a token is drawn from: rows sum to 1, in float32 or better. Greedy rows are one-hot.

    `seen` marks the tokens of the context, for the repetition penalty.
    """
    logits = penalised(logits, sampling, seen)
    if sampling.is_greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1.0:
        logits = logits.masked_fill(~_nucleus(logits, sampling.top_p), -torch.inf)
    p = logits.softmax(-1)
    if sampling.min_p > 0.0:
        p = p.masked_fill(p < sampling.min_p * p.amax(-1, keepdim=True), 0.0)
        p = p / p.sum(-1, keepdim=True)
    return p


def _nucleus(logits: Float[Tensor, "*rows V"], top_p: float) -> Bool[Tensor, "*rows V"]:
    """The most probable tokens, up to the one that fills a share `top_p`; of equal ones those of smaller ids.

    They are searched among the top 128, then 1024, and so on: sorting a vocabulary takes longer than a small model's pass.
    """
    if logits.is_cuda:
        return _sorted_nucleus(logits, top_p)
    whole, size, num = logits.logsumexp(-1, keepdim=True), logits.shape[-1], _FIRST
    while True:
        first = logits.topk(min(num, size), -1).values
        p = (first - whole).exp()
        before = p.cumsum(-1) - p
        if num >= size or bool((before[..., -1] >= top_p).all()):
            break
        num *= 8
    inside = (before < top_p).sum(-1, keepdim=True)
    least = first.gather(-1, inside - 1)
    above, equal = logits > least, logits == least
    left = inside - above.sum(-1, keepdim=True)
    if bool((equal.sum(-1, keepdim=True) == left).all()):
        return above | equal
    return above | (equal & (equal.cumsum(-1) <= left))


def _sorted_nucleus(logits: Float[Tensor, "*rows V"], top_p: float) -> Bool[Tensor, "*rows V"]:
    """The same by sorting, whose operations do not depend on values: a graph on a GPU can hold them."""
    falling, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    p = falling.softmax(-1)
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, p.cumsum(-1) - p < top_p)


def seen_rows(seen: Bool[Tensor, " V"], tokens: Int[Tensor, " K"]) -> Bool[Tensor, "K1 V"]:
    """The contexts of K + 1 consecutive positions: row i has seen the context and the first i draft tokens."""
    rows = seen.repeat(len(tokens) + 1, 1)
    for i, token in enumerate(tokens.tolist(), 1):
        rows[i:, token] = True
    return rows


@runtime_checkable
class Randomness(Protocol):
    """A stream of random draws: `Uniforms`, or `testing.Enumerator`, which tries every outcome."""

    def categorical(self, p: Float[Tensor, " V"]) -> int:
        """One index drawn from p, of any positive scale."""
        ...

    def bernoulli(self, h: Float[Tensor, " K"]) -> Bool[Tensor, " K"]:
        """Independent coins with heads probabilities h."""
        ...


class Uniforms:
    """Randomness from uniforms on [0, 1) of a generator on the CPU, one for each draw, so that a seed means the same draws on
    every device. `draw` stands for `inverted` where there is a faster way."""

    has_seed = False
    """True where the same answer is asked for again, whoever else is decoded meanwhile."""

    def __init__(self, generator: torch.Generator, *, draw: "Draw | None" = None):
        self.generator = generator
        self._draw = draw or inverted
        self._ready: list[float] = []
        self._taken: list[float] | None = None

    def categorical(self, p: Float[Tensor, " V"]) -> int:
        """Invert the running sum of p in float64."""
        (u,) = self.take(1)
        if p.device.type == "cpu":
            return self._draw(p, u)
        wide = torch.float32 if p.device.type == "mps" else torch.float64  # MPS has no float64
        cdf = p.cumsum(-1, dtype=wide)
        return min(int(torch.searchsorted(cdf, u * cdf[-1:], right=True)), p.shape[-1] - 1)

    def bernoulli(self, h: Float[Tensor, " K"]) -> Bool[Tensor, " K"]:
        """True while u < h."""
        return torch.tensor(self.take(len(h)), dtype=torch.float64).to(h.device, dtype=h.dtype if h.is_mps else None) < h

    def peek(self, num: int) -> list[float]:
        """The next uniforms. They stay the next ones."""
        while len(self._ready) < num:  # many at a time: a call of the generator takes longer than a draw may
            self._ready += torch.rand((_BLOCK,), generator=self.generator, dtype=torch.float64).tolist()
        return self._ready[:num]

    def take(self, num: int) -> list[float]:
        """The next uniforms, which are used up then."""
        taken = self.peek(num)
        del self._ready[:num]
        if self._taken is not None:
            self._taken += taken
        return taken

    def mark(self) -> None:
        """Remember from here on what is taken, for `rewind`."""
        self._taken = []

    def rewind(self) -> None:
        """Make what has been taken since `mark` the next ones again."""
        self._ready[:0] = self._taken or []
        self.mark()


Draw = Callable[[Tensor, float], int]
"""(p [V] on a CPU, of any positive scale; u in [0, 1)) -> the index in whose share of p the point u lies."""


def inverted(p: Float[Tensor, " V"], u: float) -> int:
    """The index in whose share of p the point u in [0, 1) lies: its block first, by the sums of blocks, then its place there.

    A running sum over a whole vocabulary takes longer than drawing may. A block's sum is in the precision of p.
    """
    distribution = p.numpy()
    num = len(distribution) // _BLOCK
    whole = num * _BLOCK
    sums = distribution[:whole].reshape(num, _BLOCK) @ np.ones(_BLOCK, distribution.dtype)
    if whole < len(distribution):
        sums = np.append(sums, distribution[whole:].sum())
    before = sums.cumsum(dtype=np.float64)
    point = u * before[-1]
    block = int(before.searchsorted(point, side="right"))
    within = distribution[block * _BLOCK : (block + 1) * _BLOCK].cumsum(dtype=np.float64)
    place = int(within.searchsorted(point - (before[block - 1] if block else 0.0), side="right"))
    if place == len(within):  # rounding carried the point past the block, or past all: to the last index with a share
        return int(np.flatnonzero(distribution[: (block + 1) * _BLOCK])[-1])
    return block * _BLOCK + place


def streams(seed: int | None, *, draw: Draw | None = None) -> tuple[Uniforms, Uniforms]:
    """Two independent streams, one to draft and one to verify: block verification tests prefixes after all of them were drawn.

    Without a seed both start from entropy of the operating system. Raises ValueError for a seed that is negative or not whole.
    """
    if seed is not None and (seed := whole("seed", seed)) < 0:
        raise ValueError(f"seed must be at least 0, got {seed}; use None for a fresh one")
    made = []
    for child in np.random.SeedSequence(seed).spawn(2):
        generator = torch.Generator()
        generator.manual_seed(int(child.generate_state(1, np.uint64)[0] >> 1))
        made.append(Uniforms(generator, draw=draw))
        made[-1].has_seed = seed is not None
    return made[0], made[1]
