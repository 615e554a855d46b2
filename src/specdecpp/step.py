"""A step: draft, stop, verify. This is the specification; the engines of backends do the same faster.

    Session -> Plan -> engine.run([plan]) -> Result -> Session

    [stop?] -> forward -> q_1 -> Y_1 -> (judge Y_1) -> [stop?] -> forward -> (judge Y_1), q_2 -> Y_2 -> ... -> verify

A rule judges at one of the two places. A lagged head judges Y_k by the forward pass that reads it, which also gives
q_{k+1}; so when it stops after k judgements there are k + 1 draft tokens, the last one free, and all of them are verified.
A look-ahead head judges Y_k as soon as it is drawn, and stops before that pass is paid for.

Every engine decides the same by the same uniforms, in the same order.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdecpp.backends.base import Cache
from specdecpp.grammar import Matcher, allowed_rows, restricted
from specdecpp.head import features
from specdecpp.policies import Costs, Policy, Stop
from specdecpp.policies.head import judge_of, skips_forced
from specdecpp.policies.protocol import END_OF_TEXT, LIMIT, Decision
from specdecpp.sampling import Randomness, Sampling, penalised, probabilities, seen_rows
from specdecpp.verify import Verification

if TYPE_CHECKING:
    from specdecpp.scheduler import Reading

NOT_SCORED = Stop("the draft scores none of the allowed tokens")


@dataclass(frozen=True, kw_only=True, eq=False, weakref_slot=True, slots=True)
class Request:
    """Constants of a request in all its steps: its two caches, and how it is decoded.

    `randomness` are two independent streams, to draft and to verify. `ends` are the ids after which nothing follows. `seen`
    marks the tokens of the context, for a repetition penalty; `grammar` is the matcher after the answer so far. `Session`
    updates both as it commits.
    """

    target: Cache
    draft: Cache
    policy: Policy
    verification: Verification
    sampling: Sampling
    randomness: tuple[Randomness, Randomness]
    ends: Collection[int] = ()
    seen: Bool[Tensor, " V"] | None = None
    grammar: Matcher | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Its draft tokens form one chain that follows `tokens`.

    `tokens` are all of the context; an engine reads those that a backend has not. `wants_rows` asks for the distributions that
    the step was decided on, which changes nothing else.
    """

    request: Request
    tokens: list[int]
    decision: Decision
    costs: Costs | None = None
    wants_rows: bool = False


@dataclass(kw_only=True)
class Rows:
    """The distributions of a step of K draft tokens, in float32 or better.

    `q` are those that the draft tokens were drawn from, under greedy drafting softmaxes at temperature 1. `logits` are the
    target's own, without what a grammar forbids; row i is of the i-th token that came out. `seen` are the contexts of the
    rows, for a repetition penalty.
    """

    q: Float[Tensor, "K V"]
    logits: Float[Tensor, "K1 V"]
    sampling: Sampling
    seen: Bool[Tensor, "K1 V"] | None = None

    @cached_property
    def p(self) -> Float[Tensor, "K1 V"]:
        """Distributions under the request's sampling, made once somebody asks."""
        return probabilities(self.logits, self.sampling, self.seen)


@dataclass(slots=True)
class Result:
    """Result of a step: the draft tokens, how many of them are accepted, and the token that follows those.

    `q` has the probability of each draft token, where somebody needed it; `judged` what a head expected of them: of all, or
    where it lags of all but the last. Seconds: `draft_s` of drafting but for the head's `head_s`, `verify_s` of the target's
    pass and the test, `forward_s` of those within forward passes (0 where a device runs them on its own), and `once_s` beside
    them of what such a step needs only the first time (recording it on a device): no later step takes that.

    `expected_s` and `extra` are set by an engine that a policy brings (`Policy.engine`): what its costs have such a step take,
    and whatever the policy is to learn from.
    """

    tokens: list[int]
    num_accepted: int
    next_token: int
    stop: Stop
    q: Sequence[float] = ()
    judged: Sequence[float] = ()
    draft_s: float = 0.0
    head_s: float = 0.0
    verify_s: float = 0.0
    forward_s: float = 0.0
    once_s: float = 0.0
    rows: Rows | None = field(default=None, repr=False)
    expected_s: float | None = None
    extra: Any = None
    tv: Sequence[float] = ()
    """Total variation of each token that came out (`verify.Verdict`); `overlaps` of each draft token that was tested."""
    overlaps: Sequence[float] = ()

    @property
    def num_drafted(self) -> int:
        return len(self.tokens)


