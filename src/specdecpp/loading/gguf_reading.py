"""A GGUF file as a model of transformers, without llama.cpp: its shape, and its weights as they lie in the file.

    Header -> GGUFSource: .described (a model without weights, or its sketch), .stored (bytes by names), .model(dtype)

Two things are laid out in a file as transformers does not have them, and put back here: under the architecture "llama" the rows
of q and k (llama.cpp turns neighbouring pairs, transformers the two halves of a head), which moves whole rows and leaves them
packed; and Gemma's norms, to which 1 was added.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specdecpp.backends.families import Sketch, refusal
from specdecpp.errors import BackendError
from specdecpp.loading.gguf_config import FACTORS, FAMILIES, check_shape, configured, num_heads, unsupported
from specdecpp.loading.gguf_header import Header, TensorInfo, opened

_NOT_WEIGHTS = {FACTORS, "rope_factors_long.weight", "rope_factors_short.weight"}


@dataclass(frozen=True, eq=False)
class Stored:
    """One matrix or vector as it lies in a file.

    `kind` is GGML's name of the type ("F32", "BF16", "Q8_0", "Q4_K", ...), `shape` as torch has it: (out, in) or (n,), `data`
    uint8 [out, bytes of a row] (a vector: [1, bytes]). `source` is these bytes, or what reads them each time: as many as are
    in use lie in memory then.
    """

    kind: str
    shape: tuple[int, ...]
    source: np.ndarray | Callable[[], np.ndarray]

    @property
    def data(self) -> np.ndarray:
        return self.source() if callable(self.source) else self.source

    def dequantised(self) -> Tensor:
        """The values, float32, of this shape."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        with np.errstate(all="ignore"):  # infinite scales are the file's affair
            values = dequantize(self.data, GGMLQuantizationType[self.kind])
        return torch.from_numpy(np.array(values, np.float32).reshape(self.shape))


