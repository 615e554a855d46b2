"""A fixed number of draft tokens, none among them."""

from dataclasses import dataclass, field
from numbers import Integral
from typing import ClassVar

from specdecpp.policies.protocol import Policy


@dataclass(frozen=True, kw_only=True)
class Fixed(Policy):
    """Always k draft tokens (Leviathan et al. 2023).

    >>> Fixed(3)
    Fixed(k=3)
    """

    short: ClassVar[str] = "fixed:k"
    k: int = field(default=4, kw_only=False)
    min_tokens: int = field(default=0, init=False, repr=False)
    max_tokens: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, Integral) or self.k < 0:
            raise ValueError(f"Fixed needs a whole number k of at least 0, got {self.k!r}; 0 is the target alone")
        object.__setattr__(self, "max_tokens", self.k)


def NoDraft() -> Fixed:
    """No draft tokens: the target alone, run by the same code. It is `Fixed(0)`."""
    return Fixed(0)
