"""A request of the server: the answers to make, the session of the current one, and the events of its steps."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from specdecpp.decoder import Decoder, Options
from specdecpp.serving.errors import ApiError
from specdecpp.serving.evidence import Recorder, StepEvidence
from specdecpp.session import Session, Step


@dataclass(frozen=True, kw_only=True)
class Part:
    """Prompt and options of one answer."""

    prompt: Sequence[int]
    options: Options


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """One step of answer `index`, `at_s` seconds after the request came."""

    index: int
    step: Step
    evidence: StepEvidence | None
    prefill_s: float
    num_cached_tokens: int
    at_s: float


@dataclass(frozen=True, kw_only=True)
class End:
    """The last event of a request: it is finished, or `error` explains why not."""

    error: ApiError | None = None


class Job:
    """One request: its answers are made one after another.

    `listener` is called with every `StepEvent`, on the engine's thread, and with one last `End`, on any. `recorder` makes a
    `Recorder` for the session of each answer whose details are asked for.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        parts: Sequence[Part],
        listener: Callable[[StepEvent | End], None],
        timeout_s: float,
        recorder: Callable[[Session], Recorder] | None = None,
    ):
        self.parts = tuple(parts)
        self.submitted = monotonic()
        self.queue_s: float | None = None
        self.num_tokens = 0
        self.session: Session | None = None
        self._decoder, self._listener, self._timeout_s = decoder, listener, timeout_s
        self._new_recorder = recorder
        self._recorder: Recorder | None = None
        self._index = 0
        self._cancelled: End | None = None
        self._has_ended, self._lock = False, threading.Lock()

    @property
    def is_done(self) -> bool:
        return self._index >= len(self.parts)

    def send(self, event: StepEvent | End) -> None:
        """Pass an event on; nothing after the one end."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = isinstance(event, End)
        self._listener(event)

    def cancel(self, error: ApiError | None = None) -> None:
        """Have the request end before the next turn. Safe from any thread."""
        self._cancelled = self._cancelled or End(error=error)

    def end_due(self) -> End | None:
        """The end of a request that must not go on: it was cancelled, or is past its deadline."""
        if self._cancelled is None and monotonic() - self.submitted > self._timeout_s:
            message = f"the request was not finished within {self._timeout_s:g} s and was ended after {self.num_tokens} tokens."
            self.cancel(ApiError(f"{message} Ask for fewer tokens, or when less is going on.", status=504, code="timeout"))
        return self._cancelled

    def begin(self) -> None:
        """Start a session for the next answer, if there is none."""
        if self.session is None:
            self.queue_s = monotonic() - self.submitted if self.queue_s is None else self.queue_s
            part = self.parts[self._index]
            self.session = self._decoder.start(part.prompt, **part.options)
            if self._new_recorder is not None:
                self.session.watch = self._recorder = self._new_recorder(self.session)
        if self.session.finish_reason is not None:  # there was no room for a single token
            self._next_part()

    def record(self, step: Step) -> StepEvent:
        """Count a step of `session`, and make its event."""
        session = self.session
        assert session is not None, "a step is of a session"
        self.num_tokens += step.num_tokens
        event = StepEvent(
            index=self._index,
            step=step,
            evidence=self._recorder.evidence(step) if self._recorder else None,
            prefill_s=session.prefill_s,
            num_cached_tokens=session.num_cached_tokens,
            at_s=monotonic() - self.submitted,
        )
        if session.finish_reason is not None:
            self._next_part()
        return event

    def free(self) -> None:
        """Let go of the caches at once: a session and its recorder refer to each other."""
        if self.session is not None:
            self.session.watch = None
        self.session = self._recorder = None

    def _next_part(self) -> None:
        self.free()
        self._index += 1
