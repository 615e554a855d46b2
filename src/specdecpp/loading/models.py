"""A model by its name: a checkpoint of transformers (or a GGUF file, `gguf`), and the backends it can have.

    name -> Checkpoint | GGUF -> .backend(kind)

A checkpoint is run in CUDA graphs (`graphs`), by code compiled for the machine (`native`), by torch with few operations
(`lean`) or by transformers (`eager`).
"""

import hashlib
import json
import logging
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from specdecpp.backends import GraphModel, LeanModel, Model
from specdecpp.backends.native import NativeModel
from specdecpp.errors import PairError
from specdecpp.loading import fingerprints
from specdecpp.loading.checks import Backends
from specdecpp.loading.gguf import GGUF, is_gguf
from specdecpp.loading.tokenizers import check_path, hint, load_tokenizer, reason_of
from specdecpp.sampling import Sampling

Kind = Literal["graphs", "native", "native-int8", "llama.cpp", "lean", "eager"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BY_NAME = ("native-int8",)
"""Kinds that are never chosen automatically: they change the model that is decoded (`NativeModel`, activations)."""
log = logging.getLogger("specdecpp.loading")

_SIZES = {
    "num_hidden_layers": 10_000,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "vocab_size": 2**27,
    "max_position_embeddings": 2**40,
}
"""The fields of a config that say a model's size, and the largest value that is believed."""


class Checkpoint:
    """A causal LM of transformers by local path or hub name. What is asked of it raises `PairError` if it cannot be loaded."""

    def __init__(self, name: str | Path, *, dtype: Any, device: Any, device_map: Any):
        self.name = str(name)
        self._where = {"dtype": dtype, "device": device, "device_map": device_map}
        self._backends = Backends()

    @cached_property
    def model(self) -> Any:
        """Loaded when it is first asked for: after the tokenizers, which may show that a pair cannot be one."""
        log.info("reading the weights of %s", self.name)
        return load_model(self.name, **self._where)

    @property
    def num_rows(self) -> int:
        """Rows of the output layer."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def num_bytes(self) -> int:
        """The bytes of all weights."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def copied_bytes(self, kind: str) -> int:
        """Bytes of the machine's memory that a backend of this kind takes for weights in the layout it reads."""
        return self.num_bytes if kind in ("native", "lean") and self.model.device.type == "cpu" else 0

    @cached_property
    def fingerprint(self) -> str:
        """The digest of the weights (`fingerprints`); remembered while their files stay as they are."""
        files = fingerprints.weight_files(self.name)
        return fingerprints.remembered(files, lambda: fingerprints.fingerprint(self.model), dtype=self._where["dtype"])

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Facts that a measurement of the model depends on beside the machine."""
        model = self.model
        told = {"fingerprint": self.fingerprint, "class": type(model).__name__, "config": self._digest_of_config}
        return told | {"dtype": str(model.dtype), "device": str(model.device)}

    @cached_property
    def _digest_of_config(self) -> str:
        config = self.model.config.to_diff_dict() | {"_name_or_path": None, "transformers_version": None}
        return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def tokenizer(self) -> Any:
        return load_tokenizer(self.name)

    def ends(self, tokenizer: Any) -> tuple[int, ...]:
        return end_ids(self.model, tokenizer)

    @property
    def sampling(self) -> dict[str, float]:
        """The sampling parameters that it asks for where a request names none."""
        return asked_sampling(self.model)

    @cached_property
    def refusals(self) -> dict[str, str | None]:
        """The reason against each kind of backend; None where there is none."""
        return {
            "graphs": GraphModel.refusal(self.model) if self.model.device.type == "cuda" else "its weights are not on a GPU",
            "native": NativeModel.refusal(self.model),
            "native-int8": "its weights are not quantised (name a GGUF file)",
            "llama.cpp": "it runs GGUF files, and this is a checkpoint (name a file)",
            "lean": LeanModel.refusal(self.model),
            "eager": None,
        }

    def backend(self, kind: str, *, vocab_size: int, num_threads: int, is_checked: bool = True) -> Model:
        """An empty backend. `num_threads` is for native; the others have what torch has. Raises `BackendError`."""
        return self._backends.get(kind, self, vocab_size=vocab_size, num_threads=num_threads, is_checked=is_checked)


ModelSource = Checkpoint | GGUF


def model_of(name: str | Path, *, dtype: Any, device: Any, device_map: Any = None) -> ModelSource:
    """A GGUF file or a checkpoint, by its name."""
    kind = GGUF if is_gguf(name) else Checkpoint
    return kind(name, dtype=dtype, device=device, device_map=device_map)


def end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a text: the model's generation config names them, else the tokenizer."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if named is None:
        named = tokenizer.eos_token_id
    return () if named is None else tuple(named) if isinstance(named, list | tuple) else (named,)


def asked_sampling(model: Any) -> dict[str, float]:
    """The sampling parameters that a model's generation config asks for, as transformers and vLLM take them from there."""
    config = getattr(model, "generation_config", None)
    said = config.to_diff_dict() if config is not None else {}
    return {name: said[name] for name in Sampling.__dataclass_fields__ if said.get(name) is not None}


def load_model(name: str | Path, *, dtype: Any, device: Any, device_map: Any) -> Any:
    """A causal LM by local path or hub name, on its device. Raises `PairError`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    check_path(name)
    try:
        config = AutoConfig.from_pretrained(str(name))
    except Exception:  # the model's own loading says what is wrong, or knows more
        config = None
    check_config(config, name)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(name), dtype=dtype, device_map=device_map, output_loading_info=True
        )
        model, found = loaded
    except Exception as error:  # transformers lets through whatever a damaged file or an unknown dtype raises
        raise PairError(f"no causal language model could be loaded from {name} ({reason_of(error)}).{hint(name)}") from error
    if missing := sorted(found["missing_keys"]):
        raise PairError(
            f"the weights in {name} are incomplete: {len(missing)} are missing, first {', '.join(missing[:3])}. They "
            "would be random. Load a complete checkpoint of a causal language model."
        )
    return model if device is None else model.to(device)


def check_config(config: Any, name: str | Path) -> None:
    """Raise `PairError` for sizes that no model has: none of a thing, or more layers than anybody could hold.

    transformers builds a model without layers, which decodes, and begins to build any other.
    """
    told = config.get_text_config() if hasattr(config, "get_text_config") else config
    for field, most in _SIZES.items():
        value = getattr(told, field, None)
        if value is not None and not isinstance(value, list | tuple | dict) and not _is_size(value, most):
            raise PairError(
                f"{name} says {field} = {value!r} in its config.json, and a model has a whole number from 1 to {most:,} there. "
                "The file is damaged, or of another kind of model."
            )
    heads, kv_heads = (getattr(told, field, None) for field in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise PairError(
            f"{name} says num_attention_heads = {heads} and num_key_value_heads = {kv_heads} in its config.json, and every key "
            "and value head serves equally many. The file is damaged."
        )


def _is_size(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
