"""A request of the server: the answers that it asks for, the session of the current one, and where its steps go."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from specdecpp.decoder import Decoder, Options
from specdecpp.serving.evidence import StepEvidence, Witness
from specdecpp.serving.refusals import Refusal
from specdecpp.session import Session, Step


@dataclass(frozen=True, kw_only=True)
class Part:
    """One answer that is to be made."""

    prompt: Sequence[int]
    options: Options


@dataclass(frozen=True, kw_only=True)
class Event:
    """One step of answer `index`, `at_s` seconds after the request came."""

    index: int
    step: Step
    evidence: StepEvidence | None
    prefill_s: float
    num_cached_tokens: int
    at_s: float


@dataclass(frozen=True, kw_only=True)
class End:
    """The last event of a request: it is finished, or `refusal` says why not."""

    refusal: Refusal | None = None


class Work:
    """One request: its answers to make, the session of the current one, and where to tell of it.

    `tell` is called with every `Event`, on the engine's thread, and with one last `End`, on any. `witness` makes one for a
    session whose steps somebody asks about.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        parts: Sequence[Part],
        tell: Callable[[Event | End], None],
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

    def tell(self, what: Event | End) -> None:
        """Pass on a step, or the one end; nothing after that."""
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
        """Session of the answer that is being made."""
        return self._session

    def begin(self) -> None:
        """Have a session for the next answer, if there is none."""
        session = self._session or self._begin()
        if session.finish_reason is not None:  # there was no room for a single token
            self._next_part()

    def note(self, outcome: Step) -> Event:
        """Count a step of `session`, as it is told of."""
        session = self._session
        assert session is not None, "a step is of a session"
        self.num_tokens += outcome.num_tokens
        told = Event(
            index=self._at,
            step=outcome,
            evidence=self._witness.evidence(outcome) if self._witness else None,
            prefill_s=session.prefill_s,
            num_cached_tokens=session.num_cached_tokens,
            at_s=monotonic() - self.submitted,
        )
        if session.finish_reason is not None:
            self._next_part()
        return told

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


def _too_late(timeout_s: float, num_tokens: int) -> Refusal:
    return Refusal(
        f"the request was not finished within {timeout_s:g} s and was ended after {num_tokens} tokens. Ask for fewer tokens, "
        "or when less is going on.",
        status=504,
        code="timeout",
    )
