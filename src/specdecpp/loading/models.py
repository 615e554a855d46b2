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
from typing import Any

from specdecpp.backends.engines import BACKENDS
from specdecpp.errors import PairError
from specdecpp.loading import fingerprints
from specdecpp.loading.checks import Loadable
from specdecpp.loading.gguf import GGUF, is_gguf
from specdecpp.loading.tokenizers import files_of, load_tokenizer, loaded
from specdecpp.sampling import Sampling

_FOR_FILES = {
    "native-int8": "its weights are not quantised (name a GGUF file)",
    "llama.cpp": "it runs GGUF files, and this is a checkpoint (name a file)",
}
log = logging.getLogger("specdecpp.loading")


class Checkpoint(Loadable):
    """A causal LM of transformers by local path or hub name. What is asked of it raises `PairError` if it cannot be loaded."""

    def __init__(self, name: str | Path, *, dtype: Any, device: Any, device_map: Any):
        super().__init__(name)
        self._where = {"dtype": dtype, "device": device, "device_map": device_map}

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
        fields = model.config.to_diff_dict() | {"_name_or_path": None, "transformers_version": None}
        config = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]
        kind = {"class": type(model).__name__, "dtype": str(model.dtype), "device": str(model.device)}
        return {"fingerprint": self.fingerprint, "config": config, **kind}

    @property
    def words(self) -> dict[str, Any]:
        """The files of its tokenizer."""
        return files_of(self.name)

    def tokenizer(self) -> Any:
        return load_tokenizer(self.name)

    def ends(self, tokenizer: Any) -> tuple[int, ...]:
        return end_ids(self.model, tokenizer)

    @property
    def sampling(self) -> dict[str, float]:
        """The sampling parameters that its generation config asks for, as transformers and vLLM take them from there."""
        config = getattr(self.model, "generation_config", None)
        asked = config.to_diff_dict() if config is not None else {}
        return {name: asked[name] for name in Sampling.__dataclass_fields__ if asked.get(name) is not None}

    def refusal(self, kind: str) -> str | None:
        """The reason against a kind of backend; None where there is none."""
        if kind in _FOR_FILES:
            return _FOR_FILES[kind]
        if kind == "graphs" and self.model.device.type != "cuda":
            return "its weights are not on a GPU"
        return BACKENDS[kind].model.refusal(self.model)


ModelSource = Checkpoint | GGUF


def model_of(name: str | Path, *, dtype: Any, device: Any, device_map: Any = None) -> ModelSource:
    """A GGUF file or a checkpoint, by its name."""
    kind = GGUF if is_gguf(name) else Checkpoint
    return kind(name, dtype=dtype, device=device, device_map=device_map)


def end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a text: the model's generation config names them, else the tokenizer."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    named = tokenizer.eos_token_id if named is None else named
    return () if named is None else tuple(named) if isinstance(named, list | tuple) else (named,)


def load_model(name: str | Path, *, dtype: Any, device: Any, device_map: Any) -> Any:
    """A causal LM by local path or hub name, on its device. Raises `PairError`."""
    from transformers import AutoModelForCausalLM

    options = {"dtype": dtype, "device_map": device_map, "output_loading_info": True}
    model, found = loaded("causal language model", name, lambda: AutoModelForCausalLM.from_pretrained(str(name), **options))
    if missing := sorted(found["missing_keys"]):
        raise PairError(
            f"the weights in {name} are incomplete: {len(missing)} are missing, first {', '.join(missing[:3])}. They "
            "would be random. Load a complete checkpoint of a causal language model."
        )
    return model if device is None else model.to(device)