class GGUFSource:
    """A model in a GGUF file, of an architecture of `FAMILIES`. `known` is what `told` gave for the same file before: then a
    sketch stands for the model, and transformers' modelling need not be imported.

    Raises `BackendError`: what is wrong in which file.

    >>> GGUFSource("model.gguf").stored["model.embed_tokens.weight"].kind                     # doctest: +SKIP
    'Q8_0'
    """

    def __init__(self, path: "str | Path | Header", known: Mapping[str, Any] | None = None):
        self.header = path if isinstance(path, Header) else opened(path)
        self.path = self.header.path
        if reason := unsupported(self.header):
            raise BackendError(f"{self.path.name} cannot be read here: {reason}.")
        self._names: dict[str, str] = dict(known["names"]) if known else self._found()
        self.described: Any = Sketch.parse(known["sketch"]) if known else self.skeleton
        self.stored: Mapping[str, Stored] = {name: self._stored(name, own) for name, own in self._names.items()}

    def told(self) -> dict[str, Any] | None:
        """Facts to keep of the file for a later load; None where the model cannot be described."""
        if refusal(self.skeleton):
            return None
        return {"names": self._names, "sketch": Sketch.of(self.skeleton).told()}

    @cached_property
    def skeleton(self) -> Any:
        """The model of transformers, its weights on the meta device."""
        return self._built()

    @cached_property
    def _config(self) -> Any:
        return configured(self.header)

    @property
    def num_rows(self) -> int:
        """Rows of the output layer."""
        return self.described.num_rows if isinstance(self.described, Sketch) else int(self._config.vocab_size)

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        """A model of transformers with the values of the file, on the CPU. One tensor at a time is held twice."""
        model = self._built()
        for name, stored in self.stored.items():
            module, _, last = name.rpartition(".")
            setattr(model.get_submodule(module), last, nn.Parameter(stored.dequantised().to(dtype), requires_grad=False))
        model.tie_weights()
        return model

    def _built(self) -> Any:
        """The model with its weights on the meta device, and real tables of angles."""
        import transformers
        from transformers.initialization import no_init_weights

        kind = getattr(transformers, FAMILIES[self.header.text("general.architecture")])
        with torch.device("meta"), no_init_weights():
            model = kind(self._config)
        model.tie_weights()
        rotary = model.model.rotary_emb
        model.model.rotary_emb = type(rotary)(config=self._config)
        if self._factors is not None:
            self._divide(model.model.rotary_emb, self._factors)
        for module in model.modules():
            if getattr(module, "embed_scale", None) is not None and isinstance(module.embed_scale, Tensor):
                module.embed_scale = torch.tensor(module.scalar_embed_scale)
        return model.eval()

    @cached_property
    def _factors(self) -> Tensor | None:
        entry = self.header.tensors.get(FACTORS)
        is_ruled = self._config.rope_parameters.get("rope_type") == "llama3"  # whose frequencies transformers computes
        return None if is_ruled or entry is None else torch.from_numpy(entry.data[0].view("<f4"))

    def _divide(self, rotary: Any, factors: Tensor) -> None:
        """Frequencies by the file's own factors, to the bit."""
        size = 2 * len(factors)
        plain = 1.0 / self._config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size)
        rotary.inv_freq = plain / factors
        rotary.original_inv_freq = rotary.inv_freq.clone()

    def _found(self) -> dict[str, str]:
        """The tensor of every parameter; raises for one that is missing, of another shape, or left over."""
        from gguf.constants import MODEL_ARCH
        from gguf.tensor_mapping import get_tensor_name_map

        architecture = self.header.text("general.architecture")
        names = get_tensor_name_map(MODEL_ARCH[architecture.upper()], self._config.num_hidden_layers)
        found, rest = {}, set(self.header.tensors) - _NOT_WEIGHTS
        for name, parameter in self.skeleton.named_parameters():
            own = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if own is None:
                self.header.fail(f"cannot have {name}, for which files of {architecture} have no name")
            check_shape(self.header, own, tuple(parameter.shape))
            found[name] = own
            rest.discard(own)
        if rest:
            self.header.fail(f"has {len(rest)} tensors that a model of {architecture} has no place for, first {min(rest)}")
        return found

    def _stored(self, name: str, own: str) -> Stored:
        entry, architecture = self.header.tensors[own], self.header.text("general.architecture")
        role = name.split(".")[-2]
        if architecture == "llama" and role in ("q_proj", "k_proj"):
            heads = num_heads(self.header, architecture)[role == "k_proj"]
            order = _halves(entry.shape[0], heads)
            apart = (entry.shape[0], -1)  # a vector's values, a matrix's rows
            return Stored(entry.kind, entry.shape, lambda: entry.data.reshape(apart)[order].reshape(entry.rows, entry.row))
        if architecture == "gemma3" and role.endswith("norm"):
            given = Stored(entry.kind, entry.shape, lambda: entry.data)
            return Stored("F32", entry.shape, lambda: (given.dequantised() - 1).reshape(1, -1).view(torch.uint8).numpy())
        return Stored(entry.kind, entry.shape, lambda: entry.data)


_SCALES = {
    **{"Q4_0": (18, 0), "Q4_1": (20, 0, 2), "Q5_0": (22, 0), "Q5_1": (24, 0, 2), "Q8_0": (34, 0)},
    **{"Q2_K": (84, 80, 82), "Q3_K": (110, 108), "Q4_K": (144, 0, 2), "Q5_K": (176, 0, 2), "Q6_K": (210, 208)},
}
"""Bytes of a block, and where in it its float16 scales lie."""
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}


def checked_parts(header: Header) -> Iterator[tuple[str, TensorInfo, np.ndarray]]:
    """Every byte of the tensors, in the order of their names, some rows at a time.

    Raises `BackendError` for values or scales that are infinite or no numbers.
    """
    for name, entry in sorted(header.tensors.items()):
        for part in entry.parts():
            if _is_bad(entry.kind, part):
                header.fail(f"has {name} with values that are infinite or no numbers")
            yield name, entry, part


def _is_bad(kind: str, rows: np.ndarray) -> bool:
    """True where a value, or a scale of a block, has the exponent of what is infinite or no number."""
    if kind in _EXPONENTS:
        dtype, bits = _EXPONENTS[kind]
        return bool((rows.view(dtype) & bits == bits).any())
    size, *places = _SCALES.get(kind, (1,))
    blocks = rows.reshape(-1, size)
    return any((blocks[:, at + 1] & 0x7C == 0x7C).any() for at in places)


def _halves(num: int, heads: int) -> np.ndarray:
    """Row numbers of a file in the order of transformers: in each head neighbouring pairs -> (first half, second half)."""
    return np.arange(num).reshape(heads, -1, 2).transpose(0, 2, 1).reshape(-1)