@runtime_checkable
class Engine(Protocol):
    """Runs steps. The caches of a request hold what they have read then, rejected draft tokens too: the caller rolls back."""

    reads_alone: bool = False
    """True where prompts gain nothing by sharing passes: of them one is read in a step."""

    def refusal(self, request: Request) -> str | None:
        """Reason why the steps of this request cannot be run here; None where they can."""

    def shares(self, request: Request) -> bool:
        """True where its plans take less with those of others than one after the other, and prompts can be read beside them."""
        return False

    def run(self, plans: Sequence[Plan], readings: "Sequence[Reading]" = ()) -> list[Result]:
        """A result for each plan, in order; `readings` only for an engine that `shares`. Requests must differ. An exception
        concerns all of them: `Session.rewind` restores each, to be run again."""
        ...


@dataclass
class Draft:
    """The draft tokens of one step, and what the draft's side knows about them. This is all a policy sees.

    q[i] [V] is the distribution draft token i was drawn from; `is_greedy`: the logits whose argmax it is. `judged` are the
    head's estimates of the first draft tokens, in order: of those that were read or, where the policy looks ahead, of all.
    """

    costs: Costs | None = None
    is_greedy: bool = False
    tokens: list[int] = field(default_factory=list)
    q: list[Float[Tensor, " V"]] = field(default_factory=list)
    judged: list[float] = field(default_factory=list)
    stop: Stop = LIMIT
    forward_s: float = 0.0
    head_s: float = 0.0
    _confidences: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def survival(self) -> float:
        """Estimated probability that every judged draft token is accepted: the product of `judged`."""
        return math.prod(self.judged, start=1.0)

    def distribution(self, i: int) -> Float[Tensor, " V"]:
        """Belief of the draft at draft token i: q itself, or under greedy drafting the softmax at T = 1."""
        return self.q[i].softmax(-1) if self.is_greedy else self.q[i]

    def rows(self, vocab_size: int) -> Float[Tensor, "K V"]:
        """`distribution` of all draft tokens."""
        rows = [self.distribution(i) for i in range(self.num_tokens)]
        return torch.stack(rows) if rows else torch.empty(0, vocab_size)

    def confidence(self, i: int) -> float:
        """q(Y_i) of draft token i (from 0; -1 is the last), under `distribution(i)`."""
        for k in range(len(self._confidences), self.num_tokens):
            q = self.distribution(k)
            token = self.tokens[k]
            self._confidences.append(q.numpy().item(token) if q.device.type == "cpu" else float(q[token]))
        return self._confidences[i]

    @property
    def cumulative_confidence(self) -> float:
        """The product of q(Y_i) over the step."""
        if self.num_tokens:
            self.confidence(-1)
        return math.prod(self._confidences, start=1.0)

    @property
    def known_confidences(self) -> list[float]:
        """q(Y_i) of the draft tokens as far as somebody asked, and of all that were drawn."""
        if self.num_tokens and not self.is_greedy:
            self.confidence(-1)
        return self._confidences

    def entropy(self, i: int) -> float:
        """Entropy in nats of `distribution(i)`."""
        return float(features.entropy(self.distribution(i)))

    def gap(self, i: int) -> float:
        """How far the two largest probabilities of `distribution(i)` lie apart (0 in a vocabulary of one)."""
        return float(features.gap(self.distribution(i)))

    def append(self, token: int, q: Float[Tensor, " V"]) -> None:
        """Add a draft token with the q it was drawn from, or with the logits it is the argmax of."""
        self.tokens.append(token)
        self.q.append(q)

    def judge(self, policy: Policy, hidden: Float[Tensor, " D"]) -> None:
        """Add the policy's estimate for the last draft token, if it makes one."""
        started = perf_counter()
        estimate = policy.judge(self, hidden)
        self.head_s += perf_counter() - started
        if estimate is not None:
            self.judged.append(estimate)

    def cut(self, num: int) -> None:
        """Remove all but the first `num` draft tokens."""
        for column in (self.tokens, self.q, self.judged, self._confidences):
            del column[num:]


class Host(Engine):
    """Takes every request: the specification, run as it stands."""

    # torch gives a row other bits in a product with more rows, on a CPU as on a GPU (LOG.md): decoded together, what an answer
    # says would depend on who else is there.

    def refusal(self, request: Request) -> None:
        return None

    def run(self, plans: Sequence[Plan], readings: "Sequence[Reading]" = ()) -> list[Result]:
        assert not readings, "sessions read their prompts themselves here"
        return [decoded(plan) for plan in plans]


