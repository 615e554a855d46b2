"""Exact replay: what any stopping rule would have done on recorded answers, at any costs, without the target model.

    Trace (a recorded answer) + coins + policy -> Steps -> Replayed (sums for each answer, rates)

The coupling. Take an answer X ~ p with p and q at each position. Under token verification a step that
reaches position i meets there, in distribution, X_i itself with probability b_i = min(1, q(X_i)/p(X_i)), and it is accepted;
otherwise a draw from norm((q - p)+), which is rejected, and the correction is X_i. A bonus is X_i too. Since min(p, q) + (p -
q)+ = p, and a rejected draft token and its correction are independent, the answer is X whatever the rule does, and only the
bookkeeping is random: one coin a position, and after a rejected draft token the draft's own continuation, which is recorded as
a branch. No position is met twice, so one coin and one branch for each make a replayed answer exact in distribution, and two
rules that are given the same coins differ by what they decide only. tests/test_replay.py enumerates the joint distribution of
text and steps.

The very policy objects of the decoder run here, under the decision that every engine follows (`policies.protocol.decide`):

- a step has at most `policy.limit(memory)` draft tokens and no more than the places left, one of which is the target's own;
  whether to stop is asked before each draft token, not at the limit, not after an end of text.
- a lagged head has judged all draft tokens but the last, a look-ahead head all of them; a score that looks at the depth is
  that of the draft token's place in the step.
- a draft token that ends the text ends drafting; if it is accepted the answer ends with it and nothing follows.
- a rule that drops the last draft token pays for it and has it neither verified nor counted as drafted.
- `policy.learn` is called after every step, with seconds of the cost model; costs stay what they are (no `CostClock`).

Not replayed: block verification, which has no such coupling, and stop strings.

Shapes: those of `trace`; R repeats.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from jaxtyping import Int

from specdecpp.costs.curve import is_switch
from specdecpp.policies import Costs, Policy
from specdecpp.policies.head import costs_for, judge_of, judges_by_q
from specdecpp.policies.protocol import FREE, Decision, Given, decide
from specdecpp.policies.score import by_q
from specdecpp.replay.replayed import Replayed, ReplayedStep, prices
from specdecpp.replay.trace import Opinion, Trace


class TraceView:
    """A step of a trace as a policy sees it: `policies.Draft tokens`. Nothing is worked out before it is asked for."""

    def __init__(self, trace: Trace, opinion: Opinion | None, costs: Costs | None, *, looks_ahead: bool):
        self.costs = costs
        self.num_tokens = 0
        self._width, self._lag = trace.tokens.shape[1], 0 if looks_ahead else 1
        self._tokens, self._log_q, self._entropy, self._gap = map(_flat, (trace.tokens, trace.log_q, trace.entropy, trace.gap))
        self._accept = self._next = self._first = None
        self._num_scores = 1
        if opinion is not None:
            self._accept, self._next, self._first = map(_flat, (opinion.accept, opinion.next, opinion.first))
            self._num_scores = opinion.accept.shape[2]
        self.begin(0, 0)

    def begin(self, start: int, rejected: int) -> None:
        """Show a new step, of which the draft token at position `rejected` is the first that is none of the answer's."""
        self.num_tokens = 0
        self._start, self._num_whole = start, rejected - start
        self._offset = rejected * self._width + 1 - self._num_whole
        self._judged: list[float] = []
        self._confidences: list[float] = []

    @property
    def tokens(self) -> list[int]:
        return [self._tokens[self._place(k)] for k in range(self.num_tokens)]

    @property
    def judged(self) -> Sequence[float]:
        for k in range(len(self._judged), self.num_tokens - self._lag):
            by_head = None if self._accept is None else self._accept[self._score(k)]
            self._judged.append(by_q(self.confidence(k)) if by_head is None else by_head)
        return self._judged

    @property
    def is_greedy(self) -> bool:
        """Recorded draft tokens are draws."""
        return False

    @property
    def survival(self) -> float:
        return math.prod(self.judged, start=1.0)

    @property
    def next_acceptance(self) -> float | None:
        num = self.num_tokens - self._lag
        if num <= 0:
            return None if self._first is None else self._first[self._start]
        return None if self._next is None else self._next[self._score(num - 1)]

    @property
    def cumulative_confidence(self) -> float:
        self._read()
        return math.prod(self._confidences, start=1.0)

    def confidence(self, i: int) -> float:
        self._read()
        return self._confidences[i]

    def _read(self) -> None:
        for k in range(len(self._confidences), self.num_tokens):
            self._confidences.append(math.exp(self._log_q[self._place(k)]))

    def entropy(self, i: int) -> float:
        return self._entropy[self._place(i % self.num_tokens)]

    def gap(self, i: int) -> float:
        return self._gap[self._place(i % self.num_tokens)]

    def _place(self, k: int) -> int:
        return (self._start + k) * self._width if k < self._num_whole else self._offset + k

    def _score(self, k: int) -> int:
        return self._place(k) if self._num_scores == 1 else self._place(k) * self._num_scores + k


