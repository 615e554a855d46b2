"""From an estimate to a probability, by two numbers that are learned for any pair (`learning.Belief`):

    logit P(accepted) = bias + slope * logit(estimate)

The estimate is a head's, or where there is none 1/(2 - q): its odds are 1/(1 - q). Along the answers of a target log(1 - q)
tells more than log q, the entropy of q or its gap (docs/how-it-works.md): acceptance is likely where the draft leaves little
probability to other tokens. A head's estimates are corrected in the same way, where sampling or prompts are not those it was
calibrated on.
"""

import math
from typing import NamedTuple

CLIP = 1e-6
"""Estimates are clipped to this distance from 0 and 1."""
MIN_OTHERS = 1e-2
"""The least probability that is left to other tokens than the drafted one: q is often 1 where a nucleus holds one token, and
the target may still disagree."""
_MAX_LOGIT = math.log((1 - CLIP) / CLIP)


def by_q(q: float) -> float:
    """The estimate of a draft token that was drawn with probability q, where no head is asked.

    >>> by_q(0.5)
    0.6666666666666666
    """
    return 1 / (1 + max(1 - q, MIN_OTHERS))


def logit(estimate: float) -> float:
    """log odds of an estimate that is kept from 0 and 1."""
    return math.log(estimate / (1 - estimate)) if CLIP < estimate < 1 - CLIP else math.copysign(_MAX_LOGIT, estimate - 0.5)


class Score(NamedTuple):
    """P(accepted) of an estimate."""

    bias: float = 0.0
    slope: float = 1.0

    def __call__(self, estimate: float) -> float:
        return 1 / (1 + math.exp(-(self.bias + self.slope * logit(estimate))))
