"""From an estimate to a probability: what the outcomes of steps say of P(accepted), two numbers for any pair.

    logit P(accepted) = bias + slope * logit(estimate)

The estimate is a head's, or where there is none 1/(2 - q): its odds are 1/(1 - q). Along the answers of a target log(1 - q)
tells more than log q, the entropy of q or its gap (docs/how-it-works.md): acceptance is likely where the draft leaves little
probability to other tokens. A head's estimates are corrected in the same way, where sampling or prompts are not those it was
calibrated on.

The two numbers are learned from what became of draft tokens that were tested. Those behind a rejection are not among them:
given that a draft token is tested, whether it is accepted is a coin with that very probability, so leaving out the untested
ones introduces no bias. The posterior is kept as a normal distribution, and each coin moves it by one step of
Newton's method (an extended Kalman filter for logistic regression).
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

LEAST = 1e-6
"""Estimates are clipped to this distance from 0 and 1."""
REST = 1e-2
"""The least that is taken to lie beside q: q is often 1 where a nucleus holds one token, and the target may still disagree."""
_LIMIT = math.log((1 - LEAST) / LEAST)


def by_q(q: float) -> float:
    """The estimate of a draft token that was drawn with probability q, where no head is asked.

    >>> by_q(0.5)
    0.6666666666666666
    """
    return 1 / (1 + max(1 - q, REST))


def logit(estimate: float) -> float:
    """log odds of an estimate that is kept from 0 and 1."""
    return math.log(estimate / (1 - estimate)) if LEAST < estimate < 1 - LEAST else math.copysign(_LIMIT, estimate - 0.5)


class Score(NamedTuple):
    """P(accepted) of an estimate."""

    bias: float = 0.0
    slope: float = 1.0

    def __call__(self, estimate: float) -> float:
        return 1 / (1 + math.exp(-(self.bias + self.slope * logit(estimate))))


class Belief(NamedTuple):
    """Belief about a score: means and covariance of bias and slope."""

    score: Score = Score()
    var_bias: float = 0.25
    cov: float = 0.0
    var_slope: float = 0.04

    def after(self, estimates: Iterable[float], num_accepted: int) -> "Belief":
        """Update after draft tokens were tested, of which the first so many were accepted."""
        bias, slope = self.score.bias, self.score.slope
        var_bias, cov, var_slope = self.var_bias, self.cov, self.var_slope
        for i, estimate in enumerate(estimates):
            x = logit(estimate)
            p = 1 / (1 + math.exp(-(bias + slope * x)))
            along_bias, along_slope = var_bias + cov * x, cov + var_slope * x
            share = p * (1 - p) / (1 + p * (1 - p) * (along_bias + along_slope * x))
            var_bias -= share * along_bias * along_bias
            cov -= share * along_bias * along_slope
            var_slope -= share * along_slope * along_slope
            surprise = (i < num_accepted) - p
            bias += surprise * (var_bias + cov * x)
            slope = max(0.0, slope + surprise * (cov + var_slope * x))
        return Belief(Score(bias, slope), var_bias, cov, var_slope)
