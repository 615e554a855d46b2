"""The protocol between a round and a model: extend by some tokens, look at the last rows, roll back.

A runner holds one sequence (batch 1) and its cache. `fresh()` gives another empty one over the same weights, which is how
several requests share one model.
"""

from typing import Any, Protocol, runtime_checkable

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
    """Optional part of a runner: a faster way than `sampling.inverted` to draw a token from a law on a CPU."""

    def draw(self, p: Float[Tensor, " V"], u: float) -> int:
        """The index in whose share of p the point u in [0, 1) lies."""
        ...


@runtime_checkable
class ReadsBoth(Protocol):
    """Optional part of a target's runner: a text is read by it and by a draft in less than two passes."""

    def share_of(self, draft: Any) -> float:
        """The share of the draft's work that is saved so; 0 where nothing is."""
        ...

    def extend_both(self, draft: Any, tokens: list[int]) -> None:
        """`extend` of both, whose caches hold as many tokens, where `share_of` is above 0."""
        ...


@runtime_checkable
class Skips(Runner, Protocol):
    """Optional part of a draft's runner: its cache may begin in the middle of the text, and `length` counts from the text's
    beginning all the same. q is then a function of the rest of the text, which changes nothing for the output."""

    @property
    def num_skipped(self) -> int:
        """Tokens at the beginning of the text that were not read. A `rollback` into them leaves the cache empty."""
        ...

    def skip(self, length: int) -> None:
        """Leave out the first `length` tokens. Raises ValueError unless the cache is empty."""
        ...


def check_rollback(length: int, held: int) -> None:
    """Raise ValueError unless a cache that holds so many tokens can be cut to `length`."""
    if not 0 <= length <= held:
        raise ValueError(f"cannot roll back to {length} tokens: the cache holds {held}")
