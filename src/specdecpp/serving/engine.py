"""Requests, and the one thread that runs the models for them. A turn is one `scheduler.step` of all running requests.

Requests wait in a queue until one of `max_running` places is free. One that was cancelled, or is past its deadline, loses its
caches before the next turn.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import ceil, inf, isinf
from time import monotonic
from typing import Literal

from specdecpp.decoder import Decoder, Options
from specdecpp.grammar import GrammarError
from specdecpp.scheduler import ROWS, Reading, step
from specdecpp.serving.errors import ApiError
from specdecpp.serving.evidence import Recorder, StepEvidence
from specdecpp.serving.settings import ServerSettings
from specdecpp.session import Session, Step

log = logging.getLogger(__name__)
FEW = 16
"""Tokens of prompts that a turn reads at least: a pass over them takes hardly more than over one."""
PREFILL_S = 0.1
"""Seconds that the steps of others wait in a turn for prompts to be read."""
PACING = 0.25
"""The weight of a piece in the mean of what a row of a prompt takes."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Prompt and options of one answer."""

    prompt: Sequence[int]
    options: Options


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """One step of answer `index`, `at_s` seconds after the request came.

    `prefill_s` is the request's own share of passes over its prompt; `reading_s` and `writing_s` are those of a clock on the
    wall, from the start of the answer to its first step, and from there to the end of this one.
    """

    index: int
    step: Step
    evidence: StepEvidence
    prefill_s: float
    num_cached_tokens: int
    reading_s: float
    writing_s: float
    at_s: float


@dataclass(frozen=True, kw_only=True)
class End:
    """The last event of a request: it is finished, or `error` explains why not. What comes after it does not count."""

    error: ApiError | None = None


@dataclass(eq=False, kw_only=True)
class Job:
    """One request: its answers are made one after another.

    `listener` is called with every `StepEvent`, on the engine's thread, and with an `End`, on any. `recorder` makes one for the
    session of each answer whose evidence is asked for.
    """

    decoder: Decoder
    parts: Sequence[Part]
    listener: Callable[[StepEvent | End], None]
    timeout_s: float
    recorder: Callable[[Session], Recorder | None] = lambda session: None
    submitted: float = field(default_factory=monotonic)
    queue_s: float | None = None
    num_tokens: int = 0
    session: Session | None = None
    _recorder: Recorder | None = None
    _index: int = 0
    _begun: float = 0.0
    _read: float | None = None
    _cancelled: End | None = None

    @property
    def is_done(self) -> bool:
        return self._index >= len(self.parts)

    def cancel(self, error: ApiError | None = None) -> None:
        """Have the request end before the next turn. Safe from any thread."""
        self._cancelled = self._cancelled or End(error=error)

    def end_due(self) -> End | None:
        """The end of a request that must not go on: it was cancelled, or is past its deadline."""
        if self._cancelled is None and monotonic() - self.submitted > self.timeout_s:
            message = f"the request was not finished within {self.timeout_s:g} s and was ended after {self.num_tokens} tokens."
            self.cancel(ApiError(f"{message} Ask for fewer tokens, or when less is going on.", status=504, code="timeout"))
        return self._cancelled

    def begin(self) -> Session:
        """The session of the answer, begun if there is none."""
        if self.session is not None:
            return self.session
        self._begun, self._read = monotonic(), None
        self.queue_s = self._begun - self.submitted if self.queue_s is None else self.queue_s
        part = self.parts[self._index]
        self.session = self.decoder.start(part.prompt, **part.options)
        self.session.watch = self._recorder = self.recorder(self.session)
        return self.session

    def record(self, step: Step, began: float) -> StepEvent:
        """Count a step of `session` in a turn that began at `began` (`monotonic`), and make its event."""
        session, now = self.session, monotonic()
        assert session is not None, "a step is of a session"
        self.num_tokens += step.num_tokens
        self._read = began if self._read is None else self._read
        at_s = now - self.submitted
        event = StepEvent(
            index=self._index,
            step=step,
            evidence=self._recorder.evidence(step, at_s) if self._recorder else StepEvidence(),
            prefill_s=session.prefill_s,
            num_cached_tokens=session.num_cached_tokens,
            reading_s=self._read - self._begun,
            writing_s=now - self._read,
            at_s=at_s,
        )
        if session.finish_reason is not None:
            self.free()
            self._index += 1
        return event

    def free(self) -> None:
        """Let go of the caches at once: a session and its recorder refer to each other."""
        if self.session is not None:
            self.session.watch = None
        self.session = self._recorder = None


class Pace:
    """Tokens of prompts that a turn reads: as many as take `PREFILL_S`, by the mean of what they took before."""

    def __init__(self) -> None:
        self._row_s = inf

    def rows(self, *, is_alone: bool) -> int:
        """`ROWS` where no other request waits, else what the time allows; `FEW` until something was timed."""
        return ROWS if is_alone else min(ROWS, max(FEW, int(PREFILL_S / self._row_s)))

    def learn(self, num: int, seconds: float) -> None:
        """Update the mean: `num` rows took so many seconds."""
        if num > 0:
            row_s = seconds / num
            self._row_s = row_s if isinf(self._row_s) else self._row_s + PACING * (row_s - self._row_s)


