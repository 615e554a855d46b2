"""Draft tokens without a draft model: what followed the last tokens where they stood before, in the prompt or the answer.

An index of n-grams over the committed text gives the latest place that continues like its end (prompt lookup, Saxena 2023;
SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975). A draft token is certain given the text: q is one-hot. The evidence for
it is how long the match is and how often in a row the n-gram was followed by the same token. `drafters.copying`
runs its steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecpp.backends.base import Cache

ORDERS = 4
"""n-grams of 1 to so many tokens are indexed: at most as many entries a token of the text."""
LONGEST = 32
"""A match is not followed further back, in tokens."""


@dataclass(frozen=True, slots=True)
class Match:
    """Tokens that may follow, how many tokens before them agree, and how often in a row the first of them has followed."""

    tokens: list[int]
    length: int = 0
    count: int = 0

    def confidence(self, i: int) -> float:
        """The estimate in place of q for draft token i: odds of length/4 times count^1.5. A rule's score learns the rest.

        Of what SmolLM2 writes at temperature 0.8 this says .20 of a single match of one token and .50, .67 of four and eight,
        where .17, .55 and .70 went on so; of a token that has followed twice .41, where .37 did (LOG.md).

        >>> Match([7, 8], length=4, count=1).confidence(0)
        0.5
        """
        odds = (self.length + i) * self.count**1.5 / 4
        return odds / (1 + odds)


class SuffixDrafter(Cache):
    """A drafter that copies tokens from the text. It has the shape of a model and of its cache; its `forward` only reads.

    It reads committed tokens only, so that a rejection leaves nothing behind. Memory and time are linear in the text.

    >>> drafter = SuffixDrafter(vocab_size=10)
    >>> _ = drafter.extend([1, 2, 3, 4, 1, 2], rows=1)
    >>> drafter.copied(3).tokens
    [3, 4, 1]
    """

    def __init__(self, vocab_size: int, *, device: torch.device | None = None):
        self.vocab_size, self.device = vocab_size, device or torch.device("cpu")
        self.hidden_size = 0
        self.max_length: int | None = None
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], tuple[int, int]] = {}

    @property
    def model(self) -> "SuffixDrafter":  # pyright: ignore[reportIncompatibleVariableOverride]
        return self

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens that it has read."""
        return len(self._tokens)

    def forward(self, parts: "Sequence[tuple[SuffixDrafter, list[int]]]", *, rows: int) -> tuple[Tensor, Tensor]:
        """Read tokens of each text; it has no logits and no states to give, whatever `rows` asks for."""
        for cache, tokens in parts:
            cache.read(tokens)
        return torch.empty(0, self.vocab_size), torch.empty(0, 0)

    def read(self, tokens: Sequence[int]) -> None:
        """Read tokens of the text."""
        text, places = self._tokens, self._places
        for token in tokens:
            place = len(text)
            end = tuple(text[-ORDERS:])
            for n in range(len(end)):
                before, count = places.get(end[n:], (-1, 0))
                places[end[n:]] = place, count + 1 if before >= 0 and text[before] == token else 1
            text.append(token)

    def rollback(self, length: int) -> None:
        """Forget what follows the first `length` tokens. Raises ValueError where there are not so many."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length} tokens, {self.length} have been read. Give a length up to that.")
        if length < self.length:
            kept = self._tokens[:length]
            self._tokens, self._places = [], {}
            self.read(kept)

    def new_cache(self) -> "SuffixDrafter":
        """Another one that has read nothing."""
        return type(self)(self.vocab_size, device=self.device)

    def copied(self, limit: int) -> Match:
        """Up to `limit` tokens that followed the longest match; past the end of the text the copy repeats itself."""
        text = self._tokens
        for n in range(min(ORDERS, len(text)), 0, -1):
            if (found := self._places.get(tuple(text[-n:]))) is not None:
                place, count = found
                most = min(LONGEST, place)
                while n < most and text[place - n - 1] == text[-n - 1]:
                    n += 1
                period = len(text) - place
                return Match([text[place + i % period] for i in range(limit)], n, count)
        return Match([])
