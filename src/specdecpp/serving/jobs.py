"""A request of the server: the answers to make, the session of the current one, and the events of its steps."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from specdecpp.decoder import Decoder, Options
from specdecpp.sampling import Sampling
from specdecpp.serving.errors import ApiError
from specdecpp.serving.evidence import Recorder, ScoredToken
from specdecpp.session import Session, Step


@dataclass(frozen=True, kw_only=True)
class Part:
    """Prompt and options of one answer."""

    prompt: Sequence[int]
    options: Options


@dataclass(frozen=True, kw_only=True)
class RequestPlan:
    """A request that can be answered: its answers, the decoder, and the evidence that it asks for."""

    decoder: Decoder
    parts: tuple[Part, ...]
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    verification: str = "token"
    num_prompt_tokens: int = 0
    num_top: int | None = None
    """Alternatives for each token; None: no log-probabilities."""
    details: bool = False


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """One step of answer `index`, `at_s` seconds after the request came."""

    index: int
    step: Step
    prefill_s: float
    num_cached_tokens: int
    at_s: float
    scores: Sequence[ScoredToken] = ()
    details: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class End:
    """The last event of a request: it is finished, or `error` explains why not."""

    error: ApiError | None = None


class Job:
    """One request: its answers are made one after another.

    `listener` is called with every `StepEvent`, on the engine's thread, and with one last `End`, on any.
    """

    def __init__(self, plan: RequestPlan, listener: Callable[[StepEvent | End], None], *, timeout_s: float):
        self.plan, self.submitted = plan, monotonic()
        self.queue_s: float | None = None
        self.num_tokens = 0
        self.session: Session | None = None
        self._listener, self._timeout_s = listener, timeout_s
        self._recorder: Recorder | None = None
        self._index = 0
        self._cancelled: End | None = None
        self._has_ended, self._lock = False, threading.Lock()

    @property
    def is_done(self) -> bool:
        return self._index >= len(self.plan.parts)

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
            part, decoder = self.plan.parts[self._index], self.plan.decoder
            self.session = decoder.start(part.prompt, **part.options)
            if self.plan.num_top is not None or self.plan.details:
                self._recorder = Recorder(self.session, decoder.pair.tokenizer)
        if self.session.finish_reason is not None:  # there was no room for a single token
            self._next_part()

    def record(self, step: Step) -> StepEvent:
        """Count a step of `session`, and make its event."""
        session, recorder, num_top = self.session, self._recorder, self.plan.num_top
        assert session is not None, "a step is of a session"
        self.num_tokens += step.num_tokens
        at_s = monotonic() - self.submitted
        event = StepEvent(
            index=self._index,
            step=step,
            prefill_s=session.prefill_s,
            num_cached_tokens=session.num_cached_tokens,
            at_s=at_s,
            scores=recorder.scores(step, num_top) if recorder and num_top is not None else (),
            details=recorder.details(step) | {"at_s": at_s} if recorder and self.plan.details else None,
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
