"""GGUF files for tests: tiny models, the reference pair, and files again with other metadata or tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import AutoTokenizer

from specdecpp.loading.gguf_header import Header
from specdecpp.loading.gguf_reading import Stored
from specdecpp.loading.gguf_writing import Precision, new_file, write
from specdecpp.loading.models import load_model
from specdecpp.loading.pair import REFERENCE
from specdecpp.loading.tokenizers import load_tokenizer
from specdecpp.testing import tiny_model

TOKENIZER = AutoTokenizer.from_pretrained(REFERENCE / "target")
SIZE = len(TOKENIZER) + 3  # a model often scores more ids than its tokenizer has
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
Change = Callable[[dict[str, Any]], Any]
"""A change of {"values": metadata, "tensors": {name: Stored}}."""


def model_of(kind: str = "llama", **config: Any) -> Any:
    return tiny_model(kind, vocab_size=SIZE, **({"hidden_size": 64} | config))


def written(path: Path, model: Any = None, precision: str = "f32", tokenizer: Any = TOKENIZER) -> Path:
    """A tiny model, or the one given, in a file."""
    write(model or model_of(), tokenizer, path, precision=Precision(precision))
    return path


def converted(role: str, path: Path, precision: str = "f32") -> Path:
    """A model of the reference pair in a file."""
    model = load_model(REFERENCE / role, dtype="auto", device=None, device_map=None)
    write(model, load_tokenizer(REFERENCE / role), path, precision=Precision(precision), name=role)
    return path


def rewritten(source: Path, path: Path, *, change: Change) -> Path:
    """A file again, by the package's own writer, after a change of its metadata (None: without the key) and tensors."""
    header = Header(source)
    tensors = {name: Stored(info.kind, info.shape, info.data) for name, info in header.tensors.items()}
    both = {"values": dict(header.values), "tensors": tensors}
    change(both)
    architecture = str(both["values"].pop("general.architecture", b"llama"), "utf-8")
    with new_file(path, architecture, both["tensors"]) as writer:
        for key, value in both["values"].items():
            add(writer, key, value)
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a value, if there is one, under the type of GGUF that fits it."""
    if value is not None:
        plain = value.tolist() if isinstance(value, np.ndarray) else value
        kind = gguf.GGUFValueType.get_type(plain)
        writer.add_key_value(key, plain, gguf.GGUFValueType.UINT32 if kind is gguf.GGUFValueType.INT32 else kind)


def values(*without: str, **others: Any) -> Change:
    """A change that drops keys and sets others (with __ for a dot)."""

    def change(both: dict[str, Any]) -> None:
        for key in without:
            del both["values"][key]
        both["values"].update({key.replace("__", "."): value for key, value in others.items()})

    return change
