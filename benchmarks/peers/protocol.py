"""How the driver and the workers talk: one JSON object a line, on the worker's standard input and output.

    {"do": "load", ...}  ->  {"versions": {...}}
    {"do": "run", ...}   ->  {"tokens": [...], "seconds": ..., "steps": ..., "drafted": ..., "accepted": ..., "peak_mb": ...}
    {"do": "run_all", "requests": [...], "at_once": n}  ->  {"num_tokens": [...], "seconds": ...}     (engines of `peers.batch`)

Whatever else an engine prints goes to its log. A worker that waits for a line uses no processor time.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

ROOT = Path(__file__).parents[2]
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a worker should make ready: a pair's folder, the type of its weights, and how many threads."""

    folder: str
    dtype: str
    threads: int


@dataclass(frozen=True, kw_only=True)
class Request:
    """One answer: `options` are the engine's own words for the setting. A text that may end does so where its model says, or
    at one of `ends` in engines that are told."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int
    options: dict[str, Any]
    top_p: float = 1.0
    ignore_eos: bool = True
    ends: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an engine says of one request. `seconds` where it measures better than its caller can, `reading_s` of them for the
    prompt; `overhead` is the share of its steps that is not a forward pass, where it knows."""

    tokens: list[int]
    steps: int
    drafted: int = 0
    accepted: int = 0
    seconds: float | None = None
    reading_s: float | None = None
    overhead: float | None = None


class Engine(Protocol):
    """The worker's side of an engine."""

    def load(self, load: Load) -> dict[str, str]:
        """Make a pair ready, in place of the one before; the versions in use."""
        ...

    def run(self, request: Request) -> Answer: ...

    def pids(self) -> list[int]:
        """The processes whose memory counts, in place of the worker's own; empty for that one."""
        ...


@runtime_checkable
class ManyAtOnce(Protocol):
    """An engine that answers several requests at once."""

    def ready(self, at_once: int) -> None:
        """Make it ready for so many; not timed."""
        ...

    def run_all(self, requests: Sequence[Request]) -> list[int]:
        """All of them, as many at once as it is ready for; how many tokens each got."""
        ...


def serve(engine: Engine) -> None:
    """Answer commands until the input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries write where they like
    for line in sys.stdin:
        message = json.loads(line)
        try:
            reply = _answered(engine, message)
        except Exception as error:  # whatever an engine raises is an entry in the table
            traceback.print_exc()
            first = (str(error).strip().splitlines() or [""])[0]
            reply = {"error": f"{type(error).__name__}: {first}"[:300]}
        out.write(json.dumps(reply) + "\n")
        out.flush()


def _answered(engine: Engine, message: dict[str, Any]) -> dict[str, Any]:
    match message.pop("do"):
        case "load":
            return {"versions": engine.load(Load(**message))}
        case "run":
            pids = engine.pids() or [os.getpid()]
            for pid in pids:
                _forget_peak(pid)
            started = time.perf_counter()
            answer = engine.run(Request(**message))
            seconds = time.perf_counter() - started
            pids = engine.pids() or [os.getpid()]
            return asdict(answer) | {"seconds": answer.seconds or seconds, "peak_mb": _peak_mb(pids)}
        case "run_all" if isinstance(engine, ManyAtOnce):
            requests = [Request(**one) for one in message["requests"]]
            engine.ready(message["at_once"])
            started = time.perf_counter()
            num_tokens = engine.run_all(requests)
            return {"num_tokens": num_tokens, "seconds": time.perf_counter() - started}
        case other:
            raise ValueError(f"unknown command {other!r}")


def _forget_peak(pid: int) -> None:
    """The kernel counts the peak from here on (Linux)."""
    with suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def _peak_mb(pids: Iterable[int]) -> float:
    """The largest resident size of processes together."""
    total = 0.0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            total += next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024
        except (OSError, StopIteration):
            total += resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return total


class WorkerError(RuntimeError):
    """An engine that cannot be started or does not answer; the message becomes the row's note, paths being from the project's
    root on."""

    def __init__(self, message: str):
        super().__init__(message.replace(f"{ROOT}/", ""))


@dataclass
class Worker:
    """The driver's side: a process that runs an engine's module."""

    name: str
    python: Path
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    versions: dict[str, str] = field(default_factory=dict)
    _process: "subprocess.Popen[str] | None" = None
    _sink: IO[str] | None = None

    def start(self) -> None:
        """Begin to start; it goes on beside whatever else is started. Raises `WorkerError` without an interpreter."""
        if not self.python.exists():
            raise WorkerError(f"there is no {self.python}")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._sink = self.log.open("w")
        self._process = subprocess.Popen(
            [str(self.python), "-m", self.module, *self.arguments],
            env=dict(self.environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._sink,
            text=True,
            start_new_session=True,
        )

    def load(self, load: Load, *, limit_s: float) -> None:
        """Raises `WorkerError`."""
        self.versions = self.ask({"do": "load", **asdict(load)}, limit_s=limit_s)["versions"]

    def run(self, request: Request, *, limit_s: float) -> dict[str, Any]:
        """Raises `WorkerError`."""
        return self.ask({"do": "run", **asdict(request)}, limit_s=limit_s)

    def ask(self, message: dict[str, Any], *, limit_s: float) -> dict[str, Any]:
        """Send a command and wait for its reply. Raises `WorkerError`."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise WorkerError("it is not running")
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
        except OSError as error:
            raise WorkerError(f"it has ended ({self._last_words()})") from error
        if not select.select([process.stdout], [], [], limit_s)[0]:
            self.stop()
            raise WorkerError(f"no answer within {limit_s:.0f} s")
        line = process.stdout.readline()
        if not line:
            raise WorkerError(f"it has ended ({self._last_words()})")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def busy_s(self) -> float:
        """Processor time used so far by it and what it has started, in seconds."""
        return 0.0 if self._process is None else sum(map(_cpu_s, _family(self._process.pid)))

    def stop(self) -> None:
        """End the process and what it has started."""
        if self._process is None:
            return
        with suppress(OSError, subprocess.TimeoutExpired):
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(10)
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None
        if self._sink:
            self._sink.close()

    def _last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:200] if lines else "no output"


def _family(pid: int) -> list[int]:
    """A process and those under it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        children = []
    return [pid, *(one for child in children for one in _family(int(child)))]


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS
