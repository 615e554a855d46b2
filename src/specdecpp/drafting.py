"""The first half of a round: the draft proposes candidates until the policy, or the room that is left, stops it.

    pending -> forward -> q_1 -> Y_1 -> (judge Y_1) -> [stop?] -> forward -> (judge Y_1), q_2 -> Y_2 -> ...

A rule judges at one of the two places. A lagged head judges Y_k by the forward pass that reads it, which also gives
q_{k+1}; so when it stops after k judgements there are k + 1 candidates, the last one free, and all of them are verified
(method.md 5). A look-ahead head judges Y_k as soon as it is drawn, and stops before that pass is paid for.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from specdecpp.head import features
from specdecpp.policies import Costs, Policy
from specdecpp.runners import Runner
from specdecpp.sampling import Sampling, penalised, probabilities
from specdecpp.verification import Coins


@dataclass
class Draft:
    """The candidates of one round, and what the draft's side knows about them. This is all a policy sees.

    q[i] [V] is the distribution candidate i was drawn from (None under greedy drafting); `judged` are the head's estimates
    of the first candidates, in order: of those that were read or, where the policy looks ahead, of all; `next_acceptance` is
    what it expects of the candidate after them.
    """

    costs: Costs | None = None
    tokens: list[int] = field(default_factory=list)
    q: list[Float[Tensor, " V"] | None] = field(default_factory=list)
    judged: list[float] = field(default_factory=list)
    next_acceptance: float | None = None
    stop_reason: str = ""
    forward_s: float = 0.0
    head_s: float = 0.0
    pass_s: float = 0.0
    """Of the target's forward pass over the candidates."""
    late_s: float = 0.0
    """Of drafting that a device went on with after `propose` had returned."""
    _logits: list[Float[Tensor, " V"] | None] = field(default_factory=list)
    _confidences: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def is_greedy(self) -> bool:
        """Whether the last candidate is an argmax rather than a draw."""
        return self.num_tokens > 0 and self.q[-1] is None

    @property
    def survival(self) -> float:
        """Estimated probability that every judged candidate is accepted: the product of `judged`."""
        return math.prod(self.judged, start=1.0)

    def distribution(self, i: int) -> Float[Tensor, " V"]:
        """What the draft believed at candidate i: q itself, or under greedy drafting the softmax at T = 1."""
        q, logits = self.q[i], self._logits[i]
        if q is not None:
            return q
        assert logits is not None, "a candidate has a distribution or logits"
        return logits.softmax(-1)

    def confidence(self, i: int) -> float:
        """q(Y_i) of candidate i (from 0; -1 is the last), under `distribution(i)`."""
        for k in range(len(self._confidences), self.num_tokens):
            q = self.distribution(k)
            token = self.tokens[k]
            self._confidences.append(q.numpy().item(token) if q.device.type == "cpu" else float(q[token]))
        return self._confidences[i]

    @property
    def cumulative_confidence(self) -> float:
        """The product of q(Y_i) over the round."""
        if self.num_tokens:
            self.confidence(-1)
        return math.prod(self._confidences, start=1.0)

    def entropy(self, i: int) -> float:
        """Entropy in nats of `distribution(i)`."""
        return float(features.entropy(self.distribution(i)))

    def gap(self, i: int) -> float:
        """How far the two largest probabilities of `distribution(i)` lie apart (0 in a vocabulary of one)."""
        return float(features.gap(self.distribution(i)))

    def append(self, token: int, *, q: Float[Tensor, " V"] | None = None, logits: Float[Tensor, " V"] | None = None) -> None:
        """Add a candidate with the q it was drawn from, or with the logits it was the argmax of."""
        self.tokens.append(token)
        self.q.append(q)
        self._logits.append(logits)

    def drop_last(self) -> None:
        for column in (self.tokens, self.q, self._logits):
            column.pop()
        del self._confidences[self.num_tokens :]


@dataclass(frozen=True, kw_only=True)
class Room:
    """What bounds a round from outside: places left, and the tokens after which nothing can follow."""

    num_tokens: int
    ends: Collection[int] = ()


def propose(
    runner: Runner,
    pending: list[int],
    *,
    policy: Policy,
    memory: Any,
    sampling: Sampling,
    coins: Coins,
    room: Room,
    seen: Bool[Tensor, " V"] | None = None,
    costs: Costs | None = None,
) -> Draft:
    """Draft candidates after `pending`, the tokens of the context that the draft has not read yet (at least one).

    Stops when the policy says so, at the policy's limit, when the room is used up, or after a token of `room.ends`.
    `seen` marks the tokens of the context for the repetition penalty; it is left as it was.
    """
    draft = Draft(costs=costs)
    limit = min(policy.limit(memory), room.num_tokens)
    draft.stop_reason = "tokens left" if limit == room.num_tokens else "limit"
    if seen is not None:
        seen = seen.to(runner.device, copy=True)
    while draft.num_tokens < limit:
        if draft.num_tokens >= policy.min_tokens and (reason := policy.stop(draft, memory)):
            draft.stop_reason = reason
            if policy.drops_last and draft.num_tokens:
                draft.drop_last()
            break
        started = perf_counter()
        logits, hidden = runner.extend(pending, rows=1)
        draft.forward_s += perf_counter() - started
        if draft.num_tokens and not policy.looks_ahead:
            _judge(draft, policy, hidden[0])
        token = _draw(draft, logits[0], sampling, coins, seen)
        if policy.looks_ahead:
            _judge(draft, policy, hidden[0])
        if token in room.ends:
            draft.stop_reason = "end of text"
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


def _draw(draft: Draft, logits: Float[Tensor, " V"], sampling: Sampling, coins: Coins, seen: Bool[Tensor, " V"] | None) -> int:
    """Draw the next candidate into the draft."""
    if sampling.is_greedy:
        logits = penalised(logits, sampling, seen)
        token = int(logits.argmax())
        draft.append(token, logits=logits)
        return token
    q = probabilities(logits, sampling, seen)
    token = coins.categorical(q)
    draft.append(token, q=q)
    return token
