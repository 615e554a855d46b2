"""A reduced vocabulary: an output layer of a draft that scores some of the tokens only, all others having probability 0.

The config names them (`output_ids`), and the weights are whole: other programs run the model with all tokens.

Source: FR-Spec (Zhao et al. 2025), which trims the output layer of an EAGLE draft in this way.
"""

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
