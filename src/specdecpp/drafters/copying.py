"""A step without a draft model: draft tokens copied from the text (`drafters.suffix`), stopped by a rule, verified at once.

q of a copied draft token is one-hot. Token verification then accepts it with probability p(x) and draws a rejection's token
from p without x: that is the distribution of drawing y ~ p and asking whether y = x, so comparison loses nothing here, and no q
is made. Block verification has the same distribution: the chance that a prefix survives cannot exceed the product of p.

With a compiled target the `native` engine verifies the copies; this engine serves what that refuses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from specdecpp.drafters import SuffixDrafter
from specdecpp.drafters.suffix import Match
from specdecpp.grammar import fitting
from specdecpp.policies import CostAware, Stop
from specdecpp.policies.protocol import END_OF_TEXT
from specdecpp.scheduler import Reading
from specdecpp.step import Draft, Engine, Plan, Request, Result, verified
from specdecpp.verify import BlockVerification, CompareVerification, TokenVerification

NO_MATCH = Stop("no match")
FORBIDDEN = Stop("the grammar forbids the next copy")
UNWORTHY = Stop("further copies do not pay")
FEW = 8
"""So many copies are weighed first, and more of them only where all of these pay."""


class Copying(Engine):
    """Takes requests whose draft is a `SuffixDrafter`, over any target; one after the other."""

    def refusal(self, request: Request) -> str | None:
        """Reason why a request cannot be run here; None where it can."""
        return None if isinstance(request.draft, SuffixDrafter) else "its draft is a model"

    def run(self, plans: Sequence[Plan], readings: Sequence[Reading] = ()) -> list[Result]:
        assert not readings, "sessions read their prompts themselves here"
        return [tested(plan, perf_counter(), propose(plan)) for plan in plans]


@dataclass
class Copied(Draft):
    """The draft tokens of a step as a policy sees them: what stands for q is the evidence of the match."""

    is_greedy: bool = True
    match: Match = Match([])  # noqa: RUF009 (frozen)

    def distribution(self, i: int) -> Float[Tensor, "2"]:
        """Probabilities that the match continues, and that it ends."""
        q = self.confidence(i)
        return torch.tensor([q, 1 - q], dtype=torch.float64)

    def copy(self, tokens: Sequence[int]) -> None:
        """Add the next tokens of the match."""
        self.tokens += tokens
        self._confidences += [self.match.confidence(i) for i in range(len(self._confidences), self.num_tokens)]

    def rows(self, vocab_size: int) -> Float[Tensor, "K V"]:
        """q of each draft token: one-hot."""
        q = torch.zeros(self.num_tokens, vocab_size)
        q[range(self.num_tokens), self.tokens] = 1.0
        return q


COMPARED = TokenVerification, BlockVerification
"""Verifications that copies replace by comparison."""


def tested(plan: Plan, started: float, draft: Copied) -> Result:
    """`step.verified` with comparison in place of tests that have the same distribution."""
    request = plan.request
    if type(request.verification) in COMPARED:
        plan = replace(plan, request=replace(request, verification=CompareVerification()))
    return verified(plan, draft, started)


def propose(plan: Plan) -> Copied:
    """The copied draft tokens up to where the policy stops, the text ends or a grammar forbids the next one.

    `CostAware` weighs each match as a whole: its evidence is at hand, whatever the steps before have gained.
    """
    decision, drafter, grammar = plan.decision, plan.request.draft, plan.request.grammar
    assert isinstance(drafter, SuffixDrafter), "the engine takes no other"
    draft = Copied(costs=plan.costs)
    weighs = plan.costs is not None and type(decision.policy) is CostAware  # a subclass may have another `rule`
    if not decision.limit or not (weighs or decision.may_draft):
        draft.stop = decision.stop(draft) or decision.at_limit
        return draft
    drafter.read(plan.tokens[drafter.length :])
    draft.stop = (_weighed if weighs else _followed)(draft, plan)
    if grammar is not None and (num := fitting(grammar, draft.tokens)) < draft.num_tokens:
        draft.cut(num)
        draft.stop = FORBIDDEN
    return draft


def _followed(draft: Copied, plan: Plan) -> Stop:
    """Take copies until the policy stops; why there are no more."""
    decision, policy, hidden = plan.decision, plan.decision.policy, torch.empty(0)
    drafter: Any = plan.request.draft
    draft.match = drafter.copied(decision.limit)
    for token in draft.match.tokens:
        if stop := decision.stop(draft):
            if policy.drops_last and draft.num_tokens:
                draft.cut(draft.num_tokens - 1)
            return stop
        if draft.num_tokens and not policy.looks_ahead:
            draft.judge(policy, hidden)
        draft.copy([token])
        if policy.looks_ahead:
            draft.judge(policy, hidden)
        if token in plan.request.ends:
            return END_OF_TEXT
    return decision.at_limit if draft.num_tokens else NO_MATCH


def _weighed(draft: Copied, plan: Plan) -> Stop:
    """Take as many copies as pay by `CostAware`; why there are no more."""
    decision, ends = plan.decision, plan.request.ends
    policy: Any = decision.policy
    drafter: Any = plan.request.draft
    for limit in (min(FEW, decision.limit), decision.limit):
        draft.match = drafter.copied(limit)
        tokens = draft.match.tokens
        if not tokens:
            return NO_MATCH
        end = next((i + 1 for i, token in enumerate(tokens) if token in ends), limit)
        estimates = [draft.match.confidence(i) for i in range(end)]
        num = policy.best_prefix(decision.memory, estimates, plan.costs)
        draft.cut(0)
        draft.judged = estimates[:num]
        draft.copy(tokens[:num])
        if num < end:
            return UNWORTHY
        if tokens[end - 1] in ends:
            return END_OF_TEXT
    return decision.at_limit