class EngineThread:
    """Run submitted jobs, turn by turn. `start` it once; `on_turn` gets the events of every turn, on its thread."""

    def __init__(self, settings: ServerSettings, *, on_turn: Callable[[Sequence[StepEvent]], None] = lambda events: None):
        self.status: Literal["ok", "stopping", "failed"] = "stopping"
        self._settings, self._on_turn = settings, on_turn
        self._changed = threading.Condition()
        self._running: deque[Job] = deque()
        self._waiting: deque[Job] = deque()
        self._mean_s = 1.0
        self._pace = Pace()
        self._thread: threading.Thread | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def start(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Start the thread, which first calls `prepare`; returns once it has, and raises what it raises."""
        prepared: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(prepare, prepared), name="specdecpp-engine", daemon=True)
        self._thread.start()
        prepared.result()

    def submit(self, job: Job) -> None:
        """Add a request. Raises `ApiError`: 429 when all places are taken, 503 when the server stops, or has failed."""
        with self._changed:
            if self.status == "failed":
                raise _failed()
            if self.status == "stopping":
                raise ApiError("the server is shutting down.", status=503, code="shutting_down", headers={"Retry-After": "5"})
            running, waiting = self._settings.max_running, self._settings.max_waiting
            if len(self._running) + len(self._waiting) >= running + waiting:
                raise ApiError(
                    f"all places are taken: {running} requests are being answered and {waiting} wait. Try again later.",
                    status=429,
                    code="queue_full",
                    headers={"Retry-After": str(max(1, ceil(min(60.0, self._mean_s))))},
                )
            self._waiting.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Take no more requests. The thread ends with those that are here."""
        with self._changed:
            if self.status == "ok":
                self.status = "stopping"
            self._changed.notify()

    def drop(self, error: ApiError) -> list[Job]:
        """End all requests with an error, sent at once: the present turn may be long. Returns what was dropped."""
        with self._changed:
            dropped = [*self._running, *self._waiting]
        for job in dropped:
            job.cancel(error)
            job.listener(End(error=error))
        return dropped

    def stop(self) -> None:
        """Wait for the requests and the thread to end; `drop` them before, not to wait."""
        self.close()
        if self._thread is not None:
            self._thread.join()

    def _run(self, prepare: Callable[[], None], prepared: "Future[None]") -> None:
        try:
            prepare()
        except BaseException as error:
            prepared.set_exception(error)
            return
        self.status = "ok"
        prepared.set_result(None)
        try:
            while running := self._next():
                self._turn(running)
        except BaseException:  # of the engine itself (those of models end one request): nobody may wait for a dead thread
            log.exception("the engine has failed")
            with self._changed:
                self.status = "failed"
            self.drop(_failed())
            self._running.clear()
            self._waiting.clear()

    def _next(self) -> list[Job]:
        """The requests of the coming turn, waiting for one; none when the thread is to end."""
        with self._changed:
            while True:
                for queue in (self._running, self._waiting):
                    for job, end in [(job, end) for job in queue if (end := job.end_due())]:
                        queue.remove(job)
                        job.free()
                        job.listener(end)
                while self._waiting and len(self._running) < self._settings.max_running:
                    self._running.append(self._waiting.popleft())
                if self._running or self.status != "ok":
                    self._running.rotate(-1)  # prompts are read in turn
                    return list(self._running)
                self._changed.wait()

    def _turn(self, running: Sequence[Job]) -> None:
        unread = list[int]()
        for job in running:
            try:
                unread.append(job.begin().num_unread)  # which asks its rule
            except Exception as error:
                self._fail(job, error)
        begun = {job: session for job in running if (session := job.session) is not None}
        rows = self._pace.rows(is_alone=all(unread))
        events: list[StepEvent] = []
        began = monotonic()
        for job, outcome in zip(begun, step(list(begun.values()), rows=rows, most=ROWS), strict=True):
            if isinstance(outcome, Reading):
                self._pace.learn(outcome.num_tokens, outcome.took_s)
            elif outcome is not None:
                try:
                    if isinstance(outcome, Exception):
                        raise outcome
                    event = job.record(outcome, began)
                except Exception as error:
                    self._fail(job, error)
                else:
                    events.append(event)
                    job.listener(event)
        if events:
            self._on_turn(events)
        for job in running:
            if job.is_done:
                self._finish(job, End())

    def _fail(self, job: Job, error: Exception) -> None:
        """End one request, and not the others with it, with what the models or its grammar raised."""
        if isinstance(error, GrammarError):
            self._finish(job, End(error=ApiError(str(error), status=400, code="grammar_failed")))
            return
        log.error("a request failed in the models", exc_info=error)
        message = "the models failed on this request; the server's log says how."
        self._finish(job, End(error=ApiError(message, status=500, code="failed")))

    def _finish(self, job: Job, end: End) -> None:
        with self._changed:
            self._running.remove(job)
        job.free()
        self._mean_s += 0.1 * (monotonic() - job.submitted - self._mean_s)
        job.listener(end)


def _failed() -> ApiError:
    message = "the server has failed and must be started again; its log says how it failed."
    return ApiError(message, status=503, code="failed")
