"""The round on the host, candidate by candidate: what the other engines do too, faster.

    pending -> forward -> q_1 -> Y_1 -> (judge Y_1) -> [stop?] -> forward -> (judge Y_1), q_2 -> Y_2 -> ... -> verify

A rule judges at one of the two places. A lagged head judges Y_k by the forward pass that reads it, which also gives
q_{k+1}; so when it stops after k judgements there are k + 1 candidates, the last one free, and all of them are verified.
A look-ahead head judges Y_k as soon as it is drawn, and stops before that pass is paid for.
"""

from collections.abc import Collection, Sequence
from time import perf_counter

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdecpp.policies import Costs, Policy
from specdecpp.policies.protocol import END_OF_TEXT, Decision
from specdecpp.rounds.draft import Draft
from specdecpp.rounds.plan import Plan, Reading, Request, Result, Rows
from specdecpp.rounds.ratio import Verdict
from specdecpp.runners import Cache
from specdecpp.sampling import Randomness, Sampling, penalised, probabilities, seen_rows


class Host:
    """Takes every request."""

    has_batches = False
    # torch gives a row other bits in a product with more rows, on a CPU as on a GPU (LOG.md): decoded together, what an answer
    # says would depend on who else is there.

    def refusal(self, request: Request) -> None:
        return None

    def run(self, plans: Sequence[Plan], readings: Sequence[Reading] = ()) -> list[Result]:
        assert not readings, "sessions read their prompts themselves here"
        return [_one(plan) for plan in plans]


def _one(plan: Plan) -> Result:
    request, started = plan.request, perf_counter()
    draft = propose(
        request.draft,
        plan.tokens[request.draft.length :],
        decision=plan.decision,
        sampling=request.sampling,
        randomness=request.randomness[0],
        ends=request.ends,
        seen=request.seen,
        costs=plan.costs,
    )
    drafted = perf_counter()
    verdict, pass_s, rows = _verify(plan, draft)
    return Result(
        tokens=draft.tokens,
        num_accepted=verdict.num_accepted,
        next_token=verdict.next_token,
        stop=draft.stop,
        q=draft.known_confidences,
        judged=draft.judged,
        draft_s=drafted - started - draft.head_s,
        head_s=draft.head_s,
        verify_s=perf_counter() - drafted,
        forward_s=draft.forward_s + pass_s,
        rows=rows,
        tv=verdict.tv,
        overlaps=verdict.overlaps,
    )


def propose(
    runner: Cache,
    pending: list[int],
    *,
    decision: Decision,
    sampling: Sampling,
    randomness: Randomness,
    ends: Collection[int] = (),
    seen: Bool[Tensor, " V"] | None = None,
    costs: Costs | None = None,
) -> Draft:
    """Draft candidates after `pending`, the tokens of the context that the draft has not read yet (at least one).

    Stops where the decision says so, at its limit, or after a token of `ends`. `seen` marks the tokens of the context for the
    repetition penalty; it is left as it was.
    """
    policy, draft = decision.policy, Draft(costs=costs, stop=decision.at_limit)
    if seen is not None:
        seen = seen.to(runner.device, copy=True)
    while draft.num_tokens < decision.limit:
        if stop := decision.stop(draft):
            draft.stop = stop
            if policy.drops_last and draft.num_tokens:
                draft.drop_last()
            break
        started = perf_counter()
        logits, hidden = runner.extend(pending, rows=1)
        draft.forward_s += perf_counter() - started
        if draft.num_tokens and not policy.looks_ahead:
            _judge(draft, policy, hidden[0])
        token = _draw(draft, logits[0], sampling, randomness, seen)
        if policy.looks_ahead:
            _judge(draft, policy, hidden[0])
        if token in ends:
            draft.stop = END_OF_TEXT
            break
        if seen is not None:
            seen[token] = True
        pending = [token]
    return draft


def _judge(draft: Draft, policy: Policy, hidden: Float[Tensor, " D"]) -> None:
    """Add the policy's estimate for the last candidate, if it makes one."""
    started = perf_counter()
    estimate = policy.judge(draft, hidden)
    draft.head_s += perf_counter() - started
    if estimate is not None:
        draft.judged.append(estimate)


def _draw(
    draft: Draft, logits: Float[Tensor, " V"], sampling: Sampling, randomness: Randomness, seen: Bool[Tensor, " V"] | None
) -> int:
    """Draw the next candidate into the draft."""
    if sampling.is_greedy:
        logits = penalised(logits, sampling, seen)
        token = int(logits.argmax())
        draft.append(token, logits=logits)
        return token
    q = probabilities(logits, sampling, seen)
    token = randomness.categorical(q)
    draft.append(token, q=q)
    return token


def _verify(plan: Plan, draft: Draft) -> tuple[Verdict, float, Rows | None]:
    """The verdict on the candidates, the pass's seconds, and the rows where somebody wants them."""
    needs_all = getattr(plan.request.verification, "reads_q", False)  # the distributions of greedy drafting too
    drawn = map(draft.distribution, range(draft.num_tokens)) if needs_all else draft.q
    verdict, pass_s, logits, seen = verified(plan, draft.tokens, [row for row in drawn if row is not None])
    rows = None
    if plan.wants_rows:
        believed = [draft.distribution(i).to(logits.device) for i in range(draft.num_tokens)]
        q = torch.stack(believed) if believed else logits[:0]
        rows = Rows(q=q, logits=logits, sampling=plan.request.sampling, seen=seen)
    return verdict, pass_s, rows


def verified(
    plan: Plan, candidates: list[int], q: Sequence[Float[Tensor, " V"]] = ()
) -> tuple[Verdict, float, Float[Tensor, "K1 V"], Bool[Tensor, "K1 V"] | None]:
    """One target pass over what it has not read and the candidates, and the acceptance test: the verdict, the pass's seconds,
    the logits, and for a repetition penalty the contexts of the rows."""
    request, sampling = plan.request, plan.request.sampling
    started = perf_counter()
    unread = plan.tokens[request.target.length :]
    logits, _ = request.target.extend(unread + candidates, rows=len(candidates) + 1)
    pass_s = perf_counter() - started
    tokens = torch.tensor(candidates, device=logits.device, dtype=torch.long)
    seen = None if request.seen is None else seen_rows(request.seen, tokens)
    made = penalised if request.verification.greedy_only else probabilities  # of which the argmax is all that counts
    p = made(logits, sampling, seen)
    beliefs = torch.stack([row.to(p.device) for row in q]) if q else p[:0]
    return request.verification(p, beliefs, tokens, request.randomness[1]), pass_s, logits, seen
