"""A GGUF file as a model of transformers: its shape from the metadata, and its weights as they lie in the file.

    Header -> unsupported (a reason, or None) -> built: a model without weights -> tensors_of, stored_as, filled

Details that a file leaves to the architecture (Gemma 3's second rotary base, its scale of attention) are as in llama.cpp's
source, src/llama-model.cpp.

Two things are laid out in a file as transformers does not have them, and put back here: under the architecture "llama" the rows
of q and k (llama.cpp turns neighbouring pairs, transformers the two halves of a head), which moves whole rows and leaves them
packed; and Gemma's norms, to which 1 was added.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
"""Keys of an architecture's sizes, and the fields of its configuration in transformers."""
FACTORS = "rope_freqs.weight"
"""The tensor of the divisors of rotary frequencies (Llama 3)."""
OUTPUT_IDS = f"specdecpp.{trimmed.KEY}"
"""The metadata key of the tokens that a trimmed output layer scores."""
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Llama 3's rule for rotary frequencies but for its factor, the one rule that is written as a tensor and read from it."""
_LONG = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
_GEMMA_27B = 62  # layers of the one Gemma 3 whose attention has another scale
_SCALES = {
    **{"Q4_0": (18, 0), "Q4_1": (20, 0, 2), "Q5_0": (22, 0), "Q5_1": (24, 0, 2), "Q8_0": (34, 0)},
    **{"Q2_K": (84, 80, 82), "Q3_K": (110, 108), "Q4_K": (144, 0, 2), "Q5_K": (176, 0, 2), "Q6_K": (210, 208)},
}
"""Bytes of a block, and where in it its float16 scales lie."""
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
log = logging.getLogger("specdecpp.loading")


@dataclass(frozen=True, eq=False)
class Stored:
    """One matrix or vector as it lies in a file.

    kind     GGML's name of the type ("F32", "BF16", "Q8_0", "Q4_K", ...)
    shape    as torch has it: (out, in) or (n,)
    source   its bytes, uint8 [out, bytes of a row] (a vector: [1, bytes]), or what reads them each time
    """

    kind: str
    shape: tuple[int, ...]
    source: np.ndarray | Callable[[], np.ndarray]

    @property
    def data(self) -> np.ndarray:
        return self.source() if callable(self.source) else self.source

    def dequantised(self) -> Tensor:
        """The values, float32, of this shape."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        with np.errstate(all="ignore"):  # infinite scales are the file's affair
            values = dequantize(self.data, GGMLQuantizationType[self.kind])
        return torch.from_numpy(np.array(values, np.float32).reshape(self.shape))


# The model


def built(header: Header) -> Any:
    """The model of transformers with its weights on the meta device, and real tables of angles."""
    import transformers
    from transformers.initialization import no_init_weights

    kind = getattr(transformers, FAMILIES[header.text("general.architecture")])
    arguments = _arguments(header)
    try:
        with torch.device("meta"), no_init_weights():
            model = kind(kind.config_class(**arguments))
        rotary = model.model.rotary_emb
        model.model.rotary_emb = type(rotary)(config=model.config)
    except Exception as error:  # its checks raise whatever they like
        header.fail(f"describes a model that transformers refuses ({' '.join(str(error).split())})")
    model.tie_weights()
    for module in model.modules():
        if isinstance(getattr(module, "embed_scale", None), Tensor):
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
    return model.eval()


def filled(model: Any, stored: Mapping[str, Stored], dtype: torch.dtype) -> Any:
    """The same model with the values of a file, on the CPU. One tensor at a time is held twice."""
    for name, own in stored.items():
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, nn.Parameter(own.dequantised().to(dtype), requires_grad=False))
    model.tie_weights()
    return model


def tensors_of(header: Header, model: Any) -> dict[str, str]:
    """The file's name of every parameter; raises for one that is missing, of another shape, or left over."""
    from gguf.constants import MODEL_ARCH
    from gguf.tensor_mapping import get_tensor_name_map

    architecture = header.text("general.architecture")
    names = get_tensor_name_map(MODEL_ARCH[architecture.upper()], model.config.num_hidden_layers)
    found, rest = {}, set(header.tensors) - {FACTORS, *_LONG.values()}
    for name, parameter in model.named_parameters():
        own = found[name] = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        entry = header.tensors.get(own)
        if entry is None or entry.shape != tuple(parameter.shape):
            there = f"no {own}" if entry is None else f"{own} of {list(entry.shape)}"
            header.fail(f"has {there}, where its metadata ask for {list(parameter.shape)}")
        rest.discard(own)
    if rest:
        header.fail(f"has {len(rest)} tensors that a model of {architecture} has no place for, as {min(rest)}")
    return found


