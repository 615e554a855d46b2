"""What a stopping rule is.

A policy is a frozen configuration with pure methods. What it must remember between the rounds of a request is an opaque
`memory` that the session keeps for it. Within a round it sees only the draft's side: the candidates so far, their q, the
head's estimates. It never sees the target's probabilities.

Why that is lossless: whether to go on is a function of the candidates already drawn, and the last of them stays. The
candidates are then an *adapted* stopping of the draft's own process, for which token and block verification keep the
target's law (policies.md 1; enumerated in tests/test_law.py). Dropping the last candidate after looking at it is not
adapted: the Decoder refuses that unless the verification can bear it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from specdecpp.costs import Costs


@runtime_checkable
class Candidates(Protocol):
    """What a policy sees of a round: `drafting.Draft` while decoding, `theory.replay` in a recording.

    Candidates are counted from 0, -1 is the last; q is what the draft believed (see `confidence`).
    """

    @property
    def num_tokens(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def judged(self) -> Sequence[float]:
        """The head's estimates P(accepted), in order: of those that were read, or of all where the policy looks ahead."""
        ...

    @property
    def next_acceptance(self) -> float | None:
        """What the head expects of the candidate after the last judged one; None where no head says so."""
        ...

    @property
    def survival(self) -> float:
        """The product of `judged`."""
        ...

    @property
    def cumulative_confidence(self) -> float:
        """The product of q over all candidates."""
        ...

    @property
    def is_greedy(self) -> bool:
        """Whether candidates are the draft's argmax rather than draws."""
        ...

    @property
    def costs(self) -> "Costs | None":
        """What a step costs; None where no policy needs to know."""
        ...

    def confidence(self, i: int) -> float:
        """q of candidate i."""
        ...

    def entropy(self, i: int) -> float:
        """Entropy of q at candidate i, nats."""
        ...

    def gap(self, i: int) -> float:
        """How far the two largest probabilities of q lie apart at candidate i."""
        ...


@runtime_checkable
class Outcome(Protocol):
    """What a policy sees of a finished round: `session.Round` while decoding.

    `expected_s` is what the cost model has such a round take, the others are seconds by the clock. A rule that is to give
    the same stops for the same seed learns from `expected_s` only.
    """

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_drafted(self) -> int: ...
    @property
    def num_accepted(self) -> int: ...
    @property
    def expected_s(self) -> float: ...
    @property
    def draft_s(self) -> float: ...
    @property
    def head_s(self) -> float: ...
    @property
    def verify_s(self) -> float: ...
    @property
    def other_s(self) -> float: ...


class Evidence(Enum):
    """A number that a rule watches while the draft goes on."""

    NOTHING = auto()
    LAST_Q = auto()
    """q of the last candidate."""
    PRODUCT_OF_Q = auto()
    SURVIVAL = auto()
    """The product of the head's estimates."""


@dataclass(frozen=True, kw_only=True)
class Floors:
    """A stop rule as numbers that are known when a round begins, so that a device can follow it on its own.

    After k candidates drafting goes on while the evidence is at least `least[k]`; what is missing at the end is never undercut.
    """

    evidence: Evidence = Evidence.NOTHING
    least: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Base of every rule: bounds on the number of candidates, and three hooks.

    Write your own by overriding `stop`:

    >>> @dataclass(frozen=True, kw_only=True)
    ... class UntilRare(Policy):
    ...     def stop(self, draft, memory):
    ...         return "a rare token" if draft.num_tokens and draft.confidence(-1) < 0.1 else None
    """

    max_tokens: int = 20
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"{type(self).__name__} needs 0 <= min_tokens <= max_tokens, got min_tokens={self.min_tokens} and "
                f"max_tokens={self.max_tokens}"
            )

    @property
    def drops_last(self) -> bool:
        """Whether the rule removes the last candidate when it stops, having looked at it."""
        return False

    @property
    def looks_ahead(self) -> bool:
        """Whether `judge` is asked about a candidate as soon as it is drawn, or only once the draft has read it."""
        return False

    @property
    def needs_costs(self) -> bool:
        """Whether the rule reads `draft.costs` or `outcome.expected_s`."""
        return False

    @property
    def parts(self) -> "tuple[Policy, ...]":
        """The rules that this one is made of; none for most."""
        return ()

    def judge(self, draft: "Candidates", hidden: "Tensor") -> float | None:
        """P(accepted) of the last candidate, as a head says; None without a head.

        `hidden` [D] is the draft's state after reading that candidate or, where the rule looks ahead, the state that gave
        its q: the draft has not read it yet.
        """
        return None

    def start(self) -> Any:
        """The memory of a new request."""
        return None

    def limit(self, memory: Any) -> int:
        """The most candidates of the coming round."""
        return self.max_tokens

    def stop(self, draft: "Candidates", memory: Any) -> str | None:
        """A reason to stop before the next candidate is paid for, or None to go on. Not asked below `min_tokens`."""
        return None

    def floors(self, memory: Any, costs: "Costs | None", limit: int) -> Floors | None:
        """What `stop` will say in the coming round of at most `limit` candidates, as numbers; None where it cannot be said so.

        Only of use where whole rounds run on a device; a rule without it is asked candidate by candidate.
        """
        return None

    def learn(self, memory: Any, outcome: "Outcome") -> Any:
        """The memory after a round."""
        return memory


def says_its_floors(policy: Policy) -> bool:
    """Whether `floors` is written for this rule: not where a subclass has overridden what they stand for."""
    kinds = type(policy).__mro__
    defined = {n: next(i for i, c in enumerate(kinds) if n in vars(c)) for n in ("floors", "stop", "judge", "drops_last")}
    says = defined.pop("floors")
    return says < kinds.index(Policy) and says <= min(defined.values())


def check_probability(name: str, value: float) -> None:
    """Raise ValueError unless `value` lies in [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {value}")
