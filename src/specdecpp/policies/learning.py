"""Statistics that the rule of `cost_aware` goes by: of one request (`Account`) and of those before it (`PastRequests`).

    step -> Account.with_step -> at the end of the request PastRequests.with_request -> the Account of the next request

Three things are learned. Nothing here decides.

`Belief`  the score, which turns estimates into chances of acceptance, from what became of draft tokens that were tested. Those
          behind a rejection are not among them: given that a draft token is tested, whether it is accepted is a coin with that
          very probability, so leaving out the untested ones introduces no bias.
`Gains`   whether drafting pays. A step that made n tokens in s seconds gained n - s/t tokens, t being a pass of the target
          alone. Its mean has the sign of "drafting is faster than not drafting", whatever the rule does with the steps. Both
          times are those of the cost model, as it is when the mean is asked for: what it said then may have been wrong.
sums      tokens, seconds, tested and accepted draft tokens.

A request with a seed begins with what is fixed and learns within itself only, so the seed gives the same answer again. The
others begin with what all of them have taught so far, for each way of sampling by itself (`memory.Memory`).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from specdecpp.costs import Costs
from specdecpp.policies.protocol import NO_PAST, Given, Policy
from specdecpp.policies.score import Score, logit

if TYPE_CHECKING:
    from specdecpp.policies.protocol import Outcome

STEADY, STEADY_INTERVAL = 8, 4
"""After 8 steps with draft tokens in a row the account is updated every 4 steps only: between the passes of a small pair Python
finds the processor's caches empty, and takes three times as long as by itself."""
PLAIN_INTERVAL = 8
"""Steps in a row without draft tokens that are taken in together, and after which the rule reconsiders: an update may take
longer than a step of the target alone."""
SHORT_S, SHORT_INTERVAL = 4e-3, 16
"""Where the target's pass takes less than 4 ms and earlier requests gained by drafting, the account is updated every 16 steps:
an update and the rule after it take .15 ms between the passes of SmolLM2, which take 2.5."""
FADING = 1 / 16
"""Weight that an earlier request loses with each later one."""
MAX_SCORE = 20.0
"""Bound on bias and slope of a score that a file may hold."""


class Belief(NamedTuple):
    """Normal distribution of a score: means and covariance of bias and slope."""

    score: Score = Score()
    var_bias: float = 0.25
    cov: float = 0.0
    var_slope: float = 0.04

    def after(self, estimates: Iterable[float], num_accepted: int) -> "Belief":
        """Update after draft tokens were tested, of which the first so many were accepted: a step of Newton's method for each
        (an extended Kalman filter for logistic regression)."""
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


def num_expected(outcome: "Outcome") -> float:
    """How many of the tested draft tokens are accepted in the mean (`Outcome.overlaps`); where nobody knows, how many were.

    The outcome of each test is replaced by its probability, given that the draft token is tested: both sums have the same
    mean, and this one a fraction of the variance.
    """
    return sum(min(1.0, chance) for chance in outcome.overlaps) if outcome.overlaps else float(outcome.num_accepted)


class Gains(NamedTuple):
    """Sums over steps with draft tokens: their number, draft tokens and tokens; and, by the costs of then, their time in passes
    of the target alone and the squares of their gains."""

    num: float = 0.0
    drafted: float = 0.0
    tokens: float = 0.0
    passes: float = 0.0
    squares: float = 0.0

    def after(self, outcome: "Outcome") -> "Gains":
        """With one more step."""
        assert outcome.costs is not None, "the session gives costs to a policy that needs them"
        tokens = outcome.num_tokens - outcome.num_accepted + num_expected(outcome)
        passes = outcome.expected_s / outcome.costs.verify_s(1)
        more = 1, outcome.num_drafted, tokens, passes, (tokens - passes) ** 2
        return Gains(*(a + b for a, b in zip(self, more, strict=True)))

    def mean(self, costs: Costs) -> float:
        """Tokens a step over the target alone, of steps as long as these were in the mean; 0 without steps."""
        if not self.num:
            return 0.0
        longer, k = math.modf(self.drafted / self.num)
        seconds = costs.step_s(int(k)) + longer * costs.added_s(int(k))
        return self.tokens / self.num - seconds / costs.verify_s(1)

    @property
    def variance(self) -> float:
        """Variance of a step's gain, tokens squared; 0 without steps."""
        return max(0.0, self.squares / self.num - ((self.tokens - self.passes) / self.num) ** 2) if self.num else 0.0


