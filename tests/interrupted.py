"""A command line in a process of its own that gets a real SIGINT, at a moment that what it has written shows."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

TIMEOUT_S = 120


@dataclass(frozen=True)
class Ended:
    """How it ended: the exit code and what it wrote; `chatter` is stderr."""

    code: int
    stdout: str
    chatter: str


def interrupted(
    *arguments: str, at: str, folder: Path, terminal: bool = False, when: Callable[[], bool] = lambda: True, **environment: str
) -> Ended:
    """Run a verb, and send SIGINT as soon as stderr, a pipe or a terminal, shows what matches `at` and `when` says so."""
    mine, its = pty.openpty() if terminal else os.pipe()
    with (folder / "stdout").open("w+") as stdout:
        process = subprocess.Popen(
            [sys.executable, "-m", "specdecpp", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=its,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "80", "TERM": "xterm", "OMP_NUM_THREADS": "1", **environment},
        )
        os.close(its)
        seen, is_sent, began = "", False, monotonic()
        try:
            while monotonic() - began < TIMEOUT_S:
                if select.select([mine], [], [], 0.01)[0]:
                    try:
                        part = os.read(mine, 65536)
                    except OSError:  # a terminal whose other end is closed
                        part = b""
                    if not part:
                        break
                    seen += part.decode(errors="replace")
                if not is_sent and re.search(at, seen) and when():
                    process.send_signal(signal.SIGINT)
                    is_sent = True
            code = process.wait(timeout=TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
            os.close(mine)
        assert is_sent, f"it never wrote {at!r}:\n{seen}"
        stdout.seek(0)
        return Ended(code, stdout.read(), seen)
