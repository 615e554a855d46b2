"""What is kept on this machine: whole files, and a folder that may be anything."""

import os
import time
from pathlib import Path

import pytest

from specdecpp import machine


def _half(part: Path) -> None:
    part.write_text("tw")
    raise KeyboardInterrupt


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    """Catches half a file under the final name after an error, and leftovers beside it."""
    path = tmp_path / "new" / "a.json"
    machine.write(path, "one\n")
    with pytest.raises(KeyboardInterrupt), machine.whole(path) as part:
        _half(part)
    assert path.read_text() == "one\n"
    machine.write(path, b"\x00two")
    assert path.read_bytes() == b"\x00two"
    assert os.listdir(path.parent) == ["a.json"]


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    """Catches a temporary name that two runs in one folder, or two threads of one, share."""
    path = tmp_path / "state.pt"
    with machine.whole(path) as one:
        one.write_text("one")
        with machine.whole(path) as two:
            assert one != two
            two.write_text("two")
        assert path.read_text() == "two"
    assert path.read_text() == "one"
    assert os.listdir(tmp_path) == ["state.pt"]


def test_what_a_killed_writer_left_goes_after_a_day(tmp_path: Path) -> None:
    """Catches gigabytes of half-written files that stay for ever, and the file of a living writer taken away."""
    path = tmp_path / "model[1].gguf"
    old, young, other = (tmp_path / f"{name}.part" for name in ("model[1].gguf.7-ab", "model[1].gguf.8-ab", "model1.gguf.7-ab"))
    for part in (old, young, other):
        part.write_text("half")
    day_before = time.time() - machine.LEFT_S - 60
    os.utime(old, (day_before, day_before))
    os.utime(other, (day_before, day_before))
    machine.write(path, "whole")
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, young.name, other.name])


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a rename that a power cut survives while the content does not."""
    path, synced, fsync = tmp_path / "a", [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append((os.fstat(file).st_ino, path.exists())), fsync(file)))
    machine.write(path, "content")
    assert synced == [(path.stat().st_ino, False), (tmp_path.stat().st_ino, True)]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an error of the last moment that is swallowed, or that costs the old file."""
    path = tmp_path / "a"
    machine.write(path, "old")

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        machine.write(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]
