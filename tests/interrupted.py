"""Processes that get real signals: a command line that is interrupted, and work that is killed (-9) again and again."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from specdecpp import cache_dir

TIMEOUT_S = 120
Moment = Callable[[], None]
"""Arms a kill of this process."""


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


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, number: int = 1) -> Moment:
    """Before the n-th call of a function, once it is armed."""

    def arm() -> None:
        own, calls = getattr(owner, name), 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return die() if calls == number else own(*args, **kwargs)

        setattr(owner, name, counted)

    return arm


def at_file(ending: str, number: int = 1, *, is_half: bool = False) -> Moment:
    """When the n-th file is written, or half of it, whose name ends so."""

    def arm() -> None:
        own, calls = cache_dir.whole, 0

        @contextmanager
        def torn(path: str | Path, **how: bool) -> Iterator[Path]:
            nonlocal calls
            calls += (is_meant := str(path).endswith(ending))
            is_meant = is_meant and calls == number
            with own(path, **how) as part:
                yield part
                if is_meant and is_half:
                    os.truncate(part, part.stat().st_size // 2)
                    die()
            if is_meant:
                die()

        cache_dir.whole = torn

    return arm


def attempted(run: Callable[[], object], moment: Moment = lambda: None) -> str:
    """The end of a fork that runs this: killed, or its status."""
    if child := os.fork():
        status = os.waitpid(child, 0)[1]
        return "killed" if status == signal.SIGKILL else str(status)
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        moment()
        run()
        os._exit(0)
    except BaseException as error:  # whatever it is must not go on in the fork
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def attempts(run: Callable[[], object], moments: Mapping[str, Moment]) -> None:
    """Run this in forks, each of which goes on from what the one before left and dies at a moment; a line tells its end."""
    for name, moment in moments.items():
        print(f"{name}: {attempted(run, moment)}", flush=True)


def see_killed(program: str, moments: Mapping[str, Moment], *arguments: str) -> None:
    """Run a test file as the program that makes these attempts."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([sys.executable, program, *arguments], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines() == [f"{name}: killed" for name in moments], done.stderr[-3000:]
    assert done.returncode == 0, done.stderr[-3000:]
