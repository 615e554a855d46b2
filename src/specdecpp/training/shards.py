"""A collection on disk: one pair of files for each shard, written so that after a kill it is clear which shards are complete.

    collection.json               what it is of: provenance, written first
    shard-00000.safetensors       the draft's states, float16
    shard-00000.parquet           everything else, one row for each answer; written last: it being there says "complete"

Each file is written under another name and then renamed. Nothing in them depends on when or where they were written.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.torch import load, save
from torch import Tensor

from specdecpp import cache_dir
from specdecpp.errors import DataError, first_line
from specdecpp.training.branches import Branches
from specdecpp.training.labels import Record

COLLECTION = "collection.json"
_KEY = b"specdecpp"
_INTS, _FLOATS = pa.int32(), pa.float32()
_COLUMNS = {
    "prompt": _INTS,
    "answer": _INTS,
    "candidate": _INTS,
    "log_q": _FLOATS,
    "log_ratio": _FLOATS,
    "overlap": _FLOATS,
    "entropy": _FLOATS,
    "top": _FLOATS,
    "answer_log_q": _FLOATS,
    "answer_log_ratio": _FLOATS,
    "answer_odds": _FLOATS,
    "depth": _INTS,
    "is_mixed": pa.bool_(),
}
_BRANCH_COLUMNS = {
    "token": _INTS,
    "length": _INTS,
    "log_q": _FLOATS,
    "entropy": _FLOATS,
    "gap": _FLOATS,
    "log_ratio": _FLOATS,
    "overlap": _FLOATS,
}
_STATES = ("states", "mixed", "leaf")
_BRANCH = "branch_"


def name_of(index: int) -> str:
    return f"shard-{index:05d}"


def encoded(records: Sequence[Record], provenance: dict[str, Any]) -> tuple[bytes, bytes]:
    """A shard as the bytes of its two files: (safetensors, parquet)."""
    states = save(_states(records))
    note = {**provenance, "states_bytes": len(states), "states_crc32": zlib.crc32(states)}
    table = _table(records)
    note["table_crc32"] = _checksum(_columns(table))
    table = table.replace_schema_metadata({_KEY: json.dumps(note, sort_keys=True)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return states, sink.getvalue().to_pybytes()


def write(folder: Path, index: int, files: tuple[bytes, bytes]) -> None:
    """Put the two files of `encoded` into the folder, the parquet last."""
    cache_dir.write(folder / f"{name_of(index)}.safetensors", files[0])
    cache_dir.write(folder / f"{name_of(index)}.parquet", files[1])


def done(folder: Path) -> list[int]:
    """The complete shards, checked for truncation without reading them. Raises `DataError` for a damaged one."""
    found = []
    for path in sorted(folder.glob("shard-*.parquet")):
        note = _note(path)
        states = path.with_suffix(".safetensors")
        size = states.stat().st_size if states.is_file() else 0
        if size != note.get("states_bytes"):
            raise damaged(path, f"{states.name} has {size} bytes and should have {note.get('states_bytes')}")
        found.append(int(path.stem.removeprefix("shard-")))
    return found


def read(folder: Path | str, *, split: str | None = None) -> Iterator[Record]:
    """The records of a collection in their order, all or those of one split.

    Raises `DataError` for a folder without shards, for a damaged one, and for one that is not finished.

    >>> records = list(read("out/labels", split="dev"))        # doctest: +SKIP
    """
    folder = Path(folder)
    paths = sorted(folder.glob("shard-*.parquet"))
    if not paths:
        raise DataError(f"{folder} holds no labels. Make them with: specdecpp train RECIPE --only collect")
    num_shards = about(folder).get("num_shards", len(paths))
    if len(paths) < num_shards:
        raise DataError(
            f"the collection in {folder} is not finished: {len(paths)} of its {num_shards} shards are there. Run the same "
            "collect command again; it goes on where it stopped."
        )
    for path in paths:
        yield from _shard(path, split=split)


def about(folder: Path | str) -> dict[str, Any]:
    """Contents of `collection.json`, {} where there is none. Raises `DataError` when it is unreadable, or says something
    else."""
    path = Path(folder) / COLLECTION
    if not path.is_file():
        return {}
    try:
        return _About.model_validate_json(path.read_bytes()).model_dump(exclude_unset=True)
    except (OSError, ValidationError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        raise DataError(
            f"{path} is damaged ({' '.join([*map(str, first['loc']), first['msg']])}). Put back the file as it was, or collect "
            "into another folder."
        ) from error


class _About(BaseModel):
    """Fields of `collection.json` that are checked; others are kept as they are."""

    model_config = ConfigDict(extra="allow", strict=True)
    digest: str = ""
    num_shards: int = 0
    vocab_size: int = 0
    threads: int = 0
    pair: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    prompts: dict[str, Any] = {}
    names: dict[str, Any] = {}
    collect: dict[str, Any] = {}
    versions: dict[str, Any] = {}


def damaged(path: Path, reason: str) -> DataError:
    return DataError(
        f"the shard {path} is damaged: {reason}. Delete {path.name} and {path.stem}.safetensors and run the same collect "
        "command again: it makes this shard anew and keeps the others."
    )


def _states(records: Sequence[Record]) -> dict[str, Tensor]:
    """The states of all records below each other; of branches only the real tokens."""
    tensors = {}
    for name in _STATES:
        parts = [s for r in records if (s := getattr(r, name)) is not None]
        if parts:
            tensors[name] = torch.cat(parts).half()
    if parts := [r.branches.state[_is_real(r.branches)] for r in records if r.branches is not None]:
        tensors[f"{_BRANCH}state"] = torch.cat(parts).half()
    return tensors


def _is_real(branches: Branches) -> Tensor:
    return torch.arange(branches.token.shape[1]) < branches.length.unsqueeze(-1)


def _table(records: Sequence[Record]) -> pa.Table:
    columns: dict[str, pa.Array] = {
        "source": pa.array([r.source for r in records]),
        "split": pa.array([r.split for r in records]),
    }
    for name, kind in _COLUMNS.items():
        columns[name] = _lists([getattr(r, name) for r in records], kind)
    for name, kind in _BRANCH_COLUMNS.items():
        columns[f"{_BRANCH}{name}"] = _lists([r.branches and getattr(r.branches, name) for r in records], kind)
    return pa.table({name: column for name, column in columns.items() if column.null_count < len(records)})


def _lists(values: Sequence[Tensor | None], kind: pa.DataType) -> pa.Array:
    """One list for each record, null where it has none; rows of a matrix become lists of fixed size."""
    given = [v for v in values if v is not None]
    if not given:
        return pa.nulls(len(values))
    flat = pa.array(torch.cat(given).flatten().numpy(), type=kind)
    inner = flat if given[0].ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, given[0].shape[1])
    offsets = np.cumsum([0, *(0 if v is None else len(v) for v in values)])
    mask = pa.array([v is None for v in values]) if len(given) < len(values) else None
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), inner, mask=mask)


def _note(path: Path) -> dict[str, Any]:
    """Metadata of the shard."""
    try:
        return json.loads((pq.read_schema(path).metadata or {})[_KEY])
    except Exception as error:  # pyarrow has many errors of its own
        raise damaged(path, f"its parquet is unreadable ({first_line(error)})") from error


def _shard(path: Path, *, split: str | None) -> Iterator[Record]:
    """The records of one shard, after both files have been checked."""
    note = _note(path)
    try:
        content = path.with_suffix(".safetensors").read_bytes()
        if zlib.crc32(content) != note["states_crc32"]:
            raise ValueError(f"{path.stem}.safetensors is not the file that was written with it")
        states, columns = load(content), _columns(pq.read_table(path))
        if _checksum(columns) != note["table_crc32"]:
            raise ValueError("what it holds is not what was written")
    except Exception as error:  # pyarrow and safetensors each have errors of their own
        raise damaged(path, first_line(error)) from error
    cursors = {name: 0 for name in states}

    def take(name: str, num: int) -> Tensor | None:
        if name not in states:
            return None
        start = cursors[name]
        cursors[name] += num
        return states[name][start : start + num]

    for row in range(len(columns["source"])):
        record = _record(columns, row, take)
        if split is None or record.split == split:
            yield record


def _columns(table: pa.Table) -> "dict[str, _Column]":
    return {name: _Column(table.column(name).combine_chunks()) for name in table.column_names}


def _checksum(columns: "Mapping[str, _Column]") -> int:
    """Digest of all that is read from a table: parquet's own checksums leave out its headers."""
    value = 0
    for name, column in sorted(columns.items()):
        about = [name, column.is_valid, column.strings, column.offsets, column.width]
        value = zlib.crc32(json.dumps(about).encode(), value)
        value = zlib.crc32(column.flat.numpy().tobytes(), value)
    return value


