"""A head that judges one draft token at a time, in numpy: for one row of a small network most of torch's time is dispatch."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdecpp.head.card import Calibration

if TYPE_CHECKING:
    from specdecpp.head.model import AcceptanceHead

Estimator = Callable[[Tensor, int, tuple[float, ...]], float]
"""(hidden [D], token, scalars) -> P(accepted)."""


class Arrays(NamedTuple):
    """A head's weights as float32 arrays: what reads one row at a time without torch."""

    weight: np.ndarray | None
    """[W, D + S] of the layer in front of the blocks, None where there is none."""
    table: np.ndarray
    """[V or 1, W]: what a token adds to it, its bias included."""
    blocks: np.ndarray
    """[L, W, W]"""
    biases: np.ndarray
    """[L, W]"""
    output: np.ndarray
    """[W]"""
    output_bias: float


class RowEstimator:
    """A head for one row, in numpy: P(accepted). The weights are those of now."""

    def __init__(self, head: "AcceptanceHead", calibration: Calibration):
        self.card, self.arrays, self.calibration = head.card, head.arrays(), calibration
        half = np.float32(0.5)  # x sigmoid(x) is h + h tanh(h) with h = x/2
        self._blocks = [(half * w, half * b) for w, b in zip(self.arrays.blocks, self.arrays.biases, strict=True)]
        self._shift, self._slope = math.log(calibration.rejection_weight), 1 / calibration.temperature

    @np.errstate(invalid="ignore")  # a BLAS may compute with what lies beside a short row, and numpy warns of that
    def __call__(self, hidden: Tensor, token: int, scalars: tuple[float, ...]) -> float:
        weight, table, _, _, output, output_bias = self.arrays
        is_plain = hidden.dtype == torch.float32 and not hidden.requires_grad and hidden.device.type == "cpu"
        x = hidden.numpy() if is_plain else hidden.detach().float().cpu().numpy()
        if weight is not None:
            if scalars:
                x = np.concatenate((x, np.array(scalars, np.float32)))
            x = weight @ x
            x += table[token if len(table) > 1 else 0]
        for w, b in self._blocks:
            h = w @ x
            h += b
            gate = np.tanh(h)
            gate += 1
            gate *= h
            x = x + gate
        logit = (float(output @ x) + output_bias + self._shift) * self._slope + self.calibration.bias
        return 1 / (1 + math.exp(-min(max(logit, -700.0), 700.0)))
