"""Shards: what was written comes back to the bit, and damage of any kind is told, never read."""

import json
import shutil
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from kinds import model_of

from specdecpp import DataError
from specdecpp.backends import EagerModel
from specdecpp.testing import tiny_draft
from specdecpp.training import shards
from specdecpp.training.labels import Labelling, Record, Sampled, label

ANSWERS = [
    Sampled(prompt=[5], answer=[7, 9, 12, 3, 1], source="maths", split="train"),
    Sampled(prompt=[9, 8, 7], answer=[30, 31, 30, 31], source="code", split="train"),
    Sampled(prompt=[60, 3, 60], answer=[17], source="code", split="dev"),
]


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """Three records, the last with leaves and branches... of which the first two have none."""
    target, draft = EagerModel(model_of("llama")), EagerModel(tiny_draft(model_of("llama")))
    generator, plain = torch.Generator().manual_seed(0), Labelling(ends=(1,), features=("mixed", "leaf"))
    made = label(target, draft, ANSWERS[:2], plain, generator)
    return [*made, *label(target, draft, ANSWERS[2:], replace(plain, branch_length=3, branch_odds=True), generator)]


@pytest.fixture
def folder(tmp_path: Path, records: list[Record]) -> Path:
    """Two shards: the first two records, then the third."""
    shards.write(tmp_path, 0, shards.encoded(records[:2], {"digest": "d"}))
    shards.write(tmp_path, 1, shards.encoded(records[2:], {"digest": "d"}))
    return tmp_path


def same(a: object, b: object) -> bool:
    """Equal to the bit, types included."""
    if is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return a == b


def test_records_come_back_to_the_bit(folder: Path, records: list[Record]) -> None:
    """Catches a column left out, rows of one record read for another, and a type that changes on the way."""
    assert [same(a, b) for a, b in zip(records, shards.read(folder), strict=True)] == [True] * 3


def test_records_with_and_without_branches_share_a_shard(tmp_path: Path, records: list[Record]) -> None:
    """Catches states of branches that are given to a record without any, in either order."""
    for order in ([0, 2, 1], [2, 0, 1]):
        mixed = [records[i] for i in order]
        shards.write(tmp_path, 0, shards.encoded(mixed, {}))
        assert [same(a, b) for a, b in zip(mixed, shards.read(tmp_path), strict=True)] == [True] * 3


def older(record: Record) -> Record:
    """The record without what used not to be recorded."""
    branches = record.branches and replace(record.branches, log_ratio=None, overlap=None)
    return replace(record, answer_log_ratio=None, branches=branches)


def test_what_an_older_shard_lacks_is_none(tmp_path: Path, records: list[Record]) -> None:
    """Catches collections that can no longer be read, alone or with records that have what they lack."""
    for shard in ([older(r) for r in records], [older(records[2]), records[2], older(records[0]), records[1]]):
        shards.write(tmp_path, 0, shards.encoded(shard, {}))
        assert all(same(a, b) for a, b in zip(shard, shards.read(tmp_path), strict=True))
    shards.write(tmp_path, 0, shards.encoded([older(r) for r in records], {}))
    names = pq.read_table(tmp_path / "shard-00000.parquet").column_names
    assert not {"answer_log_ratio", "branch_log_ratio", "branch_overlap"} & set(names)
    assert {"branch_token", "answer_odds"} <= set(names)


def test_a_choice_of_split(folder: Path) -> None:
    """Catches a filter that shifts the states of the records after what it leaves out."""
    assert [r.answer.tolist() for r in shards.read(folder, split="dev")] == [[17]]


def test_anyone_can_read_the_table(folder: Path) -> None:
    """Catches columns that only our own reader understands, and provenance that is lost."""
    table = pq.read_table(folder / "shard-00000.parquet")
    assert table.num_rows == 2
    assert table.column("answer").to_pylist() == [[7, 9, 12, 3, 1], [30, 31, 30, 31]]
    assert [len(c) for c in table.column("candidate").to_pylist()[0]] == [4] * 5
    assert json.loads(table.schema.metadata[b"specdecpp"])["digest"] == "d"


def test_a_folder_without_labels_says_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no labels\. Make them with: specdecpp train"):
        next(shards.read(tmp_path))


def test_an_unfinished_collection_is_not_read_by_accident(folder: Path) -> None:
    """Catches a head that is trained on the first half of a collection without a word."""
    (folder / shards.COLLECTION).write_text(json.dumps({"num_shards": 3}))
    with pytest.raises(DataError, match=r"2 of its 3 shards are there\. Run the same collect command again"):
        next(shards.read(folder))


@pytest.mark.parametrize("suffix", ["parquet", "safetensors"])
@pytest.mark.parametrize("harm", ["cut", "emptied", "deleted"])
def test_a_damaged_shard_is_named_with_the_way_out(folder: Path, suffix: str, harm: str) -> None:
    """Catches a shard that was cut short and is taken for complete, by the reader or by a collection that goes on."""
    path = folder / f"shard-00001.{suffix}"
    if harm == "deleted":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] if harm == "cut" else b"")
    if harm == "deleted" and suffix == "parquet":
        assert shards.done(folder) == [0]
        return
    for use in (shards.done, lambda folder: list(shards.read(folder))):
        with pytest.raises(DataError, match=r"shard-00001.parquet is damaged: .*Delete shard-00001.parquet and shard-00001.s"):
            use(folder)


@pytest.mark.parametrize("suffix", ["parquet", "safetensors"])
def test_a_flipped_bit_is_told_or_harmless(folder: Path, records: list[Record], suffix: str) -> None:
    """Catches a bit that changes what is read, wherever in a file it is; one in parquet's statistics changes nothing."""
    path = folder / f"shard-00001.{suffix}"
    content, num_told = path.read_bytes(), 0
    for at in range(0, len(content), len(content) // 100):
        path.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        try:
            assert same(list(shards.read(folder))[2], records[2])
        except DataError:
            num_told += 1
    assert num_told > 50


def test_states_of_another_shard_are_not_taken(folder: Path) -> None:
    """Catches files that were copied over each other."""
    shutil.copy(folder / "shard-00000.safetensors", folder / "shard-00001.safetensors")
    with pytest.raises(DataError, match="is not the file that was written with it"):
        list(shards.read(folder))


def test_a_parquet_that_is_not_ours_is_told(folder: Path) -> None:
    """Catches a KeyError where somebody put a file of their own."""
    pq.write_table(pa.table({"x": [1]}), folder / "shard-00001.parquet")
    with pytest.raises(DataError, match="is damaged"):
        shards.done(folder)


def test_states_beyond_float16_are_cut_to_it_and_stay_finite() -> None:
    """Catches infinities in the features of a model with large states."""
    from specdecpp.training.branches import half

    assert half(torch.tensor([1e6, -1e6, 1.5])).tolist() == [65504.0, -65504.0, 1.5]