def stored_as(header: Header, name: str, own: str) -> Stored:
    """A parameter as transformers lays it out, of the tensor that the file calls `own`."""
    entry, role, architecture = header.tensors[own], name.split(".")[-2], header.text("general.architecture")
    given = Stored(entry.kind, entry.shape, lambda: entry.data)
    if architecture == "llama" and role in ("q_proj", "k_proj"):
        num, heads = entry.shape[0], _width(header, "attention.head_count")
        if role == "k_proj":
            heads = _width(header, "attention.head_count_kv", heads)
        order = np.arange(num).reshape(heads, -1, 2).transpose(0, 2, 1).reshape(-1)  # neighbouring pairs -> two halves

        def halves() -> np.ndarray:
            data = entry.data  # a matrix's rows move, a vector's values
            return data.reshape(num, -1)[order].reshape(data.shape)

        return Stored(entry.kind, entry.shape, halves)
    if architecture == "gemma3" and role.endswith("norm"):
        return Stored("F32", entry.shape, lambda: (given.dequantised() - 1).reshape(1, -1).view(torch.uint8).numpy())
    return given


# Metadata


def unsupported(header: Header) -> str | None:
    """The reason why a model that may be sound is not read here; None where it is."""
    architecture = header.text("general.architecture")
    if architecture not in FAMILIES:
        return f"its architecture is {architecture}, and {', '.join(FAMILIES)} are read"
    if header.integer(f"{architecture}.expert_count", 0):
        return "it is a mixture of experts"
    if (scaling := header.text(f"{architecture}.rope.scaling.type", "none")) not in ("none", "linear", "yarn", "longrope"):
        return f"its rotary angles are scaled by {scaling}"
    if FACTORS in header.tensors and (scaling != "none" or not _is_llama3(header)):
        return "its rotary frequencies are divided by factors that are not Llama 3's"
    size = _head_size(header)
    turned = _width(header, "rope.dimension_count", size)
    if turned != size and architecture != "phi3":
        return f"its rotary angles turn {turned} of {size} values of a head"
    from gguf import quants

    readable = {"F32", "F16"} | {kind.name for kind in quants._type_traits}
    if strange := sorted({f"{e.kind} ({name})" for name, e in header.tensors.items() if e.kind not in readable}):
        return f"its weights are stored as {strange[0]}, which is not known here"
    return None


def _width(header: Header, key: str, default: int | None = None) -> int:
    most = 2**31 - 1 if key == "context_length" else 2**20
    return header.integer(f"{header.text('general.architecture')}.{key}", default, least=1, most=most)


def _real(header: Header, key: str, default: float | None = None) -> float:
    return header.number(f"{header.text('general.architecture')}.{key}", default, above=0.0)


