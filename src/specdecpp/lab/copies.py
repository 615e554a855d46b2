"""Copies from the text beside a draft model: a step takes those that the text offers where they promise more than the model's
steps have brought, else the model drafts by its own rule (SuffixDecoding's hybrid, Oliaro et al. 2024, arXiv 2411.04975).

Both are weighed in tokens beyond those that their seconds bring at the rate rho of the request so far (`cost_aware`):

    copies   S_1 + S_1 S_2 + ... - rho (t_target(k + 1) - t_target(1))      by the match in the text, read by a learned score
    model    mean over its steps of  tokens - 1 - rho (seconds - t_target(1))

Behind a step of the model's copies have to be worth a draft step more: what they bring the draft has to read when it goes on.

What is asked is the text and what became of earlier steps, never this step's draws, so a step is an adapted one of either
kind and keeps the target's distribution (tests/test_copies.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from specdecpp.drafters import SuffixDrafter
from specdecpp.drafters.copying import propose, tested
from specdecpp.lab.around import Around
from specdecpp.policies.cost_aware import CostAware, survivals
from specdecpp.policies.learning import Account, Gains
from specdecpp.policies.protocol import FREE, NO_PAST, Given, Policy, Rule, rule_of
from specdecpp.scheduler import Reading
from specdecpp.step import Engine, Host, Plan, Request, Result

if TYPE_CHECKING:
    from specdecpp.costs import Costs
    from specdecpp.policies.protocol import Outcome

COPIED = "copied"
"""`Step.extra` of a step of copies."""
WEIGHT = 2
"""Steps of the model's that are taken to have brought what the target alone brings, before there were any."""


@dataclass(frozen=True, kw_only=True)
class Both:
    """Statistics of copies, with the sums of all steps; the memory of the model's rule, and what its steps brought."""

    copies: Account
    memory: Any
    gains: Gains = Gains()  # noqa: RUF009 (frozen)
    is_behind: bool = True
    """Tell whether the draft lacks tokens: at first those of the prompt, later those that copies brought."""


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

    def start(self, given: Given = NO_PAST) -> Both:
        def started(rule: Policy, name: str) -> Any:
            past = (given.past or {}).get(name)
            return rule.start(replace(given, past=past if isinstance(past, Mapping) else None))

        return Both(copies=started(self.copies, "copies"), memory=started(self.policy, "policy"))

    def carry(self, past: Mapping[str, Any] | None, memory: Both) -> Mapping[str, Any]:
        told = past or {}
        return {
            "copies": self.copies.carry(told.get("copies"), memory.copies),
            "policy": self.policy.carry(told.get("policy"), memory.memory),
        }

    def limit(self, memory: Both) -> int:
        return max(self.copies.limit(memory.copies), self.policy.limit(memory.memory))

    def rule(self, memory: Both, costs: "Costs | None") -> Rule | None:
        """The rule of the model's steps."""
        return rule_of(self.policy, memory.memory, costs)

    def prefers_copies(self, memory: Both, estimates: Sequence[float], costs: "Costs") -> bool:
        """Tell whether copies with these estimates promise more than a step of the model's."""
        copied, gains, target_s = copied_costs(costs), memory.gains, costs.verify_s(1)
        rho = self.copies.rate(memory.copies, copied)
        tokens = sum(survivals(memory.copies.belief.score, estimates))
        reading_s = 0.0 if memory.is_behind else catch_up_s(costs)
        worth = tokens - rho * (copied.step_s(len(estimates)) - target_s + reading_s)
        return worth > (gains.tokens - gains.num - rho * target_s * (gains.passes - gains.num)) / (gains.num + WEIGHT)

    def learn(self, memory: Both, outcome: "Outcome") -> Both:
        if getattr(outcome, "extra", None) == COPIED:
            copies, own = self.copies.learn(memory.copies, outcome), memory.memory
            if isinstance(own, Account):  # its draft has so many tokens more to read
                own = own.up_to_date()
                own = own.like(num_unread=own.num_unread + outcome.num_tokens)
            return replace(memory, copies=copies, memory=own, is_behind=True)
        of = memory.copies
        copies = replace(of, num_tokens=of.num_tokens + outcome.num_tokens, seconds=of.seconds + outcome.expected_s)
        gains, is_behind = memory.gains.after(outcome), not outcome.num_drafted
        return Both(copies=copies, memory=self.policy.learn(memory.memory, outcome), gains=gains, is_behind=is_behind)

    def engine(self) -> "Either":
        return EITHER

    def check(self, verification: Any, *, is_greedy: bool = False, draft: Any = None) -> None:
        if isinstance(draft, SuffixDrafter):
            raise ValueError("WithCopies is for a pair with a draft model, and this one has but copies. Use CostAware alone.")


def copied_costs(costs: "Costs") -> "Costs":
    """Costs of copied draft tokens: those of the wider pass."""
    return replace(costs, draft_s=0.0, start_s=0.0, switch_s=0.0, head_s=0.0, other_s=0.0, read_along=0.0, num_together=1)


def catch_up_s(costs: "Costs") -> float:
    """Seconds that the draft takes to read what copies have brought, as a beginning with one draft token."""
    return costs.start_s + costs.draft_s


class Either(Engine):
    """Runs the steps of `WithCopies`. Each request is two, with the same target: one over an index of its text and one over
    its draft model, which reads what copies have brought when it is next asked."""

    def __init__(self) -> None:
        self._host = Host()
        self._parts: WeakKeyDictionary[Request, tuple[Request, Request]] = WeakKeyDictionary()
        self._behind: WeakKeyDictionary[Request, bool] = WeakKeyDictionary()

    def refusal(self, request: Request) -> None:
        return None

    def run(self, plans: Sequence[Plan], readings: Sequence[Reading] = ()) -> list[Result]:
        assert not readings, "sessions read their prompts themselves here"
        return [self._one(plan) for plan in plans]

    def _one(self, plan: Plan) -> Result:
        """The step of copies, if these promise more, else that of the model."""
        policy, memory, costs = plan.request.policy, plan.decision.memory, plan.costs
        assert isinstance(policy, WithCopies)
        assert costs is not None, "the session gives costs to a policy that needs them"
        copies, model = self._of(plan.request)
        decision = plan.decision.of(policy.copies, memory.copies, FREE)
        copied = Plan(copies, plan.tokens, decision, copied_costs(costs), plan.wants_rows)
        started = perf_counter()
        found = propose(copied)
        if found.tokens and policy.prefers_copies(memory, found.judged, costs):
            result = tested(copied, started, found)
            result.expected_s, result.extra = copied_costs(costs).step_s(result.num_drafted), COPIED
            self._behind[plan.request] = True
            return result
        decision = plan.decision.of(policy.policy, memory.memory, plan.decision.rule)
        (result,) = self._host.run([Plan(model, plan.tokens, decision, costs, plan.wants_rows)])
        if self._behind.get(plan.request) and result.num_drafted:
            result.expected_s = costs.step_s(result.num_drafted) + catch_up_s(costs)
            self._behind[plan.request] = False
        return result

    def _of(self, request: Request) -> tuple[Request, Request]:
        """The request with copies, and with the model."""
        if request not in self._parts:
            policy: Any = request.policy
            drafter = SuffixDrafter(request.draft.vocab_size, device=request.draft.device)
            copies = replace(request, draft=drafter, policy=policy.copies)
            self._parts[request] = copies, replace(request, policy=policy.policy)
        return self._parts[request]


EITHER = Either()
