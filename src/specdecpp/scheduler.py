"""One step of several requests: prompts are read in pieces, and each request whose prompt has been read takes a step.

    prefill -> draft -> verify -> commit -> learn

`Decoder` and the server run the same `step`. Requests whose engine has batches share passes, and each gets what it would get
alone: to the bit in compiled code, and with a seed on a GPU, where it shares none; products over other numbers of rows round
otherwise there. The others go one after the other, and of their prompts one is read in a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specdecpp.backends.base import ReadsBoth
from specdecpp.step import Request, Result

if TYPE_CHECKING:
    from specdecpp.session import Session, Step

ROWS = 256
"""Tokens of prompts that are read in one pass."""


@dataclass(slots=True)
class Reading:
    """A piece of a prompt: ids for the target and for the draft, either may be empty. `took_s`: its share, in seconds."""

    request: Request
    target: list[int]
    draft: list[int]
    took_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return max(len(self.target), len(self.draft))

    def by_both(self, least: int = 1) -> bool:
        """Have both models read the tokens in one pass, where there are at least `least`, the same for both, after the same
        number of tokens, and the target can (`backends.ReadsBoth`). Tell whether that was done."""
        target, draft = self.request.target, self.request.draft
        is_same = len(self.target) >= least and self.draft == self.target and draft.length == target.length
        model = target.model
        if not (is_same and isinstance(model, ReadsBoth) and model.share_of(draft.model)):
            return False
        started = perf_counter()
        model.forward_both(target, draft, self.target)
        self.took_s = perf_counter() - started
        return True

    def read(self) -> None:
        """Have both models read the tokens."""
        if self.by_both():
            return
        started = perf_counter()
        for backend, tokens in ((self.request.target, self.target), (self.request.draft, self.draft)):
            if tokens:
                backend.extend(tokens, rows=1)
        self.took_s = perf_counter() - started


def step(
    sessions: "Sequence[Session]", *, rows: int = ROWS, most: int | None = None
) -> "list[Step | Reading | Exception | None]":
    """Take one step of requests that have not ended. The outcome of each, in order: a step, or what was read of its prompt.

    Passes that requests share read up to `rows` tokens of their prompts; a request that reads alone reads up to `most` (None:
    all). The outcome is None where a prompt waits for that of another. An exception concerns its request alone: where a shared
    pass fails, nothing has been decided, and each request is run by itself.
    """
    sharing = [s for s in sessions if s.shares and not (s.engine.reads_alone and s.num_unread)]
    outcomes: dict[Session, Any] = _shared(sharing, rows) if sharing else {}
    has_read = False
    for session in sessions:
        if session in outcomes:
            continue
        if not session.num_unread:
            outcomes[session] = _tried(session.step)
        elif not has_read:
            outcomes[session], has_read = _tried(session.read, most), True
    return [outcomes.get(session) for session in sessions]


def outcome_of(session: "Session") -> "Step | None":
    """Take one step of one request: its step, or None where it has read. Raises what the models raise."""
    (outcome,) = step([session])
    if isinstance(outcome, Exception):
        raise outcome
    return None if isinstance(outcome, Reading) else outcome


def _shared(sessions: "Sequence[Session]", rows: int) -> "dict[Session, Step | Reading | Exception]":
    """A step of requests that share passes; one by one where that fails."""
    reading = [session for session in sessions if session.num_unread]
    on = [session for session in sessions if session not in reading]
    try:
        return decode(on, reading, rows=rows)
    except Exception as error:
        if len(sessions) == 1:
            return {sessions[0]: error}
    for session in sessions:
        session.rewind()
    alone: dict[Session, Any] = {session: _tried(session.step) for session in on}
    return alone | {session: _tried(session.read, max(1, rows // len(reading))) for session in reading}


def decode(
    sessions: "Sequence[Session]", reading: "Sequence[Session]" = (), *, rows: int = ROWS
) -> "dict[Session, Step | Reading | Exception]":
    """A step of each of `sessions`, and pieces of the prompts of `reading`. Seconds are each request's share.

    An exception stands in place of a step that could not be committed: a matter of that request alone. What fails before, in
    the models, is raised; then nothing is decided, and each that is told to `rewind` can go on.
    """
    started, everyone = perf_counter(), [*sessions, *reading]
    for session in everyone:
        session.num_together = len(everyone)
    plans = {session: session.plan() for session in sessions}
    pieces = shares(reading, rows)
    results: dict[Session, Result] = {}
    for engine in dict.fromkeys(session.engine for session in everyone):
        own = [session for session in sessions if session.engine is engine]
        beside = [pieces[session] for session in reading if session.engine is engine]
        results.update(zip(own, engine.run([plans[session] for session in own], beside), strict=True))
    spent_s = 0.0
    for session, piece in pieces.items():
        session.prefill_s += piece.took_s
        spent_s += piece.took_s
    for session, result in results.items():
        session.prefill_s += result.once_s
        spent_s += result.draft_s + result.head_s + result.verify_s + result.once_s
    committed = {session: _tried(session.commit, plans[session], result) for session, result in results.items()}
    other_s = max(0.0, perf_counter() - started - spent_s) / max(1, len(sessions))
    outcomes: dict[Session, Any] = {**pieces, **committed}
    for session, tokens in committed.items():
        if not isinstance(tokens, Exception):
            outcomes[session] = _tried(session.learn, results[session], tokens, other_s)
    return outcomes


def shares(sessions: "Sequence[Session]", rows: int) -> "dict[Session, Reading]":
    """`rows` tokens of prompts, shared out evenly; what a short prompt leaves goes to the others. One of each at least."""
    nums, left = {}, rows
    for num, session in enumerate(sorted(sessions, key=lambda session: session.num_unread)):
        nums[session] = min(session.num_unread, max(1, left // (len(sessions) - num)))
        left -= nums[session]
    return {session: session.reading(nums[session]) for session in sessions}


def _tried(do: Callable[..., Any], *args: Any) -> Any:
    """Result of a call, or the exception that it raises."""
    try:
        return do(*args)
    except Exception as error:
        return error
