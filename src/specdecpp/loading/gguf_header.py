"""The header of a GGUF file: its metadata, and where its tensors lie. Counts, lengths, types and offsets are checked.

The package gguf has a reader too. It takes 8 s for a vocabulary of 152 thousand tokens (this one 0.1 s), and believes what a
file says. Nothing is mapped: where a mapped file is cut short, the next look at it ends the process with a signal.

Source: the GGUF specification (ggml-org/ggml, docs/gguf.md), versions 2 and 3.
"""

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from specdecpp.errors import BackendError

CHUNK = 2**22
"""Bytes that are read at a time where a few will do."""
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
"""GGUF's types of values with a fixed size."""
_TEXT, _LIST = 8, 9
_ADVICE = "The file is damaged, or was not fetched whole: fetch or write it again"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file: GGML's name of its type, its shape as torch has it, and the start of its bytes, in rows of `row`
    (0 for a type that is not known here)."""

    kind: str
    shape: tuple[int, ...]
    path: Path
    start: int = 0
    row: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row

    @property
    def data(self) -> np.ndarray:
        """Its bytes, read each time: uint8 [rows, bytes of a row]."""
        return next(self.parts(self.num_bytes))

    def parts(self, size: int = CHUNK) -> Iterator[np.ndarray]:
        """Its bytes, some rows at a time. Raises `BackendError` where the file was cut since."""
        step = max(1, size // self.row) * self.row
        for first in range(0, self.num_bytes, step):
            num = min(step, self.num_bytes - first)
            found = np.fromfile(self.path, np.uint8, num, offset=self.start + first)
            if len(found) < num:
                raise BackendError(
                    f"{self.path.name} was changed while it was read: it has {self.path.stat().st_size} bytes now. Load it "
                    f"again when nothing writes to it ({self.path})."
                )
            yield found.reshape(-1, self.row)


class Header:
    """Metadata and tensors of one file. Raises `BackendError`, which says what is wrong in which file."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.paths = [self.path]
        if not self.path.is_file():
            raise BackendError(f"there is no file {self.path}. Give the path of a GGUF file.")
        self._size, self.end = self.path.stat().st_size, 0
        self.values: dict[str, Any] = {}
        self.types: dict[str, int] = {}
        """GGUF's number of the type of each value, or of the items of a list."""
        with self.path.open("rb", CHUNK) as self._stream:
            if (magic := self._take(min(4, self._size))) != b"GGUF":
                self.fail(f"is no GGUF file: it begins with {magic!r}", "Name a GGUF file, or fetch this one again")
            if (version := self._number("I")) not in (2, 3):
                self.fail(f"is GGUF version {version}, and 2 and 3 are known here", "Write it again with a current converter")
            num_tensors, num_values = self._number("Q"), self._number("Q")
            for _ in range(num_values):
                key = self._name(self.values)
                self.values[key] = self._content(key, self._number("I"))
            found: dict[str, tuple[tuple[int, ...], int, int]] = {}
            for _ in range(num_tensors):
                name = self._name(found)
                num_dims = self._number("I")
                shape = tuple(self._number("Q") for _ in range(min(num_dims, 5)))[::-1]
                if not 1 <= num_dims <= 4 or not 0 < math.prod(shape) < 2**48:
                    self.fail(f"gives {name} {num_dims} dimensions, {list(shape)}")
                found[name] = shape, self._number("I"), self._number("Q")
        self.tensors = dict(self._placed(found))

    # Values by key: each raises where the key is missing without a default, or holds another type

    def text(self, key: str, default: str | None = None) -> str:
        return self._decoded(self._value(key, default, bytes, str), key)

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        return [self._decoded(item, key) for item in self._value(key, default, list)]

    def integer(self, key: str, default: int | None = None, *, least: int = 0, most: int = 2**31 - 1) -> int:
        value = self._value(key, default, int)
        if not least <= value <= most:
            self.fail(f"says {key} = {value}, which must lie within {least} and {most}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = -math.inf) -> float:
        value = self._value(key, default, int, float)
        if not (math.isfinite(value) and value > above):
            self.fail(f"says {key} = {value}, which must be finite and above {above:g}")
        return float(value)

    def numbers(self, key: str) -> np.ndarray:
        return self._value(key, None, np.ndarray)

    def flag(self, key: str, default: bool) -> bool:
        return self._value(key, default, bool)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def _value(self, key: str, default: Any, *kinds: type) -> Any:
        value = self.values.get(key, default)
        if value is None:
            self.fail(f"has no {key}", "It is incomplete: write it again with a current converter")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            self.fail(f"has a {key} that is no {' or '.join(kind.__name__ for kind in kinds)}")
        return value

    def _decoded(self, value: bytes | str, key: str) -> str:
        try:
            return value.decode() if isinstance(value, bytes) else value
        except UnicodeDecodeError:
            self.fail(f"has a text in {key} that is not UTF-8")

    def fail(self, what: str, advice: str = _ADVICE) -> NoReturn:
        """Raise `BackendError`: the file `what`, and what to do."""
        raise BackendError(f"{self.path.name} {what}. {advice} ({self.path}).")

    # Reading

    def _take(self, size: int) -> bytes:
        self.end += size
        if self.end > self._size:
            self.fail(f"ends within its header: it has {self._size} bytes, and announces {self.end} or more")
        return self._stream.read(size)

    def _number(self, kind: str) -> int:
        return struct.unpack("<" + kind, self._take(struct.calcsize(kind)))[0]

    def _name(self, others: dict[str, Any]) -> str:
        name = self._decoded(self._take(self._number("Q")), "a name")
        if name in others:
            self.fail(f"has {name} twice")
        return name

    def _content(self, key: str, kind: int) -> Any:
        """A text as bytes, a list of them, an array, or a number."""
        self.types[key] = kind
        if kind == _TEXT:
            return self._take(self._number("Q"))
        if kind in _SCALARS:
            return self._array(kind, 1)[0].item()
        if kind == _LIST:
            kind = self.types[key] = self._number("I")
            num = self._number("Q")
            if kind in _SCALARS:
                return self._array(kind, num)
            if kind == _TEXT:
                take, size_of = self._take, struct.Struct("<Q").unpack  # hundreds of thousands of times
                return [take(*size_of(take(8))) for _ in range(num)]
        self.fail(f"has {key} of a type {kind} that is not known here")

    def _array(self, kind: int, num: int) -> np.ndarray:
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._take(num * dtype.itemsize), dtype)

    def _placed(self, found: dict[str, tuple[tuple[int, ...], int, int]]) -> Iterator[tuple[str, TensorInfo]]:
        """Tensors with their bytes, none of which may lie outside or belong to two."""
        alignment = self.integer("general.alignment", 32, least=1, most=2**20)
        start = -(-self.end // alignment) * alignment
        reached, last = 0, ""
        for name, (shape, number, offset) in sorted(found.items(), key=lambda item: item[1][2]):
            kind, block, size = _sizes().get(number, (f"type {number}", 0, 0))
            if offset % alignment or offset < reached:
                self.fail(f"puts {name} at byte {offset}, off its alignment of {alignment} or within {last}")
            if not block:
                yield name, TensorInfo(kind, shape, self.path)
                continue
            if shape[-1] % block:
                self.fail(f"has {name} with rows of {shape[-1]} values in {kind}, which packs {block} at a time")
            info = TensorInfo(kind, shape, self.path, start + offset, shape[-1] // block * size)
            reached, last = offset + info.num_bytes, name
            if start + reached > self._size:
                self.fail(f"is too short: {name} should end at byte {start + reached}, and it has {self._size}")
            yield name, info


def opened(path: str | Path) -> Header:
    """A file, or all parts of one that was split, by the name of the first: its metadata and the tensors of all."""
    header = Header(path)
    num = header.integer("split.count", 0, most=99_999)
    if num < 2:
        return header
    found = re.fullmatch(rf"(.+)-00001-of-{num:05}\.gguf", header.path.name)
    if found is None or header.integer("split.no", 0):
        header.fail(f"is one of {num} parts", f"Name the first of them, whose name ends in -00001-of-{num:05}.gguf")
    for i in range(1, num):
        part = Header(header.path.with_name(f"{found[1]}-{i + 1:05}-of-{num:05}.gguf"))
        if part.integer("split.no") != i or header.tensors.keys() & part.tensors.keys():
            part.fail(f"is not part {i + 1} of {num} of {header.path.name}")
        header.tensors |= part.tensors
        header.paths.append(part.path)
    return header


@cache
def _sizes() -> dict[int, tuple[str, int, int]]:
    """Name, values of a block and bytes of a block, by GGML's number of the type."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): (kind.name, block, size) for kind, (block, size) in GGML_QUANT_SIZES.items()}
