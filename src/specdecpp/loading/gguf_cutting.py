"""A smaller model cut from a GGUF file: its first layers byte for byte, and where they are given other layers on top of them.

    file + how many layers [+ a model whose further layers are its own] -> file

What belongs to no layer (embedding, output layer, tokenizer, chat template) is the file's; the last norm is the model's.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from specdecpp import machine
from specdecpp.errors import RunnerError
from specdecpp.loading import gguf_writing
from specdecpp.loading.gguf_config import OUTPUT_IDS
from specdecpp.runners import trimmed

_OWN = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture", "general.alignment")
"""What a writer says by itself."""
_NORM = "output_norm.weight"


def cut(
    path: str | Path,
    out: str | Path,
    layers: int,
    *,
    model: Any = None,
    precision: gguf_writing.Precision = gguf_writing.Precision.q8_0,
) -> None:
    """Write a GGUF file with the first layers of another, whole or not at all.

    `model`, of transformers, has these layers too and more of its own, which are written behind them in `precision`, with its
    last norm and the tokens that it scores (`runners.trimmed`). Raises `RunnerError` unless the file has more layers than asked
    for, and for a model of an architecture that cannot be written (`gguf_writing`).
    """
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(path)
    values = {name: field.contents() for name, field in reader.fields.items()}
    architecture: Any = values["general.architecture"]
    num = int(values[f"{architecture}.block_count"])
    if not (0 if model is not None else 1) <= layers < num:
        raise RunnerError(
            f"{Path(path).name} has {num} layers, of which {layers} were asked for. Ask for fewer than it has, one at least."
        )
    whole = layers if model is None else int(model.config.num_hidden_layers)
    own = {}
    if model is not None:
        own = gguf_writing.quantised(
            model, architecture, precision, is_wanted=lambda name: name == _NORM or _layer(name) >= layers
        )
    with machine.whole(Path(out)) as part:
        writer = GGUFWriter(part, architecture)
        for name, field in reader.fields.items():
            value = values[name]
            if name in (*_OWN, gguf_writing.FINGERPRINT, OUTPUT_IDS):  # it is another model now
                continue
            if name.startswith(f"{architecture}."):
                by_layer = isinstance(value, list) and len(value) == num
                value = whole if name.endswith(".block_count") else value[:whole] if by_layer else value
            kind, *_, inner = field.types[0], *field.types
            writer.add_key_value(name, value, kind, inner if kind == GGUFValueType.ARRAY else None)
        if ids := getattr(getattr(model, "config", None), trimmed.KEY, None):
            writer.add_array(OUTPUT_IDS, list(ids))
        kept = {
            tensor.name: (np.asarray(tensor.data), tensor.tensor_type)
            for tensor in reader.tensors
            if _layer(tensor.name) < layers and (model is None or tensor.name != _NORM)
        }
        kept |= own
        for name, (data, kind) in kept.items():
            writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for data, _ in kept.values():
            writer.write_tensor_data(data)
        writer.close()


def _layer(name: str) -> int:
    """Which layer a tensor belongs to; -1 for none."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1
