"""Stop when further draft tokens no longer pay: no threshold, only costs.

If steps are alike and independent, tokens per second are E[tokens]/E[seconds] of a step, and by Dinkelbach's argument another
draft token pays if the chance that it ends in the output is worth the time it adds, at the rate rho that is being achieved:

    continue  iff  S_k * m  >  rho * (t_draft + t_target(k + 2) - t_target(k + 1))

S_k is the chance that everything so far is accepted, m the chance that the next draft token then is. That is exact where m is
constant and time grows evenly. Where a pass takes a step up and is then flat, going on may pay for what comes after the next
draft token. So the rule asks for any j >= 1 whether j more pay:

    S_k * m * (1 + a + ... + a^(j-1))  >  rho * (j t_draft + t_target(k + 1 + j) - t_target(k + 1))

with a the mean acceptance. Going on is never worth less than one of these plans, so it is never wrong to follow the best.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import mul
from typing import TYPE_CHECKING, Any, ClassVar

from specdecpp.costs import LONG_WARM_UP, QUICK_S, Costs, chain_tokens
from specdecpp.policies.head import HeadPolicy
from specdecpp.policies.learning import Account, Belief, Gains, PastRequests, reading_s
from specdecpp.policies.protocol import NO_PAST, Evidence, Given, Rule, check_probability
from specdecpp.policies.score import Score

if TYPE_CHECKING:
    from specdecpp.head import AcceptanceHead
    from specdecpp.policies.protocol import Outcome


HORIZON = 8
"""The longest plan j: further on S_k a^j is small."""
BY_Q = Belief(Score(bias=-0.15, slope=0.85))
"""Prior score of q: the reference pair has .05 and 1.04 at temperature 1, -.29 and .76 at .7 with top_p .9."""
BY_Q_GREEDY = Belief(Score(bias=-0.2, slope=1.3))
"""Prior score of q at temperature 0, where draft tokens are argmax tokens and q says more."""
RESUMED = 0.1, 0.0, 0.02
"""Variances of a score that other requests have taught: that of bias, the covariance, that of slope."""
OPTIMISM = 1.0
"""Standard errors by which the gain of drafting is taken to lie above its mean."""
PRIOR_VARIANCE = 0.5
"""Prior variance of a step's gain, tokens squared."""
MAX_PAST_STEPS = 12
"""Gains of earlier requests count as at most this many steps of the request's own."""
TRIAL = 4
"""Steps of a trial of drafting, where it is not expected to pay."""
CREDIT = 500
"""Tokens that a pair is taken to have made before its first request: what may be lost over them may be lost at once."""
USUAL = 100
"""Tokens of an answer before any is known. An answer may end at any token, so the mean length is always still to come."""
MORE_THAN = 1 + 2**-50
"""Rules go on at a threshold itself, and this one only above it: its thresholds are multiplied by this."""
NO_DRAFT_TOKEN = Rule(Evidence.SURVIVAL, (math.inf,), words="drafting does not pay")
_ROUNDING = 1e-9
"""Two costs a draft token that differ by less are those of an even curve, rounded."""