class _Column:
    """A column of lists as one array, cut by row. Strings stay a list."""

    def __init__(self, column: pa.Array):
        self.is_valid: list[bool] = column.is_valid().to_pylist()
        self.strings: list[str] = []
        self.offsets: list[int] = []
        self.width: int | None = None
        self.flat = torch.empty(0)
        if not isinstance(column, pa.ListArray):
            self.strings = column.to_pylist()
            return
        self.offsets = column.offsets.to_pylist()
        inner = column.values
        self.width = inner.type.list_size if isinstance(inner, pa.FixedSizeListArray) else None
        flat = (inner if self.width is None else inner.values).to_numpy(zero_copy_only=False)
        self.flat = torch.from_numpy(flat.astype(np.int64) if flat.dtype == np.int32 else flat.copy())

    def __len__(self) -> int:
        return len(self.is_valid)

    def at(self, row: int) -> Tensor | None:
        if not self.is_valid[row]:
            return None
        start, end = self.offsets[row], self.offsets[row + 1]
        return self.flat[start:end] if self.width is None else self.flat.view(-1, self.width)[start:end]


def _record(columns: dict[str, _Column], row: int, take: Callable[[str, int], Tensor | None]) -> Record:
    values: dict[str, Any] = {name: columns[name].at(row) for name in _COLUMNS if name in columns}
    num = len(values["answer"])
    values |= {"states": take("states", num + 1), "mixed": take("mixed", num), "leaf": take("leaf", num)}
    values |= {name: columns[name].strings[row] for name in ("source", "split")}
    return Record(branches=_branches(columns, row, take), **values)


def _branches(columns: dict[str, _Column], row: int, take: Callable[[str, int], Tensor | None]) -> Branches | None:
    if f"{_BRANCH}token" not in columns:
        return None
    present = [name for name in _BRANCH_COLUMNS if f"{_BRANCH}{name}" in columns]
    values: dict[str, Any] = {name: columns[f"{_BRANCH}{name}"].at(row) for name in present}
    if values["token"] is None:
        return None
    packed = take(f"{_BRANCH}state", int(values["length"].sum()))
    assert packed is not None, "branches have states"
    num, longest = values["token"].shape
    state = packed.new_zeros(num, longest, packed.shape[-1])
    state[torch.arange(longest) < values["length"].unsqueeze(-1)] = packed
    return Branches(**values, state=state)
