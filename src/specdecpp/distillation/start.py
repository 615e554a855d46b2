"""The start of a draft in closed form.

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
from typing import Any

import torch

from specdecpp.backends import families
from specdecpp.distillation.network import Shape, caught, tail
from specdecpp.training.labels import padded

RIDGE = 1e-5
"""Share of the mean square of a feature that is added to the diagonal."""
BATCH = 8
"""Texts of one pass."""


@torch.inference_mode()
def fit(draft: Any, target: Any, texts: Sequence[Sequence[int]], shape: Shape) -> None:
    """Set the draft's first own layer from the target's passes over some texts (ids). Nothing is done where a norm follows the
    feed-forward part, whose output is then not linear in its weights."""
    if any(layer.down_norm is not None for layer in families.described(target).layers):
        return
    own = tail(draft, shape.kept).model
    above = [*target.model.layers, target.model.norm][len(target.model.layers) - shape.own + 1]
    below, product, after = target.model.layers[shape.kept], own.layers[0].mlp.down_proj, [*own.layers[1:], own.norm][0]
    product.weight.zero_()
    gram = cross = torch.zeros((), device=target.device)
    for first in range(0, len(texts), BATCH):
        given = padded(texts[first : first + BATCH], target.device)
        mask = given["attention_mask"]
        with caught(below) as x, caught(above) as y:
            target.model(**given, use_cache=False)
        with caught(product) as features, caught(after) as out:
            own(inputs_embeds=x[0], attention_mask=mask, use_cache=False)
        at = mask.bool()
        f, wanted, found = (states[0][at].float() for states in (features, y, out))
        weighted = f / wanted.square().mean(-1, keepdim=True)  # [N, F]
        gram, cross = gram + weighted.T @ f, cross + weighted.T @ (wanted - found)
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), device=gram.device)
    product.weight.copy_(torch.linalg.solve((gram + ridge).double(), cross.double()).float().T)
