"""The protocol between a round and a model: extend by some tokens, look at the last rows, roll back.

A runner holds one sequence (batch 1) and its cache. `fresh()` gives another empty one over the same weights, which is how
several requests share one model.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor


@runtime_checkable
class Runner(Protocol):
    """One model with one sequence in its cache."""

    vocab_size: int
    """V: rows of logits that are used (padded rows are cut off)."""
    hidden_size: int
    """D: width of the hidden state that the output layer reads."""
    max_length: int | None
    """The most tokens the model can hold, None when its positions have no end."""
    device: torch.device

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        ...

    def extend(self, tokens: list[int], *, rows: int) -> tuple[Float[Tensor, "rows V"], Float[Tensor, "rows D"]]:
        """Append tokens to the cache; logits and hidden states of the last `rows` of them."""
        ...

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` tokens, exactly."""
        ...

    def fresh(self) -> "Runner":
        """An empty runner over the same weights."""
        ...


@runtime_checkable
class Draws(Protocol):
    """What a runner may have beside the rest: a faster way than `sampling.inverted` to draw a token from a law on a CPU."""

    def draw(self, p: Float[Tensor, " V"], u: float) -> int:
        """The index in whose share of p the point u in [0, 1) lies."""
        ...
