"""A GGUF file as one model of a pair, and the backends it can have.

    GGUF -> .backend(kind): native-int8, native (the file's own blocks), lean, eager, graphs (its values written out), llama.cpp

Architectures that `gguf_reading.FAMILIES` lacks are run by llama.cpp where llama-cpp-python is installed.
"""

import math
import re
from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch

from specdecpp import cache_dir
from specdecpp.backends import Model, families, trimmed
from specdecpp.backends.engines import BACKENDS
from specdecpp.backends.families import Sketch
from specdecpp.backends.llama_cpp import GGUFFile, LlamaCppModel
from specdecpp.backends.native import NativeModel
from specdecpp.backends.native.weights import DTYPES
from specdecpp.errors import BackendError, MissingExtraError, PairError
from specdecpp.loading import fingerprints
from specdecpp.loading.gguf_header import opened
from specdecpp.loading.gguf_reading import Stored, built, digest_of, filled, stored_as, tensors_of, unsupported
from specdecpp.loading.gguf_tokenizer import JSON, ends_of, keys_of, tokenizer_of
from specdecpp.loading.models import Loadable, code
from specdecpp.loading.tokenizers import files_of, load_tokenizer


class GGUF(Loadable):
    """A GGUF file. dtype and device are those of its values written out ("auto": bfloat16 on a GPU that has it, where a pass
    takes as long as its bytes, else float32), for all backends but native and llama.cpp.

    Raises `BackendError` for a file that is damaged, `MissingExtraError` for one of another architecture without llama.cpp.

    >>> GGUF("model.gguf").stored["model.embed_tokens.weight"].kind                          # doctest: +SKIP
    'Q8_0'
    """

    sampling: ClassVar[Mapping[str, float]] = {}
    """Sampling parameters that it asks for: a file names none."""

    def __init__(self, path: str | Path, *, dtype: Any = "auto", device: Any = None, device_map: Any = None):
        super().__init__(path)
        if device_map is not None:
            raise PairError(f"{path} is a GGUF file, which device_map={device_map!r} cannot spread. Give device instead.")
        self._device = torch.device(device or "cpu")
        self._dtype = _dtype(dtype, self._device)
        self._header = opened(path)
        self._unsupported = unsupported(self._header)
        if self._unsupported and find_spec("llama_cpp") is None:
            raise MissingExtraError(
                f"{self._header.path.name} cannot be read here: {self._unsupported}. llama.cpp may know it: pip install "
                "'specdecpp[gguf]'"
            )
        self.num_bytes = sum(entry.num_bytes for entry in self._header.tensors.values())

    # What needs the model raises `BackendError` for a file that is run by llama.cpp only

    @cached_property
    def skeleton(self) -> Any:
        """The model of transformers without its weights."""
        if self._unsupported:
            raise BackendError(f"{self.name} can be run by llama.cpp only: {self._unsupported}.")
        return built(self._header)

    @cached_property
    def model(self) -> Any:
        """A model of transformers with the file's values."""
        return filled(built(self._header), self.stored, self._dtype).to(self._device)

    @property
    def described(self) -> Any:
        """The skeleton, or a sketch that stands for it: then transformers' modelling need not be imported."""
        return self._known[0]

    @cached_property
    def stored(self) -> Mapping[str, Stored]:
        """The weights as they lie in the file, by transformers' names."""
        return {name: stored_as(self._header, name, own) for name, own in self._known[1].items()}

    @cached_property
    def _known(self) -> tuple[Any, dict[str, str]]:
        """`described`, and the file's names of all parameters: from memory where the file and the code are the same."""
        of = {"files": fingerprints.state(self._header.paths), "code": code()}
        try:
            if kept := cache_dir.recall("sketch", of):
                return Sketch.parse(kept["sketch"]), dict(kept["names"])
        except (KeyError, TypeError):
            pass  # of another version, or damaged
        names = tensors_of(self._header, self.skeleton)
        if families.refusal(self.skeleton) is None:
            cache_dir.remember("sketch", of, {"names": names, "sketch": Sketch.of(self.skeleton).told()})
        return self.skeleton, names

    @property
    def num_rows(self) -> int:
        """Rows of the output layer."""
        if self._unsupported:
            return self._file.num_rows
        return self.described.num_rows if isinstance(self.described, Sketch) else int(self.described.config.vocab_size)

    @cached_property
    def _file(self) -> GGUFFile:
        return GGUFFile(self.name)

    # Provenance and words

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the checkpoint where the file names it, else of all that its model computes with."""
        named = self._header.text("specdecpp.fingerprint", "")
        return named if re.fullmatch("[0-9a-f]{16,64}", named) else self._digest

    @cached_property
    def _digest(self) -> str:
        return fingerprints.remembered(self._header.paths, lambda: digest_of(self._header), dtype="gguf blocks")

    @property
    def identity(self) -> dict[str, Any]:
        """Facts that a measurement of the model depends on beside the machine."""
        return {"fingerprint": self._digest, "dtype": str(self._dtype), "device": str(self._device)}

    @cached_property
    def _folder(self) -> Path | None:
        """The folder of the file, where a tokenizer.json in it is taken."""
        beside = Path(self.name).resolve().parent
        return beside if JSON not in self._header and (beside / "tokenizer.json").is_file() else None

    @property
    def words(self) -> dict[str, Any]:
        """Metadata and files that its tokenizer is made of."""
        return files_of(self._folder) if self._folder else keys_of(self._header)

    def tokenizer(self) -> Any:
        """The tokenizer.json inside the file, else the one beside it, else one made of the keys of GGUF."""
        return load_tokenizer(self._folder) if self._folder else tokenizer_of(self._header, num_rows=self.num_rows)

    def ends(self, tokenizer: Any) -> tuple[int, ...]:
        """Ids that end a text."""
        return ends_of(self._header, num_rows=self.num_rows)

    # Backends

    def copied_bytes(self, kind: str) -> int:
        """Bytes of the machine's memory that a backend of this kind takes for weights."""
        if kind in ("native", "native-int8"):
            return self.num_bytes
        if self._unsupported or kind == "llama.cpp" or self._device.type != "cpu":
            return 0
        return self._dtype.itemsize * sum(math.prod(stored.shape) for stored in self.stored.values())

    def refusal(self, kind: str) -> str | None:
        """The reason against a kind of backend; None where there is none."""
        on_cpu, model = self._device.type == "cpu", BACKENDS[kind].model
        if kind == "llama.cpp":
            if not on_cpu:
                return f"it takes no device={str(self._device)!r} for a GGUF file"
            return None if find_spec("llama_cpp") else "llama_cpp is not installed (pip install 'specdecpp[gguf]')"
        if self._unsupported:
            return self._unsupported
        if kind == "graphs" and self._device.type != "cuda":
            return "its weights are not on a GPU"
        if model is not NativeModel:
            return model.refusal(self.described)
        reason = NativeModel.refusal(self.described, is_stored=True) if on_cpu else f"it runs on a CPU, not on {self._device}"
        is_quantised = any(entry.kind not in DTYPES.values() for entry in self._header.tensors.values())
        return reason or (None if kind == "native" or is_quantised else "its weights are not quantised")

    def backend(self, kind: str, *, vocab_size: int, **more: Any) -> Model:
        """A backend of this kind. Raises `BackendError`."""
        if kind == "llama.cpp":
            ids = None if self._unsupported else getattr(self.described.config, trimmed.KEY, None)
            return LlamaCppModel(self._file, vocab_size=vocab_size, output_ids=ids, num_threads=torch.get_num_threads())
        if BACKENDS[kind].model is NativeModel:
            more |= {"model": self.described, "stored": self.stored}
        if kind == "native-int8":
            more["activations"] = "int8"
        return super().backend(kind, vocab_size=vocab_size, **more)


def is_gguf(name: str | Path) -> bool:
    """True for the name of a GGUF file."""
    return Path(name).suffix.lower() == ".gguf"


def _dtype(dtype: Any, device: torch.device) -> torch.dtype:
    if dtype in ("auto", None):
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise PairError(f"dtype={dtype!r} is no type of weights. Give a torch dtype, its name, or 'auto'.")
    return found