def _flat(values: np.ndarray | None) -> Any:
    """Items come out of a memoryview as plain numbers, in half the time of an array's, and nothing is copied."""
    return None if values is None else np.ascontiguousarray(values).reshape(-1).data


class Player:
    """A policy that is ready to be replayed on one trace; `steps` decodes the answer once.

    `max_tokens` bounds every step from outside, as few tokens left would: for a policy that goes further than the branches.
    Raises ValueError where the trace cannot say what the policy would have seen.
    """

    def __init__(self, trace: Trace, policy: Policy, costs: Costs, *, max_tokens: int | None = None):
        if policy.engine() is not None:
            raise ValueError(
                f"a trace has the draft's chains, and {type(policy).__name__} drafts otherwise. Replay a rule for "
                "chains, or trees by lab.trees.replay."
            )
        self.trace, self.policy, self.costs = trace, policy, costs
        self._bound = max_tokens
        self._bounded(policy.max_tokens)
        if policy.drops_last and not trace.is_greedy:
            raise ValueError(
                f"{type(policy).__name__} drops a draft token that it has looked at, which only verifications without q can "
                "bear, and these odds come from sampling with q. Replay it on labels made at temperature 0."
            )
        opinion = _opinion(trace, policy)
        self._view = TraceView(trace, opinion, costs, looks_ahead=policy.looks_ahead)
        self._judges = judge_of(policy) is not None
        self._ends, self._overlaps = trace.ends(), trace.overlap.tolist()
        self._prices = prices(costs, trace.branch_size)

    def steps(self, runs: Sequence[int]) -> Iterator[ReplayedStep]:
        """Step by step; `runs` is a row of `Trace.runs`."""
        trace, policy = self.trace, self.policy
        memory = policy.start(Given(is_greedy=trace.is_greedy))
        at, before = 0, 1
        while at < len(trace):
            rejected = runs[at]
            room = min(self._bounded(policy.limit(memory)), max(0, trace.num_places - at), self._ends[rejected] - at)
            self._view.begin(at, rejected)
            decision = decide(policy, memory, self.costs, room)
            count, num_dropped = (decision.limit, 0) if decision.rule is FREE else self._draft(decision)
            step = self._verified(at, min(count, rejected - at), before, count, num_dropped)
            memory = policy.learn(memory, step)
            before, at = count, at + step.num_tokens
            yield step

    def _draft(self, decision: Decision) -> tuple[int, int]:
        """(draft tokens to be verified, draft tokens dropped)."""
        policy, view = self.policy, self._view
        for count in range(policy.min_tokens, decision.limit):
            view.num_tokens = count
            if decision.stop(view):
                num_dropped = int(policy.drops_last and count > 0)
                return count - num_dropped, num_dropped
        return decision.limit, 0

    def _verified(self, at: int, accepted: int, before: int, count: int, num_dropped: int) -> ReplayedStep:
        """The step at a position, with so many draft tokens of which the first `accepted` are the answer's."""
        expected_s, draft_s, verify_s = self._prices[count]
        expected_s += self.costs.switch_s * is_switch(before, count)
        self._view.num_tokens = count
        return ReplayedStep(
            num_tokens=min(accepted + 1, len(self.trace) - at),
            num_drafted=count,
            num_accepted=accepted,
            expected_s=expected_s,
            draft_s=draft_s,
            verify_s=verify_s,
            num_dropped=num_dropped,
            judged=self._view.judged[:count] if self._judges else (),
            costs=self.costs,
            overlaps=() if self.trace.is_greedy else self._overlaps[at : at + min(accepted + 1, count)],
        )

    def _bounded(self, limit: int) -> int:
        """The limit under the bound; ValueError where the branches do not reach that far."""
        bounded = limit if self._bound is None else min(limit, self._bound)
        if bounded > self.trace.branch_size:
            raise ValueError(
                f"{type(self.policy).__name__} may draft {limit} draft tokens and the recorded branches have "
                f"{self.trace.branch_size} tokens. Give the policy max_tokens={self.trace.branch_size}, bound every step with "
                "replay(..., max_tokens=...), or collect labels with longer branches."
            )
        return bounded


