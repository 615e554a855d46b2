"""What is kept on this machine: whole files, and a folder that may be anything."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdecpp import cache_dir, load_pair

needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be another user")


def _half(part: Path) -> None:
    part.write_text("tw")
    raise KeyboardInterrupt


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches half a file under the final name after an error, one of the last moment that is swallowed, leftovers, and a
    rename that a power cut survives while the content does not."""
    path, synced, fsync = tmp_path / "new" / "a.json", [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append((os.fstat(file).st_ino, path.exists())), fsync(file)))
    cache_dir.write(path, "one\n")
    assert synced == [(path.stat().st_ino, False), (path.parent.stat().st_ino, True)]
    with pytest.raises(KeyboardInterrupt), cache_dir.whole(path) as part:
        _half(part)
    assert path.read_text() == "one\n"

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            cache_dir.write(path, "new")
    assert path.read_text() == "one\n"
    cache_dir.write(path, b"\x00two")
    assert path.read_bytes() == b"\x00two"
    assert os.listdir(path.parent) == ["a.json"]


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    """Catches a temporary name that two runs in one folder, or two threads of one, share."""
    path = tmp_path / "state.pt"
    with cache_dir.whole(path) as one:
        one.write_text("one")
        with cache_dir.whole(path) as two:
            assert one != two
            two.write_text("two")
        assert path.read_text() == "two"
    assert path.read_text() == "one"
    assert os.listdir(tmp_path) == ["state.pt"]


def test_what_a_killed_writer_left_goes_after_a_day(tmp_path: Path) -> None:
    """Catches gigabytes of half-written files that stay for ever, and the file of a living writer taken away."""
    path = tmp_path / "model[1].gguf"
    old, young, other = (tmp_path / f"{name}.part" for name in ("model[1].gguf.7-ab", "model[1].gguf.8-ab", "model1.gguf.7-ab"))
    day_before = time.time() - cache_dir.LEFT_S - 60
    for part in (old, young, other):
        part.write_text("half")
        if part != young:
            os.utime(part, (day_before, day_before))
    cache_dir.write(path, "whole")
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, young.name, other.name])


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache_dir._temporary.cache_clear()
    yield tmp_path / "cache"
    cache_dir._temporary.cache_clear()


def _a_folder(base: Path, *, mode: int = 0o700, above: int = 0o700, owner: int = 0, owner_above: int = 0) -> None:
    path = base / "specdecpp"
    path.mkdir(parents=True)
    for at, bits, user in ((path, mode, owner), (base, above, owner_above)):
        at.chmod(bits)
        if user:
            os.chown(at, user, user)


def _a_dangling_link(base: Path) -> None:
    base.mkdir()
    (base / "specdecpp").symlink_to(base / "nowhere" / "at all")


def test_the_folder_is_made_for_this_user_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a folder that others may look into, one that is made anew each time, and a request that waits for the disk."""
    monkeypatch.setattr(os, "fsync", None)
    old = os.umask(0o002)
    try:
        assert cache_dir.trouble() is None
    finally:
        os.umask(old)
    assert cache_dir.folder() == base / "specdecpp"
    assert stat.S_IMODE(cache_dir.folder().stat().st_mode) == 0o700
    cache_dir.remember("costs", {"a": 1}, {"x": 2})
    assert (cache_dir.recall("costs", {"a": 1}) or {})["x"] == 2


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda base: base.write_text("in the way"), "cannot be made"),
        (_a_dangling_link, "cannot be made"),
        (lambda base: base.symlink_to(base), "cannot be made"),
        (lambda base: _a_folder(base, mode=0o777), "others can write to"),
        (lambda base: _a_folder(base, above=0o777), "others can write to"),
        pytest.param(lambda base: _a_folder(base, owner=65534), "belongs to user 65534", marks=needs_root),
        pytest.param(lambda base: _a_folder(base, owner_above=65534), "others can write to", marks=needs_root),
    ],
)
def test_a_folder_that_cannot_be_trusted_gives_way_to_a_temporary_one(made: Any, told: str, base: Path) -> None:
    """Catches a traceback on the default path, and code or figures that another user could have put there."""
    made(base)
    assert told in (cache_dir.trouble() or "")
    path = cache_dir.folder()
    assert cache_dir.folder() == path != base / "specdecpp"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    cache_dir.remember("costs", {"a": 1}, {"x": 2})
    assert (cache_dir.recall("costs", {"a": 1}) or {})["x"] == 2, "as long as the process lives"


def test_a_folder_may_be_linked_and_a_relative_one_is_disregarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a cache on another disk, or under /tmp, that is refused, and a folder of code wherever one happens to be."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk").chmod(0o1777)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    assert cache_dir.trouble() is None
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert cache_dir.folder() == tmp_path / ".cache" / "specdecpp"


def test_without_any_folder_nothing_is_kept(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback where not even a temporary folder can be made."""

    def full(**_: str) -> str:
        raise OSError(28, "No space left on device")

    base.write_text("in the way")
    monkeypatch.setattr(cache_dir.tempfile, "mkdtemp", full)
    cache_dir.remember("costs", {"a": 1}, {"x": 2})
    assert cache_dir.recall("costs", {"a": 1}) is None
    assert not cache_dir.folder().exists()


BECOME = """
import os
from specdecpp import cache_dir
os.setgroups([]), os.setgid(54321), os.setuid(54321)
cache_dir.write(cache_dir.folder() / "a", "b")
print(cache_dir.trouble())
"""


def _told(**env: Path) -> str:
    """What a process of a user without a name says of the folder, that has written to it. Its temporary folder is TMPDIR."""
    own = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    own |= {name: str(value) for name, value in env.items()}
    done = subprocess.run([sys.executable, "-c", BECOME], env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_root
def test_users_without_a_home_and_with_one_that_they_cannot_write() -> None:
    """Catches RuntimeError without HOME, PermissionError with that of another, and temporary folders that stay."""
    folder = Path("/tmp") / f"specdecpp-test-{os.getpid()}"  # pytest's own folders are root's alone
    (folder / "readonly").mkdir(parents=True)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    readonly, tmp = folder / "readonly", folder / "tmp"
    try:
        assert _told(TMPDIR=tmp) == "there is no home folder (set XDG_CACHE_HOME)\n"
        for value in (readonly, Path("/nonexistent")):
            assert f"{value}/.cache/specdecpp cannot be made" in _told(TMPDIR=tmp, HOME=value)
        assert f"{readonly}/specdecpp cannot be made" in _told(TMPDIR=tmp, XDG_CACHE_HOME=readonly)
        (readonly / "specdecpp").mkdir()
        assert "belongs to user 0" in _told(TMPDIR=tmp, XDG_CACHE_HOME=readonly)
        os.chown(readonly / "specdecpp", 54321, 54321)
        (readonly / "specdecpp").chmod(0o500)
        assert "cannot be written" in _told(TMPDIR=tmp, XDG_CACHE_HOME=readonly)
        assert os.listdir(folder / "tmp") == []
    finally:
        shutil.rmtree(folder)


def test_loading_goes_on_without_a_folder(base: Path) -> None:
    """Catches a traceback of `load_pair()` where the cache cannot be written."""
    _a_dangling_link(base)
    assert load_pair(backend="lean").backends
    assert os.listdir(base) == ["specdecpp"]
