"""The one thread that runs the models: a turn is a step of every request (`scheduler`), so a short one is not stuck behind a
long one.

`running` are the requests that take part, each with one session and its pair of caches; `waiting` are those that came later.
The answers of one request are made one after another. A request that was called off, or is past its deadline, loses its caches
before the next turn.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from time import monotonic
from typing import Literal

from specdecpp.scheduler import Read, step
from specdecpp.serving.limits import Limits
from specdecpp.serving.memory import give_back
from specdecpp.serving.refusals import Refusal
from specdecpp.serving.work import End, Event, Work

log = logging.getLogger(__name__)
FEW = 16
"""Tokens of prompts that a turn reads at least."""
PACING = 0.25
"""The weight of a piece in the mean of what a row of a prompt takes."""
TIDY_S = 10.0
"""How often freed memory is given back while there is always something to do."""


class Pace:
    """How many tokens of prompts are read in a turn: as many as take `limit_s`, by the mean of what they took before."""

    def __init__(self, most: int, limit_s: float):
        self._most, self._limit_s = most, limit_s
        self._row_s: float | None = None

    def rows(self, *, is_alone: bool) -> int:
        """`most` where no other request waits, else what the time allows. At least `FEW`, also before anything was timed: a
        pass over them takes hardly more than over one."""
        if is_alone:
            return self._most
        return min(self._most, FEW if self._row_s is None else max(FEW, int(self._limit_s / self._row_s)))

    def learn(self, num: int, seconds: float) -> None:
        """Update the mean: `num` rows took so many seconds."""
        if num > 0:
            row_s = seconds / num
            self._row_s = row_s if self._row_s is None else self._row_s + PACING * (row_s - self._row_s)


class EngineThread:
    """Runs the work that is submitted, turn by turn. `start` it once; `on_turn` hears of every turn's steps, on its thread."""

    def __init__(self, limits: Limits, *, on_turn: Callable[[Sequence[Event]], None] = lambda events: None):
        self._limits, self._on_turn = limits, on_turn
        self._changed = threading.Condition()
        self._running: deque[Work] = deque()
        self._waiting: deque[Work] = deque()
        self._is_open = self._is_stopping = self._has_failed = False
        self._mean_s = 1.0
        self._pace = Pace(limits.prefill_tokens, limits.prefill_s)
        self._has_freed, self._tidied = False, monotonic()
        self._thread: threading.Thread | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_open(self) -> bool:
        """True while work is taken on."""
        return self._is_open

    @property
    def status(self) -> Literal["ok", "stopping", "failed"]:
        """State of the engine: it takes work, is about to stop, or has failed."""
        return "ok" if self._is_open else "failed" if self._has_failed else "stopping"

    def start(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Start the thread, which first calls `prepare`; returns once it has, and raises what it raises."""
        prepared: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(prepare, prepared), name="specdecpp-engine", daemon=True)
        self._thread.start()
        prepared.result()

    def submit(self, work: Work) -> None:
        """Take a request on. Raises `Refusal`: 429 when all places are taken, 503 when the server is about to stop, or has
        failed."""
        with self._changed:
            if self._has_failed:
                raise _failed()
            if not self._is_open:
                raise Refusal("the server is shutting down.", status=503, code="shutting_down", retry_after_s=5.0)
            if len(self._running) + len(self._waiting) >= self._limits.capacity:
                raise Refusal(
                    f"all places are taken: {self._limits.max_running} requests are being answered and "
                    f"{self._limits.max_waiting} wait. Try again later.",
                    status=429,
                    code="queue_full",
                    retry_after_s=min(60.0, self._mean_s),
                )
            self._waiting.append(work)
            self._changed.notify()

    def close(self) -> None:
        """Take on no more; what is here goes on."""
        with self._changed:
            self._is_open = False

    def drop(self, refusal: Refusal) -> list[Work]:
        """End everything that is here, telling why at once: a turn that is being taken may be long. What that was."""
        with self._changed:
            dropped = [*self._running, *self._waiting]
        for work in dropped:
            work.stop(refusal)
            work.tell(End(refusal=refusal))
        return dropped

    def stop(self) -> None:
        """End the thread once what is here has ended; `drop` it before, not to wait."""
        with self._changed:
            self._is_open, self._is_stopping = False, True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self, prepare: Callable[[], None], prepared: "Future[None]") -> None:
        try:
            prepare()
        except BaseException as error:
            prepared.set_exception(error)
            return
        self._is_open = True
        prepared.set_result(None)
        try:
            while (running := self._next()) is not None:
                self._turn(running)
                if monotonic() - self._tidied > TIDY_S:
                    self._tidy()
        except BaseException:  # of the engine itself (those of models end one request): nobody may wait for a dead thread
            log.exception("the engine has failed")
            with self._changed:
                self._is_open, self._has_failed = False, True
            self.drop(_failed())
            self._running.clear()
            self._waiting.clear()

    def _next(self) -> list[Work] | None:
        """The requests of the coming turn, waiting for one; None when the thread is to end."""
        with self._changed:
            while True:
                self._sweep()
                while self._waiting and len(self._running) < self._limits.max_running:
                    self._running.append(self._waiting.popleft())
                if self._running:
                    self._running.rotate(-1)  # prompts are read in turn
                    return list(self._running)
                self._tidy()
                if self._is_stopping:
                    return None
                self._changed.wait()

    def _tidy(self) -> None:
        """Give back what requests that have ended held, if any has."""
        if self._has_freed:
            give_back()
            self._has_freed, self._tidied = False, monotonic()

    def _sweep(self) -> None:
        """Part with what was called off or took too long."""
        now = monotonic()
        for line in (self._running, self._waiting):
            for work, end in [(work, end) for work in line if (end := work.over(now))]:
                line.remove(work)
                self._free(work)
                work.tell(end)

    def _turn(self, running: Sequence[Work]) -> None:
        events: list[Event] = []
        for work in running:
            self._guarded(work, work.begin)
        begun = {work: session for work in running if (session := work.session) is not None}
        is_alone = all(session.num_unread for session in begun.values())
        rows = self._pace.rows(is_alone=is_alone)
        outcomes = step(list(begun.values()), rows=rows, most=self._limits.prefill_tokens)
        for work, outcome in zip(begun, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self._fail(work, outcome)
            elif isinstance(outcome, Read):
                self._pace.learn(outcome.num_tokens, outcome.seconds)
            elif outcome is not None and (told := self._guarded(work, lambda work=work, of=outcome: work.note(of))) is not None:
                events.append(told)
                work.tell(told)
        if events:
            self._on_turn(events)
        for work in [work for work in running if work.is_done and work in self._running]:
            self._part_with(work, End())

    def _guarded(self, work: Work, do: Callable[[], Event | None]) -> Event | None:
        """Have what the models raise end one request, and not the others with it."""
        try:
            return do()
        except Exception as error:
            return self._fail(work, error)

    def _fail(self, work: Work, error: Exception) -> None:
        log.error("a request failed in the models", exc_info=error)
        refusal = Refusal("the models failed on this request; the server's log says how.", status=500, code="failed")
        self._part_with(work, End(refusal=refusal))

    def _part_with(self, work: Work, end: End) -> None:
        with self._changed:
            self._running.remove(work)
        self._free(work)
        self._mean_s += 0.1 * (monotonic() - work.submitted - self._mean_s)
        work.tell(end)

    def _free(self, work: Work) -> None:
        work.free()
        self._has_freed = True


def _failed() -> Refusal:
    message = "the server has failed and must be started again; its log says how it failed."
    return Refusal(message, status=503, code="failed")
