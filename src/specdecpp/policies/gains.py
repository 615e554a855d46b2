"""Whether drafting pays, from the rounds that drafted: what they brought over the target alone in the same time.

A round that made n tokens in s seconds gained n - s/t tokens, t being a pass of the target alone. Its mean has the sign of
"drafting is faster than not drafting", whatever the rule does with the rounds. Both times are those that the cost model had
then, so that what was seen on a busy machine still tells on a quiet one.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdecpp.policies.protocol import Outcome


@dataclass(frozen=True, slots=True)
class Gains:
    """Sums over rounds with candidates: their number, tokens, time in passes of the target alone, and the squares of gains."""

    num: float = 0.0
    tokens: float = 0.0
    passes: float = 0.0
    squares: float = 0.0

    def after(self, outcome: "Outcome") -> "Gains":
        """With one more round, of which the cost model had something to say."""
        assert outcome.costs is not None, "the session gives costs to a policy that needs them"
        num_tokens, passes = outcome.num_tokens, outcome.expected_s / outcome.costs.verify_s(1)
        return Gains(self.num + 1, self.tokens + num_tokens, self.passes + passes, self.squares + (num_tokens - passes) ** 2)

    @property
    def mean(self) -> float:
        """Tokens a round over the target alone; 0 without rounds."""
        return (self.tokens - self.passes) / self.num if self.num else 0.0

    @property
    def variance(self) -> float:
        """Of a round's gain, tokens squared; 0 without rounds."""
        return max(0.0, self.squares / self.num - self.mean**2) if self.num else 0.0
