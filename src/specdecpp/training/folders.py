"""A folder that a run works in: made, writable, and nobody else's meanwhile. Asked for before hours are spent."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from specdecpp.cache_dir import PARTS
from specdecpp.errors import DataError, first_line

try:
    import fcntl
except ImportError:  # Windows: two runs in one folder are not noticed there
    fcntl = None


def writable(folder: Path) -> Path:
    """The folder, made if it is missing. Raises `DataError` where it cannot be made or written into."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        at = f", at {error.filename}" if error.filename and Path(error.filename) != folder else ""
        raise DataError(f"the folder {folder} cannot be made ({error.strerror}{at}). {_ADVICE}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DataError(f"the folder {folder} cannot be written into. {_ADVICE}")
    return folder


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """The folder for this run alone, until it ends or is killed. What killed runs left half written is removed.

    Raises `DataError` where it cannot be written into, or where another run works in it. On a file system without locks no
    other run is noticed.
    """
    held = os.open(writable(folder), os.O_RDONLY)
    try:
        if _is_taken(held):
            raise DataError(
                f"another run works in {folder}. Wait until it has ended, or name another folder with out in the recipe or "
                "--out."
            )
        yield
    finally:
        os.close(held)


@contextmanager
def writing(folder: Path, *, safe: str) -> Iterator[None]:
    """Raise `DataError` where what is written in this block cannot be: `safe` is what nevertheless stays."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have errors of their own for a full disk
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "its disk is full" if is_full else getattr(error, "strerror", None) or first_line(error)
        raise DataError(
            f"{folder} cannot be written into ({reason}). {safe} are safe: {'make room' if is_full else 'mend that'} and run "
            "the same command again; it goes on where it stopped."
        ) from error


def _is_taken(held: int) -> bool:
    """Tell whether another run has the folder; if not, it is ours now, and so is what lies half written in it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    for name in os.listdir(held):
        if Path(name).match(PARTS):
            with suppress(OSError):
                os.unlink(name, dir_fd=held)
    return False


_ADVICE = "Name another with out in the recipe or --out, or see to it that this one can be written."
