"""The bytes of a GGUF file, and where in it each tensor lies.

Nothing is mapped: where a mapped file is cut short, the next look at it ends the process with a signal.
"""

import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specdecpp.errors import RunnerError

CHUNK = 2**22
"""Bytes that are read at a time where a few will do."""


class File:
    """The bytes of a file, by plain reads. Raises `RunnerError` where it cannot be read, or was changed since it was opened."""

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
            raise RunnerError(
                f"{self.path.name} was changed while it was read: it had {self.stat.st_size} bytes when it was opened, and has "
                f"{now.st_size} now. Load it again when nothing writes to it ({self.path})."
            )
        return found

    def _unreadable(self, error: OSError) -> RunnerError:
        return RunnerError(f"{self.path} cannot be read ({error.strerror or error}). Name a GGUF file that can be.")


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: its type by GGML's name, its shape as torch has it, and where its bytes lie, `rows` of `row` each.

    `file` is None for a type that is not known here.
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
        """The same, some rows at a time."""
        num = max(1, CHUNK // max(1, self.row))
        for first in range(0, self.rows, num):
            yield self._some(first, min(first + num, self.rows))

    def _some(self, first: int, end: int) -> np.ndarray:
        assert self.file is not None, "a type that is not known has no rows"
        return self.file.read(self.start + first * self.row, (end - first) * self.row).reshape(-1, self.row)
