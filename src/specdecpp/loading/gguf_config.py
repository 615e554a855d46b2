"""The hyperparameters in a GGUF file, as a configuration of transformers.

    Header -> unsupported (a reason, or None) -> configured -> config

The keys are those of the GGUF specification. Details that a file leaves to the architecture (Gemma 3's second rotary base, its
scale of attention) are as in llama.cpp's source, src/llama-model.cpp.
"""

from typing import Any

import numpy as np

from specdecpp.backends import trimmed
from specdecpp.loading.gguf_header import Header

FAMILIES = {
    "llama": "LlamaForCausalLM",  # Mistral's files, too, call themselves so
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
"""Architectures that are read here, and their classes in transformers."""
FACTORS = "rope_freqs.weight"
"""The tensor of the divisors of rotary frequencies (Llama 3)."""
OUTPUT_IDS = f"specdecpp.{trimmed.KEY}"
"""The metadata key of the tokens that a trimmed output layer scores."""
_LONG_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
_WIDEST = 2**20
_GEMMA_27B = 62  # layers of the one Gemma 3 whose attention has another scale
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def unsupported(header: Header) -> str | None:
    """The reason why a model that may be sound is not read here; None where it is."""
    architecture = header.text("general.architecture")
    if architecture not in FAMILIES:
        return f"its architecture is {architecture}, and {', '.join(FAMILIES)} are read"
    if header.integer(f"{architecture}.expert_count", 0):
        return "it is a mixture of experts"
    for key in ("head_count", "head_count_kv"):
        if isinstance(header.values.get(f"{architecture}.attention.{key}"), np.ndarray):
            return "its layers differ in their numbers of heads"
    if (scaling := header.text(f"{architecture}.rope.scaling.type", "none")) not in ("none", "linear", "yarn", "longrope"):
        return f"its rotary angles are scaled by {scaling}"
    key_size, value_size = _head_sizes(header, architecture)
    if key_size != value_size:
        return f"its keys are {key_size} wide and its values {value_size}"
    turned = header.integer(f"{architecture}.rope.dimension_count", key_size, least=1)
    if turned != key_size and architecture != "phi3":
        return f"its rotary angles turn {turned} of {key_size} values of a head"
    readable = _readable()
    if strange := sorted({f"{e.kind} ({name})" for name, e in header.tensors.items() if e.kind not in readable}):
        return f"its weights are stored as {strange[0]}, which is not known here"
    return None


def configured(header: Header) -> Any:
    """The configuration. Raises `BackendError` for one that contradicts itself or the tensors, or that transformers refuses."""
    import transformers

    architecture = header.text("general.architecture")
    arguments = _arguments(header, architecture)
    _check_widths(header, arguments)
    family = getattr(transformers, FAMILIES[architecture])
    try:
        return family.config_class(**arguments)
    except Exception as error:  # its checks raise whatever they like
        told = " ".join(str(error).split())
        header.fail(f"describes a model that transformers refuses ({told})")


def num_heads(header: Header, architecture: str) -> tuple[int, int]:
    """The numbers of heads of q, and of k and v."""
    heads = header.integer(f"{architecture}.attention.head_count", least=1, most=_WIDEST)
    return heads, header.integer(f"{architecture}.attention.head_count_kv", heads, least=1, most=_WIDEST)


def _head_sizes(header: Header, architecture: str) -> tuple[int, int]:
    heads = header.integer(f"{architecture}.attention.head_count", least=1, most=_WIDEST)
    even = header.integer(f"{architecture}.embedding_length", least=1, most=_WIDEST) // heads
    key, value = (
        header.integer(f"{architecture}.attention.{what}_length", even, least=2, most=_WIDEST) for what in ("key", "value")
    )
    return key, value


def _arguments(header: Header, architecture: str) -> dict[str, Any]:
    def integer(key: str, *default: int) -> int:
        return header.integer(f"{architecture}.{key}", *default, least=1, most=_WIDEST)

    (heads, kv_heads), size = num_heads(header, architecture), _head_sizes(header, architecture)[0]
    found: dict[str, Any] = {
        "vocab_size": _rows(header, "token_embd.weight"),
        "hidden_size": integer("embedding_length"),
        "intermediate_size": integer("feed_forward_length"),
        "num_hidden_layers": integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "max_position_embeddings": header.integer(f"{architecture}.context_length", least=1),
        "rms_norm_eps": header.number(f"{architecture}.attention.layer_norm_rms_epsilon", above=0.0, most=1.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _angles(header, architecture, size),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if OUTPUT_IDS in header:
        found[trimmed.KEY] = header.numbers(OUTPUT_IDS).tolist()
    window = header.integer(f"{architecture}.attention.sliding_window", 0)
    if architecture == "llama":
        found["attention_bias"], found["mlp_bias"] = (
            "blk.0.attn_q.bias" in header.tensors,
            "blk.0.ffn_up.bias" in header.tensors,
        )
    elif architecture == "gemma3":
        base = header.number(f"{architecture}.rope.freq_base_swa", 1e4, above=0.0)
        found |= {
            "sliding_window": window,
            "query_pre_attn_scalar": found["hidden_size"] // heads if found["num_hidden_layers"] == _GEMMA_27B else size,
            "rope_parameters": {
                "full_attention": found["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": base},
            },
            "final_logit_softcapping": header.number(f"{architecture}.final_logit_softcapping", 0.0) or None,
        }
    elif architecture == "phi3":
        turned = header.integer(f"{architecture}.rope.dimension_count", size, least=1)
        found["rope_parameters"]["partial_rotary_factor"] = turned / size
        found["sliding_window"] = window or None
        if size * heads == found["hidden_size"]:
            del found["head_dim"]  # transformers derives it
    return found


def _angles(header: Header, architecture: str, size: int) -> dict[str, Any]:
    """The rotary angles. Factors in a tensor are Llama 3's if they are what its rule gives; else they replace frequencies."""
    plain = {"rope_type": "default", "rope_theta": header.number(f"{architecture}.rope.freq_base", 1e4, above=0.0)}
    scaling = f"{architecture}.rope.scaling"
    kind = header.text(f"{scaling}.type", "linear" if f"{architecture}.rope.scale_linear" in header else "none")
    original = f"{scaling}.original_context_length"
    if all(name in header.tensors for name in _LONG_FACTORS):
        context = header.integer(f"{architecture}.context_length", least=1)
        names = zip(("long_factor", "short_factor"), _LONG_FACTORS, strict=True)
        before = header.integer(original, context, least=2)
        return plain | {
            "rope_type": "longrope",
            "original_max_position_embeddings": before,
            "factor": context / before,
            **{key: _vector(header, name).tolist() for key, name in names},
        }
    if FACTORS in header.tensors:
        factors = _vector(header, FACTORS)
        if len(factors) != size // 2 or not (np.isfinite(factors).all() and (factors > 0).all()):
            header.fail(f"has {FACTORS} with {len(factors)} values, where {size // 2} above 0 belong")
        return (
            plain
            if kind != "none" or not _is_llama3(factors, plain["rope_theta"])
            else plain | _LLAMA3 | {"factor": round(float(factors.max()), 4)}
        )
    if kind == "none":
        return plain
    old = header.number(f"{architecture}.rope.scale_linear", 1.0, above=0.0)
    factor = header.number(f"{scaling}.factor", old, above=0.0)
    if kind == "linear":
        return plain if factor == 1 else plain | {"rope_type": "linear", "factor": factor}
    return plain | {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": header.integer(original, least=1),
        "beta_fast": header.number(f"{scaling}.yarn_beta_fast", 32.0, above=0.0),
        "beta_slow": header.number(f"{scaling}.yarn_beta_slow", 1.0, above=0.0),
    }


def _is_llama3(factors: np.ndarray, theta: float) -> bool:
    """True for what Llama 3 divides its frequencies by."""
    long, short = 8192 / _LLAMA3["low_freq_factor"], 8192 / _LLAMA3["high_freq_factor"]
    waves = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
    smooth = (8192 / waves - 1) / 3
    ruled = np.where(waves > long, factors.max(), np.where(waves < short, 1, 1 / ((1 - smooth) / factors.max() + smooth)))
    return bool(np.allclose(ruled, factors, rtol=1e-4))


def _check_widths(header: Header, found: dict[str, Any]) -> None:
    """Check the counts, before a model is built by them, against the tensors."""
    blocks = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    wanted = found["num_hidden_layers"]
    if blocks != {str(i) for i in range(len(blocks))} or len(blocks) != wanted:
        header.fail(f"announces {wanted} layers and has tensors of {len(blocks)}")
    size, heads, kv = _size(found), found["num_attention_heads"], found["num_key_value_heads"]
    is_joined = "blk.0.attn_qkv.weight" in header.tensors
    gates = 2 if is_joined else 1
    expected = {
        "token_embd.weight": (found["vocab_size"], found["hidden_size"]),
        "blk.0.attn_qkv.weight" if is_joined else "blk.0.attn_q.weight": (
            (heads + 2 * kv * is_joined) * size,
            found["hidden_size"],
        ),
        "blk.0.ffn_up.weight": (gates * found["intermediate_size"], found["hidden_size"]),
    }
    for name, shape in expected.items():
        check_shape(header, name, shape)
    if heads % kv:
        header.fail(f"announces {heads} heads over {kv} of keys and values, which do not divide them")


def check_shape(header: Header, name: str, shape: tuple[int, ...]) -> None:
    """Raise `BackendError` unless the tensor is there, in the shape that the metadata ask for."""
    entry = header.tensors.get(name)
    if entry is None or entry.shape != shape:
        found = f"no {name}" if entry is None else f"{name} of {list(entry.shape)}"
        header.fail(f"has {found}, where its metadata ask for {list(shape)}")


def _size(found: dict[str, Any]) -> int:
    return found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"]


def _rows(header: Header, name: str) -> int:
    entry = header.tensors.get(name)
    if entry is None or len(entry.shape) != 2 or entry.shape[0] > 2**24:
        header.fail(f"has {f'no {name}' if entry is None else f'{name} of {list(entry.shape)}'}, where each token has a row")
    return entry.shape[0]


def _vector(header: Header, name: str) -> np.ndarray:
    entry = header.tensors[name]
    if entry.kind != "F32" or len(entry.shape) != 1:
        header.fail(f"has {name} of {list(entry.shape)} in {entry.kind}, where a list in F32 belongs")
    return entry.data[0].view("<f4")


def _readable() -> set[str]:
    """Types whose values the package gguf computes."""
    from gguf import quants

    return {"F32", "F16"} | {kind.name for kind in quants._type_traits}
