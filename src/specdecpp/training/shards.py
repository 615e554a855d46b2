"""A collection on disk: one pair of files for each shard, written so that after a kill it is clear which shards are complete.

    collection.json               what it is of: provenance, written first
    shard-00000.safetensors       the draft's states, float16
    shard-00000.parquet           everything else, one row for each answer; written last: it being there says "complete"

Each file is written under another name and then renamed. Nothing in them depends on when or where they were written.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
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
_BRANCH, _STATES = "branch_", ("states", "mixed", "leaf")
_COLUMNS = [f.name for f in fields(Record) if f.name not in ("source", "split", "branches", *_STATES)]
_BRANCH_COLUMNS = [f.name for f in fields(Branches) if f.name != "state"]
_KINDS = {torch.int64: pa.int32(), torch.float32: pa.float32(), torch.bool: pa.bool_()}


def encoded(records: Sequence[Record], provenance: dict[str, Any]) -> tuple[bytes, bytes]:
    """A shard as the bytes of its two files: (safetensors, parquet)."""
    states = save(_states(records))
    note = {**provenance, "states_bytes": len(states), "states_crc32": zlib.crc32(states)}
    table = _table(records)
    _, note["table_crc32"] = _rows(table)
    table = table.replace_schema_metadata({_KEY: json.dumps(note, sort_keys=True)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return states, sink.getvalue().to_pybytes()


def write(folder: Path, index: int, files: tuple[bytes, bytes]) -> None:
    """Put the two files of `encoded` into the folder, the parquet last."""
    for content, suffix in zip(files, ("safetensors", "parquet"), strict=True):
        cache_dir.write(folder / f"shard-{index:05d}.{suffix}", content)


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
    branches = [r.branches for r in records if r.branches is not None]
    if parts := [b.state[_is_real(b.token, b.length)] for b in branches]:
        tensors[f"{_BRANCH}state"] = torch.cat(parts).half()
    return tensors


def _table(records: Sequence[Record]) -> pa.Table:
    columns: dict[str, pa.Array] = {
        "source": pa.array([r.source for r in records]),
        "split": pa.array([r.split for r in records]),
    }
    for name in _COLUMNS:
        columns[name] = _lists([getattr(r, name) for r in records])
    for name in _BRANCH_COLUMNS:
        columns[f"{_BRANCH}{name}"] = _lists([r.branches and getattr(r.branches, name) for r in records])
    return pa.table({name: column for name, column in columns.items() if column.null_count < len(records)})


def _lists(values: Sequence[Tensor | None]) -> pa.Array:
    """One list for each record, null where it has none; rows of a matrix become lists of fixed size."""
    given = [v for v in values if v is not None]
    if not given:
        return pa.nulls(len(values))
    flat = pa.array(torch.cat(given).flatten().numpy(), type=_KINDS[given[0].dtype])
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
        states, (rows, checksum) = load(content), _rows(pq.read_table(path))
        if checksum != note["table_crc32"]:
            raise ValueError("what it holds is not what was written")
    except Exception as error:  # pyarrow and safetensors each have errors of their own
        raise damaged(path, first_line(error)) from error
    sizes = [len(answer) for answer in rows["answer"]]
    columns: dict[str, Iterable[Any]] = {name: rows[name] for name in ("source", "split", *_COLUMNS) if name in rows}
    columns["states"] = states["states"].split([size + 1 for size in sizes])
    columns |= {name: states[name].split(sizes) for name in ("mixed", "leaf") if name in states}
    columns["branches"] = _branches(rows, states)
    for values in zip(*columns.values(), strict=True):
        record = Record(**dict(zip(columns, values, strict=True)))
        if split is None or record.split == split:
            yield record


def _rows(table: pa.Table) -> tuple[dict[str, list[Any]], int]:
    """The values of each column by row, and a digest of all of them: parquet's own checksums leave out its headers."""
    rows, digest = dict[str, list[Any]](), 0
    for name in sorted(table.column_names):
        column = table.column(name).combine_chunks()
        is_valid, flat = column.is_valid().to_pylist(), torch.empty(0)
        strings, offsets, width = list[str](), list[int](), None
        if isinstance(column, pa.ListArray):
            offsets, inner = column.offsets.to_pylist(), column.values
            width = inner.type.list_size if isinstance(inner, pa.FixedSizeListArray) else None
            numbers = (inner if width is None else inner.values).to_numpy(zero_copy_only=False)
            flat = torch.from_numpy(numbers.astype(np.int64) if numbers.dtype == np.int32 else numbers.copy())
            lists = flat if width is None else flat.view(-1, width)
            rows[name] = [lists[a:b] if there else None for (a, b), there in zip(pairwise(offsets), is_valid, strict=True)]
        else:
            rows[name] = strings = column.to_pylist()
        digest = zlib.crc32(json.dumps([name, is_valid, strings, offsets, width]).encode(), digest)
        digest = zlib.crc32(flat.numpy().tobytes(), digest)
    return rows, digest


def _branches(rows: Mapping[str, Sequence[Any]], states: Mapping[str, Tensor]) -> Iterator[Branches | None]:
    """The branches of each row, None for one without."""
    if f"{_BRANCH}token" not in rows:
        yield from [None] * len(rows["source"])
        return
    columns = {name: rows[f"{_BRANCH}{name}"] for name in _BRANCH_COLUMNS if f"{_BRANCH}{name}" in rows}
    packed = states[f"{_BRANCH}state"].split([0 if length is None else int(length.sum()) for length in columns["length"]])
    for part, *values in zip(packed, *columns.values(), strict=True):
        made: dict[str, Any] = dict(zip(columns, values, strict=True))
        if made["token"] is None:
            yield None
            continue
        state = part.new_zeros(*made["token"].shape, part.shape[-1])
        state[_is_real(made["token"], made["length"])] = part
        yield Branches(**made, state=state)


def _is_real(token: Tensor, length: Tensor) -> Tensor:
    """The places of tokens [N, K] that are no padding."""
    return torch.arange(token.shape[1]) < length.unsqueeze(-1)
