"""The one thread that runs the models: a turn is a round of every request, so a short one is not stuck behind a long one.

In a turn prompts are read, a piece of each, and each request whose prompt has been read gets a round: all in the same passes
where their engine can do that, else one after the other, and then of one prompt only. `running` are the requests that take
part, each with one session and its pair of caches; `waiting` are those that came later. The answers of one request are made one
after another. A request that was called off, or is past its deadline, loses its caches before the next turn.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic
from typing import Literal

from specdecpp.decoder import Decoder, Options
from specdecpp.serving.evidence import Evidence, Witness
from specdecpp.serving.limits import Limits
from specdecpp.serving.memory import give_back
from specdecpp.serving.refusals import Refusal
from specdecpp.session import Round, Session, attempt

log = logging.getLogger(__name__)
FEW = 16
"""Tokens of prompts that a turn reads at least."""
PACING = 0.25
"""The weight of a piece in the mean of what a row of a prompt takes."""
TIDY_S = 10.0
"""How often freed memory is given back while there is always something to do."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One answer that is to be made."""

    prompt: Sequence[int]
    options: Options


@dataclass(frozen=True, kw_only=True)
class Step:
    """One round of answer `index`, `at_s` seconds after the request came."""

    index: int
    round: Round
    evidence: Evidence | None
    prefill_s: float
    num_cached_tokens: int
    at_s: float


@dataclass(frozen=True, kw_only=True)
class End:
    """The last event of a request: it is finished, or `refusal` says why not."""

    refusal: Refusal | None = None


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


class Work:
    """One request: its answers to make, the session of the current one, and where to tell of it.

    `tell` is called with every `Step`, on the engine's thread, and with one last `End`, on any. `witness` makes one for a
    session whose rounds somebody asks about.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        parts: Sequence[Part],
        tell: Callable[[Step | End], None],
        timeout_s: float,
        witness: Callable[[Session], Witness] | None = None,
    ):
        self.parts, self._tell = tuple(parts), tell
        self.submitted = monotonic()
        self.queue_s: float | None = None
        self.num_tokens = 0
        self._decoder, self._witness_of = decoder, witness
        self._timeout_s = timeout_s
        self._at = 0
        self._session: Session | None = None
        self._witness: Witness | None = None
        self._stop: End | None = None
        self._has_ended, self._ending = False, threading.Lock()

    def tell(self, what: Step | End) -> None:
        """Pass on a round, or the one end; nothing after that."""
        with self._ending:
            if self._has_ended:
                return
            self._has_ended = isinstance(what, End)
        self._tell(what)

    def stop(self, refusal: Refusal | None = None) -> None:
        """Have the request end before the next turn. Safe from any thread."""
        self._stop = self._stop or End(refusal=refusal)

    @property
    def is_done(self) -> bool:
        return self._at >= len(self.parts)

    def over(self, now: float) -> End | None:
        """Why the request must not go on, or None."""
        if self._stop is None and now - self.submitted > self._timeout_s:
            self._stop = End(refusal=_too_late(self._timeout_s, self.num_tokens))
        return self._stop

    @property
    def session(self) -> Session | None:
        """That of the answer that is being made."""
        return self._session

    def begin(self) -> None:
        """Have a session for the next answer, if there is none."""
        session = self._session or self._begin()
        if session.finish_reason is not None:  # there was no room for a single token
            self._next_part()

    def read(self, most: int) -> None:
        """Read a piece of the prompt."""
        assert self._session is not None, "a prompt is of a session"
        self._session.prefill(most)

    def step(self, outcome: Round | None = None) -> Step:
        """A round of `session` as it is told of; it is run here unless it has been."""
        session = self._session
        assert session is not None, "a round is of a session"
        outcome = outcome or session.step()
        self.num_tokens += outcome.num_tokens
        step = Step(
            index=self._at,
            round=outcome,
            evidence=self._witness.evidence(outcome) if self._witness else None,
            prefill_s=session.prefill_s,
            num_cached_tokens=session.num_cached_tokens,
            at_s=monotonic() - self.submitted,
        )
        if session.finish_reason is not None:
            self._next_part()
        return step

    def free(self) -> None:
        """Let go of the caches, at once: a session and the witness that it tells know each other."""
        if self._session is not None:
            self._session.watch = None
        self._session = self._witness = None

    def _begin(self) -> Session:
        if self.queue_s is None:
            self.queue_s = monotonic() - self.submitted
        part = self.parts[self._at]
        self._session = session = self._decoder.start(part.prompt, **part.options)
        if self._witness_of is not None:
            session.watch = self._witness = self._witness_of(session)
        return session

    def _next_part(self) -> None:
        self.free()
        self._at += 1


class Engine:
    """Runs the work that is submitted, turn by turn. `start` it once; `on_turn` hears of every turn's rounds, on its thread."""

    def __init__(self, limits: Limits, *, on_turn: Callable[[Sequence[Step]], None] = lambda steps: None):
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
        """Whether work is taken on."""
        return self._is_open

    @property
    def status(self) -> Literal["ok", "stopping", "failed"]:
        """Whether work is taken on, and if not, whether that was asked for."""
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
        for work in running:
            self._guarded(work, work.begin)
        begun = [(work, session) for work in running if (session := work.session) is not None]
        ready = [work for work, session in begun if not session.num_unread]
        unread = [work for work, session in begun if session.num_unread]
        shares = {work: session.engine.has_batches for work, session in begun}
        outcomes = self._advanced([work for work in ready if shares[work]], [work for work in unread if shares[work]])
        if (alone := next((work for work in unread if not shares[work]), None)) is not None:
            self._guarded(alone, lambda: alone.read(self._limits.prefill_tokens))
        steps: list[Step] = []
        for work in ready:
            outcome = outcomes.get(work)
            if isinstance(outcome, Exception):
                self._fail(work, outcome)
            elif (step := self._guarded(work, lambda work=work, outcome=outcome: work.step(outcome))) is not None:
                steps.append(step)
                work.tell(step)
        if steps:
            self._on_turn(steps)
        for work in [work for work in running if work.is_done and work in self._running]:
            self._part_with(work, End())

    def _advanced(self, ready: Sequence[Work], unread: Sequence[Work]) -> dict[Work, Round | Exception]:
        """A round of each that is ready, and prompts read in the same passes; none where the models failed: each by itself
        shows whose it was."""
        if len(ready) < 2 and not unread:
            return {}
        sessions, reading = ([session for work in works if (session := work.session) is not None] for works in (ready, unread))
        rows, before = self._pace.rows(is_alone=not ready), [(session.num_unread, session.prefill_s) for session in reading]
        try:
            outcomes = attempt(sessions, reading, rows=rows)
        except Exception:
            log.exception("a turn of %d requests failed in the models", len(ready) + len(unread))
            for session in (*sessions, *reading):
                session.rewind()
            for work in unread:
                self._guarded(work, lambda work=work: work.read(max(1, rows // len(unread))))
            return {}
        for session, (num_unread, read_s) in zip(reading, before, strict=True):
            self._pace.learn(num_unread - session.num_unread, session.prefill_s - read_s)
        return dict(zip(ready, outcomes, strict=True))

    def _guarded(self, work: Work, do: Callable[[], Step | None]) -> Step | None:
        """What the models raise ends one request, and not the others with it."""
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


def _too_late(timeout_s: float, num_tokens: int) -> Refusal:
    return Refusal(
        f"the request was not finished within {timeout_s:g} s and was ended after {num_tokens} tokens. Ask for fewer tokens, "
        "or when less is going on.",
        status=504,
        code="timeout",
    )
