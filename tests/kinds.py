"""Models of transformers that backends are tested on, as `testing.tiny_model` takes them; what backends must keep."""

import inspect
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from specdecpp.backends import EagerModel, GraphModel, LeanModel, NativeModel
from specdecpp.backends.native import compiler
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


SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.5, 2.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    "long_factor": [9.0] * 8,
}
TWO_ANGLES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}


def angles(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4} | more}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "gemma3": ("gemma3_text", SLIDING),
    "mistral-window": ("mistral", {"sliding_window": 6}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "as-many-kv-heads": ("llama", {"num_key_value_heads": 4}),
    "wide-heads": ("qwen3", {"head_dim": 48}),
    "odd-widths": ("llama", {"intermediate_size": 37, "hidden_size": 44, "vocab_size": 71}),
    "llama3-angles": ("llama", angles("llama3", **LLAMA3)),
    "linear-angles": ("llama", angles("linear", factor=2.0)),
    "yarn-angles": ("qwen3", angles("yarn", factor=4.0, original_max_position_embeddings=32)),
    "window-of-one": ("mistral", {"sliding_window": 1}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3-window": ("qwen3", {"use_sliding_window": True} | SLIDING),
    "phi3-window": ("phi3", {"sliding_window": 6}),
    "phi3-partial": ("phi3", angles("default", partial_rotary_factor=0.5)),
    "phi3-longrope": ("phi3", {"original_max_position_embeddings": 16} | angles("longrope", **LONGROPE)),
    "gemma3-scaled": (
        "gemma3_text",
        SLIDING | {"query_pre_attn_scalar": 20, "tie_word_embeddings": True, "rope_parameters": TWO_ANGLES},
    ),
}
"""Members of the families that `backends.families` describes, with heads of 16, which compiled code can have."""
TEXT = [1, 7, 3, 9, 12, 30, 2, 5, 41, 8, 8, 17]
LONG = [int(t) for t in torch.randint(0, 64, (700,), generator=torch.Generator().manual_seed(0))]
needs_compiler = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
BACKENDS: dict[str, Any] = {"eager": EagerModel, "lean": LeanModel, "graphs": GraphModel, "native": NativeModel}
each_backend = pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=needs_compiler) if name == "native" else name for name in BACKENDS]
)


def built(variant: str, **more: Any) -> Any:
    """A tiny model whose norms and biases differ from each other and from what they begin as."""
    kind, config = VARIANTS[variant]
    sizes = {"hidden_size": 64, "head_dim": 16} | config | more
    model, generator = tiny_model(kind, seed=1, **sizes), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


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


@torch.inference_mode()
def full_pass(model: Any, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, V] and last hidden states after the final norm [T, D] of one pass without a cache."""
    inputs = torch.tensor([tokens], device=model.device)
    hidden = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
    return model(input_ids=inputs, use_cache=False).logits[0], hidden[0]
