"""The header of a GGUF file: its metadata, and where its tensors lie. Every count, length, type and offset is checked.

    bytes -> Header -> .text(key), .integer(key), ..., .tensors[name] -> TensorInfo

The package gguf has a reader too. It takes 8 s for a vocabulary of 152 thousand tokens (this one 0.1 s), and believes what a
file says: lengths, dimensions and offsets that lie outside end in numpy's errors or in views of other tensors' bytes.

Nothing is mapped: where a mapped file is cut short, the next look at it ends the process with a signal.

Source: the GGUF specification (ggml-org/ggml, docs/gguf.md), versions 2 and 3.
"""

import math
import os
import re
import struct
import weakref
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
_MOST_KEYS, _MOST_TENSORS, _MOST_TEXTS = 2**16, 2**17, 2**22
_LONGEST_NAME, _LONGEST_TEXT, _LONGEST_HEADER = 2**16, 2**26, 2**28
_ADVICE = "The file is damaged, or was not fetched whole: fetch or write it again"


class File:
    """The bytes of a file, by plain reads. Raises `BackendError` where it cannot be read, or was changed since it was
    opened."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._handle = os.open(path, os.O_RDONLY)
            self.stat = os.fstat(self._handle)
        except OSError as error:
            raise self._unreadable(error) from error
        weakref.finalize(self, os.close, self._handle)

    def read(self, at: int, size: int) -> np.ndarray:
        """So many bytes from there, uint8 [size]."""
        found = np.empty(size, np.uint8)
        rest = memoryview(found)  # pyright: ignore[reportArgumentType]
        try:
            while rest and (num := os.preadv(self._handle, [rest], at)):
                at, rest = at + num, rest[num:]
            now = os.fstat(self._handle)
        except OSError as error:
            raise self._unreadable(error) from error
        if rest or (now.st_size, now.st_mtime_ns) != (self.stat.st_size, self.stat.st_mtime_ns):
            raise BackendError(
                f"{self.path.name} was changed while it was read: it had {self.stat.st_size} bytes when it was opened, and has "
                f"{now.st_size} now. Load it again when nothing writes to it ({self.path})."
            )
        return found

    def _unreadable(self, error: OSError) -> BackendError:
        return BackendError(f"{self.path} cannot be read ({error.strerror or error}). Name a GGUF file that can be.")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file, without its values.

    kind    GGML's name of its type
    shape   as torch has it
    file    None for a type that is not known here
    start   the byte at which it begins
    rows    their number; `row` is the bytes of each
    """

    kind: str
    shape: tuple[int, ...]
    file: File | None = None
    start: int = 0
    rows: int = 0
    row: int = 0

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row

    @property
    def data(self) -> np.ndarray:
        """Its bytes, read each time: uint8 [rows, bytes of a row]."""
        return self._some(0, self.rows)

    def parts(self) -> Iterator[np.ndarray]:
        """Its bytes, some rows at a time."""
        num = max(1, CHUNK // max(1, self.row))
        for first in range(0, self.rows, num):
            yield self._some(first, min(first + num, self.rows))

    def _some(self, first: int, end: int) -> np.ndarray:
        assert self.file is not None, "a type that is not known has no rows"
        return self.file.read(self.start + first * self.row, (end - first) * self.row).reshape(-1, self.row)


class Header:
    """Metadata and tensors of one file. Raises `BackendError`, which says what is wrong in which file."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._at = 0
        if not self.path.is_file():
            raise BackendError(f"there is no file {self.path}. Give the path of a GGUF file.")
        self._file, self._seen = File(self.path), b""
        stat = self._file.stat
        self._size = stat.st_size
        if not self._size:
            self.fail("is empty")
        self.state: dict[str, Any] = {"path": str(self.path.resolve()), "size": self._size, "mtime_ns": stat.st_mtime_ns}
        self.state["inode"] = stat.st_ino
        num_tensors, num_values = self._counts()
        self.values: dict[str, Any] = dict(self._values(num_values))
        found = list(self._infos(num_tensors))
        self.end, self._seen = self._at, b""
        self.tensors = dict(self._entries(found))

    # Values by key

    def text(self, key: str, default: str | None = None) -> str:
        """A text. Raises where the key is missing (and there is no default) or holds another type; so do all below."""
        return self._decoded(self._value(key, default, (bytes, str), "text"), key)

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        return [self._decoded(item, key) for item in self._value(key, default, (list,), "list of texts")]

    def integer(self, key: str, default: int | None = None, *, least: int = 0, most: int = 2**31 - 1) -> int:
        """A whole number within limits."""
        value = self._value(key, default, (int,), "whole number")
        if not least <= value <= most:
            self.fail(f"says {key} = {value}, which must lie within {least} and {most}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = -math.inf, most: float = math.inf) -> float:
        """A finite number within limits."""
        value = self._value(key, default, (int, float), "number")
        if not (math.isfinite(value) and above < value <= most):
            self.fail(f"says {key} = {value}, which must be finite, above {above:g} and at most {most:g}")
        return float(value)

    def numbers(self, key: str) -> np.ndarray:
        return self._value(key, None, (np.ndarray,), "list of numbers")

    def flag(self, key: str, default: bool | None = None) -> bool:
        return self._value(key, default, (bool,), "truth value")

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def _value(self, key: str, default: Any, kinds: tuple[type, ...], what: str) -> Any:
        value = self.values.get(key, default)
        if value is None:
            self.fail(f"has no {key}", "It is incomplete: write it again with a current converter")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            self.fail(f"has a {key} that is no {what}")
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

    def _counts(self) -> tuple[int, int]:
        """The numbers of tensors and of values, after the marks of the format."""
        self._see(4)
        if (magic := self._seen[:4]) != b"GGUF":
            self.fail(f"is no GGUF file: it begins with {magic!r}, not b'GGUF'", "Name a GGUF file, or fetch this one again")
        self._at = 4
        version = self._read("I")
        if version and not version & 0xFFFF:
            self.fail("was written for big-endian machines", "Fetch or write it for little-endian ones")
        if version not in (2, 3):
            self.fail(f"is GGUF version {version}, and 2 and 3 are known here", "Write it again with a current converter")
        num_tensors, num_values = self._read("Q"), self._read("Q")
        for what, num, most in (("tensors", num_tensors, _MOST_TENSORS), ("values", num_values, _MOST_KEYS)):
            if num > most:
                self.fail(f"announces {num} {what}")
        return num_tensors, num_values

    def _see(self, end: int) -> bool:
        """Read at least so far; False where the file ends before."""
        if end <= len(self._seen):
            return True
        if end > self._size:
            return False
        if end > _LONGEST_HEADER:
            self.fail(f"announces a header of {end} bytes or more")
        have = len(self._seen)
        more = min(max(end - have, have, CHUNK), self._size - have)  # twice as much each time
        self._seen += self._file.read(have, more).tobytes()
        return True

    def _read(self, kind: str) -> int:
        size = struct.calcsize(kind)
        if not self._see(self._at + size):
            self.fail(f"ends within its header, after {self._size} bytes")
        (value,) = struct.unpack_from("<" + kind, self._seen, self._at)
        self._at += size
        return value

    def _string(self, longest: int) -> bytes:
        size, at = self._read("Q"), self._at
        if size > longest or not self._see(at + size):
            self.fail(f"announces a text of {size} bytes at byte {at - 8}")
        self._at = at + size
        return self._seen[at : at + size]

    def _name(self, what: str) -> str:
        at, raw = self._at, self._string(_LONGEST_NAME)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"has a name of a {what} that is not UTF-8, at byte {at}")

    def _values(self, num: int) -> Iterator[tuple[str, Any]]:
        seen = set()
        for _ in range(num):
            key = self._name("value")
            if key in seen:
                self.fail(f"says {key} twice")
            seen.add(key)
            kind = self._read("I")
            if kind == _TEXT:
                yield key, self._string(_LONGEST_TEXT)
            elif kind == _LIST:
                yield key, self._list(key)
            elif kind in _SCALARS:
                yield key, self._array(key, kind, 1)[0].item()
            else:
                self.fail(f"has {key} of a type {kind} that does not exist")

    def _list(self, key: str) -> Any:
        kind, num = self._read("I"), self._read("Q")
        if kind in _SCALARS:
            return self._array(key, kind, num)
        if kind != _TEXT:
            self.fail(f"has {key}, a list of a type {kind} that is not known here")
        if num > _MOST_TEXTS:
            self.fail(f"announces {num} texts in {key}")
        texts, at, size_of, seen = [], self._at, struct.Struct("<Q").unpack_from, len(self._seen)
        for _ in range(num):  # hundreds of thousands of them
            after = at + 8 + size_of(self._seen, at)[0] if at + 8 <= seen or self._see(at + 8) else self._size + 1
            if after > seen:
                if not self._see(after):
                    self.fail(f"ends within {key}, or a text in it is too long (byte {at})")
                seen = len(self._seen)
            texts.append(self._seen[at + 8 : after])
            at = after
        self._at = at
        return texts

    def _array(self, key: str, kind: int, num: int) -> np.ndarray:
        dtype = np.dtype(_SCALARS[kind])
        at, self._at = self._at, self._at + num * dtype.itemsize
        if not self._see(self._at):
            self.fail(f"announces {num} values in {key}, more than it has bytes for")
        if kind == 7 and any(value > 1 for value in self._seen[at : self._at]):
            self.fail(f"has a truth value in {key} that is neither 0 nor 1")
        return np.frombuffer(self._seen, dtype, num, at).copy()

    def _infos(self, num: int) -> Iterator[tuple[str, int, tuple[int, ...], int]]:
        """Name, type, shape and offset of each tensor."""
        seen = set()
        for _ in range(num):
            name = self._name("tensor")
            if name in seen:
                self.fail(f"has two tensors {name}")
            seen.add(name)
            if not 1 <= (num_dims := self._read("I")) <= 4:
                self.fail(f"gives {name} {num_dims} dimensions")
            shape = tuple(self._read("Q") for _ in range(num_dims))[::-1]
            if not all(shape) or math.prod(shape) >= 2**48:
                self.fail(f"gives {name} the shape {list(shape)}")
            yield name, self._read("I"), shape, self._read("Q")

    def _entries(self, found: list[tuple[str, int, tuple[int, ...], int]]) -> Iterator[tuple[str, TensorInfo]]:
        """Tensors with their bytes, none of which may lie outside or belong to two."""
        alignment = self.integer("general.alignment", 32, least=1, most=2**20)
        if alignment & (alignment - 1):
            self.fail(f"has an alignment of {alignment}, not a power of two")
        start = -(-self._at // alignment) * alignment
        reached, last = 0, ""
        for name, number, shape, offset in sorted(found, key=lambda info: info[3]):
            kind, block, size = _sizes().get(number, (f"type {number}", 0, 0))
            if offset % alignment:
                self.fail(f"puts {name} at byte {offset}, off its alignment of {alignment}")
            if offset < reached:
                self.fail(f"puts {name} at byte {offset}, within {last}")
            if not block:
                yield name, TensorInfo(kind, shape)
                continue
            if shape[-1] % block:
                self.fail(f"has {name} with rows of {shape[-1]} values in {kind}, which packs {block} at a time")
            row, rows = shape[-1] // block * size, math.prod(shape[:-1])
            reached, last = offset + row * rows, name
            if start + reached > self._size:
                self.fail(f"is too short: {name} should end at byte {start + reached}, and it has {self._size}")
            yield name, TensorInfo(kind, shape, self._file, start + offset, rows, row)


def opened(path: str | Path) -> Header:
    """A file, or all parts of one that was split, by the name of the first: its metadata and the tensors of all."""
    header = Header(path)
    num = header.integer("split.count", 0, most=99_999)
    if num < 2:
        return header
    found = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", header.path.name)
    if found is None or int(found[3]) != num or header.integer("split.no", 0):
        header.fail(f"is one of {num} parts", f"Name the first of them, whose name ends in -00001-of-{num:05}.gguf")
    header.state["parts"] = parts = []
    for i in range(1, num):
        part = Header(header.path.with_name(f"{found[1]}-{i + 1:05}-of-{num:05}.gguf"))
        if part.integer("split.no") != i or header.tensors.keys() & part.tensors.keys():
            part.fail(f"is not part {i + 1} of {num} of {header.path.name}")
        header.tensors |= part.tensors
        parts.append(part.state)
    if (announced := header.integer("split.tensors.count", len(header.tensors))) != len(header.tensors):
        header.fail(f"and its other parts have {len(header.tensors)} tensors, where it announces {announced}")
    return header


@cache
def _sizes() -> dict[int, tuple[str, int, int]]:
    """Name, values of a block and bytes of a block, by GGML's number of the type."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): (kind.name, block, size) for kind, (block, size) in GGML_QUANT_SIZES.items()}