def decoded(plan: Plan) -> Result:
    """Draft until the rule stops, verify all of it in one pass of the target."""
    started = perf_counter()
    return verified(plan, propose(plan), started)


def propose(plan: Plan) -> Draft:
    """Draft after the tokens of the context, as far as the decision says, or up to a token that ends the text."""
    request, decision = plan.request, plan.decision
    policy, sampling = decision.policy, request.sampling
    draft = Draft(costs=plan.costs, is_greedy=sampling.is_greedy, stop=decision.at_limit)
    unread = plan.tokens[request.draft.length :]
    request.draft.settle(unread)
    seen = None if request.seen is None else request.seen.to(request.draft.device, copy=True)
    grammar = None if request.grammar is None else request.grammar.fork()
    num_forced = 0
    while True:
        if grammar is not None:
            forced = _forced(draft, grammar, plan)
            unread, num_forced = [*unread, *forced], num_forced + len(forced)
            if seen is not None:
                seen[forced] = True
            if grammar.is_over:
                draft.stop = END_OF_TEXT
                break
        if draft.num_tokens >= max(decision.limit, min(decision.limit + num_forced, decision.max_with_forced)):
            break
        if draft.num_tokens and not decision.may_draft:  # forced tokens alone: the rule wants none of its own
            break
        if stop := decision.stop(draft):
            draft.stop = stop
            if policy.drops_last and draft.num_tokens:
                draft.cut(draft.num_tokens - 1)
            break
        started = perf_counter()
        logits, hidden = request.draft.extend(unread, rows=1)
        draft.forward_s += perf_counter() - started
        if draft.num_tokens and not policy.looks_ahead:
            draft.judge(policy, hidden[0])
        row = logits[0]
        if grammar is not None and (row := restricted(row, grammar.allowed())).amax() == -torch.inf:
            draft.stop = NOT_SCORED
            break
        q = penalised(row, sampling, seen) if sampling.is_greedy else probabilities(row, sampling, seen)
        token = int(q.argmax()) if sampling.is_greedy else request.randomness[0].categorical(q)
        draft.append(token, q)
        if policy.looks_ahead:
            draft.judge(policy, hidden[0])
        if token in request.ends:
            draft.stop = END_OF_TEXT
            break
        if seen is not None:
            seen[token] = True
        if grammar is not None:
            grammar.push(token)
        unread = [token]
    return draft


def _forced(draft: Draft, grammar: Matcher, plan: Plan) -> list[int]:
    """Add the tokens that the grammar leaves no choice about, as far as there is room: they cost no pass of the draft, q is
    one-hot, and nobody need judge them."""
    request = plan.request
    found = grammar.forced()[: plan.decision.max_with_forced - draft.num_tokens] if skips_forced(request.policy) else []
    for token in found:
        certain = torch.zeros(request.draft.vocab_size, device=request.draft.device)
        certain[token] = 1.0
        draft.append(token, certain.log() if draft.is_greedy else certain)
        if judge_of(request.policy) is not None:
            draft.judged.append(1.0)
        grammar.push(token)
    return found


def verified(plan: Plan, draft: Draft, started: float) -> Result:
    """One pass of the target over what it has not read and the draft tokens, and the acceptance test on its K + 1 rows.

    `started` is when drafting began, by `perf_counter`.
    """
    request, sampling, verification = plan.request, plan.request.sampling, plan.request.verification
    drafted = perf_counter()
    unread = plan.tokens[request.target.length :]
    logits, _ = request.target.extend(unread + draft.tokens, rows=draft.num_tokens + 1)
    forward_s = draft.forward_s + perf_counter() - drafted
    tokens = torch.tensor(draft.tokens, device=logits.device, dtype=torch.long)
    seen = None if request.seen is None else seen_rows(request.seen, tokens)
    if request.grammar is not None:
        logits = restricted(logits, allowed_rows(request.grammar, draft.tokens))
    made = penalised if verification.greedy_only else probabilities  # of which the argmax is all that counts
    p = made(logits, sampling, seen)
    reads_q = getattr(verification, "reads_q", not verification.allows_dropping)
    q = draft.rows(p.shape[-1]).to(p.device) if reads_q or plan.wants_rows else p[:0]
    verdict = verification(p, q if reads_q else p[:0], tokens, request.randomness[1])
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
        forward_s=forward_s,
        rows=Rows(q=q, logits=logits, sampling=sampling, seen=seen) if plan.wants_rows else None,
        tv=verdict.tv,
        overlaps=verdict.overlaps,
    )
