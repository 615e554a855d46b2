"""GGUF files: a model of the Llama family written as llama.cpp and `gguf_reading` read it, and smaller models cut from a file.

    write   model, tokenizer -> FILE.gguf
    cut     file + how many layers [+ a model whose further layers are its own] -> file
    pared   such a file -> its own part: those layers, the last norm, the tokens that it scores
    grow    file + own part -> such a file again

Rows of q and k and Llama 3's rotary angles are laid out as `gguf_reading` says. A file names the checkpoint that it was made
from (`fingerprints`), so that a head trained on that is known to fit, and holds the whole tokenizer.json.
"""

import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdecpp import cache_dir
from specdecpp.backends import trimmed
from specdecpp.backends.families import described
from specdecpp.backends.lean import LeanModel
from specdecpp.errors import BackendError
from specdecpp.loading.fingerprints import fingerprint
from specdecpp.loading.gguf_header import Header, TensorInfo, opened
from specdecpp.loading.gguf_reading import FACTORS, FAMILIES, LLAMA3, OUTPUT_IDS, SIZES, Stored
from specdecpp.loading.gguf_tokenizer import ENDS, JSON, WAYS
from specdecpp.loading.models import end_ids

FINGERPRINT = "specdecpp.fingerprint"
"""The metadata key of the checkpoint's fingerprint."""
_KEPT = "specdecpp.kept_layers"
"""The metadata key of the number of layers that are another file's, in what `pared` writes."""
_ARCHITECTURES = {FAMILIES[name]: name for name in ("llama", "qwen2", "qwen3")} | {"MistralForCausalLM": "llama"}
_WIDE = ("token_embd.weight", "output.weight")
"""Tensors of eight bits where the rest has four, as llama.cpp's own quantiser keeps these two wider."""
_ADVICE = "llama.cpp's own convert_hf_to_gguf.py knows more"
Tensors = Mapping[str, Stored | TensorInfo]
"""What is to be written, by GGUF's names."""


class Precision(StrEnum):
    """The type of matrices. Vectors are always float32; beside four bits, the embedding and the output layer have eight."""

    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"
    q4_0 = "q4_0"
    q4_1 = "q4_1"


def write(model: Any, tokenizer: Any, path: str | Path, *, precision: Precision = Precision.f32, name: str = "model") -> None:
    """Write a causal LM of transformers and its tokenizer to a GGUF file, whole or not at all.

    Raises `BackendError` for a model or tokenizer outside the families it can write (Llama, Mistral, Qwen2, Qwen3 with
    byte-level BPE).

    >>> write(model, tokenizer, "model.gguf", precision=Precision.q8_0)                      # doctest: +SKIP
    """
    tensors = _tensors(model, precision)
    vocabulary = vocabulary_of(tokenizer, size=int(model.config.vocab_size))
    with new_file(path, _ARCHITECTURES[type(model).__name__], tensors) as writer:
        _describe(writer, model, name=name, precision=precision)
        writer.add_string(FINGERPRINT, fingerprint(model))
        _add_output_ids(writer, getattr(model.config, trimmed.KEY, None))
        _add_vocabulary(writer, vocabulary, tokenizer, ends=end_ids(model, tokenizer))


def refusal(model: Any) -> str | None:
    """The reason why a model cannot be written; None where it can."""
    if reason := LeanModel.refusal(model):
        return reason
    name, angles = type(model).__name__, model.config.rope_parameters
    if name not in _ARCHITECTURES:
        return f"it is not one of {', '.join(_ARCHITECTURES)}"
    if windows := [view.window for view in described(model).views if view.window]:
        return f"its attention slides over a window of {min(windows)}"
    is_llama3 = _ARCHITECTURES[name] == "llama" and angles == angles | LLAMA3
    return "its rotary angles are scaled" if not is_llama3 and _angle_factors(model) is not None else None


# Parts of files


def cut(path: str | Path, out: str | Path, layers: int, *, model: Any = None, precision: Precision = Precision.q8_0) -> None:
    """Write a GGUF file with the first layers of another, whole or not at all.

    `model`, of transformers, has these layers too and more of its own, which are written behind them in `precision`, with its
    last norm and the tokens that it scores (`backends.trimmed`). Raises `BackendError` unless the file has more layers than
    asked for, and for a model that cannot be written (`refusal`).
    """
    header = opened(path)
    num = header.integer(f"{header.text('general.architecture')}.block_count")
    if not (model is None) <= layers < num:
        raise BackendError(
            f"{Path(path).name} has {num} layers, of which {layers} were asked for. Ask for fewer than it has, one at least."
        )
    total, ids, own = layers, None, {}
    if model is not None:
        total, ids = int(model.config.num_hidden_layers), getattr(model.config, trimmed.KEY, None)
        own = _own(_tensors(model, precision), layers)
    _write_cut(header, out, layers, own, total=total, ids=ids)