def _opinion(trace: Trace, policy: Policy) -> Opinion | None:
    """The opinion of a policy's head on the trace; None for a policy that asks no head. All its parts have the same."""
    judge: Any = judge_of(policy)
    if judge is None or judges_by_q(judge):
        return None
    name = type(judge).__name__
    if not (hasattr(judge, "head") and hasattr(judge, "calibrated")):
        raise ValueError(f"{name} judges draft tokens; a replay needs its attributes `head` and `calibrated` to know how.")
    if (opinion := trace.opinions.get((judge.head, judge.calibrated))) is None:
        raise ValueError(
            f"{name} asks a head (calibrated={judge.calibrated}) that has not judged these traces. Give that very head to "
            "training.traces when you make them."
        )
    if opinion.accept.shape[2] not in (1, trace.branch_size):
        raise ValueError(f"a head that looks at the depth scores each of {trace.branch_size}, got {opinion.accept.shape}")
    return opinion


def replay(
    traces: Sequence[Trace], policy: Policy, costs: Costs, *, seed: int = 0, repeats: int = 1, max_tokens: int | None = None
) -> Replayed:
    """Decode every answer `repeats` times with a policy, exactly in distribution under token verification (see the module).

    A seed gives the same coins to every policy, for each trace by its place in the list: compare policies on equal lists.
    Of a policy that asks a head, its time `costs.head_s` is part of a draft token's. `max_tokens` bounds every step from
    outside. Raises ValueError for a policy that goes further than the branches and is not bounded, or that asks a
    head which has not judged the traces.

    >>> replayed = replay(traces, CumulativeConfidence(max_tokens=10), Costs.relative(0.22), repeats=4)   # doctest: +SKIP
    >>> replayed.speed_up, replayed.gain(over=replay(traces, Fixed(k=2), Costs.relative(0.22), repeats=4))   # doctest: +SKIP
    """

    costs = costs_for(policy, costs)

    def played(trace: Trace, runs: Int[np.ndarray, "R N"]) -> Iterator[ReplayedStep]:
        player = Player(trace, policy, costs, max_tokens=max_tokens)
        return chain.from_iterable(map(player.steps, runs.tolist()))

    return Replayed.of(
        map(played, traces, thrown(traces, seed=seed, repeats=repeats)),
        sources=tuple(trace.source for trace in traces),
        costs=costs,
        repeats=repeats,
        is_priced=policy.needs_costs,
    )


def thrown(traces: Sequence[Trace], *, seed: int, repeats: int) -> Iterator[Int[np.ndarray, "R N"]]:
    """`Trace.runs` of the coins of each trace. Raises ValueError without traces or repeats."""
    if not (traces and repeats >= 1):
        raise ValueError(f"a replay needs traces and at least one repeat, got {len(traces)} and {repeats}")
    return (trace.runs(np.random.default_rng([seed, i]).random((repeats, len(trace)))) for i, trace in enumerate(traces))