@dataclass(frozen=True, kw_only=True)
class CostAware(HeadPolicy):
    """Go on while the next draft token's chance of ending in the output is worth the time it adds. Nothing to tune.

    Costs are measured on the machine. S_k comes from a head's probabilities or, without one, from q; a `score` learned from
    the request's own outcomes corrects either. m is estimated by a, the acceptance of the request so far, and rho is the rate
    it has achieved by the cost model, at least the target's own. Both begin as if `prior_steps` steps had been decoded in
    which each draft token is accepted with probability `prior`.

    Where even an optimistic estimate says that drafting loses, it is tried for `TRIAL` steps now and then: all that is lost by
    it, with the switch (`Costs.switch_s`) and the reading, stays below `regret` of the time that the target alone would have
    taken for all requests of the pair that taught this one.

    >>> policy = CostAware(head=pair.head)                                              # doctest: +SKIP
    """

    short: ClassVar[str] = "cost-aware:prior"
    head: "AcceptanceHead | None" = None
    prior: float = 0.7
    prior_steps: int = 8
    regret: float = 0.01
    calibrated: bool = field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("CostAware.prior", self.prior)
        check_probability("CostAware.regret", self.regret)
        if self.prior_steps < 1:
            raise ValueError(f"CostAware needs prior_steps of at least 1, got {self.prior_steps}")

    @property
    def needs_costs(self) -> bool:
        return True

    def start(self, given: Given = NO_PAST) -> Account:
        past = PastRequests.parse(given.past)
        if past.num_requests:
            belief = Belief(Score(past.bias, past.slope), *RESUMED)
        elif self.head is None:
            belief = BY_Q_GREEDY if given.is_greedy else BY_Q
        else:
            belief = Belief()
        return Account(past=past, belief=belief, num_unread=given.num_unread)

    def carry(self, past: Mapping[str, Any] | None, memory: Account) -> Mapping[str, Any]:
        return PastRequests.parse(past).with_request(memory).to_json()

    def learn(self, memory: Account, outcome: "Outcome") -> Account:
        return memory.with_step(outcome)

    def rule(self, memory: Account, costs: Costs | None) -> Rule:
        """All terms but S are known when a step begins, and each plan asks for an S above some number."""
        assert costs is not None, "the session gives costs to a policy that needs them"
        if memory.is_off and memory.pending:
            return NO_DRAFT_TOKEN
        planned = memory.planned
        if not (planned and planned[0] is self and planned[1] is costs):
            planned[:] = self, costs, self._rule(memory, costs)
        return planned[2]

    def _rule(self, memory: Account, costs: Costs) -> Rule:
        mean, rho = self.mean_acceptance(memory), self.rate(memory, costs)
        if not mean > 0 or costs.is_new_load or not self._drafts(memory, costs):
            return NO_DRAFT_TOKEN
        each = prices_of_more(costs, self.max_tokens, mean)
        # The product of a head that lags lacks the last draft token: S is taken to be the product times m.
        scale = MORE_THAN * rho / (mean if self.looks_ahead else mean**2)
        return Rule(Evidence.SURVIVAL, (0.0, *(scale * x for x in each[1:])), score=memory.belief.score)

    def _drafts(self, memory: Account, costs: Costs) -> bool:
        """Tell whether the coming step has a draft token: where drafting may pay, in a trial, and where a trial may begin."""
        past, (mean, most) = memory.past, self.gain(memory, costs)
        if memory.num_running:
            return most >= 0 or memory.num_running < TRIAL
        target_s, begin_s = costs.verify_s(1), costs.switch_s + reading_s(costs, memory)
        num_steps = (CREDIT + past.num_tokens) / (CREDIT / USUAL + past.num_requests) / (1 + self._expected_acceptance(memory))
        if most >= 0 and num_steps * expected_gain(mean, (most - mean) / OPTIMISM) * target_s >= begin_s:
            return True
        if target_s < QUICK_S and memory.num_tokens < LONG_WARM_UP:
            return False  # the clock learns nothing from a trial there
        loss = begin_s / target_s + TRIAL * max(0.0, -mean)
        num_tokens = CREDIT + past.num_tokens + costs.load * memory.num_tokens
        return past.lost + costs.load * (memory.lost + loss) < self.regret * num_tokens  # those beside it do the same

    def best_prefix(self, memory: Account, estimates: Sequence[float], costs: Costs) -> int:
        """The number of the first draft tokens that bring the most beyond what their time would bring at the rate achieved.

        For copies: all of them are known, so the whole is weighed; `estimates` are their chances of acceptance.
        """
        rho, tokens, best, most = self.rate(memory, costs), 0.0, 0, 0.0
        for num, survival in enumerate(accumulate(map(memory.belief.score, estimates), mul), 1):
            tokens += survival
            if (value := tokens - rho * (costs.step_s(num) - costs.step_s(0))) > most:
                best, most = num, value
        return max(best, min(self.min_tokens, len(estimates)))

    def rate(self, memory: Account, costs: Costs) -> float:
        """rho: tokens per second so far, the prior's steps included; at least that of the target alone."""
        tokens, seconds = _best_step(costs, self._expected_acceptance(memory), range(self.max_tokens + 1))
        tokens, seconds = memory.num_tokens + self.prior_steps * tokens, memory.seconds + self.prior_steps * seconds
        return max(tokens / seconds, 1 / costs.verify_s(1))

    def mean_acceptance(self, memory: Account) -> float:
        """a: of the draft tokens tested so far, the prior's steps included."""
        prior, weight = self._expected_acceptance(memory), 2 * self.prior_steps
        return (memory.num_accepted + weight * prior) / (memory.num_tested + weight)

    def gain(self, memory: Account, costs: Costs) -> tuple[float, float]:
        """(Mean, upper bound) of what a step with draft tokens brings over the target alone in its time, in tokens.

        An upper bound, because a loss is observed and a gain that was missed is not. Requests that are decoded together share
        the exploration. Earlier steps may have been longer than they would be at the costs of now: then the hope, that of the
        best single length, counts for them.
        """
        own, before = (gains.get(costs.load, Gains()) for gains in (memory.gains, memory.past.gains))
        seen = min(before.num, MAX_PAST_STEPS)
        hoped = max(1.0, self.prior_steps - seen)  # the fewer steps are remembered, the more the prior counts
        num = own.num + seen + hoped
        tokens, seconds = _best_step(costs, self._expected_acceptance(memory), range(1, max(self.max_tokens, 1) + 1))
        hope = tokens - seconds / costs.verify_s(1)
        mean = (own.num * own.mean(costs) + seen * max(before.mean(costs), hope) + hoped * hope) / num
        variance = (own.num * own.variance + self.prior_steps * PRIOR_VARIANCE) / (own.num + self.prior_steps)
        return mean, mean + OPTIMISM * math.sqrt(variance / (num * costs.load))

    def _expected_acceptance(self, memory: Account) -> float:
        """Acceptance before the request has shown its own."""
        return (memory.past.num_accepted + self.prior) / (memory.past.num_tested + 1)


