"""A smaller model cut from a GGUF file: its first layers byte for byte, and where they are given other layers on top of them.

    cut    file + how many layers [+ a model whose further layers are its own] -> file
    pared  such a file -> its own part: those layers, the last norm, the tokens that it scores
    grow   file + own part -> such a file again

Embedding, output layer, tokenizer and chat template are the file's; the last norm is the model's.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specdecpp import cache_dir
from specdecpp.backends import trimmed
from specdecpp.errors import BackendError
from specdecpp.loading import gguf_writing
from specdecpp.loading.gguf_config import OUTPUT_IDS

_OWN = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture", "general.alignment")
"""Keys that a writer adds by itself."""
_NORM = "output_norm.weight"
_KEPT = "specdecpp.kept_layers"
"""The number of layers that are another file's, in what `pared` writes."""
Tensors = Mapping[str, tuple[Any, Any]]
"""Bytes as they are stored, and their type, by GGUF's names."""


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
    last norm and the tokens that it scores (`backends.trimmed`). Raises `BackendError` unless the file has more layers than
    asked for, and for a model of an architecture that cannot be written (`gguf_writing`).
    """
    from gguf import GGUFReader

    reader = GGUFReader(path)
    architecture, num = _about(reader)
    if not (0 if model is not None else 1) <= layers < num:
        raise BackendError(
            f"{Path(path).name} has {num} layers, of which {layers} were asked for. Ask for fewer than it has, one at least."
        )
    if model is None:
        _write(reader, out, layers, {}, whole=layers, ids=None)
        return
    own = gguf_writing.quantised(model, architecture, precision, is_wanted=lambda name: name == _NORM or _layer(name) >= layers)
    _write(reader, out, layers, own, whole=int(model.config.num_hidden_layers), ids=getattr(model.config, trimmed.KEY, None))


def pared(path: str | Path, out: str | Path, layers: int) -> None:
    """Write the part of a file that `cut` made which is not another's first layers: `grow` needs it beside that other."""
    from gguf import GGUFReader, GGUFWriter

    reader = GGUFReader(path)
    architecture, num = _about(reader)
    with cache_dir.whole(out) as part:
        writer = GGUFWriter(part, architecture)
        writer.add_block_count(num)
        writer.add_uint32(_KEPT, layers)
        if field := reader.get_field(OUTPUT_IDS):
            writer.add_array(OUTPUT_IDS, field.contents())
        _add(writer, {t.name: _stored(t) for t in reader.tensors if t.name == _NORM or _layer(t.name) >= layers})


def grow(path: str | Path, own: str | Path, out: str | Path) -> None:
    """Write the file that `pared` made `own` of, from the file that it was cut from: the same tensors, byte for byte.

    Whole or not at all. Raises `BackendError` where the two are not of one architecture, or the other has too few layers.
    """
    from gguf import GGUFReader

    reader, part = GGUFReader(path), GGUFReader(own)
    (architecture, num), (other, whole) = _about(reader), _about(part)
    layers = _value(part, _KEPT)
    if architecture != other or layers > num:
        raise BackendError(
            f"{Path(own).name} stands on {layers} layers of {other}, and {Path(path).name} has {num} of {architecture}. Give "
            "the file that it was cut from."
        )
    ids = _value(part, OUTPUT_IDS) if part.get_field(OUTPUT_IDS) else None
    _write(reader, out, layers, {t.name: _stored(t) for t in part.tensors}, whole=whole, ids=ids)


def _write(reader: Any, out: str | Path, layers: int, own: Tensors, *, whole: int, ids: Any) -> None:
    """Write the first layers of a file, what belongs to no layer, and tensors of its own: `whole` layers in all."""
    from gguf import GGUFValueType, GGUFWriter

    architecture, num = _about(reader)
    with cache_dir.whole(out) as part:
        writer = GGUFWriter(part, architecture)
        for name, field in reader.fields.items():
            if name in (*_OWN, gguf_writing.FINGERPRINT, OUTPUT_IDS):  # it is another model now
                continue
            value = field.contents()
            if name.startswith(f"{architecture}."):
                by_layer = isinstance(value, list) and len(value) == num
                value = whole if name.endswith(".block_count") else value[:whole] if by_layer else value
            kind, *_, inner = field.types[0], *field.types
            writer.add_key_value(name, value, kind, inner if kind == GGUFValueType.ARRAY else None)
        if ids:
            writer.add_array(OUTPUT_IDS, list(ids))
        kept = {t.name: _stored(t) for t in reader.tensors if _layer(t.name) < layers and t.name not in own}
        _add(writer, kept | dict(own))


def _add(writer: Any, tensors: Tensors) -> None:
    """Write the tensors, and close the file."""
    for name, (data, kind) in tensors.items():
        writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for data, _ in tensors.values():
        writer.write_tensor_data(data)
    writer.close()


def _stored(tensor: Any) -> tuple[Any, Any]:
    return np.asarray(tensor.data), tensor.tensor_type


def _about(reader: Any) -> tuple[str, int]:
    """The architecture and the number of layers."""
    architecture = _value(reader, "general.architecture")
    return architecture, int(_value(reader, f"{architecture}.block_count"))


def _value(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def _layer(name: str) -> int:
    """The layer of a tensor; -1 for none."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1
