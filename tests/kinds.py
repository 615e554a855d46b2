"""The kinds of transformers models the real-model tests run on, as `testing.tiny_model` takes them; what backends must keep."""

import inspect
from functools import cache
from typing import Any

import torch
from transformers import LlamaForCausalLM

from specdecpp.backends import NativeModel
from specdecpp.testing import tiny_model

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
"""Where what a GPU records can be tried; elsewhere the same code is called."""
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""What a model of the installed transformers calls its cache: renamed in 5.24."""

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


def assert_same_bits(backend: NativeModel, text: list[int], *cuts: list[int], threads: int) -> None:
    """Logits and states of a text do not depend on the parts that it is read in, of these lengths, nor on the threads."""
    whole = backend.with_threads(1).new_cache().extend(text, rows=len(text))
    for lengths in cuts:
        compiled, ends = backend.with_threads(threads).new_cache(), [sum(lengths[: i + 1]) for i in range(len(lengths))]
        parts = [compiled.extend(text[end - n : end], rows=n) for n, end in zip(lengths, ends, strict=True)]
        for found, expected in zip(zip(*parts, strict=True), whole, strict=True):
            assert torch.equal(torch.cat(found), expected), f"read {lengths} at a time"
