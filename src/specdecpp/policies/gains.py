"""Whether drafting pays, from the rounds that drafted: what they brought over the target alone in the same time.

A round that made n tokens in s seconds gained n - s/t tokens, t being a pass of the target alone. Its mean has the sign of
"drafting is faster than not drafting", whatever the rule does with the rounds. It is kept as sums, so that t may move.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gains:
    """Sums over rounds with candidates: their number, tokens, seconds of the cost model, and the second moments."""

    num: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    tokens_seconds: float = 0.0
    seconds_squared: float = 0.0

    def after(self, num_tokens: int, seconds: float) -> "Gains":
        """With one more round."""
        return Gains(
            self.num + 1,
            self.tokens + num_tokens,
            self.seconds + seconds,
            self.tokens_squared + float(num_tokens**2),
            self.tokens_seconds + num_tokens * seconds,
            self.seconds_squared + seconds**2,
        )

    def mean(self, target_s: float) -> float:
        """Tokens a round over the target alone; 0 without rounds."""
        return (self.tokens - self.seconds / target_s) / self.num if self.num else 0.0

    def variance(self, target_s: float) -> float:
        """Of a round's gain, tokens squared; 0 without rounds."""
        if not self.num:
            return 0.0
        squares = self.tokens_squared - 2 * self.tokens_seconds / target_s + self.seconds_squared / target_s**2
        return max(0.0, squares / self.num - self.mean(target_s) ** 2)
