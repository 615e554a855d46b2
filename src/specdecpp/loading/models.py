"""A model by its name: a checkpoint of transformers (or a GGUF file, `gguf`), and the runners it can have.

    name -> Checkpoint | GGUF -> .runner(kind)

A checkpoint is run in CUDA graphs (`graphs`), by code compiled for the machine (`native`), by llama.cpp from a copy in its
format that is kept in `machine.folder()`, by torch with few operations (`lean`) or by transformers (`eager`).
"""

import hashlib
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from specdecpp import machine
from specdecpp.errors import PairError, RunnerError
from specdecpp.loading.gguf import GGUF
from specdecpp.runners import EagerRunner, GraphRunner, LeanRunner, Runner
from specdecpp.runners.gguf import GGUFFile, GGUFRunner
from specdecpp.runners.native import NativeRunner

Kind = Literal["graphs", "native", "llama.cpp", "lean", "eager"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class Checkpoint:
    """A causal LM of transformers by local path or hub name. What is asked of it raises `PairError` if it cannot be loaded."""

    def __init__(self, name: str | Path, *, dtype: Any, device: Any, device_map: Any):
        self.name = str(name)
        self._native: NativeRunner | None = None
        self._where = {"dtype": dtype, "device": device, "device_map": device_map}

    @cached_property
    def model(self) -> Any:
        """Loaded when it is first asked for: after the tokenizers, which may show that a pair cannot be one."""
        return load_model(self.name, **self._where)

    @property
    def num_rows(self) -> int:
        """Rows of the output layer."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def copied_bytes(self, kind: str) -> int:
        """Of the machine's memory, that a runner of this kind takes for weights in the layout it reads."""
        return self.num_bytes if kind in ("native", "lean") and self.model.device.type == "cpu" else 0

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.model)

    def tokenizer(self) -> Any:
        return load_tokenizer(self.name)

    def ends(self, tokenizer: Any) -> tuple[int, ...]:
        return end_ids(self.model, tokenizer)

    def refusals(self) -> dict[str, str | None]:
        """What stands against each kind of runner; None where nothing does."""
        lean = LeanRunner.refusal(self.model)
        llama_cpp = lean or self._refusal_of_llama_cpp()
        return {
            "graphs": GraphRunner.refusal(self.model) if self.model.device.type == "cuda" else "its weights are not on a GPU",
            "native": NativeRunner.refusal(self.model),
            "llama.cpp": llama_cpp,
            "lean": lean,
            "eager": None,
        }

    def _refusal_of_llama_cpp(self) -> str | None:
        if find_spec("llama_cpp") is None:
            return "llama_cpp is not installed (pip install 'specdecpp[gguf]')"
        if self.model.device.type != "cpu":
            return f"its weights are on {self.model.device}; name a GGUF file instead"
        if self.model.dtype not in PRECISIONS:
            return f"GGUF has no {self.model.dtype}"
        from specdecpp.loading.gguf_writing import refusal

        return refusal(self.model)

    def runner(self, kind: str, *, vocab_size: int, num_threads: int) -> Runner:
        """`num_threads` is for native and llama.cpp; the others have what torch has. Raises `RunnerError`."""
        if kind == "native":
            if self._native is None or self._native.vocab_size != vocab_size:
                self._native = NativeRunner(self.model, vocab_size=vocab_size, num_threads=num_threads)
            return self._native.fresh(num_threads=num_threads)
        if kind == "llama.cpp":
            return GGUFRunner(self._as_gguf, vocab_size=vocab_size, num_threads=num_threads)
        return {"eager": EagerRunner, "lean": LeanRunner, "graphs": GraphRunner}[kind](self.model, vocab_size=vocab_size)

    @cached_property
    def _as_gguf(self) -> GGUFFile:
        """The copy in llama.cpp's format, written if it is not there."""
        from specdecpp.loading import gguf_writing

        precision = PRECISIONS[self.model.dtype]
        path = machine.folder() / f"{self.fingerprint}-{gguf_writing.FORMAT}-{precision}.gguf"
        if not path.exists():
            kind = gguf_writing.Precision(precision)
            try:
                gguf_writing.write(self.model, self.tokenizer(), path, precision=kind, name=Path(self.name).name)
            except OSError as error:
                raise RunnerError(f"its copy for llama.cpp cannot be written to {path} ({error.strerror})") from error
        return GGUFFile(path)


Model = Checkpoint | GGUF


def end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a text: the model's generation config names them, else the tokenizer."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if named is None:
        named = tokenizer.eos_token_id
    return () if named is None else tuple(named) if isinstance(named, list | tuple) else (int(named),)


def fingerprint(model: Any) -> str:
    """Sixteen hex digits that tell a model's weights: shapes of all parameters and a few values of each, as bfloat16.

    The same for a checkpoint wherever it lies and whether it is loaded in bfloat16 or wider.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        values = parameter.detach().flatten()[:16].to(device="cpu", dtype=torch.bfloat16)
        digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def load_tokenizer(name: str | Path) -> Any:
    """The tokenizer of a folder or hub name. Raises `PairError`."""
    from transformers import AutoTokenizer

    _check_path(name)
    try:
        return AutoTokenizer.from_pretrained(str(name))
    except Exception as error:  # transformers lets through whatever a damaged file raises
        raise PairError(f"no tokenizer could be loaded from {name} ({_first_line(error)}).") from error


def load_model(name: str | Path, *, dtype: Any, device: Any, device_map: Any) -> Any:
    """A causal LM by local path or hub name, on its device. Raises `PairError`."""
    from transformers import AutoModelForCausalLM

    _check_path(name)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(name), dtype=dtype, device_map=device_map, output_loading_info=True
        )
        model, found = loaded
    except Exception as error:  # as above, or an unknown dtype
        raise PairError(f"no causal language model could be loaded from {name} ({_first_line(error)}).") from error
    if missing := sorted(found["missing_keys"]):
        raise PairError(
            f"the weights in {name} are incomplete: {len(missing)} are missing, first {', '.join(missing[:3])}. They "
            "would be random. Load a complete checkpoint of a causal language model."
        )
    return model if device is None else model.to(device)


def _check_path(name: str | Path) -> None:
    """A name that can only be a path must exist: the hub's answer to it would mislead."""
    text = str(name)
    if not Path(name).exists() and (isinstance(name, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1):
        raise PairError(f"there is no folder {name}. Give the folder of a saved model, or a hub name like org/name.")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
