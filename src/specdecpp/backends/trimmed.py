"""A reduced vocabulary: an output layer of a draft that scores some of the tokens only, all others having probability 0.

A draft's config may name them (`output_ids`); the weights are whole, and other programs run the model with all tokens. Any
other draft can be given a list at load (`base.Reduces`), and then scores the tokens of the text too (`TextTokens`).

Source: FR-Spec (Zhao et al. 2025), which trims the output layer of an EAGLE draft in this way.
"""

from copy import copy
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdecpp.errors import BackendError

KEY = "output_ids"
"""Name of the ids in a config of transformers."""


def of(config: Any, *, vocab_size: int, device: torch.device | str = "cpu") -> Int[Tensor, " S"] | None:
    """The ids that a model scores, in rising order and below `vocab_size`; None: all of them. Raises `BackendError`."""
    return checked(getattr(config, KEY, None), vocab_size=vocab_size, device=device)


def checked(ids: Any, *, vocab_size: int, device: torch.device | str = "cpu") -> Int[Tensor, " S"] | None:
    """Check ids as `of` does. Raises `BackendError` for what is no list of ids, or where none is left."""
    if ids is None:
        return None
    if not isinstance(ids, list | tuple) or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise BackendError(f"the config's {KEY} is no list of token ids. Write the ids that the output layer scores, or null.")
    found = sorted({i for i in ids if i < vocab_size})
    if not found:
        raise BackendError(f"none of the config's {KEY} is below {vocab_size}, the vocabulary's size. Write ids, or null.")
    return None if len(found) == vocab_size else torch.tensor(found, device=device)


def widened(logits: Float[Tensor, "*rows S"], ids: Int[Tensor, " S"], *, vocab_size: int) -> Float[Tensor, "*rows V"]:
    """Logits of these ids among all: minus infinity elsewhere."""
    return logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf).index_copy_(-1, ids, logits)


class TextTokens:
    """Tokens of a text that a list lacks: a draft with a reduced vocabulary scores the last `MOST` of them too.

    Where a text brings more of them than `FOREIGN` in `WINDOW` tokens, the list is not made for it, and the draft scores all
    tokens (`is_foreign`). Both depend on the text alone, whatever has been read and forgotten before, so that a seed gives the
    same answer again. `listed[i]` is true for the tokens of the list.
    """

    MOST, WINDOW, FOREIGN = 256, 64, 6

    def __init__(self, listed: bytes):
        self._listed, self._known = listed, set[int]()
        self._new: list[tuple[int, int]] = []  # (position, id) of tokens that were no known ones when the text brought them
        self._end = 0
        self.is_foreign = False

    @property
    def ids(self) -> list[int]:
        """Ids in rising order."""
        return sorted(self._known)

    def read(self, tokens: list[int], start: int) -> None:
        """Take in the tokens of the text from this position on; those up to where it has read already are left out."""
        for position, token in enumerate(tokens[max(0, self._end - start) :], max(start, self._end)):
            if not self._listed[token] and token not in self._known:
                self._new.append((position, token))
                self._known.add(token)
                if len(self._new) > self.MOST:
                    self._known = self._last()
        self._end = max(self._end, start + len(tokens))

    def rollback(self, length: int) -> None:
        """Forget the text after its first `length` tokens."""
        self._end = min(self._end, length)
        if self._new and self._new[-1][0] >= length:
            self._new = [one for one in self._new if one[0] < length]
            self._known = self._last()

    def settle(self) -> None:
        """Decide `is_foreign` by the text so far."""
        self.is_foreign = (
            sum(position >= self._end - self.WINDOW for position, _ in self._new[-self.FOREIGN - 1 :]) > self.FOREIGN
        )

    def fork(self, length: int) -> "TextTokens":
        """A copy for the first `length` tokens."""
        other = copy(self)
        other._new, other._known = [*self._new], {*self._known}
        other.rollback(length)
        return other

    def _last(self) -> set[int]:
        return {token for _, token in self._new[-self.MOST :]}
