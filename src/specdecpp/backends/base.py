"""The protocol between a step and a model: requests share a model, and each has a cache of what it has read.

cache = model.new_cache()
logits, hidden = model.forward([(cache, tokens), ...], rows=1)
cache.rollback(length)
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from specdecpp.errors import BackendError


@runtime_checkable
class Model(Protocol):
    """A model: weights, and how its forward pass is run.

    The class of a backend makes one of a model of transformers, `LeanModel(model, vocab_size=None, probe=True)`: of V =
    `vocab_size` tokens (None: all that the output layer has), and with `probe` compared with transformers first. It raises
    `BackendError` for a model that it cannot run; its static `refusal(model)` gives the reason beforehand, None without one.
    `output_ids`, where it has them, are the tokens that it scores. `LlamaCppModel` is made of a file instead.
    """

    vocab_size: int
    """V: rows of logits that are used (padded rows are cut off)."""
    hidden_size: int
    """D: width of the hidden state that the output layer reads."""
    max_length: int | None
    """The most tokens the model can hold, None when its positions have no end."""
    device: torch.device

    def new_cache(self) -> "Any":
        """An empty cache (`Cache`)."""
        ...

    def forward(
        self, parts: "Sequence[tuple[Any, list[int]]]", *, rows: int
    ) -> tuple[Float[Tensor, "rows V"], Float[Tensor, "rows D"]]:
        """Append tokens, at least one, to each of different caches; logits and hidden states of the last `rows` of each."""
        ...


class Cache:
    """One sequence that a model has read. Every backend has a subclass, which knows how to `rollback`."""

    length: int
    """Tokens that it holds."""

    def __init__(self, model: Any):
        self.model = model
        self.vocab_size: int = model.vocab_size
        self.hidden_size: int = model.hidden_size
        self.max_length: int | None = model.max_length
        self.device: torch.device = model.device

    def extend(self, tokens: list[int], *, rows: int) -> tuple[Float[Tensor, "rows V"], Float[Tensor, "rows D"]]:
        """Append tokens; logits and hidden states of the last `rows` of them."""
        return self.model.forward([(self, tokens)], rows=rows)

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` tokens, exactly."""
        raise NotImplementedError

    def settle(self, unread: list[int]) -> None:
        """Called before the draft tokens of a step, with the tokens that the draft will read first: what q depends on beside
        the text's last tokens is decided now, for the whole step."""


@runtime_checkable
class Draws(Protocol):
    """Optional part of a model: a faster way than `sampling.inverted` to draw a token from a distribution on a CPU."""

    def draw(self, p: Float[Tensor, " V"], u: float) -> int:
        """The index in whose share of p the point u in [0, 1) lies."""
        ...


@runtime_checkable
class ReadsBoth(Protocol):
    """Optional part of a target: a text is read by it and by a draft in less than two passes."""

    def share_of(self, draft: Any) -> float:
        """The share of the draft's work that is saved so; 0 where nothing is."""
        ...

    def forward_both(self, cache: Any, draft: Any, tokens: list[int]) -> None:
        """Append tokens to both caches, which hold the same text, where `share_of` the draft's model is above 0."""
        ...


@runtime_checkable
class Reduces(Protocol):
    """Optional part of a draft: a reduced vocabulary (`trimmed`), which makes its output layer cheaper."""

    vocab_size: int

    def reduced(self, ids: list[int]) -> Any:
        """A model over the same weights that scores these tokens, in rising order, and those of the text it reads."""
        ...


@runtime_checkable
class Skips(Protocol):
    """Optional part of a draft's cache: it may begin in the middle of the text; `length` counts from the text's beginning."""

    @property
    def length(self) -> int: ...
    @property
    def num_skipped(self) -> int:
        """Tokens at the beginning of the text that were not read. A `rollback` into them leaves the cache empty."""
        ...

    def skip(self, length: int) -> None:
        """Leave out the first `length` tokens. Raises ValueError unless the cache is empty."""
        ...


def scored_rows(asked: int | None, rows: int, name: str) -> int:
    """V: what was asked for, or all rows of the output layer. Raises `BackendError` where it has fewer."""
    if asked is not None and asked > rows:
        raise BackendError(f"vocab_size={asked} asked of {name}, whose output layer has {rows} rows.")
    return rows if asked is None else asked


def check_rollback(length: int, held: int) -> None:
    """Raise ValueError unless a cache that holds so many tokens can be cut to `length`."""
    if not 0 <= length <= held:
        raise ValueError(f"cannot roll back to {length} tokens: the cache holds {held}")
