"""A model by its name: the base of checkpoints and GGUF files (`gguf`), and a checkpoint of transformers.

    Checkpoint | GGUF -> .backend(kind), made once, and compared with transformers once on a machine

A passed check is remembered for the model, the code that runs it and the machine; a failed one is run and reported again.
"""

import hashlib
import json
import logging
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from specdecpp import backends, cache_dir
from specdecpp.backends import Model
from specdecpp.backends.engines import BACKENDS
from specdecpp.backends.families import Sketch
from specdecpp.backends.native import NativeModel, compiler, library
from specdecpp.errors import PairError
from specdecpp.loading import fingerprints
from specdecpp.loading.tokenizers import files_of, load_tokenizer, loaded
from specdecpp.sampling import Sampling

_FOR_FILES = {
    "native-int8": "its weights are not quantised (name a GGUF file)",
    "llama.cpp": "it runs GGUF files, and this is a checkpoint (name a file)",
}
log = logging.getLogger("specdecpp.loading")


class Loadable:
    """A model by its name, with its backends over one copy of its weights in each layout."""

    model: Any
    identity: Any
    skeleton: Any = None
    """The model without weights, where a sketch stands for it."""

    def __init__(self, name: str | Path):
        self.name = str(name)
        self._made: dict[tuple[str, int], Model] = {}

    def backend(self, kind: str, *, vocab_size: int, **more: Any) -> Model:
        """A backend of this kind. Raises `BackendError`."""
        if (kind, vocab_size) not in self._made:
            log.info("making %s of %s", BACKENDS[kind].model.__name__, self.name)
            self._made[kind, vocab_size] = self._checked(BACKENDS[kind].model, vocab_size=vocab_size, **more)
        return self._made[kind, vocab_size]

    def _checked(self, made_by: type, *, model: Any = None, vocab_size: int, **more: Any) -> Model:
        model = model or self.model
        facts = {"backend": made_by.__name__, "model": self.identity, "vocab_size": vocab_size, "code": code()}
        facts |= cache_dir.about()
        if made_by is NativeModel:
            facts |= {"compiled": library.origin(), "activations": more.get("activations")}
        is_known = cache_dir.recall("check", facts) is not None
        if not is_known:
            log.info("comparing %s with transformers on %s", made_by.__name__, self.name)
            model = self.skeleton if isinstance(model, Sketch) else model
        made = made_by(model, vocab_size=vocab_size, probe=not is_known, **more)
        if not is_known:
            cache_dir.remember("check", facts, {})
        return made


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
        """Bytes of all weights."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def copied_bytes(self, kind: str) -> int:
        """Bytes of the machine's memory that a backend of this kind takes for weights in the layout it reads."""
        return self.num_bytes if kind in ("native", "lean") and self.model.device.type == "cpu" else 0

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the weights (`fingerprints`); remembered while their files stay as they are."""
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
        """Files of its tokenizer."""
        return files_of(self.name)

    def tokenizer(self) -> Any:
        return load_tokenizer(self.name)

    def ends(self, tokenizer: Any) -> tuple[int, ...]:
        """Ids that end a text."""
        return end_ids(self.model, tokenizer)

    @property
    def sampling(self) -> dict[str, float]:
        """Sampling parameters that its generation config asks for, as transformers and vLLM take them from there."""
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


def end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a text: the model's generation config names them, else the tokenizer."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    named = tokenizer.eos_token_id if named is None else named
    return () if named is None else tuple(named) if isinstance(named, list | tuple) else (named,)


@cache
def code() -> str:
    """Sixteen hex digits of what runs models here: our sources, the compiler and transformers."""
    import transformers

    folder = Path(backends.__file__).parent
    digest = hashlib.sha256(f"{transformers.__version__} {compiler()}".encode())
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h", ".hpp")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
