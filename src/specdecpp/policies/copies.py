"""Copies from the text beside a draft model: a round takes those that the text offers where they promise more than the model's
rounds have brought, else the model drafts by its own rule (SuffixDecoding's hybrid, Oliaro et al. 2024, arXiv 2411.04975).

Both are weighed in tokens beyond those that their seconds bring at the rate rho of the request so far (`cost_aware`):

    copies   S_1 + S_1 S_2 + ... - rho (t_target(k + 1) - t_target(1))      by the match in the text, read by a learned score
    model    mean over its rounds of  tokens - 1 - rho (seconds - t_target(1))

Behind a round of the model's copies have to be worth a draft step more: what they bring the draft has to read when it goes on.

What is asked is the text and what became of earlier rounds, never this round's draws, so a round is an adapted one of either
kind and keeps the target's law (tests/test_copies.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from specdecpp.policies.account import Account
from specdecpp.policies.around import Around
from specdecpp.policies.cost_aware import CostAware, survivals
from specdecpp.policies.gains import Gains
from specdecpp.policies.protocol import Rule, rule_of

if TYPE_CHECKING:
    from specdecpp.costs import Costs
    from specdecpp.policies.protocol import Outcome

WEIGHT = 2
"""Rounds of the model's that are taken to have brought what the target alone brings, before there were any."""


@dataclass(frozen=True, kw_only=True)
class Both:
    """What copies have taught, with the sums of all rounds; the memory of the model's rule, and what its rounds brought."""

    copies: Account
    memory: Any
    gains: Gains = Gains()  # noqa: RUF009 (frozen)
    is_behind: bool = True
    """Whether the draft lacks tokens: at first those of the prompt, later those that copies brought."""


@dataclass(frozen=True, kw_only=True)
class WithCopies(Around):
    """Another rule for the draft model, and copies from the text where they promise more.

    `copies` weighs what the text offers. Only for pairs with a draft model: without one there are but copies.

    >>> from specdecpp.policies import CumulativeConfidence
    >>> policy = WithCopies(policy=CumulativeConfidence(threshold=0.2))
    """

    short: ClassVar[str] = "copies:policy"
    copies: CostAware = field(default=CostAware(max_tokens=64, prior=0.2), init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_tokens", max(self.copies.max_tokens, self.policy.max_tokens))

    def start(self) -> Both:
        return Both(copies=self.copies.start(), memory=self.policy.start())

    def resume(self, past: Mapping[str, Any]) -> Both:
        given = {name: past[name] if isinstance(past.get(name), Mapping) else None for name in ("copies", "policy")}
        begun = (
            rule.start() if told is None else rule.resume(told)
            for rule, told in zip((self.copies, self.policy), given.values(), strict=True)
        )
        return Both(**dict(zip(("copies", "memory"), begun, strict=True)))

    def begin(self, memory: Both, *, num_tokens: int, is_greedy: bool) -> Both:
        copies = self.copies.begin(memory.copies, num_tokens=num_tokens, is_greedy=is_greedy)
        return replace(
            memory, copies=copies, memory=self.policy.begin(memory.memory, num_tokens=num_tokens, is_greedy=is_greedy)
        )

    def carry(self, past: Mapping[str, Any] | None, memory: Both) -> Mapping[str, Any]:
        told = past or {}
        return {
            "copies": self.copies.carry(told.get("copies"), memory.copies),
            "policy": self.policy.carry(told.get("policy"), memory.memory),
        }

    def limit(self, memory: Both) -> int:
        return max(self.copies.limit(memory.copies), self.policy.limit(memory.memory))

    def rule(self, memory: Both, costs: "Costs | None", limit: int) -> Rule | None:
        """That of the model's rounds."""
        return rule_of(self.policy, memory.memory, costs, limit)

    def prefers_copies(self, memory: Both, estimates: Sequence[float], costs: "Costs") -> bool:
        """Whether copies with these estimates promise more than a round of the model's."""
        copied, gains, target_s = costs.copied(), memory.gains, costs.verify_s(1)
        rho = self.copies.rate(memory.copies, copied)
        tokens = sum(survivals(memory.copies.belief.score, estimates))
        reading_s = 0.0 if memory.is_behind else costs.catch_up_s
        worth = tokens - rho * (copied.round_s(len(estimates)) - target_s + reading_s)
        return worth > (gains.tokens - gains.num - rho * target_s * (gains.passes - gains.num)) / (gains.num + WEIGHT)

    def learn(self, memory: Both, outcome: "Outcome") -> Both:
        """After a round of the model's."""
        of = memory.copies
        copies = replace(of, num_tokens=of.num_tokens + outcome.num_tokens, seconds=of.seconds + outcome.expected_s)
        gains, is_behind = memory.gains.after(outcome), not outcome.num_drafted
        return Both(copies=copies, memory=self.policy.learn(memory.memory, outcome), gains=gains, is_behind=is_behind)

    def aside(self, memory: Both, outcome: "Outcome") -> Both:
        """After a round of copies."""
        copies = self.copies.learn(memory.copies, outcome)
        return replace(memory, copies=copies, memory=self.policy.aside(memory.memory, outcome), is_behind=True)
