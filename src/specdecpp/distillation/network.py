"""The draft as a network: the target's first layers unchanged, layers of its own on top, and the target's output layer.

    embedding, layers 0 .. E-1   the target's, frozen: their states are computed once (`text`)
    layers E .. E+T-1            the draft's own, started from the target's E-th and its last ones (`start`), and trained
    last norm                    started from the target's, trained
    output layer                 the target's rows of the likeliest tokens (`backends.trimmed`)

It is a model of the target's own class with fewer layers, so that whatever runs the target runs the draft.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from specdecpp import cache_dir
from specdecpp.backends import trimmed
from specdecpp.errors import BackendError


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of a draft."""

    kept: int
    """Layers of the target, its first ones."""
    own: int
    """Layers of its own on top."""
    tokens: int | None = None
    """Tokens that it can say; None: all of them."""

    def __post_init__(self) -> None:
        if self.kept < 0 or self.own < 1 or (self.tokens is not None and self.tokens < 2):
            raise ValueError(f"a draft keeps 0 layers or more, has 1 of its own and 2 tokens at least, got {self}")

    def layers(self, num: int) -> list[int]:
        """Indices of the target's `num` layers that a draft starts from: the first, and for its own the next and the last."""
        return [*range(self.kept + 1), *range(num - self.own + 1, num)]


def check_smaller(target: Any, shape: Shape) -> None:
    """Raise `BackendError` for a draft that is no smaller than its target."""
    num = len(target.model.layers)
    if shape.kept + shape.own >= num:
        name = type(target).__name__
        raise BackendError(
            f"a draft of {shape.kept}+{shape.own} layers is no smaller than {name} with its {num}. Ask for fewer."
        )


def of_layers(target: Any, indices: Sequence[int], *, shares: bool = False) -> Any:
    """A model of the target's class, of copies of these of its layers in this order; embedding and output layer are shared.
    One that `shares` the layers too is for passes without a cache."""
    if shares:
        return _assembled(target, [target.model.layers[i] for i in indices], target.model.norm, indices)
    layers = [copy.deepcopy(target.model.layers[i]) for i in indices]
    for place, layer in enumerate(layers):
        if hasattr(layer.self_attn, "layer_idx"):
            layer.self_attn.layer_idx = place
    return _assembled(target, layers, copy.deepcopy(target.model.norm), indices)


def draft(target: Any, shape: Shape) -> Any:
    """An untrained draft of a shape."""
    return of_layers(target, shape.layers(len(target.model.layers)))


def tail(model: Any, kept: int) -> Any:
    """A draft's layers from `kept` on as a model of their own, over the same weights; it reads states as `inputs_embeds`."""
    layers = model.model.layers
    return _assembled(model, [*layers[kept:]], model.model.norm, range(kept, len(layers)))


def _assembled(model: Any, layers: Sequence[nn.Module], norm: nn.Module, indices: Sequence[int]) -> Any:
    """A model of these layers; `indices` are their places in the other one."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [model.config.layer_types[i] for i in indices]
    with torch.device("meta"):
        made = type(model)(config)
    body, old = made.model, model.model
    body.layers, body.norm = nn.ModuleList(layers), norm
    body.embed_tokens, body.rotary_emb, made.lm_head = old.embed_tokens, old.rotary_emb, model.lm_head
    made.generation_config = copy.deepcopy(model.generation_config)
    return made.eval()


def shape_of(draft: Any, target: Any) -> Shape | None:
    """The shape of a draft which was cut from this target; None for another model, and for one with no layer of its own."""
    layers = draft.model.layers
    pairs = zip(layers, target.model.layers, strict=False)
    kept = sum(1 for _ in takewhile(lambda pair: _are_same(*pair), pairs))
    if not 0 < kept < len(layers) or not _are_same(draft.model.embed_tokens, target.model.embed_tokens):
        return None
    ids = getattr(draft.config, trimmed.KEY, None)
    return Shape(kept=kept, own=len(layers) - kept, tokens=None if ids is None else len(ids))


def _are_same(layer: nn.Module, other: nn.Module) -> bool:
    """Tell whether two layers have the same weights in bfloat16, the type of a draft's checkpoint."""
    pairs = zip(layer.parameters(), other.parameters(), strict=False)
    return all(a.shape == b.shape and torch.equal(a.bfloat16(), b.bfloat16()) for a, b in pairs)


class _HalfLinear(nn.Linear):
    """A linear layer with its product in bfloat16, whose result has the type of its input."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.bfloat16()).to(input.dtype)


def with_half_products(model: Any) -> Any:
    """The model with its matrices in bfloat16: a whole model in bfloat16 may be a third off (`backends.probe`)."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                half = copy.deepcopy(child).bfloat16()
                half.__class__ = _HalfLinear
                setattr(module, name, half)
    return model


def is_fast_at_half(device: torch.device) -> bool:
    """Tell whether products in bfloat16 take less time than in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    flags = cache_dir.processor().split()
    return device.type == "cpu" and any(flag in flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))


@contextmanager
def caught(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Inputs of a layer during this block: a tensor for each pass."""
    found: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(args[0] if args else kwargs["hidden_states"])

    handle = layer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()