def expected_gain(mean: float, deviation: float) -> float:
    """The value of a normally distributed gain that one may refuse once it is known: E max(0, gain).

    >>> expected_gain(0.0, 1.0), expected_gain(-1.0, 0.0)
    (0.3989422804014327, 0.0)
    """
    if not deviation > 0:
        return max(0.0, mean)
    z = mean / deviation
    return mean * (1 + math.erf(z / math.sqrt(2))) / 2 + deviation * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def prices_of_more(costs: Costs, max_tokens: int, mean: float) -> Sequence[float]:
    """Least seconds for each token gained by going on after 0, 1, ... draft tokens, over all plans; inf behind the last."""
    one_more, longer = _plans(costs, max_tokens)
    if not longer:
        return one_more
    powers = accumulate([mean] * (HORIZON - 1), mul, initial=1.0)
    least, worth = list(one_more), [0.0, *accumulate(powers)]  # 1 + a + ... + a^(j-1) of j draft tokens
    for num, j, seconds in longer:
        least[num] = min(least[num], seconds / worth[j])
    return least


@lru_cache(maxsize=64)
def _plans(costs: Costs, max_tokens: int) -> tuple[tuple[float, ...], tuple[tuple[int, int, float], ...]]:
    """Seconds that one more draft token adds after 0, 1, ...; and, of plans for several, (draft tokens so far, j, seconds).

    Later draft tokens of a plan are worth less than its first, so it can only pay where it costs less a draft token than every
    shorter one does: behind a step of the curve. Where that grows evenly there is none.
    """
    seconds = [costs.step_s(num) for num in range(max_tokens + 1)]
    one_more = [after - before for before, after in pairwise(seconds)]
    longer = []
    for num, least in enumerate(one_more):
        for j in range(2, min(HORIZON, max_tokens - num) + 1):
            each = (seconds[num + j] - seconds[num]) / j
            if each < least * (1 - _ROUNDING):
                longer.append((num, j, j * each))
                least = each
    return (*one_more, math.inf), tuple(longer)


@lru_cache(maxsize=256)  # asked with what changes at most once a step
def _best_step(costs: Costs, acceptance: float, lengths: range) -> tuple[float, float]:
    """(tokens, seconds) of a step of the length that is best where every draft token is accepted with one probability."""
    k = costs.best_length(acceptance, lengths)
    return chain_tokens(acceptance, k), costs.step_s(k)
