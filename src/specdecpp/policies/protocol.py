"""The protocol of a stopping rule: what it sees (`DraftSoFar`, `Outcome`), what it says (`Rule`, `Stop`), and `Policy`.

    memory = policy.start(given)
    each step:  rule = policy.rule(memory, costs)  ->  draft tokens, until rule.stop(draft)  ->  verification
                memory = policy.learn(memory, outcome)

A policy is a frozen configuration with pure methods; the session keeps its memory. Within a step it sees only the draft's side:
the draft tokens so far, their q, the head's estimates. It never sees the target's probabilities.

Why that is lossless: whether to go on is a function of the draft tokens already drawn, and the last of them stays. They are
then an *adapted* stopping of the draft's own process, for which token and block verification keep the target's distribution
(enumerated in tests/test_law.py). Dropping the last draft token after looking at it is not adapted, and is refused.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from specdecpp.policies.score import Score

if TYPE_CHECKING:
    from torch import Tensor

    from specdecpp.costs import Costs


@runtime_checkable
class DraftSoFar(Protocol):
    """A step as a policy sees it: `step.Draft` while decoding, `replay.replay` in a recording.

    Draft token i is counted from 0, -1 is the last. `judged` are estimates of P(accepted), of the draft tokens that the draft
    has read or, where the policy looks ahead, of all; `survival` is their product. `confidence` is q of a draft token,
    `cumulative_confidence` the product over all, `entropy` that of its distribution in nats, `gap` the difference of its two
    largest probabilities. `is_greedy`: draft tokens are the draft's argmax rather than draws.
    """

    @property
    def num_tokens(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def judged(self) -> Sequence[float]: ...
    @property
    def survival(self) -> float: ...
    @property
    def cumulative_confidence(self) -> float: ...
    @property
    def is_greedy(self) -> bool: ...
    @property
    def costs(self) -> "Costs | None": ...
    def confidence(self, i: int) -> float: ...
    def entropy(self, i: int) -> float: ...
    def gap(self, i: int) -> float: ...


@runtime_checkable
class Outcome(Protocol):
    """A finished step as a policy and the clock see it: `metrics.Step` while decoding.

    `num_accepted` draft tokens ended in the answer, of `num_tested` the verdict did: one more after a rejection. `judged` are
    the estimates of the first draft tokens, before any score; `overlaps` the chances that a draw from q passes in the place of
    each tested one, sum min(p, q), empty where they are not known. `expected_s` is the time of such a step by the cost model,
    `costs` as they were then; the other seconds are measured. Rules that repeat their stops for a seed learn from `expected_s`
    only.
    """

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_drafted(self) -> int: ...
    @property
    def num_accepted(self) -> int: ...
    @property
    def num_tested(self) -> int: ...
    @property
    def judged(self) -> Sequence[float]: ...
    @property
    def overlaps(self) -> Sequence[float]: ...
    @property
    def expected_s(self) -> float: ...
    @property
    def draft_s(self) -> float: ...
    @property
    def head_s(self) -> float: ...
    @property
    def verify_s(self) -> float: ...
    @property
    def other_s(self) -> float: ...
    @property
    def costs(self) -> "Costs | None": ...


class Evidence(Enum):
    """A number that a rule watches while the draft goes on. All of them are 1 before the first draft token."""

    NOTHING = ""
    LAST_Q = "q"
    """q of the last draft token."""
    PRODUCT_OF_Q = "product of q"
    NEGATIVE_ENTROPY = "-entropy"
    """Minus the entropy of q at the last draft token, nats."""
    SURVIVAL = "survival"
    """The product of the estimates of what was judged, each as the rule's score reads it."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Reason why drafting stopped: a limit or an end in words, or evidence whose value was below the threshold."""

    words: str = ""
    evidence: Evidence | None = None
    value: float = 1.0
    threshold: float = 1.0

    def __str__(self) -> str:
        if self.words or self.evidence in (None, Evidence.NOTHING):
            return self.words
        return f"{self.evidence.value} = {self.value:.3g} < {self.threshold:.3g}"


LIMIT, TOKENS_LEFT, END_OF_TEXT = Stop("limit"), Stop("tokens left"), Stop("end of text")


