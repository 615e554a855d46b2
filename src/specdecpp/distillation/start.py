"""Starts of a draft: layers of the target, the first fitted in closed form, or a model that is trained further.

The layer over the cut learns, by least squares, to do the work of all the layers that are left out:

    x  the state after the kept layers, read by a copy of the layer that follows them in the target
    y  the state that the target's last layers read
    the output weights of the copy's feed-forward part are fitted to y minus what is there without it

What that part puts out is linear in them, so that ridge regression finds them from some ten thousand tokens; gradients take
some hundred thousand to come as far (recipes/smollm2). Each place counts by 1/|y|^2: a norm follows, and the first token's
state may be a hundred times as long as all others.

Shapes: N positions, F inner width of the feed-forward part, D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from specdecpp.backends import families
from specdecpp.distillation import network
from specdecpp.distillation.network import Shape, batched, caught, layers_of, tail
from specdecpp.distillation.target import Target
from specdecpp.loading.pair import common_vocabulary
from specdecpp.loading.tokenizers import check_same_tokenizer

RIDGE = 1e-5
"""Share of the mean square of a feature that is added to the diagonal."""
BATCH = 8
"""Texts of one pass."""


@dataclass(frozen=True)
class Begun:
    """A model that is trained further. `is_cut`: it was cut from this target; else all of its layers are its own."""

    model: Target
    shape: Shape
    is_cut: bool

    @classmethod
    def named(cls, name: str, target: Target) -> "Begun":
        """Raises `PairError` for a model that could not be the target's draft."""
        small = Target(name, target.device)
        network.check(small.model)
        check_same_tokenizer(target.tokenizer, small.tokenizer)
        common_vocabulary(target.source, small.source, num_tokens=max(target.tokenizer.get_vocab().values()) + 1)
        shape = network.shape_of(small.model, target.model)
        return cls(small, shape or Shape(kept=0, own=len(small.model.model.layers)), shape is not None)


def can_fit(target: Any) -> bool:
    """Tell whether what a feed-forward part puts out is added as it is, not through a norm."""
    return all(layer.down_norm is None for layer in families.described(target).layers)


@torch.inference_mode()
def fit(draft: Any, target: Any, texts: Sequence[Sequence[int]], shape: Shape) -> None:
    """Set the draft's first own layer from the target's passes over some texts (ids)."""
    own = tail(draft, shape.kept)
    layer, num = own.model.layers[0], len(target.model.layers)
    above = target.model.norm if shape.own == 1 else target.model.layers[layers_of(num, shape)[shape.kept + 1]]
    below, product, after = target.model.layers[shape.kept], layer.mlp.down_proj, [*own.model.layers[1:], own.model.norm][0]
    product.weight.zero_()
    gram = cross = torch.zeros((), device=target.device)
    for first in range(0, len(texts), BATCH):
        ids, mask = batched(texts[first : first + BATCH], device=target.device)
        with caught(below) as x, caught(above) as y:
            target.model(input_ids=ids, attention_mask=mask, use_cache=False)
        with caught(product) as features, caught(after) as out:
            own.model(inputs_embeds=x[0], attention_mask=mask, use_cache=False)
        at = mask.bool()
        f, wanted, found = (states[0][at].float() for states in (features, y, out))
        weighted = f / wanted.square().mean(-1, keepdim=True)
        gram, cross = gram + weighted.T @ f, cross + weighted.T @ (wanted - found)
    product.weight.copy_(_solved(gram, cross).T)


def _solved(gram: Float[Tensor, "F F"], cross: Float[Tensor, "F D"]) -> Float[Tensor, "F D"]:
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), device=gram.device)
    return torch.linalg.solve((gram + ridge).double(), cross.double()).float()
