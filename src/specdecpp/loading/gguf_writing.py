"""GGUF files: a model of the Llama family written as llama.cpp and `gguf_reading` read it.

    model, tokenizer -> metadata, vocabulary, tensors -> FILE.gguf

The weights keep their values but for the type they are stored in. Two things are laid out anew: under the architecture
"llama" the rows of q and k, because llama.cpp turns neighbouring pairs where transformers turns the two halves of a head; and
the scaling of rotary angles, which becomes one factor per frequency. The file says which checkpoint it was made from
(`specdecpp.fingerprint`, `fingerprints`), so that a head trained on the checkpoint is known to fit, and it holds
the whole tokenizer.json (`tokenizer.huggingface.json`), so that text becomes the same ids.

Source: the GGUF specification (ggml-org/ggml, docs/gguf.md).
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdecpp import __version__, cache_dir
from specdecpp.backends import trimmed
from specdecpp.backends.families import described
from specdecpp.backends.lean import LeanModel
from specdecpp.errors import BackendError
from specdecpp.loading.fingerprints import fingerprint
from specdecpp.loading.gguf_config import OUTPUT_IDS
from specdecpp.loading.gguf_tokenizer import WHOLE_WORDS, cutting
from specdecpp.loading.models import end_ids

FINGERPRINT = "specdecpp.fingerprint"
"""The metadata key of the checkpoint's fingerprint."""
ENDS = "specdecpp.end_token_ids"
"""The metadata key of all ids that end a text, with commas: GGUF itself has room for one or two."""
SPECIAL = "specdecpp.special_tokens"
"""The metadata key of the special tokens that have no role in GGUF, as a JSON list."""
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_WIDE = ("token_embd.weight", "output.weight")
"""Tensors of eight bits where the rest has four, as llama.cpp's own quantiser keeps these two wider."""
_WAYS = ("qwen2", "llama-bpe", "gpt-2", "smollm")
"""Ways to cut texts that are written, by llama.cpp's names."""
_ADVICE = "llama.cpp's own convert_hf_to_gguf.py knows more"


class Precision(StrEnum):
    """The type of matrices. Vectors are always float32; beside four bits, the embedding and the output layer have eight."""

    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"
    q4_0 = "q4_0"
    q4_1 = "q4_1"


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A byte-level BPE tokenizer in llama.cpp's terms, ids past the tokenizer's own filled up.

    kinds      GGUF's: 1 normal, 3 control (a special token), 4 added by hand, 5 unused
    splitter   llama.cpp's name of the way to cut texts
    """

    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    splitter: str

    @classmethod
    def of(cls, tokenizer: Any, *, size: int) -> "Vocabulary":
        """Read a fast tokenizer of transformers. Raises `BackendError` for one that llama.cpp would cut differently."""
        whole = _whole(tokenizer)
        named = {i: token for token, i in whole["model"]["vocab"].items()}
        kinds = dict.fromkeys(named, 1)
        for added in whole["added_tokens"]:
            named[added["id"]], kinds[added["id"]] = added["content"], 3 if added["special"] else 4
        if max(named) >= size:
            raise BackendError(
                f"the tokenizer has ids up to {max(named)}, but the model scores {size}. Give the model's own tokenizer."
            )
        return cls(
            tokens=[named.get(i, f"[PAD{i}]") for i in range(size)],
            kinds=[kinds.get(i, 5) for i in range(size)],
            merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in whole["model"]["merges"]],
            splitter=_splitter(whole),
        )


def write(model: Any, tokenizer: Any, path: str | Path, *, precision: Precision = Precision.f32, name: str = "model") -> None:
    """Write a causal LM of transformers and its tokenizer to a GGUF file, whole or not at all.

    Raises `BackendError` for a model or tokenizer outside the families it can write (Llama, Mistral, Qwen2, Qwen3 with
    byte-level BPE).

    >>> write(model, tokenizer, "model.gguf", precision=Precision.q8_0)                      # doctest: +SKIP
    """
    import gguf

    _check(model)
    architecture = _ARCHITECTURES[type(model).__name__]
    vocabulary = Vocabulary.of(tokenizer, size=int(model.config.vocab_size))
    tensors = list(_tensors(model, architecture))
    kinds = [_kind(tensor, precision, own=own) for own, tensor in tensors]
    with cache_dir.whole(path) as part:
        writer = gguf.GGUFWriter(part, architecture)
        try:
            _describe(writer, model, name=name, precision=precision)
            writer.add_string(FINGERPRINT, fingerprint(model))
            if ids := getattr(model.config, trimmed.KEY, None):
                writer.add_array(OUTPUT_IDS, list(ids))
            writer.add_string("specdecpp.version", __version__)
            _add_vocabulary(writer, vocabulary, tokenizer, ends=end_ids(model, tokenizer))
            _write_tensors(writer, tensors, kinds)
        finally:
            writer.close()


def _check(model: Any) -> None:
    if reason := refusal(model):
        raise BackendError(f"{type(model).__name__} cannot be written here: {reason}. {_ADVICE} families.")


def refusal(model: Any) -> str | None:
    """The reason why a model cannot be written; None where it can. Lean's families can that are Llamas to GGUF."""
    if reason := LeanModel.refusal(model):
        return reason
    if type(model).__name__ not in _ARCHITECTURES:
        return f"it is not one of {', '.join(_ARCHITECTURES)}"
    if windows := [view.window for view in described(model).views if view.window]:
        return f"its attention slides over a window of {min(windows)}"
    if model.model.rotary_emb.attention_scaling != 1.0:
        return f"its rotary angles are {model.model.rotary_emb.rope_type}"
    if _ARCHITECTURES[type(model).__name__] != "llama" and _angle_factors(model) is not None:
        return "its rotary angles are scaled"
    return None


