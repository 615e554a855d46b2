"""Lessons for the rule of `cost_aware`: of one request (`Account`), whether drafting pays (`Gains`), and for later requests
(`Experience`). Nothing here decides.

A step that made n tokens in s seconds gained n - s/t tokens, t being a pass of the target alone. Its mean has the sign of
"drafting is faster than not drafting", whatever the rule does with the steps. Where it is known how likely the tested
draft tokens were to be accepted, n is the mean that follows: the same on average, with a fraction of the variance. Both times
are those that the cost model had then, so that what was seen on a busy machine still holds on a quiet one.

A request with a seed begins with what is fixed and learns within itself only, so the seed gives the same answer again. The
others begin with what all of them have taught so far, for each way of sampling by itself (`memory.Memory`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from specdecpp.costs import Costs
from specdecpp.costs.clock import differ, shares
from specdecpp.policies.protocol import NO_PAST, Given, Policy
from specdecpp.policies.score import Belief

if TYPE_CHECKING:
    from specdecpp.policies.protocol import Outcome

STEADY, EVERY = 8, 4
"""After `STEADY` steps with draft tokens in a row the account is updated every `EVERY` steps only: between the passes of a
small pair Python finds the processor's caches empty, and takes three times as long as by itself."""
LOOK = 8
"""Steps in a row without draft tokens that are taken in together, and after which the rule reconsiders: a step of the target
alone may take less than that."""
SHORT_S, SELDOM = 2e-3, 16
"""Where the target's pass takes less than `SHORT_S` and earlier requests gained by drafting, the account is updated every
`SELDOM` steps: an update takes .05 ms, a seventh of the reference pair's pass."""


def num_expected(outcome: "Outcome") -> float:
    """How many of the tested draft tokens are accepted in the mean (`Outcome.overlaps`); where nobody knows, how many were.

    The outcome of each test is replaced by its probability, given that the draft token is tested: both sums have the same mean.
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


@dataclass(frozen=True, kw_only=True)
class Account:
    """Statistics of a request: sums over its steps, the gains of steps with draft tokens (but those of a switch) at each
    load, the score, and how far the draft has fallen behind. Fields whose names end in
    `_before` hold what earlier requests taught.
    """

    num_tokens: int = 0
    seconds: float = 0.0
    """Those of the cost model, so that a seed gives the same stops again."""
    num_tested: int = 0
    num_accepted: float = 0.0
    acceptance_before: float | None = None
    gains_before: Mapping[int, Gains] = field(default_factory=dict)
    gains: Mapping[int, Gains] = field(default_factory=dict)
    belief: Belief = Belief()  # noqa: RUF009 (frozen)
    lost: float = 0.0
    """Passes of the target alone by which the steps, with what the draft has read for them, took longer than it would
    have."""
    lost_before: float = 0.0
    num_tokens_before: float = 0.0
    """What earlier requests have lost, and their tokens."""
    num_unread: int = 0
    """Tokens since the last step with draft tokens, or those of the prompt."""
    num_running: int = 0
    """Steps with draft tokens since the last without."""
    is_off: bool = False
    """True where the last step had none."""
    pending: "tuple[Outcome, ...]" = ()
    """Steps that the sums do not hold yet."""
    every: int = 1  # so many steps are taken in together
    planned: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)
    """Cached rule of the coming step, [policy, costs, rule]: valid until the sums change."""

    def with_step(self, outcome: "Outcome") -> "Account":
        """After a step. What it teaches is put off where many like it have gone before (`STEADY`, `SELDOM`)."""
        if len(self.pending) < self.every - 1 and self.is_off is not bool(outcome.num_drafted):
            return self.like(pending=(*self.pending, outcome))
        return self.settled().after(outcome)

    def settled(self) -> "Account":
        """The account with nothing pending."""
        account = self
        for outcome in self.pending:
            account = account.after(outcome)
        return account

    def _every(self, costs: Costs | None) -> int:
        """Steps like the last that may wait for each other: `SELDOM` where steps are short and earlier requests, or practice,
        gained by drafting."""
        if costs is not None and costs.verify_s(1) < SHORT_S and self.gains_before.get(costs.load, Gains()).mean > 0:
            return SELDOM
        return EVERY if self.num_running + 1 >= STEADY else 1

    def acceptance(self, prior: float, weight: int) -> float:
        """Acceptance of the draft tokens tested so far; the prior counts for `weight` of them."""
        return (self.num_accepted + weight * prior) / (self.num_tested + weight)

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
            "lost": self.lost + self._lost(outcome),
            "pending": (),
            "planned": [],
        }
        if not outcome.num_drafted:
            return self.like(**changes, num_unread=self.num_unread + outcome.num_tokens, num_running=0, is_off=True, every=LOOK)
        num_tested = min(outcome.num_accepted + 1, outcome.num_drafted)
        belief = self.belief.after(outcome.judged[:num_tested], outcome.num_accepted)
        return self.like(
            **changes,
            num_tested=self.num_tested + num_tested,
            num_accepted=self.num_accepted + num_expected(outcome),
            gains=self.gains if self.is_off else _with_gain(self.gains, outcome),
            belief=belief,
            num_unread=0,
            num_running=self.num_running + 1,
            is_off=False,
            every=self._every(outcome.costs),
        )

    def _lost(self, outcome: "Outcome") -> float:
        """Passes of the target alone that the step took beyond its tokens."""
        if not outcome.num_drafted or (costs := outcome.costs) is None:
            return 0.0
        return (outcome.expected_s + reading_s(costs, self)) / costs.verify_s(1) - outcome.num_tokens


def reading_s(costs: Costs, account: Account) -> float:
    """Seconds of the draft's pass over what it has missed; before the first token it may read along with the target."""
    share = 1.0 if account.num_tokens else 1 - costs.read_along
    return share * costs.draft_pass_s(account.num_unread) if account.num_unread > 1 else 0.0


def _with_gain(gains: Mapping[int, Gains], outcome: "Outcome") -> Mapping[int, Gains]:
    assert outcome.costs is not None, "the session gives costs to a policy that needs them"
    load = outcome.costs.load
    return {**gains, load: gains.get(load, Gains()).after(outcome)}


def settings(policy: Policy) -> dict[str, Any]:
    """The numbers and words that tell a rule from others of its class."""
    named = {f.name: getattr(policy, f.name) for f in fields(policy) if f.init}
    return {name: value for name, value in named.items() if isinstance(value, int | float | str)}


def since(past: Mapping[str, Any] | None, now: Costs | None) -> Mapping[str, Any] | None:
    """Statistics of an earlier process, without its gains where it took steps to cost otherwise than they do now."""
    if past is None or now is None or "gains" not in past:
        return past
    try:
        holds = not differ(past["shares"], shares(now))
    except (KeyError, TypeError, ValueError):  # of nobody knows which costs
        holds = False
    return past if holds else {**past, "gains": {}, "lost": 0.0}


class Experience:
    """Statistics for one rule and one sampling. `past` is what an earlier process has kept, and `keep` is called with what
    this one knows after 1, 4, 16, 64, ... requests."""

    def __init__(
        self,
        policy: Policy,
        past: Mapping[str, Any] | None = None,
        *,
        keep: Callable[[Mapping[str, Any]], None] | None = None,
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
        if self._keep is not None and self.past is not None and self._num == self._due:
            self._due *= 4
            self._keep(self.past)
