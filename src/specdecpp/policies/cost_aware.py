"""Stop when further candidates no longer pay: no threshold, only costs (policies.md 3).

Rounds renew, so tokens per second are E[tokens]/E[seconds] of a round, and by Dinkelbach's argument another candidate pays
if the chance that it ends in the output is worth the time it adds, at the rate rho that is being achieved:

    continue  iff  S_k * m  >  rho * (t_draft + t_target(k + 2) - t_target(k + 1))

S_k is the chance that everything so far is accepted, m the chance that the next candidate then is. That is exact where m is
constant and time grows evenly. Where a pass takes a step up and is then flat, going on may pay for what comes after the next
candidate. So the rule asks for any j >= 1 whether j more pay:

    S_k * m * (1 + a + ... + a^(j-1))  >  rho * (j t_draft + t_target(k + 1 + j) - t_target(k + 1))

with a the mean acceptance. Going on is never worth less than one of these plans, so it is never wrong to follow the best.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from specdecpp.costs import Costs, chain_tokens
from specdecpp.policies.head import HeadPolicy
from specdecpp.policies.protocol import Evidence, Rule, check_probability

if TYPE_CHECKING:
    from specdecpp.policies.protocol import Outcome


HORIZON = 8
"""The longest plan j: further on S_k a^j is small."""
_NOISE = 1e-9
"""Two costs a candidate that differ by less are those of an even curve, rounded."""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Sums over the rounds of a request: what came out, what it should have taken, candidates tested and accepted."""

    num_tokens: int = 0
    seconds: float = 0.0
    num_tested: int = 0
    num_accepted: int = 0

    def with_round(self, outcome: "Outcome") -> "Ledger":
        """Seconds are those of the cost model, so that a seed gives the same stops again."""
        return Ledger(
            num_tokens=self.num_tokens + outcome.num_tokens,
            seconds=self.seconds + outcome.expected_s,
            num_tested=self.num_tested + min(outcome.num_accepted + 1, outcome.num_drafted),
            num_accepted=self.num_accepted + outcome.num_accepted,
        )

    def acceptance(self, prior: float, weight: int) -> float:
        """Of the candidates tested so far; the prior counts for `weight` of them."""
        return (self.num_accepted + weight * prior) / (self.num_tested + weight)


@dataclass(frozen=True, kw_only=True)
class CostAware(HeadPolicy):
    """Go on while the next candidate's chance of ending in the output is worth the time it adds. Nothing to tune.

    Costs are measured on the machine. S_k comes from the head's calibrated probabilities, m is the acceptance of the request
    so far and rho the rate it has achieved. Before there is anything to go by, both are those of a chain with acceptance
    `prior`, which counts for `prior_rounds` rounds.

    >>> policy = CostAware(head=pair.head)                                              # doctest: +SKIP
    """

    min_tokens: int = 1
    prior: float = 0.7
    prior_rounds: int = 8
    calibrated: bool = field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("CostAware.prior", self.prior)
        if self.prior_rounds < 1:
            raise ValueError(f"CostAware needs prior_rounds of at least 1, got {self.prior_rounds}")

    @property
    def needs_costs(self) -> bool:
        return True

    def start(self) -> Ledger:
        return Ledger()

    def learn(self, memory: Ledger, outcome: "Outcome") -> Ledger:
        return memory.with_round(outcome)

    def rule(self, memory: Ledger, costs: Costs | None, limit: int) -> Rule:
        """All terms but S are known when a round begins, and each plan asks for an S above some number."""
        assert costs is not None, "the session gives costs to a policy that needs them"
        mean, rho = self.mean_acceptance(memory), self.rate(memory, costs)
        if not mean > 0:
            return Rule(Evidence.SURVIVAL, (math.inf,) * (limit + 1))
        # The last candidate has not been judged by a head that lags, and more than the threshold is asked for, not as much.
        scale = rho / mean if self.looks_ahead else rho / mean**2
        one_more, longer = _plans(costs, self.max_tokens)
        least = [scale * seconds for seconds in one_more[: limit + 1]]
        for num, j, seconds in longer:
            if num <= limit:
                least[num] = min(least[num], scale * seconds / chain_tokens(mean, j - 1))
        if not self.looks_ahead:
            least[0] *= mean
        return Rule(Evidence.SURVIVAL, tuple(math.nextafter(x, math.inf) for x in least))

    def rate(self, memory: Ledger, costs: Costs) -> float:
        """rho: tokens per second so far, the prior's rounds included."""
        tokens, seconds = _prior(costs, self.prior, self.prior_rounds, self.max_tokens)
        return (memory.num_tokens + tokens) / (memory.seconds + seconds)

    def mean_acceptance(self, memory: Ledger) -> float:
        """a: of the candidates tested so far, the prior's rounds included."""
        return memory.acceptance(self.prior, 2 * self.prior_rounds)


@lru_cache(maxsize=64)
def _plans(costs: Costs, max_tokens: int) -> tuple[tuple[float, ...], tuple[tuple[int, int, float], ...]]:
    """Seconds that one more candidate adds after 0, 1, ... of them; and, of plans for several, (candidates so far, j, seconds).

    Later candidates of a plan are worth less than its first, so it can only pay where it costs less a candidate than every
    shorter one does: behind a step of the curve. Where that grows evenly there is none.
    """
    seconds = [costs.round_s(num) for num in range(max_tokens + 1)]
    one_more = [after - before for before, after in pairwise(seconds)]
    longer = []
    for num, least in enumerate(one_more):
        for j in range(2, min(HORIZON, max_tokens - num) + 1):
            each = (seconds[num + j] - seconds[num]) / j
            if each < least * (1 - _NOISE):
                longer.append((num, j, j * each))
                least = each
    return (*one_more, math.inf), tuple(longer)


@lru_cache(maxsize=256)  # asked before every candidate, with what changes at most once a round
def _prior(costs: Costs, acceptance: float, num_rounds: int, max_tokens: int) -> tuple[float, float]:
    """(tokens, seconds) of the prior's rounds: of the length that is best for a chain."""
    k = costs.best_length(acceptance, range(max_tokens + 1))
    return num_rounds * chain_tokens(acceptance, k), num_rounds * costs.round_s(k)
