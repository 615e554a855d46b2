"""The weights of a model in the layout that the compiled code reads.

Values come from a model of transformers, or as they lie in a GGUF file (`stored`): quantised blocks are kept as they are, those
that the compiled code does not know become float32.
"""

import ctypes
import weakref
from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdecpp.backends.angles import Angles
from specdecpp.backends.families import Layer, Sketch
from specdecpp.backends.native.library import library
from specdecpp.errors import BackendError

KINDS = {
    **{"F32": 0, "F16": 1, "BF16": 30},
    **{"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8},
    **{"Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23},
}
"""Kinds that the compiled code can read, by GGML's names and numbers."""
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
TABLES = 4
_ROLES = ("q", "k", "v", "out", "gate", "up", "down", "embedding", "output")
_NORMS = ("norm", "mlp_norm", "q_norm", "k_norm", "out_norm", "down_norm", "last")
_ENDS = -1
IDLE_BYTES, LARGE_BYTES = 256 * 2**20, 32 * 2**20
"""Bytes that caches that nobody uses may hold together, and a single one of them: the rest is given back."""
COMPARED = 16
"""Rows of a matrix that the package gguf reads too (`values_of`)."""

_Lines = tuple[str, np.ndarray, int]
"""Rows of a matrix: the kind of their values, their bytes [rows, bytes of a row], and how many values a row has."""


class _Shape(ctypes.Structure):
    _names = ("layers", "width", "heads", "kv_heads", "size", "rotary", "hidden", "vocab", "is_gelu", "rounds_to")
    _fields_ = [(name, ctypes.c_int32) for name in _names]
    _fields_ += [(name, ctypes.c_float) for name in ("eps", "query_scale", "embedding_scale")]


class Weights:
    """The weights of a model, and its tables of angles. Raises `MemoryError`, `BackendError` where nothing can be compiled."""

    def __init__(self, sketch: Sketch, values: "Values", *, vocab_size: int, output_ids: Tensor | None, rounds_to: int):
        self.lib, self.family = library(), sketch.family
        family, size = self.family, self.family.head_size
        shape = _Shape(
            layers=len(family.layers),
            width=family.width,
            heads=family.heads,
            kv_heads=family.kv_heads,
            size=size,
            rotary=family.rotary_size,
            hidden=family.hidden,
            vocab=vocab_size,
            is_gelu=family.activation != "silu",
            rounds_to=rounds_to,
            eps=family.eps,
            query_scale=family.score_scale,
            embedding_scale=family.embedding_scale,
        )
        self.handle = self.lib.native_new(ctypes.byref(shape))
        if not self.handle:
            raise MemoryError("there is no memory for the weights of a model")
        self.idle: list[int] = []
        """Caches that nobody uses: memory that is new to a process is slow to write for the first time."""
        weakref.finalize(self, _freed, self.lib, self.handle, self.idle)
        for i, layer in enumerate(family.layers):
            self._add_layer(i, layer, values)
        self._norm(_ENDS, "last", values.vector(family.norm))
        ids = None if output_ids is None else output_ids.numpy()
        self._matrix(_ENDS, "output", values.lines(family.output, slice(vocab_size) if ids is None else ids))
        embedding = values.lines(family.embedding)
        self.num_ids = len(embedding[1])
        if family.output != family.embedding or ids is not None or vocab_size != self.num_ids:
            self._matrix(_ENDS, "embedding", embedding)
        if ids is not None:
            narrow = ids.astype(np.int32)
            self.lib.native_output_ids(self.handle, narrow.ctypes.data, len(narrow))
        self.bytes_per_position = 2 * 4 * len(family.layers) * family.kv_heads * size
        """Bytes of a cache: keys and values in float32."""
        table = partial(Angles, sketch.rotary, dtype=torch.float32, head_size=size)
        self._angles = [table(kind=view.angles) for view in family.views]
        self._tables: list[tuple[Tensor, Tensor]] = []
        self._common: weakref.WeakKeyDictionary[Weights, int] = weakref.WeakKeyDictionary()
        self._lies_with: list[Weights] = []
        self._lends = False

    def common(self, other: "Weights") -> int:
        """Count the first layers that the other has too, to the bit; it reads them here from then on. Not during a pass."""
        if other not in self._common:
            both = zip(self._angles, other._angles, strict=False)
            turn_alike = len(self._angles) == len(other._angles) and all(one.is_like(two) for one, two in both)
            self._common[other] = num = self.lib.native_common(self.handle, other.handle) if turn_alike else 0
            if num and not other._lends:  # others may read there what it would give up
                self.lib.native_share(other.handle, self.handle, num)
                other._lies_with.append(self)
                self._lends = True
        return self._common[other]

    def let_go(self, sequence: int) -> None:
        """Keep the memory of a cache for the next one, unless it is large or others hold much."""
        size, *others = (self.bytes_per_position * self.lib.native_capacity(one) for one in (sequence, *self.idle))
        if size <= LARGE_BYTES and size + sum(others) <= IDLE_BYTES:
            self.idle.append(sequence)
        else:
            self.lib.native_sequence_free(sequence)

    def see_to(self, end: int) -> None:
        """Tables of angles that go to this position or further."""
        if self._tables and end <= self._tables[0][0].shape[0]:
            return
        self._tables = [angles.to(end) for angles in self._angles]
        for i, (cos, sin) in enumerate(self._tables):
            self.lib.native_angles(self.handle, i, cos.data_ptr(), sin.data_ptr())

    def _add_layer(self, i: int, layer: Layer, values: "Values") -> None:
        family = self.family
        sizes = [num * family.head_size for num in (family.heads, family.kv_heads, family.kv_heads)]
        biases: tuple[Tensor | None, ...] = (None,) * 3
        if layer.qkv_bias:
            biases = torch.cat([values.vector(name) for name in layer.qkv_bias]).split(sizes)
        for role, lines, bias in zip("qkv", values.split(layer.qkv, sizes), biases, strict=True):
            self._matrix(i, role, lines, bias)
        for role, lines in zip(("gate", "up"), values.split(layer.gate_up, [family.hidden] * 2), strict=True):
            self._matrix(i, role, lines)
        self._matrix(i, "out", values.lines(layer.out))
        self._matrix(i, "down", values.lines(layer.down))
        norms = (layer.norm, layer.mlp_norm, *(layer.head_norms or (None, None)), layer.out_norm, layer.down_norm)
        for role, name in zip(_NORMS[:-1], norms, strict=True):
            if name is not None:
                self._norm(i, role, values.vector(name))
        self.lib.native_layer(self.handle, i, family.views[layer.view].window or 0, layer.view)

    def _matrix(self, layer: int, role: str, lines: _Lines, bias: Tensor | None = None) -> None:
        kind, data, width = lines
        data = np.ascontiguousarray(data)
        given = data.ctypes.data, len(data), width, data.strides[0], None if bias is None else bias.data_ptr()
        threads = torch.get_num_threads()
        if not self.lib.native_matrix(self.handle, layer, _ROLES.index(role), KINDS[kind], *given, threads):
            raise MemoryError(f"there is no memory for a matrix of {len(data)} x {width} ({kind})")

    def _norm(self, layer: int, role: str, weight: Tensor) -> None:
        weight = weight + self.family.norm_offset
        if not self.lib.native_norm(self.handle, layer, _NORMS.index(role), weight.data_ptr(), len(weight)):
            raise MemoryError(f"there is no memory for a norm of {len(weight)}")


class Subset:
    """A copy of the output layer's rows of some tokens, ids in rising order."""

    def __init__(self, weights: Weights, ids: list[int]):
        narrow = np.array(ids, dtype=np.int32)
        self.handle = weights.lib.native_subset(weights.handle, narrow.ctypes.data, len(narrow))
        if not self.handle:
            raise MemoryError(f"there is no memory for the output rows of {len(ids)} tokens")
        weakref.finalize(self, weights.lib.native_subset_free, self.handle)


def values_of(stored: Any) -> Tensor:
    """The values of a stored matrix or vector, float32, by compiled code. Raises `BackendError` where some of its rows are not
    what the package gguf makes of them."""
    values = torch.empty(stored.shape)
    lines, kind = stored.data, KINDS.get(stored.kind, -1)
    shape = len(lines), values.numel() // len(lines)
    to, threads = values.data_ptr(), torch.get_num_threads()
    if not library().native_unpack(kind, lines.ctypes.data, *shape, lines.strides[0], to, threads):
        return stored.dequantised()
    some = slice(None, None, -(-len(lines) // COMPARED))
    expected = type(stored)(stored.kind, (len(lines[some]), shape[1]), lines[some]).dequantised()
    if not torch.allclose(values.view(shape)[some], expected, rtol=1e-5, atol=0, equal_nan=True):
        raise BackendError(
            f"compiled code reads weights of the type {stored.kind} otherwise than the package gguf. Use LeanModel."
        )
    return values


def _freed(lib: Any, handle: int, idle: list[int]) -> None:
    for sequence in idle:
        lib.native_sequence_free(sequence)
    lib.native_free(handle)


class Values:
    """Parameters by name, of a model or as they are stored."""

    def __init__(self, model: Any, stored: Mapping[str, Any] | None):
        self._model, self._stored = model, stored

    def vector(self, name: str) -> Tensor:
        """float32, in one piece."""
        found = self._model.get_parameter(name) if self._stored is None else self._stored[name].dequantised()
        return found.detach().float().contiguous()

    def lines(self, name: str, which: Any = slice(None)) -> _Lines:
        """Some rows of a matrix, a slice or by their numbers."""
        found = None if self._stored is None else self._stored[name]
        if found is not None and found.kind in KINDS:
            return found.kind, found.data[which], found.shape[1]
        tensor = (self._model.get_parameter(name) if found is None else found.dequantised()).detach()
        tensor = (tensor if tensor.dtype in DTYPES else tensor.float()).contiguous()
        return DTYPES[tensor.dtype], tensor.view(torch.uint8).numpy()[which], tensor.shape[1]

    def split(self, names: tuple[str, ...], sizes: list[int]) -> list[_Lines]:
        """Matrices of these numbers of rows, of which each has its name or all have one."""
        name, *others = names
        if others:
            return [self.lines(name) for name in names]
        return [self.lines(name, slice(end - size, end)) for end, size in zip(accumulate(sizes), sizes, strict=True)]
