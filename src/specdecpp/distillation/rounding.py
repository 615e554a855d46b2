"""The rounding of a draft's own layers to the types of its file, which they are trained through.

Forward they are rounded, backward it is as if they were not (the straight-through estimator, Bengio et al. 2013), so that four
bits, which make a draft's step cheaper by what it need not read, cost little of its acceptance.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specdecpp.distillation.target import Target
from specdecpp.loading.gguf import GGUF
from specdecpp.loading.gguf_writing import Precision

BLOCK = 32
_FEW_BITS = 6.0
"""Bits a weight, scales included: between formats of four and five bits, and others."""


def precision_of(target: Target) -> Precision | None:
    """The type of a draft's own layers beside a target's file: four bits where the target's matrices have about as many, else
    eight. None beside a checkpoint, whose draft has no such file."""
    if not isinstance(target.source, GGUF):
        return None
    matrices = [w for name, w in target.source.stored.items() if name.startswith("model.layers.0.") and len(w.shape) == 2]
    bits = 8 * sum(w.data.nbytes for w in matrices) / sum(w.shape[0] * w.shape[1] for w in matrices)
    return Precision.q4_1 if bits < _FEW_BITS else Precision.q8_0


def rounded(weight: Float[Tensor, "R C"], precision: Precision | None) -> Float[Tensor, "R C"]:
    """The values that a file of this precision will have, to the bit; gradients pass as if they were the weight itself. Rows
    that are not of whole blocks are stored in 16 bits and stay unchanged."""
    if precision is None or weight.shape[-1] % BLOCK:
        return weight
    with torch.no_grad():
        blocks = weight.reshape(-1, BLOCK)
        if precision is Precision.q4_1:
            low = blocks.amin(-1, keepdim=True)
            step = (blocks.amax(-1, keepdim=True) - low) / 15
            code = (blocks - low).mul_(_inverse(step)).add_(0.5).floor_().clamp_(0, 15)
            found = code.mul_(_half(step)).add_(_half(low))
        else:
            assert precision is Precision.q8_0, "the other type that `precision_of` names"
            step = blocks.abs().amax(-1, keepdim=True) / 127
            code = blocks * _inverse(step)
            found = (code.sign() * (code.abs() + 0.5).floor()).mul_(_half(step))  # halves away from zero
    return found.reshape(weight.shape) + (weight - weight.detach())


def layers(model: nn.Module, precision: Precision | None) -> dict[str, Tensor]:
    """Matrices of a model's layers by name, rounded, for `torch.func.functional_call`."""
    named = ((name, p) for name, p in model.named_parameters() if name.startswith("layers.") and p.ndim == 2)
    return {name: rounded(p, precision) for name, p in named}


def _inverse(step: Tensor) -> Tensor:
    """1 / step; 0 for a block of equal weights."""
    return torch.where(step == 0, 0.0, 1 / step)


def _half(scale: Tensor) -> Tensor:
    """The scale as a file has it, in two bytes."""
    return scale.half().float()
