"""The kinds of transformers models the real-model tests run on, as `testing.tiny_model` takes them."""

from functools import cache
from typing import Any

import torch

from specdecpp.testing import tiny_model

# Windows of 6: shorter than nearly every sequence in the tests.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 6},
    "gemma": {},
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {},
    "gpt_neox": {},
    "opt": {},
    "phi": {},
    "mixtral": {"sliding_window": 6},
}


@cache
def model_of(kind: str, dtype: torch.dtype = torch.float32, seed: int = 1) -> Any:
    """A tiny model, made once per test run; nobody may change it."""
    return tiny_model(kind, seed=seed, **KINDS[kind]).to(dtype)
