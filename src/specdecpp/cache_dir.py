"""A folder for what is kept on this machine, facts about it, and files that are written whole or not at all.

Measurements are kept in a file each, so that a later process sees the same figures and chooses the same: under
`$XDG_CACHE_HOME/specdecpp`, else `~/.cache/specdecpp`. Delete a file to measure again. Where that folder cannot be used, or
others can write to it, a temporary one serves this process, and `trouble` says why.
"""

import atexit
import glob
import hashlib
import json
import os
import platform
import secrets
import shutil
import stat
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

STEADY = 1.4
"""The most that the median of equal measurements may be over the fastest: 1.1 or so on a quiet machine, 2 on a busy one."""
BELIEVED_S = 600.0
"""Seconds for which the figures of a busy machine are believed."""
MOST_OF_A_KIND = 256
"""Files of one kind that stay: clients of a server may name any number of sampling parameters."""
PART = ".part"
PARTS = f"*.[0-9]*-????????{PART}"
"""The end of the name of a half-written file, and the form of the whole name (`whole`)."""
LEFT_S = 24 * 3600.0
"""Seconds without a change after which a half-written file is one that a killed process left."""
CGROUP = Path("/sys/fs/cgroup")
"""The folder in which Linux states the limits of a container."""


def folder() -> Path:
    """The folder for measurements, compiled code and weights: it belongs to this user, is there and can be written. A temporary
    one where `trouble` gives a reason; where even that cannot be made, a path that nothing can be written to."""
    path = _wanted()
    return path if path and trouble() is None else _temporary()


def trouble() -> str | None:
    """The reason why nothing can be kept for later processes; None where it can."""
    path = _wanted()
    if path is None:
        return "there is no home folder (set XDG_CACHE_HOME)"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = path.resolve(strict=True)
        reason = _danger(path)
        if reason is None and not os.access(path, os.W_OK | os.X_OK):
            reason = f"{path} cannot be written"
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        reason = f"{path} cannot be made: {getattr(error, 'strerror', error)}"
    return reason and f"{reason} (set XDG_CACHE_HOME)"


def _wanted() -> Path | None:
    """The folder by the rules of the XDG base directories, which disregard a relative path; None without a home."""
    given = Path(os.environ.get("XDG_CACHE_HOME") or "")
    with suppress(RuntimeError):
        base = given if given.is_absolute() else Path.home() / ".cache"
        return base / "specdecpp" if base.is_absolute() else None
    return None


def _danger(path: Path) -> str | None:
    """The reason why others could put code of theirs here, or replace a folder above; None where they cannot. A group may write
    above: where users have groups of their own, homes are made so."""
    me, found = os.geteuid(), path.stat()
    if found.st_uid != me:
        return f"{path} belongs to user {found.st_uid}, not to {me}"
    if found.st_mode & 0o022:
        return f"others can write to {path}, mode {stat.S_IMODE(found.st_mode):o}: run chmod go-w"
    for at in path.parents:
        found = at.stat()
        if found.st_uid not in (0, me) or (found.st_mode & 0o002 and not found.st_mode & stat.S_ISVTX):
            return f"others can write to {at}, which holds {path}"
    return None


@cache
def _temporary() -> Path:
    try:
        path = Path(tempfile.mkdtemp(prefix="specdecpp-"))
    except OSError:
        return Path(os.devnull) / "specdecpp"
    maker = os.getpid()
    atexit.register(lambda: maker == os.getpid() and shutil.rmtree(path, ignore_errors=True))  # not in a fork
    return path


def about() -> dict[str, Any]:
    """Facts that a measurement depends on beside the models."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "machine": [platform.node(), processor(), os.cpu_count()],
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }


def processor() -> str:
    """The processor's name and features: code and figures of one may not hold on another that shares the folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    facts = dict(line.split(":", 1) for line in lines if line.startswith(("model name", "flags", "Features")))
    return " ".join(facts.values()).strip() or platform.machine()


def free_bytes() -> int | None:
    """Bytes of memory that are available in the system and within the limit of a container; None where neither is known."""
    found = []
    with suppress(OSError, ValueError, KeyError):
        found.append(1024 * _counts(Path("/proc/meminfo"))["MemAvailable"])
    with suppress(OSError, ValueError, KeyError):  # "max" where there is no limit
        most, taken = (int((CGROUP / f"memory.{name}").read_text(encoding="utf-8")) for name in ("max", "current"))
        cached = _counts(CGROUP / "memory.stat")
        found.append(most - taken + cached["inactive_file"] + cached["active_file"])
    return min(found, default=None)


def _counts(path: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number a line."""
    lines = (line.replace(":", " ").split() for line in path.read_text(encoding="utf-8").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


def is_steady(times: Iterable[list[float]]) -> bool:
    """True where seconds, in lists of equal work, are worth keeping: no other process took the machine away meanwhile."""
    return all(statistics.median(found) < STEADY * min(found) for found in times if len(found) > 2)


def recall(kind: str, of: Mapping[str, Any]) -> dict[str, Any] | None:
    """The figures that `remember` was given for these facts; None without any, or if a busy machine's are ten minutes old."""
    path = _path(kind, of)
    with suppress(OSError, ValueError):  # nothing, half a file, or one of another person
        found, age_s = json.loads(path.read_text(encoding="utf-8")), time.time() - path.stat().st_mtime
        if isinstance(found, dict) and (found.get("is_steady") is not False or age_s <= BELIEVED_S):
            return found
    return None


def remember(kind: str, of: Mapping[str, Any], found: Mapping[str, Any], *, is_steady: bool = True) -> None:
    """Keep figures; those of a busy machine for ten minutes, so that a seed gives the same answer meanwhile. Of one kind the
    `MOST_OF_A_KIND` that were written last stay. A folder that cannot be written is no error; nothing waits for the disk."""
    path = _path(kind, of)
    with suppress(OSError):
        write(path, json.dumps({**found, "is_steady": is_steady, "of": dict(of)}, indent=1) + "\n", waits=False)
        for old in sorted(path.parent.glob(f"{kind}-*.json"), key=lambda p: -p.stat().st_mtime)[MOST_OF_A_KIND:]:
            old.unlink()


def _path(kind: str, of: Mapping[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(dict(of), sort_keys=True).encode()).hexdigest()[:16]
    return folder() / f"{kind}-{key}.json"


@contextmanager
def whole(path: str | Path, *, waits: bool = True) -> Iterator[Path]:
    """A name to write a file under, which becomes `path`; `waits` until that is on the disk. After an error nothing changed.

    Two that write the same file get two names, and the later one stays. Parts of killed writers are removed by a later writer
    of the same file, after `LEFT_S`. The folder is made where it is missing. Raises the OSError of whatever fails.

    >>> with whole("model.bin") as part:                                                     # doctest: +SKIP
    ...     torch.save(state, part)
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{glob.escape(path.name)}.*{PART}"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > LEFT_S:
                left.unlink()
    part = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}{PART}")
    try:
        yield part
        if waits:
            _sync(part)
        part.replace(path)
        if waits:
            with suppress(OSError):  # not every file system can; the file itself is on the disk
                _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def write(path: str | Path, content: str | bytes, *, waits: bool = True) -> None:
    """Write a file whole or not at all (`whole`), text as UTF-8. Raises the OSError of whatever fails."""
    with whole(path, waits=waits) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