@dataclass(frozen=True, kw_only=True)
class PastRequests:
    """Statistics of earlier requests: sums of which older ones fade, and running means of bias and slope. All 0 at first."""

    num_requests: float = 0.0
    num_tested: float = 0.0
    num_accepted: float = 0.0
    num_tokens: float = 0.0
    lost: float = 0.0
    """Passes of the target alone that drafting took beyond its tokens."""
    bias: float = 0.0
    slope: float = 0.0
    gains: Mapping[int, Gains] = field(default_factory=dict)
    """By load."""

    @classmethod
    def parse(cls, found: Any) -> "PastRequests":
        """Read the JSON form. What cannot be read, or cannot be statistics, teaches nothing."""
        try:
            gains = {int(load): Gains(**sums) for load, sums in found["gains"].items()}
            past = cls(gains=gains, **{f.name: found[f.name] for f in fields(cls) if f.name != "gains"})
            sums = past.num_accepted, past.num_tested - past.num_accepted, past.num_tokens, past.lost, past.slope
            are_sums = all(0 <= x < math.inf for x in chain(sums, *gains.values()))
            is_sound = are_sums and 0 < past.num_requests < math.inf and max(abs(past.bias), past.slope) < MAX_SCORE
        except (AttributeError, KeyError, TypeError, ValueError):
            return cls()
        return past if is_sound else cls()

    def to_json(self) -> dict[str, Any]:
        """The inverse of `parse`."""
        return vars(self) | {"gains": {str(load): sums._asdict() for load, sums in self.gains.items()}}

    def with_request(self, account: "Account") -> "PastRequests":
        """With one more request, the latest."""
        account, kept = account.up_to_date(), 1 - FADING
        old, (bias, slope) = kept * self.num_requests, account.belief.score

        def faded(load: int) -> Gains:
            now, before = (gains.get(load, Gains()) for gains in (account.gains, self.gains))
            return Gains(*(a + kept * b for a, b in zip(now, before, strict=True)))

        return PastRequests(
            num_requests=1 + old,
            num_tested=account.num_tested + kept * self.num_tested,
            num_accepted=account.num_accepted + kept * self.num_accepted,
            num_tokens=account.num_tokens + kept * self.num_tokens,
            lost=max(0.0, account.lost) + kept * self.lost,
            bias=(bias + old * self.bias) / (1 + old),
            slope=(slope + old * self.slope) / (1 + old),
            gains={load: faded(load) for load in account.gains.keys() | self.gains.keys()},
        )


