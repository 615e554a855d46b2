"""A step without a draft model: draft tokens copied from the text (`drafters.suffix`), stopped by a rule, verified at once.

q of a copied draft token is one-hot. Token verification then accepts it with probability p(x) and draws a rejection's token
from p without x: that is the distribution of drawing y ~ p and asking whether y = x, so comparison loses nothing here, and no q
is made. Block verification has the same distribution: the chance that a prefix survives cannot exceed the product of p.

With a compiled target the `native` engine verifies the copies; this engine serves every other target.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import log, prod
from time import perf_counter
from typing import Any

import torch

from specdecpp.drafters import SuffixDrafter
from specdecpp.drafters.suffix import Match
from specdecpp.grammar import fitting
from specdecpp.policies import CostAware, Costs, Policy, Stop
from specdecpp.policies.protocol import END_OF_TEXT
from specdecpp.scheduler import Reading
from specdecpp.step import Plan, Request, Result, verify
from specdecpp.verify import BlockVerification, CompareVerification, TokenVerification

NO_MATCH = Stop("no match")
FORBIDDEN = Stop("the grammar forbids the next copy")
UNWORTHY = Stop("further copies do not pay")
FEW = 8
"""So many copies are weighed first, and more of them only where all of these pay."""


class Copying:
    """Takes requests whose draft is a `SuffixDrafter`, over any target; one after the other."""

    has_batches = False

    def refusal(self, request: Request) -> str | None:
        """Reason why a request cannot be run here; None where it can."""
        return None if isinstance(request.draft, SuffixDrafter) else "its draft is a model"

    def run(self, plans: Sequence[Plan], readings: Sequence[Reading] = ()) -> list[Result]:
        assert not readings, "sessions read their prompts themselves here"
        return [_one(plan) for plan in plans]


@dataclass
class Copied:
    """The draft tokens of a step as a policy sees them: what stands for q is the evidence of the match."""

    match: Match
    costs: Costs | None
    tokens: list[int] = field(default_factory=list)
    judged: list[float] = field(default_factory=list)
    is_greedy: bool = True

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def survival(self) -> float:
        return prod(self.judged, start=1.0)

    @property
    def cumulative_confidence(self) -> float:
        return prod(map(self.match.confidence, range(self.num_tokens)), start=1.0)

    def confidence(self, i: int) -> float:
        return self.match.confidence(i % self.num_tokens)

    def entropy(self, i: int) -> float:
        """Entropy of the event that the match continues, nats."""
        q = self.confidence(i)
        return -q * log(q) - (1 - q) * log(1 - q)

    def gap(self, i: int) -> float:
        return abs(2 * self.confidence(i) - 1)

    def rows(self, vocab_size: int) -> torch.Tensor:
        """q of each draft token [K V]: one-hot."""
        q = torch.zeros(self.num_tokens, vocab_size)
        q[range(self.num_tokens), self.tokens] = 1.0
        return q


def _one(plan: Plan) -> Result:
    request, started = plan.request, perf_counter()
    draft, stop = plan.found or propose(plan)
    drafted = perf_counter()
    verification, q = request.verification, draft.rows(request.target.vocab_size)
    if type(verification) in (TokenVerification, BlockVerification):
        verification = CompareVerification()  # the same distribution where q is one-hot, and no q
    needs_q = not (verification.greedy_only or isinstance(verification, CompareVerification))
    plan = replace(plan, request=replace(request, verification=verification))
    verdict, rows, pass_s = verify(plan, draft.tokens, list(q) if needs_q else ())
    rows.q = q.to(rows.logits.device)
    return Result(
        tokens=draft.tokens,
        num_accepted=verdict.num_accepted,
        next_token=verdict.next_token,
        tv=verdict.tv,
        stop=stop,
        q=[draft.confidence(i) for i in range(draft.num_tokens)],
        judged=draft.judged,
        draft_s=drafted - started,
        verify_s=perf_counter() - drafted,
        forward_s=pass_s,
        rows=rows if plan.wants_rows else None,
    )


def propose(plan: Plan) -> tuple[Copied, Stop]:
    """The copied draft tokens up to where the policy stops, the text ends or a grammar forbids the next one; and why."""
    draft, stop = _chosen(plan)
    grammar = plan.request.grammar
    if grammar is None or (num := fitting(grammar, draft.tokens)) == draft.num_tokens:
        return draft, stop
    del draft.tokens[num:], draft.judged[num:]
    return draft, FORBIDDEN


def _chosen(plan: Plan) -> tuple[Copied, Stop]:
    """The copied draft tokens up to where the policy stops, or the text ends; and why.

    `CostAware` weighs each match as a whole: its evidence is at hand, whatever the steps before have gained.
    """
    request, decision = plan.request, plan.decision
    policy, drafter, draft = decision.policy, request.draft, Copied(Match([]), plan.costs)
    assert isinstance(drafter, SuffixDrafter), "the engine takes no other"
    weighs = plan.costs is not None and type(policy) is CostAware  # a subclass may have another `rule`
    if not decision.limit or not (weighs or decision.may_draft):
        return draft, decision.stop(draft) or decision.at_limit
    drafter.read(plan.tokens[drafter.length :])
    if weighs:
        return _weighed(draft, plan)
    draft.match = drafter.copied(decision.limit)
    for token in draft.match.tokens:
        if stop := decision.stop(draft):
            if policy.drops_last and draft.num_tokens:
                draft.tokens.pop()
                del draft.judged[draft.num_tokens :]
            return draft, stop
        if draft.num_tokens and not policy.looks_ahead:
            _judge(draft, policy)
        draft.tokens.append(token)
        if policy.looks_ahead:
            _judge(draft, policy)
        if token in request.ends:
            return draft, END_OF_TEXT
    return draft, decision.at_limit if draft.num_tokens else NO_MATCH


def _judge(draft: Copied, policy: Policy) -> None:
    if (estimate := policy.judge(draft, torch.empty(0))) is not None:
        draft.judged.append(estimate)


def _weighed(draft: Copied, plan: Plan) -> tuple[Copied, Stop]:
    """Take as many copies as pay by `CostAware`."""
    decision, ends = plan.decision, plan.request.ends
    policy: Any = decision.policy
    drafter: Any = plan.request.draft
    for limit in (min(FEW, decision.limit), decision.limit):
        draft.match = drafter.copied(limit)
        tokens = draft.match.tokens
        if not tokens:
            return draft, NO_MATCH
        end = next((i + 1 for i, token in enumerate(tokens) if token in ends), limit)
        estimates = [draft.match.confidence(i) for i in range(end)]
        num = policy.best_prefix(decision.memory, estimates, plan.costs)
        draft.tokens, draft.judged = tokens[:num], estimates[:num]
        if num < end:
            return draft, UNWORTHY
        if tokens[end - 1] in ends:
            return draft, END_OF_TEXT
    return draft, decision.at_limit
