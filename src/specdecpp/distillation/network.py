"""The draft as a network: the target's first layers as they are, layers of its own on top, and the target's output layer.

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
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from specdecpp import cache_dir
from specdecpp.backends import families, trimmed
from specdecpp.errors import BackendError


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How many of the target's first layers are kept, how many of its own the draft has, and how many tokens it can say (None:
    all of them)."""

    kept: int
    own: int
    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.kept < 0 or self.own < 1 or (self.tokens is not None and self.tokens < 2):
            raise ValueError(f"a draft keeps 0 layers or more, has 1 of its own and 2 tokens at least, got {self}")


def check(target: Any, shape: Shape | None = None) -> None:
    """Raise `BackendError` for a target that no draft can be cut from, or not this one."""
    name = type(target).__name__
    if reason := families.refusal(target):
        raise BackendError(
            f"no draft can be cut from {name}: {reason}. Name a model of a family that the compiled backend knows."
        )
    num = int(target.config.num_hidden_layers)
    if shape is not None and shape.kept + shape.own >= num:
        raise BackendError(
            f"a draft of {shape.kept}+{shape.own} layers is no smaller than {name} with its {num}. Ask for fewer."
        )


def of_layers(target: Any, indices: list[int]) -> Any:
    """A model of the target's class, of copies of these of its layers in this order; embedding and output layer are shared."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len(indices)
    if getattr(config, "layer_types", None):
        config.layer_types = [target.config.layer_types[i] for i in indices]
    with torch.device("meta"):
        model = type(target)(config)
    body, of = model.model, target.model
    layers = [copy.deepcopy(of.layers[i]) for i in indices]
    for place, layer in enumerate(layers):
        if hasattr(layer.self_attn, "layer_idx"):
            layer.self_attn.layer_idx = place
    body.layers, body.norm = nn.ModuleList(layers), copy.deepcopy(of.norm)
    body.embed_tokens, body.rotary_emb = of.embed_tokens, of.rotary_emb
    model.lm_head = target.lm_head
    model.generation_config = copy.deepcopy(target.generation_config)
    return model.eval()


def layers_of(num: int, shape: Shape) -> list[int]:
    """Which of the target's `num` layers a draft starts from: the first, and for its own the next and the last."""
    return [*range(shape.kept + 1), *range(num - shape.own + 1, num)]


def draft(target: Any, shape: Shape) -> Any:
    """An untrained draft of a shape: a model of the target's class."""
    return of_layers(target, layers_of(len(target.model.layers), shape))


def shape_of(draft: Any, target: Any) -> Shape | None:
    """The shape of a draft which was cut from this target, whose embedding it has; None for another model, and for one with no
    layer of its own."""
    pairs = zip(draft.model.layers, target.model.layers, strict=False)
    kept = sum(1 for _ in takewhile(lambda layers: _are_same(*layers), pairs))
    if kept == len(draft.model.layers) or not _are_same(draft.model.embed_tokens, target.model.embed_tokens):
        return None
    ids = getattr(draft.config, trimmed.KEY, None)
    return Shape(kept=kept, own=len(draft.model.layers) - kept, tokens=None if ids is None else len(ids))


def _are_same(layer: nn.Module, other: nn.Module) -> bool:
    """Tell whether two tensors are equal in bfloat16, the type of a draft's checkpoint."""
    of = dict(other.named_parameters())
    return all(
        name in of and p.shape == of[name].shape and torch.equal(p.bfloat16(), of[name].bfloat16())
        for name, p in layer.named_parameters()
    )


def tail(model: Any, kept: int) -> Any:
    """A draft's layers from `kept` on as a model of their own, over the same weights; it reads states as `inputs_embeds`."""
    own = of_layers(model, [])
    own.model.layers, own.model.norm = model.model.layers[kept:], model.model.norm
    own.config.num_hidden_layers = len(own.model.layers)
    if getattr(model.config, "layer_types", None):
        own.config.layer_types = model.config.layer_types[kept:]
    return own


class _Products(nn.Module):
    """A linear layer whose product is in bfloat16, and whose sums go on in the type they came in."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().bfloat16(), requires_grad=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().bfloat16(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.weight, self.bias).to(x.dtype)


def with_half_products(model: Any) -> Any:
    """The model with its matrices in bfloat16 and all else as it was: a whole model in bfloat16 may be a third off
    (`backends.probe` compares with float32)."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, _Products(child))
    return model


def is_fast_at_half(device: torch.device) -> bool:
    """Tell whether products in bfloat16 take less time than in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    flags = cache_dir.processor().split()
    return device.type == "cpu" and any(flag in flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))


def batched(texts: Sequence[Sequence[int]], *, device: torch.device) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Texts of several lengths as one batch, and where it holds text."""
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=device)
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts], device=device)
    return ids, mask


@contextmanager
def caught(layer: nn.Module) -> Iterator[list[Tensor]]:
    """The inputs of a layer during this block: a tensor for each pass."""
    found: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(args[0] if args else kwargs["hidden_states"])

    handle = layer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()