@dataclass(frozen=True, kw_only=True)
class Account:
    """Statistics of a request: sums over its steps, and how far the draft has fallen behind."""

    past: PastRequests = PastRequests()
    num_tokens: int = 0
    seconds: float = 0.0
    """Those of the cost model, so that a seed gives the same stops again."""
    num_tested: int = 0
    num_accepted: float = 0.0
    gains: Mapping[int, Gains] = field(default_factory=dict)
    """By load, of the steps with draft tokens but the first after a plain one."""
    belief: Belief = Belief()  # noqa: RUF009 (frozen)
    lost: float = 0.0
    """Passes of the target alone that the steps took beyond one for each of their tokens, the draft's reading included."""
    num_unread: int = 0
    """Tokens since the last step with draft tokens, or those of the prompt."""
    num_running: int = 0
    """Steps with draft tokens since the last without."""
    is_off: bool = False
    """True where the last step had none."""
    interval: int = 1
    """Steps that are taken in together."""
    pending: "tuple[Outcome, ...]" = ()
    """Steps that the sums do not hold yet."""
    planned: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)
    """Cached rule of the coming step, [policy, costs, rule]: valid until the sums change."""

    def with_step(self, outcome: "Outcome") -> "Account":
        """After a step. What it teaches is put off where many like it have gone before."""
        if len(self.pending) < self.interval - 1 and self.is_off == (outcome.num_drafted == 0):
            return self.like(pending=(*self.pending, outcome))
        return self.up_to_date().after(outcome)

    def up_to_date(self) -> "Account":
        """The account with nothing pending."""
        return reduce(lambda account, outcome: account.after(outcome), self.pending, self)

    def like(self, **changes: Any) -> "Account":
        """A copy with these fields changed."""
        after = object.__new__(type(self))  # in a third of the time of `replace`
        after.__dict__.update(self.__dict__, **changes)
        return after

    def after(self, outcome: "Outcome") -> "Account":
        """Sums with one more step, worked out now."""
        changes: dict[str, Any] = {
            "num_tokens": self.num_tokens + outcome.num_tokens,
            "seconds": self.seconds + outcome.expected_s,
            "pending": (),
            "planned": [],
        }
        if not outcome.num_drafted:
            num_unread = self.num_unread + outcome.num_tokens
            return self.like(**changes, num_unread=num_unread, num_running=0, is_off=True, interval=PLAIN_INTERVAL)
        costs, gains = outcome.costs, self.gains
        assert costs is not None, "the session gives costs to a policy that needs them"
        num_tested = outcome.num_tested
        if not self.is_off:
            gains = {**gains, costs.load: gains.get(costs.load, Gains()).after(outcome)}
        return self.like(
            **changes,
            lost=self.lost + ((outcome.expected_s + reading_s(costs, self)) / costs.verify_s(1) - outcome.num_tokens),
            num_tested=self.num_tested + num_tested,
            num_accepted=self.num_accepted + num_expected(outcome),
            gains=gains,
            belief=self.belief.after(outcome.judged[:num_tested], outcome.num_accepted),
            num_unread=0,
            num_running=self.num_running + 1,
            is_off=False,
            interval=self._interval(costs),
        )

    def _interval(self, costs: Costs) -> int:
        if costs.verify_s(1) < SHORT_S and self.past.gains.get(costs.load, Gains()).mean(costs) > 0:
            return SHORT_INTERVAL
        return STEADY_INTERVAL if self.num_running + 1 >= STEADY else 1


def reading_s(costs: Costs, account: Account) -> float:
    """Seconds of the draft's pass over what it has missed; before the first token it may read along with the target."""
    share = 1.0 if account.num_tokens else 1 - costs.read_along
    return share * costs.draft_pass_s(account.num_unread) if account.num_unread > 1 else 0.0


class Experience:
    """Statistics for one rule and one sampling. `past` is what an earlier process has kept, and `keep` is called with what
    this one knows after 1, 4, 16, 64, ... requests."""

    def __init__(
        self,
        policy: Policy,
        past: Mapping[str, Any] | None = None,
        *,
        keep: Callable[[Mapping[str, Any] | None], None] | None = None,
    ):
        self.past = past
        self._policy, self._keep, self._num, self._due = policy, keep, 0, 1

    def begin(self, given: Given = NO_PAST) -> Any:
        """The memory of a new request."""
        return self._policy.start(given if self.past is None else replace(given, past=self.past))

    def add(self, memory: Any) -> None:
        """Take in what a request had learned when it ended."""
        self.past = self._policy.carry(self.past, memory)
        self._num += 1
        if self._keep is not None and self._num == self._due:
            self._due *= 4
            self._keep(self.past)
