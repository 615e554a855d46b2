"""What an engine is given, and what it gives back: one round of a request as two values.

    Session -> Plan -> engine.run([plan]) -> Result -> Session

A list of plans is a batch, and pieces of prompts (`Reading`) may be read beside it. Every engine decides the same by the same
uniforms, in the same order: `host` is the readable one, `native` and `device` are faster.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

from specdecpp.policies import Costs, Policy, Stop
from specdecpp.policies.protocol import Decision
from specdecpp.rounds.verification import Verification
from specdecpp.runners import Cache, ReadsBoth
from specdecpp.sampling import Randomness, Sampling, probabilities

if TYPE_CHECKING:
    from specdecpp.rounds.copying import Copied


@dataclass(frozen=True, kw_only=True, eq=False, weakref_slot=True, slots=True)
class Request:
    """What is the same in all rounds of a request: its two caches, and how it is decoded.

    `randomness` are two independent streams, to draft and to verify. `ends` are the ids after which nothing follows. `seen`
    marks the tokens of the context where a repetition penalty needs them; whoever commits tokens marks them.
    """

    target: Cache
    draft: Cache
    policy: Policy
    verification: Verification
    sampling: Sampling
    randomness: tuple[Randomness, Randomness]
    ends: Collection[int] = ()
    seen: Bool[Tensor, " V"] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One round. A candidate's sequence is that of its request, its position follows the last of `tokens`, and its parent is
    the candidate before it.

    `tokens` are all of the context; an engine reads those that a runner has not. `wants_rows` asks for the distributions that
    the round was decided on, which changes nothing else.
    """

    request: Request
    tokens: list[int]
    decision: Decision
    costs: Costs | None = None
    wants_rows: bool = False
    found: "tuple[Copied, Stop] | None" = None
    """What the text offers to copy, where that has been looked up."""


@dataclass(kw_only=True)
class Rows:
    """The distributions of a round of K candidates, in float32 or better.

    `q` are those that the candidates were drawn from, under greedy drafting softmaxes at temperature 1. `logits` are the
    target's own; row i is of the i-th token that came out. `seen` are the contexts of the rows, for a repetition penalty.
    """

    q: Float[Tensor, "K V"]
    logits: Float[Tensor, "K1 V"]
    sampling: Sampling
    seen: Bool[Tensor, "K1 V"] | None = None

    @cached_property
    def p(self) -> Float[Tensor, "K1 V"]:
        """What the request's sampling makes of the logits, once somebody asks."""
        return probabilities(self.logits, self.sampling, self.seen)


@dataclass(slots=True)
class Result:
    """What became of a round: the candidates, how many of them are accepted, and the token that follows those.

    `q` has the probability of each candidate, where somebody needed it; `judged` what a head expected of them: of all, or
    where it lags of all but the last. Seconds: `draft_s` of drafting but for the head's `head_s`, `verify_s` of the target's
    pass and the test, `forward_s` of those within forward passes (0 where a device runs them on its own), and `once_s` beside
    them of what such a round needs only the first time (recording it on a device): no later round takes that.

    `expected_s` and `extra` are set by an engine that a policy brings (`Policy.engine`): what its costs have such a round take,
    and whatever the policy is to learn from.
    """

    tokens: list[int]
    num_accepted: int
    next_token: int
    stop: Stop
    q: Sequence[float] = ()
    judged: Sequence[float] = ()
    draft_s: float = 0.0
    head_s: float = 0.0
    verify_s: float = 0.0
    forward_s: float = 0.0
    once_s: float = 0.0
    rows: Rows | None = field(default=None, repr=False)
    expected_s: float | None = None
    extra: Any = None
    tv: Sequence[float] = ()
    """Of each token that came out, as in `ratio.Verdict`; `overlaps` of each candidate that was tested likewise."""
    overlaps: Sequence[float] = ()

    @property
    def accepted(self) -> list[int]:
        """The candidates that are accepted."""
        return self.tokens[: self.num_accepted]

    @property
    def is_whole(self) -> bool:
        """Whether no candidate was rejected: the next token is a bonus."""
        return self.num_accepted == self.num_drafted

    @property
    def num_drafted(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class Reading:
    """Tokens of a prompt that the models of a request are to read, nothing being decided: `target` ids by the one, `draft` ids
    by the other, either of them none. `took_s` becomes the request's share of the passes, in seconds."""

    request: Request
    target: list[int]
    draft: list[int]
    took_s: float = 0.0

    def by_both(self, least: int = 1) -> bool:
        """Have both models read the tokens in one pass: where there are so many, the same for both, behind as much text,
        and the target knows how (`runners.ReadsBoth`). Tell whether that was done."""
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
        for runner, tokens in ((self.request.target, self.target), (self.request.draft, self.draft)):
            if tokens:
                runner.extend(tokens, rows=1)
        self.took_s = perf_counter() - started


@runtime_checkable
class Engine(Protocol):
    """Runs rounds. The caches of a request hold what they have read then, rejected candidates too: the caller rolls back."""

    has_batches: bool
    """Whether several plans take less than one after the other, and prompts can be read beside them."""

    def refusal(self, request: Request) -> str | None:
        """Why the rounds of this request cannot be run here; None where they can."""
        ...

    def run(self, plans: Sequence[Plan], readings: Sequence[Reading] = ()) -> list[Result]:
        """A result for each plan, in order; `readings` only where `has_batches`. Requests must differ.

        An exception concerns all of them: `Session.rewind` restores each, to be run again.
        """
        ...