def pared(path: str | Path, out: str | Path, layers: int) -> None:
    """Write the part of a file that `cut` made which `grow` needs beside the file that it was cut from."""
    header = opened(path)
    architecture = header.text("general.architecture")
    with new_file(out, architecture, _own(header.tensors, layers)) as writer:
        writer.add_block_count(header.integer(f"{architecture}.block_count"))
        writer.add_uint32(_KEPT, layers)
        _add_output_ids(writer, header.values.get(OUTPUT_IDS))


def grow(path: str | Path, own: str | Path, out: str | Path) -> None:
    """Write the file that `pared` made `own` of, from the file that it was cut from: the same tensors, byte for byte, whole or
    not at all. The fingerprint shows whether it was cut from this file."""
    part = opened(own)
    total = part.integer(f"{part.text('general.architecture')}.block_count")
    _write_cut(opened(path), out, part.integer(_KEPT), part.tensors, total=total, ids=part.values.get(OUTPUT_IDS))


def _own(tensors: Tensors, layers: int) -> Tensors:
    """Tensors that a file with so many layers of another has of its own."""
    return {name: tensor for name, tensor in tensors.items() if name == "output_norm.weight" or _layer(name) >= layers}


def _layer(name: str) -> int:
    """The layer of a tensor; -1 for none."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _write_cut(header: Header, out: str | Path, layers: int, own: Tensors, *, total: int, ids: Any) -> None:
    """Write the first layers of a file, what belongs to no layer, and tensors of its own: `total` layers in all."""
    from gguf import GGUFValueType

    architecture = header.text("general.architecture")
    kept = {name: tensor for name, tensor in header.tensors.items() if _layer(name) < layers and name not in own}
    with new_file(out, architecture, kept | dict(own)) as writer:
        for key, value in header.values.items():
            if key in ("general.architecture", "general.alignment", FINGERPRINT, OUTPUT_IDS):
                continue  # the writer adds two itself, and it is another model now
            kind, value = GGUFValueType(header.types[key]), total if key == f"{architecture}.block_count" else value
            if isinstance(value, list | np.ndarray):
                writer.add_key_value(key, list(value), GGUFValueType.ARRAY, kind)
            else:
                writer.add_key_value(key, value, kind)
        _add_output_ids(writer, ids)


@contextmanager
def new_file(path: str | Path, architecture: str, tensors: Tensors) -> Iterator[Any]:
    """A writer for the metadata of a file, whose tensors follow at the end: it is there whole or not at all."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

    with cache_dir.whole(path) as part:
        writer = GGUFWriter(part, architecture)
        try:
            yield writer
            for name, tensor in tensors.items():
                kind = GGMLQuantizationType[tensor.kind]
                block, size = GGML_QUANT_SIZES[kind]
                num_bytes = math.prod(tensor.shape) // block * size
                writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), num_bytes, raw_dtype=kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in tensors.values():
                writer.write_tensor_data(tensor.data)
        finally:
            writer.close()


def _add_output_ids(writer: Any, ids: Any) -> None:
    """Write the tokens that a trimmed output layer scores, where there are some."""
    if ids is not None:
        writer.add_array(OUTPUT_IDS, np.asarray(ids).tolist())


# Tensors


def _tensors(model: Any, precision: Precision) -> Tensors:
    """All weights, each once: an output layer tied to the embedding has none of its own. Raises `BackendError`."""
    import gguf

    if reason := refusal(model):
        raise BackendError(f"{type(model).__name__} cannot be written here: {reason}. {_ADVICE} families.")
    architecture, config = _ARCHITECTURES[type(model).__name__], model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if architecture == "llama" else {}
    found = {}
    for name, parameter in model.named_parameters():  # a tied weight is named once
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, f"no name for {name}"  # the families are known, every weight of theirs has one
        found[own] = _stored(own, parameter.detach(), precision, heads.get(name.split(".")[-2]))
    if (factors := _angle_factors(model)) is not None:
        found[FACTORS] = _stored(FACTORS, factors, precision)
    return found


