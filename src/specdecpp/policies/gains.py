"""Tell whether drafting pays, from the steps that drafted: what they brought over the target alone in the same time.

A step that made n tokens in s seconds gained n - s/t tokens, t being a pass of the target alone. Its mean has the sign of
"drafting is faster than not drafting", whatever the rule does with the steps. Where it is known how likely the tested
draft tokens were to be accepted, n is the mean that follows: the same on average, with a fraction of the variance. Both times
are those that the cost model had then, so that what was seen on a busy machine still tells on a quiet one.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from specdecpp.policies.protocol import Outcome


def num_expected(outcome: "Outcome") -> float:
    """How many of the tested draft tokens are accepted in the mean (`Outcome.overlaps`); where nobody knows, how many were.

    Whether a draft token is tested hangs on what was drawn before it. Given that it is, its chance stands in for the coin, and
    over many steps both have the same sum.
    """
    return sum(min(1.0, chance) for chance in outcome.overlaps) if outcome.overlaps else float(outcome.num_accepted)


class Gains(NamedTuple):
    """Sums over steps with draft tokens: their number, tokens, time in passes of the target alone, and the squares of gains."""

    num: float = 0.0
    tokens: float = 0.0
    passes: float = 0.0
    squares: float = 0.0

    def after(self, outcome: "Outcome") -> "Gains":
        """With one more step, of which the cost model had something to say."""
        assert outcome.costs is not None, "the session gives costs to a policy that needs them"
        num_tokens = outcome.num_tokens - outcome.num_accepted + num_expected(outcome)
        passes = outcome.expected_s / outcome.costs.verify_s(1)
        return Gains(self.num + 1, self.tokens + num_tokens, self.passes + passes, self.squares + (num_tokens - passes) ** 2)

    @property
    def mean(self) -> float:
        """Tokens a step over the target alone; 0 without steps."""
        return (self.tokens - self.passes) / self.num if self.num else 0.0

    @property
    def variance(self) -> float:
        """Variance of a step's gain, tokens squared; 0 without steps."""
        return max(0.0, self.squares / self.num - self.mean**2) if self.num else 0.0
