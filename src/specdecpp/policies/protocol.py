"""What a stopping rule is.

A policy is a frozen configuration with pure methods. What it must remember between the rounds of a request is an opaque
`memory` that the session keeps for it. Within a round it sees only the draft's side: the candidates so far, their q, the
head's estimates. It never sees the target's probabilities.

Why that is lossless: whether to go on is a function of the candidates already drawn, and the last of them stays. The
candidates are then an *adapted* stopping of the draft's own process, for which token and block verification keep the
target's law (policies.md 1; enumerated in tests/test_law.py). Dropping the last candidate after looking at it is not
adapted: the Decoder refuses that unless the verification can bear it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from specdecpp.drafting import Draft
    from specdecpp.session import Round


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

    def judge(self, draft: "Draft", hidden: "Tensor") -> float | None:
        """P(accepted) of the last candidate; None without a head.

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

    def stop(self, draft: "Draft", memory: Any) -> str | None:
        """A reason to stop before the next candidate is paid for, or None to go on. Not asked below `min_tokens`."""
        return None

    def learn(self, memory: Any, outcome: "Round") -> Any:
        """The memory after a round."""
        return memory


def check_probability(name: str, value: float) -> None:
    """Raise ValueError unless `value` lies in [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {value}")