def quantised(
    model: Any, architecture: str, precision: Precision, *, is_wanted: Callable[[str], bool]
) -> dict[str, tuple[Any, Any]]:
    """Weights by GGUF's names, those that are wanted: their bytes as they are stored, and the type. Raises `BackendError`."""
    import gguf

    _check(model)
    found = {}
    for name, tensor in _tensors(model, architecture):
        if not is_wanted(name):
            continue
        kind = _kind(tensor, precision, own=name)
        found[name] = gguf.quants.quantize(tensor.float().cpu().contiguous().numpy(), kind), kind
    return found


def _tensors(model: Any, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """GGUF's names and values of all weights, each once: an output layer tied to the embedding has none of its own."""
    import gguf

    config = model.config
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():  # a tied weight is named once
        role = name.split(".")[-2]
        tensor = parameter.detach()
        if architecture == "llama" and role in heads:
            tensor = _paired(tensor, heads[role])
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, f"no name for {name}"  # the families are known, every weight of theirs has one
        yield found, tensor
    if (factors := _angle_factors(model)) is not None:
        yield "rope_freqs.weight", factors


def _paired(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of q or k, in each head (first half, second half) -> neighbouring pairs."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _angle_factors(model: Any) -> Tensor | None:
    """Divisors of the rotary frequencies; None where all are plain."""
    rotary, config = model.model.rotary_emb, model.config
    size = 2 * len(rotary.inv_freq)
    plain = float(config.rope_parameters["rope_theta"]) ** (-torch.arange(0, size, 2).double() / size)
    factors = (plain / rotary.inv_freq.double().cpu()).float()
    return None if torch.allclose(factors, torch.ones_like(factors), rtol=1e-5) else factors


def _kind(tensor: Tensor, precision: Precision, *, own: str) -> Any:
    """The type of a tensor: quantised ones need rows of whole blocks of 32, others fall back to f16."""
    from gguf import GGMLQuantizationType as Kinds

    if tensor.ndim < 2:
        return Kinds.F32
    if precision.startswith("q") and tensor.shape[-1] % 32:
        return Kinds.F16
    return Kinds.Q8_0 if precision.startswith("q4") and own in _WIDE else Kinds[precision.upper()]


def _describe(writer: Any, model: Any, *, name: str, precision: Precision) -> None:
    """Write what the file holds, and the model's hyperparameters."""
    import gguf

    config = model.config
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer.add_type("model")
    writer.add_name(name)
    share = "ALL" if precision is Precision.f32 else "MOSTLY"
    writer.add_file_type(gguf.LlamaFileType[f"{share}_{precision.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_vocabulary(writer: Any, vocabulary: Vocabulary, tokenizer: Any, *, ends: tuple[int, ...]) -> None:
    """Write the tokenizer in GGUF's keys, and as it is."""
    from gguf import Keys

    writer.add_tokenizer_model("gpt2")  # what GGUF calls byte-level BPE
    writer.add_tokenizer_pre(vocabulary.splitter)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    writer.add_token_merges(vocabulary.merges)
    writer.add_string(Keys.Tokenizer.HF_JSON, tokenizer.backend_tokenizer.to_str())
    roles = (  # one token may have several
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.eos_token_id, writer.add_eos_token_id),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
    )
    for token, write_id in roles:
        if token is not None:
            write_id(token)
    if others := [end for end in ends if end != tokenizer.eos_token_id]:
        writer.add_eot_token_id(others[0])
    if ends:
        writer.add_string(ENDS, ",".join(map(str, ends)))
    named = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token}
    writer.add_string(SPECIAL, json.dumps([token for token in tokenizer.all_special_tokens if token not in named]))
    ids = tokenizer("a").input_ids
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id)
    writer.add_add_space_prefix(False)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _write_tensors(writer: Any, tensors: list[tuple[str, Tensor]], kinds: list[Any]) -> None:
    """Sizes first, then one tensor after the other, so that no more than one is held twice."""
    import gguf

    for (name, tensor), kind in zip(tensors, kinds, strict=True):
        block, size = gguf.GGML_QUANT_SIZES[kind]
        writer.add_tensor_info(name, tensor.shape, torch.empty(0).numpy().dtype, tensor.numel() // block * size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for (_, tensor), kind in zip(tensors, kinds, strict=True):
        writer.write_tensor_data(gguf.quants.quantize(tensor.float().cpu().contiguous().numpy(), kind))


def _whole(tokenizer: Any) -> dict[str, Any]:
    """The tokenizer.json of a byte-level BPE. Raises `BackendError` for another tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = json.loads(backend.to_str()) if backend is not None else {}
    if (whole.get("decoder") or {}).get("type") != "ByteLevel" or (whole.get("model") or {}).get("type") != "BPE":
        raise BackendError(f"{type(tokenizer).__name__} is not byte-level BPE, the only kind written here. {_ADVICE} kinds.")
    return whole


def _splitter(whole: dict[str, Any]) -> str:
    """llama.cpp's name of the way a text is cut. Raises `BackendError` for one that has no name here."""
    found, are_whole = _steps(whole["pre_tokenizer"]), bool(whole["model"].get("ignore_merges"))
    for way in _WAYS:
        if found == _steps(json.loads(cutting(way).__getstate__())) and are_whole is (way in WHOLE_WORDS):
            return way
    pattern = next((step["pattern"].get("Regex") for step in found if step.get("type") == "Split"), "no pattern")
    raise BackendError(f"the tokenizer cuts texts in a way that has no name here ({pattern}). {_ADVICE} ways.")


def _steps(cut: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps that decide where a text is cut."""
    steps = (cut or {}).get("pretokenizers", [cut or {}])
    return [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
