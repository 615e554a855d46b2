"""Quantised weights for tests, in types that the package gguf cannot write too: random blocks with sane scales.

>>> fabricated("Q4_K", 8, 256, seed=0).dequantised().shape
torch.Size([8, 256])
"""

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from specdecpp.loading.gguf_reading import Stored

_SCALES: dict[str, dict[int, float]] = {
    "Q8_0": {0: 1 / 74},
    "Q4_0": {0: 1 / 4.6},
    "Q4_1": {0: 1 / 4.6, 2: -7.5 / 4.6},
    "Q5_0": {0: 1 / 9.2},
    "Q5_1": {0: 1 / 9.2, 2: -15.5 / 9.2},
    "Q2_K": {80: 1 / 12, 82: 1 / 7},
    "Q3_K": {108: 1 / 40},
    "Q4_K": {0: 1 / 190, 2: 7.5 / 190},
    "Q5_K": {0: 1 / 380, 2: 15.5 / 380},
    "Q6_K": {208: 1 / 1400},
    "IQ4_NL": {0: 1 / 70},
    "IQ4_XS": {0: 1 / 1300},
}
"""Where a block has its float16 scales, and what they are for values of deviation one or so."""


def fabricated(kind: str, out: int, inputs: int, seed: int) -> Stored:
    """A matrix [out, inputs] of values around zero, of deviation 1/sqrt(inputs) or so. Every bit of a block occurs."""
    rng, size = np.random.default_rng(seed), inputs**-0.5
    if kind in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        values = torch.from_numpy(rng.normal(0, size, (out, inputs))).to(dtype)
        return Stored(kind, (out, inputs), values.contiguous().view(torch.uint8).numpy().reshape(out, -1))
    values_of_block, size_of_block = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    assert inputs % values_of_block == 0, f"{kind} packs {values_of_block} values at a time"
    blocks = rng.integers(0, 256, (out * inputs // values_of_block, size_of_block), dtype=np.uint8)
    spread = rng.uniform(0.5, 1.5, len(blocks))  # of all scales of a block alike, so that its values stay around zero
    for at, scale in _SCALES[kind].items():
        blocks[:, at : at + 2] = (scale * size * spread).astype("<f2")[:, None].view(np.uint8)
    return Stored(kind, (out, inputs), blocks.reshape(out, -1))