def _stored(name: str, values: Tensor, precision: Precision, num_heads: int | None = None) -> Stored:
    """Values in the type that belongs to them; rows of q or k (`num_heads`) become neighbouring pairs in each head."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    kind = precision.upper()
    if values.ndim < 2:
        kind = "F32"
    elif precision.startswith("q") and values.shape[-1] % 32:
        kind = "F16"  # such rows are no whole blocks
    elif precision.startswith("q4") and name in _WIDE:
        kind = "Q8_0"

    def data() -> np.ndarray:
        rows = values
        if num_heads is not None:
            rows = rows.reshape(num_heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
        return quantize(rows.float().cpu().contiguous().numpy(), GGMLQuantizationType[kind])

    return Stored(kind, tuple(values.shape), data)


def _angle_factors(model: Any) -> Tensor | None:
    """Divisors of the rotary frequencies; None where all are plain."""
    rotary, config = model.model.rotary_emb, model.config
    size = 2 * len(rotary.inv_freq)
    plain = float(config.rope_parameters["rope_theta"]) ** (-torch.arange(0, size, 2).double() / size)
    factors = (plain / rotary.inv_freq.double().cpu()).float()
    return None if torch.allclose(factors, torch.ones_like(factors), rtol=1e-5) else factors


# Metadata


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
    for key, field in SIZES.items():
        writer.add_uint32(f"{writer.arch}.{key}", getattr(config, field))
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(head_size)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def vocabulary_of(tokenizer: Any, *, size: int) -> tuple[list[str], list[int], str]:
    """Tokens of a fast byte-level BPE tokenizer, GGUF's kinds of them (1 normal, 3 special, 4 added by hand, 5 unused), and
    llama.cpp's name of the way to cut texts. Raises `BackendError` for one that llama.cpp would cut differently."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = json.loads(backend.to_str()) if backend is not None else {}
    if (whole.get("decoder") or {}).get("type") != "ByteLevel" or whole["model"].get("type") != "BPE":
        raise BackendError(f"{type(tokenizer).__name__} is not byte-level BPE, the only kind written here. {_ADVICE} kinds.")
    named = {i: (token, 1) for token, i in whole["model"]["vocab"].items()}
    named |= {added["id"]: (added["content"], 3 if added["special"] else 4) for added in whole["added_tokens"]}
    if max(named) >= size:
        raise BackendError(
            f"the tokenizer has ids up to {max(named)}, but the model scores {size}. Give the model's own tokenizer."
        )
    tokens, kinds = zip(*(named.get(i, (f"[PAD{i}]", 5)) for i in range(size)), strict=True)
    found, has_words = _steps(whole["pre_tokenizer"]), bool(whole["model"].get("ignore_merges"))
    for name, way in WAYS.items():
        if found == _steps(json.loads(way.cutting.__getstate__())) and has_words is way.has_words:
            return [*tokens], [*kinds], name
    raise BackendError(f"the tokenizer cuts texts in a way that has no name here ({json.dumps(found)[:200]}). {_ADVICE} ways.")


def _steps(cutting: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps that decide where a text is cut."""
    steps = (cutting or {}).get("pretokenizers", [cutting or {}])
    return [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]


def _add_vocabulary(writer: Any, vocabulary: tuple[Any, ...], tokenizer: Any, *, ends: tuple[int, ...]) -> None:
    """Write the tokenizer in GGUF's keys, and as it is."""
    from gguf import SpecialVocab

    tokens, kinds, splitter = vocabulary
    writer.add_tokenizer_model("gpt2")  # what GGUF calls byte-level BPE
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_string(JSON, tokenizer.backend_tokenizer.to_str())
    writer.add_add_space_prefix(False)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        special = SpecialVocab(folder, load_merges=True, special_token_types=("bos", "eos", "unk", "pad"))
    ids = tokenizer("a").input_ids
    roles = {"bos": (tokenizer.bos_token_id, ids[0]), "eos": (tokenizer.eos_token_id, ids[-1])}
    special.add_special_token = {role: own is not None and own == found for role, (own, found) in roles.items()}
    if others := [end for end in ends if end != tokenizer.eos_token_id]:
        special.special_token_ids["eot"] = others[0]
    special.add_to_gguf(writer, quiet=True)
    if ends:
        writer.add_string(ENDS, ",".join(map(str, ends)))