@dataclass(frozen=True, slots=True)
class Rule:
    """When to stop in one step, in numbers that are known when it begins, so that every engine can follow it.

    After k draft tokens drafting goes on while the evidence is at least `least[k]`; beyond its end its last value applies,
    and without any there is no threshold. `words` say why where the evidence does not. `score` turns estimates into
    probabilities; None takes them as they are.
    """

    evidence: Evidence = Evidence.NOTHING
    least: tuple[float, ...] = ()
    words: str = ""
    score: Score | None = None

    def stop(self, draft: DraftSoFar) -> Stop | None:
        """A reason to stop, or None to go on."""
        if not self.least or (value := self.value(draft)) >= self.threshold(draft.num_tokens):
            return None
        return self.why(draft.num_tokens, value)

    def threshold(self, k: int) -> float:
        """The threshold after k draft tokens."""
        return self.least[min(k, len(self.least) - 1)] if self.least else -math.inf

    def thresholds(self, num: int) -> list[float]:
        """The thresholds after 0, 1, ..., num - 1 draft tokens."""
        least = self.least or (-math.inf,)
        return [*least[:num], *least[-1:] * (num - len(least))]

    def value(self, draft: DraftSoFar) -> float:
        """The evidence now."""
        match self.evidence if draft.num_tokens else Evidence.NOTHING:
            case Evidence.LAST_Q:
                return draft.confidence(-1)
            case Evidence.PRODUCT_OF_Q:
                return draft.cumulative_confidence
            case Evidence.NEGATIVE_ENTROPY:
                return -draft.entropy(-1)
            case Evidence.SURVIVAL:
                return math.prod(self.read(draft.judged), start=1.0)
        return 1.0

    def read(self, judged: Sequence[float]) -> list[float]:
        """Estimates as probabilities."""
        return list(judged if self.score is None else map(self.score, judged))

    def why(self, k: int, value: float) -> Stop:
        """The reason of a stop after k draft tokens at this evidence."""
        return Stop(self.words, self.evidence, value, self.threshold(k))


FREE = Rule()
"""Never stops before the limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """Facts about a new request that a rule may begin with."""

    past: Mapping[str, Any] | None = None
    """Statistics of earlier requests (`Policy.carry`)."""
    num_unread: int = 0
    """Tokens that the draft has to read before its first draft token."""
    is_greedy: bool = False
    """True where draft tokens are the draft's argmax rather than draws."""