def _head_size(header: Header) -> int:
    return _width(header, "attention.key_length", _width(header, "embedding_length") // _width(header, "attention.head_count"))


def _arguments(header: Header) -> dict[str, Any]:
    """The fields of the configuration of transformers."""
    architecture = header.text("general.architecture")
    heads, size = _width(header, "attention.head_count"), _head_size(header)
    layers = len({name.split(".")[1] for name in header.tensors if name.startswith("blk.")})
    if (announced := _width(header, "block_count")) != layers:  # before a model of so many is built
        header.fail(f"announces {announced} layers and has tensors of {layers}")
    if "token_embd.weight" not in header.tensors:
        header.fail("has no token_embd.weight, where each token has a row")
    found: dict[str, Any] = {
        **{field: _width(header, key, heads if key == "attention.head_count_kv" else None) for key, field in SIZES.items()},
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "head_dim": size,
        "rms_norm_eps": _real(header, "attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _angles(header),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    if OUTPUT_IDS in header:
        found[trimmed.KEY] = header.numbers(OUTPUT_IDS).tolist()
    window = header.integer(f"{architecture}.attention.sliding_window", 0)
    if architecture == "llama":
        found["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    elif architecture == "gemma3":
        near = {"rope_type": "default", "rope_theta": _real(header, "rope.freq_base_swa", 1e4)}
        found |= {
            "sliding_window": window,
            "query_pre_attn_scalar": found["hidden_size"] // heads if layers == _GEMMA_27B else size,
            "rope_parameters": {"full_attention": found["rope_parameters"], "sliding_attention": near},
        }
    elif architecture == "phi3":
        found["rope_parameters"]["partial_rotary_factor"] = _width(header, "rope.dimension_count", size) / size
        found["sliding_window"] = window or None
    return found


def _angles(header: Header) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": _real(header, "rope.freq_base", 1e4)}
    kind = header.text(f"{header.text('general.architecture')}.rope.scaling.type", "none")
    if all(name in header.tensors for name in _LONG.values()):
        context = _width(header, "context_length")
        before = _width(header, "rope.scaling.original_context_length", context)
        found |= {key: _vector(header, name).tolist() for key, name in _LONG.items()}
        found |= {"rope_type": "longrope", "original_max_position_embeddings": before, "factor": context / before}
    elif FACTORS in header.tensors:
        found |= LLAMA3 | {"factor": round(float(_vector(header, FACTORS).max()), 4)}
    elif kind in ("linear", "yarn"):
        found |= {"rope_type": kind, "factor": _real(header, "rope.scaling.factor", 1.0)}
    if found["rope_type"] == "yarn":
        found |= {
            "original_max_position_embeddings": _width(header, "rope.scaling.original_context_length"),
            "beta_fast": _real(header, "rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": _real(header, "rope.scaling.yarn_beta_slow", 1.0),
        }
    return found


def _is_llama3(header: Header) -> bool:
    """True where frequencies are divided by what Llama 3's rule divides them by."""
    factors = _vector(header, FACTORS)
    if len(factors) != _head_size(header) // 2 or not factors.max() > 0:
        return False
    waves = 2 * np.pi * _real(header, "rope.freq_base", 1e4) ** (np.arange(len(factors)) / len(factors))
    smooth = (8192 / waves - 1) / 3
    ruled = np.where(smooth < 0, factors.max(), np.where(smooth > 1, 1, 1 / ((1 - smooth) / factors.max() + smooth)))
    return bool(np.allclose(ruled, factors, rtol=1e-4))


def _vector(header: Header, name: str) -> np.ndarray:
    entry = header.tensors[name]
    if entry.kind != "F32" or len(entry.shape) != 1:
        header.fail(f"has {name} of {list(entry.shape)} in {entry.kind}, where a list in F32 belongs")
    return entry.data[0].view("<f4")


# Values


def digest_of(header: Header) -> str:
    """32 hex digits of all that a model computes with: the numbers of its architecture and every byte of its tensors, or of the
    whole file where a tensor has a type that only llama.cpp knows.

    Raises `BackendError` for values or scales that are infinite or no numbers: such a model may compute nonsense.
    """
    log.info("reading all of %s", header.path)
    architecture = header.text("general.architecture")
    numbers = {key: str(header.values[key]) for key in sorted(header.values) if key.startswith(f"{architecture}.")}
    digest = hashlib.sha256(str(numbers).encode())
    if OUTPUT_IDS in header:
        digest.update(str(header.numbers(OUTPUT_IDS).tolist()).encode())
    if not all(entry.row for entry in header.tensors.values()):
        for path in header.paths:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()[:32]
    for name, entry in sorted(header.tensors.items()):
        digest.update(f"{name} {entry.kind} {entry.shape}".encode())
        for part in entry.parts():
            if not _is_finite(entry.kind, part):
                header.fail(f"has {name} with values that are infinite or no numbers")
            digest.update(memoryview(part))  # pyright: ignore[reportArgumentType]
    return digest.hexdigest()[:32]


def _is_finite(kind: str, rows: np.ndarray) -> bool:
    """False where a value, or a scale of a block, has the exponent of what is infinite or no number."""
    if kind in _EXPONENTS:
        dtype, bits = _EXPONENTS[kind]
        return not (rows.view(dtype) & bits == bits).any()
    size, *places = _SCALES.get(kind, (1,))
    blocks = rows.reshape(-1, size)
    return not any((blocks[:, at + 1] & 0x7C == 0x7C).any() for at in places)