NO_PAST = Given()


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Base of every rule: bounds on the number of draft tokens, and what it decides and learns.

    Most rules override `rule` alone, or `stop` where no threshold can say it:

    >>> @dataclass(frozen=True, kw_only=True)
    ... class UntilRare(Policy):
    ...     def stop(self, draft, memory):
    ...         return "a rare token" if draft.num_tokens and draft.confidence(-1) < 0.1 else None
    """

    short: ClassVar[str] = ""
    """Name on the command line; behind a colon the parameter that is set by `NAME:value` (the fields of parts of a rule)."""
    max_tokens: int = 20
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"{type(self).__name__} needs 0 <= min_tokens <= max_tokens, got min_tokens={self.min_tokens} and "
                f"max_tokens={self.max_tokens}"
            )

    @property
    def drops_last(self) -> bool:
        """Tell whether the rule removes the last draft token when it stops, having looked at it."""
        return False

    @property
    def looks_ahead(self) -> bool:
        """True where `judge` is asked before the draft reads the draft token."""
        return False

    @property
    def needs_costs(self) -> bool:
        """Tell whether the rule reads `draft.costs` or `outcome.expected_s`."""
        return False

    @property
    def parts(self) -> "tuple[Policy, ...]":
        """The rules that this one is made of; none for most."""
        return ()

    def engine(self) -> Any:
        """The engine (`step.Engine`) of a rule whose draft is not one sequence of tokens, such as a tree; None: any engine."""
        return None

    def check(self, verification: Any, *, is_greedy: bool = False) -> None:
        """Raise `UnsoundError` or ValueError where the rule does not go with this verification."""

    def judge(self, draft: "DraftSoFar", hidden: "Tensor") -> float | None:
        """P(accepted) of the last draft token, as a head says; None without a head.

        `hidden` [D] is the draft's state after reading that draft token or, where the rule looks ahead, the state that gave
        its q: the draft has not read it yet.
        """
        return None

    def start(self, given: Given = NO_PAST) -> Any:
        """The memory of a new request."""
        return None

    def carry(self, past: Mapping[str, Any] | None, memory: Any) -> Mapping[str, Any] | None:
        """Statistics of requests after one more, which ended with `memory`: `Given.past` of later requests without a seed, in
        other processes too. None: the rule begins anew each time."""
        return None

    def limit(self, memory: Any) -> int:
        """The most draft tokens of the coming step."""
        return self.max_tokens

    def rule(self, memory: Any, costs: "Costs | None") -> Rule | None:
        """How the coming step stops; None where only `stop` can say it."""
        return FREE

    def stop(self, draft: "DraftSoFar", memory: Any) -> "Stop | str | None":
        """A reason to stop before the next draft token is paid for, or None to go on. Not asked below `min_tokens`.

        It follows from `rule`. Override it for what no threshold can say: it is then asked before every draft token, in Python
        (`step.Host`), where compiled engines follow a `rule`.
        """
        rule = self.rule(memory, draft.costs)
        return None if rule is None else rule.stop(draft)

    def learn(self, memory: Any, outcome: "Outcome") -> Any:
        """The memory after a step."""
        return memory


def rule_of(policy: Policy, memory: Any, costs: "Costs | None") -> Rule | None:
    """The rule of the coming step, without thresholds below `min_tokens`; None where the policy's `stop` has to be asked."""
    if not _says_its_rule(type(policy)):
        return None
    rule = policy.rule(memory, costs)
    if rule is None or not policy.min_tokens or not rule.least:
        return rule
    num = policy.min_tokens
    return replace(rule, least=(-math.inf,) * num + (rule.least[num:] or rule.least[-1:]))


@lru_cache(maxsize=256)
def _says_its_rule(kind: type[Policy]) -> bool:
    """False where a subclass has overridden the `stop` that follows from the rule."""
    return "rule" in vars(next(found for found in kind.__mro__ if vars(found).keys() & {"rule", "stop"}))


@dataclass(frozen=True, slots=True)
class Decision:
    """How one step of a request ends: at most `limit` draft tokens, and the policy's rule. What every engine follows."""

    policy: Policy
    memory: Any
    limit: int
    rule: Rule | None
    is_cut: bool = False
    """True where the tokens that may still come, or the context, set the limit, and not the policy."""
    max_with_forced: int = 0
    """The most draft tokens with those that a grammar leaves no choice about, which do not count to the limit."""

    @property
    def at_limit(self) -> Stop:
        return TOKENS_LEFT if self.is_cut else LIMIT

    @property
    def may_draft(self) -> bool:
        """Tell whether there may be a draft token at all."""
        return self.limit > 0 and not (self.rule is not None and self.rule.threshold(0) > 1.0)

    def read(self, judged: Sequence[float]) -> list[float]:
        """Estimates as the rule reads them."""
        return list(judged) if self.rule is None else self.rule.read(judged)

    def stop(self, draft: DraftSoFar) -> "Stop | None":
        """A reason to stop, or None to go on. Asked before each draft token below the limit."""
        if self.rule is not None:
            return self.rule.stop(draft)
        if draft.num_tokens < self.policy.min_tokens:
            return None
        reason = self.policy.stop(draft, self.memory)
        return Stop(reason) if isinstance(reason, str) and reason else reason or None


def decide(policy: Policy, memory: Any, costs: "Costs | None", room: int) -> Decision:
    """The policy's decision for the coming step; `room` is the number of draft tokens that the answer and the context admit."""
    limit, rule = policy.limit(memory), rule_of(policy, memory, costs)
    return Decision(policy, memory, min(room, limit), rule, room <= limit, min(room, policy.max_tokens))


def check_probability(name: str, value: float) -> None:
    """Raise ValueError unless `value` lies in [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {value}")
