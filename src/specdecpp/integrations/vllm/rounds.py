"""The rounds of a batch: each request drafts under the policy with candidates, costs and memory of its own.

    settle (what became of the last candidates) -> open -> advance, once a draft step -> close

This is `rounds.host.propose` for many requests that share their forward passes: a row whose rule has stopped takes no further
candidates, and the steps end when no row goes on. A draft step takes as long for few rows as for all, so rows whose rule weighs
costs make one together where it pays for all of them (`_pays`), and the batch drafts while that is worth it (`clock.Worth`).

Stops are functions of the candidates drawn so far, by all rows, and of earlier rounds, and every candidate stays, so any of the
library's verifications keeps the target's law (`policies.protocol`): what the others draw is independent of what a row has
yet to draw.

Nothing here knows the engine; `proposer` feeds it.
"""

import math
import weakref
from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdecpp.integrations.vllm.clock import StepClock
from specdecpp.integrations.vllm.judging import Judging
from specdecpp.integrations.vllm.meters import Meters
from specdecpp.metrics import Metrics
from specdecpp.policies import CostAware, Costs, Policy
from specdecpp.policies.experience import Experience
from specdecpp.policies.head import HeadPolicy, judge_of, judges_by_q
from specdecpp.policies.protocol import END_OF_TEXT, Decision, Stop, decide
from specdecpp.policies.score import by_q
from specdecpp.rounds.draft import Draft

TO_TIME, NOT_WORTH = Stop("a pass without candidates is timed"), Stop("drafting is not worth it to the batch")
TOO_FEW = Stop("too few of the batch go on")
"""Why a request has no candidate, or no further one, that its rule would have drawn. A rule does not learn from having had
none, and goes on wanting one."""
SAMPLINGS = 64
"""Ways of sampling whose lessons are kept, those that were used last."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A request as a target pass leaves it.

    `state` is the engine's own object for it, which lives as long as the request. `num_context` counts the tokens before
    this pass's output, `num_drafted` the candidates that were verified, `num_sampled` the tokens that came out: 0 where the
    prompt is still being read.
    """

    state: Any
    num_context: int
    num_drafted: int
    num_sampled: int
    ends: Collection[int] = ()
    is_greedy: bool = False
    sampling: Hashable = None
    """How it samples: what it teaches is for others that do so too."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What became of a round (`policies.Outcome`). Seconds are those of the whole batch's steps."""

    num_tokens: int
    num_drafted: int
    num_accepted: int
    expected_s: float
    costs: Costs | None
    draft_s: float
    head_s: float
    verify_s: float
    other_s: float = 0.0
    judged: Sequence[float] = ()
    overlaps: Sequence[float] = ()


@dataclass
class Row(Draft):
    """The candidates of one request: what its policy sees."""

    decision: Decision = field(kw_only=True)
    ends: Collection[int] = ()
    is_open: bool = True
    is_timed: bool = True
    """Whether `costs` were given or measured; before that they are a guess, and nothing is learned from it."""

    def add(self, token: int, q: Float[Tensor, " V"], confidence: float) -> None:
        """`append`, with q(token) already read for the whole batch."""
        self.append(token, q=q)
        self._confidences.append(confidence)


@dataclass
class Request:
    """What is remembered of a request between its rounds."""

    memory: Any
    experience: Experience
    metrics: Metrics = field(default_factory=Metrics)
    row: Row | None = None
    """Its candidates that are being verified."""
    num_context: int = 0
    """Tokens before those candidates."""


class Rounds:
    """The requests of one engine under one policy. `max_tokens` is the most candidates the engine has room for.

    `costs`, where given, stand as they are; else `clock` measures them.
    """

    def __init__(
        self, policy: Policy, *, max_tokens: int, judging: Judging | None, costs: Costs | None, clock: StepClock, meters: Meters
    ):
        self.policy, self.max_tokens = policy, max_tokens
        self._judges_by_q = judges_by_q(judge_of(policy))
        self._judging, self._costs, self._clock, self._meters = judging, costs, clock, meters
        self._requests: dict[int, Request] = {}
        self._experiences: OrderedDict[Hashable, Experience] = OrderedDict()
        self._batch: Sequence[Seen] = ()
        self._rows: list[Row | None] = []
        self._is_greedy = torch.zeros(0, dtype=torch.bool)
        self._is_steady = self._is_ready = False
        self._num_steps = 0
        self._entered_s = self._left_s = self._first_s = self._draft_s = self._head_s = 0.0

    @classmethod
    def of(cls, policy: Policy, *, device: Any, **others: Any) -> "Rounds":
        """With the head that the policy asks, if it asks one, on the draft's device."""
        judge = judge_of(policy)
        judging = None
        if isinstance(judge, HeadPolicy) and judge.head is not None:
            judging = Judging(judge.head, calibrated=judge.calibrated, device=device)
        return cls(policy, judging=judging, **others)

    def settle(self, batch: Sequence[Seen]) -> None:
        """Learn from a target pass, the host having waited for it."""
        self._entered_s = perf_counter()
        self._batch = batch
        requests = [self._requests.get(id(seen.state)) for seen in batch]
        outcomes = [
            (request, seen, request.row)
            for request, seen in zip(requests, batch, strict=True)
            if request is not None and request.row is not None and seen.num_sampled and request.num_context == seen.num_context
        ]
        self._is_steady = bool(batch) and len(outcomes) == len(batch)  # nobody has just come, or been held up
        verify_s = self._entered_s - self._left_s
        if self._is_steady:
            num, num_drafted = len(batch), sum(seen.num_drafted for seen in batch)
            self._clock.verified(num, 1 + num_drafted / num, verify_s)
            if num_drafted and self._is_ready:
                self._clock.made(num, sum(seen.num_sampled for seen in batch) / num, self._draft_s + verify_s)
        self._is_ready = True
        for request, seen, row in outcomes:
            self._learn(request, seen, row, verify_s)
        for request in requests:
            if request is not None:
                request.row = None

    def _learn(self, request: Request, seen: Seen, row: Row, verify_s: float) -> None:
        outcome = Verified(
            num_tokens=seen.num_sampled,
            num_drafted=seen.num_drafted,
            num_accepted=seen.num_sampled - 1,
            expected_s=row.costs.round_s(seen.num_drafted) if row.costs else 0.0,
            costs=row.costs,
            draft_s=self._draft_s - self._head_s,
            head_s=self._head_s,
            verify_s=verify_s,
            judged=row.judged[: seen.num_drafted],
        )
        if row.is_timed or not self.policy.needs_costs:
            is_own = outcome.num_drafted or row.stop not in (TO_TIME, NOT_WORTH)
            request.memory = (self.policy.learn if is_own else self.policy.aside)(request.memory, outcome)
        request.metrics += Metrics(
            num_tokens=outcome.num_tokens,
            num_spec_steps=1,
            num_draft_tokens=outcome.num_drafted,
            num_accepted_draft_tokens=outcome.num_accepted,
            acceptance_histogram=Counter([outcome.num_accepted]),
            drafted_histogram=Counter([outcome.num_drafted]),
        )
        judged = row.decision.read(row.judged[: seen.num_drafted])
        self._meters.observe_round(
            num_drafted=outcome.num_drafted,
            num_accepted=outcome.num_accepted,
            num_judged_accepted=min(outcome.num_accepted, len(judged)),
            expected=sum(accumulate(judged, mul), 0.0),
        )

    def open(self, max_tokens: int) -> list[bool]:
        """Begin a round of at most `max_tokens` candidates each; which rows take a first one."""
        self._num_steps, self._head_s = 0, 0.0
        if self._judging is not None:
            self._judging.start()
        costs, is_timed = (self._costs, True) if self._costs else self._clock.costs(len(self._batch))
        most = min(max_tokens, self.max_tokens)
        self._is_greedy = torch.tensor([seen.is_greedy for seen in self._batch], dtype=torch.bool)
        self._rows = [self._row(seen, most, costs, is_timed) if seen.num_sampled else None for seen in self._batch]
        goes_on = self._going_on()
        if any(goes_on) and (reason := self._overruled()) is not None:
            self._end(reason)
            return [False] * len(goes_on)
        return goes_on

    def _overruled(self) -> Stop | None:
        """Why the batch does not draft although some of its requests want to; never where costs or a minimum were given."""
        if not self.policy.needs_costs or self.policy.min_tokens or self._costs is not None:
            return None
        if self._is_steady and self._clock.wants_plain(len(self._batch)):
            return TO_TIME
        return None if self._clock.drafts(len(self._batch)) else NOT_WORTH

    def caught_up(self) -> None:
        """The draft has read, in passes of their own, what it had missed: the coming step is not like others."""
        self._is_steady = self._is_ready = False

    def _row(self, seen: Seen, most: int, costs: Costs, is_timed: bool) -> Row:
        request, policy = self._request(seen), self.policy
        if not is_timed and isinstance(policy, CostAware) and not policy.min_tokens:
            policy = replace(policy, min_tokens=1)  # a guess must not decide against it: what is never drafted is never timed
        row = request.row = Row(
            costs=costs if self.policy.needs_costs else None,
            decision=decide(policy, request.memory, costs, most),
            ends=seen.ends,
            is_timed=is_timed,
        )
        request.num_context = seen.num_context + seen.num_sampled
        return row

    def _request(self, seen: Seen) -> Request:
        """Forgotten, and its figures reported, as soon as the engine drops the state."""
        key = id(seen.state)
        if key not in self._requests:
            experience = self._experience(seen.sampling)
            memory = self.policy.begin(experience.begin(), num_tokens=seen.num_context, is_greedy=seen.is_greedy)
            self._requests[key] = Request(memory=memory, experience=experience)
            weakref.finalize(seen.state, self._finish, key).atexit = False
        return self._requests[key]

    def _experience(self, sampling: Hashable) -> Experience:
        found = self._experiences.setdefault(sampling, Experience(self.policy))
        self._experiences.move_to_end(sampling)
        while len(self._experiences) > SAMPLINGS:
            self._experiences.popitem(last=False)
        return found

    def _finish(self, key: int) -> None:
        request = self._requests.pop(key)
        if request.metrics.num_spec_steps:
            request.experience.add(request.memory)
            self._meters.observe_request(request.metrics)

    def advance(self, hidden: Float[Tensor, "B D"], tokens: Int[Tensor, " B"], q: Float[Tensor, "B V"]) -> list[bool]:
        """Take the candidates of a draft step, drawn from q; which rows take another. Rows that have stopped take none."""
        self._num_steps += 1
        confidences = q.gather(1, tokens.long()[:, None])[:, 0].tolist()
        drawn = tokens.tolist()
        started = perf_counter()
        said = None if self._judging is None else self._judging(hidden, tokens, q, is_greedy=self._is_greedy.to(q.device))
        accept = None if said is None else said.tolist()
        self._head_s += perf_counter() - started
        for i, row in enumerate(self._rows):
            if row is None or not row.is_open:
                continue
            row.add(drawn[i], q[i], confidences[i])
            if accept is not None:
                row.judged.append(accept[i])
            elif self._judges_by_q:
                row.judged.append(by_q(confidences[i]))
        goes_on = self._going_on()
        if self._num_steps == 1:
            self._first_s = perf_counter() - self._entered_s
        return goes_on

    def _going_on(self) -> list[bool]:
        rows = [row for row in self._rows if row is not None]
        for row in rows:
            if row.is_open and (stop := self._stop(row)) is not None:
                row.stop, row.is_open = stop, False
        going = [row for row in rows if row.is_open]
        if going and self._num_steps and self.policy.needs_costs and not self._pays(going, len(rows)):
            self._end(TOO_FEW)
        return [row is not None and row.is_open for row in self._rows]

    def _end(self, reason: Stop) -> None:
        """No row goes on."""
        for row in self._rows:
            if row is not None and row.is_open:
                row.stop, row.is_open = reason, False

    def _pays(self, going: Sequence[Row], num_rows: int) -> bool:
        """Whether a further draft step for some of the rows pays for all of them.

        A row's threshold is what a candidate costs if all of them take one. Where only some do, the step itself is as long,
        so that each has to bear more of it, while the pass of the target is wider for those only.
        """
        brought = needed = 0.0
        for row in going:
            rule, k = row.decision.rule, row.num_tokens
            if rule is None or k >= len(rule.least) or row.costs is None:
                return True  # it goes on for a reason of its own
            wider_s, draft_s = row.costs.pass_s(k + 2) - row.costs.pass_s(k + 1), row.costs.draft_s
            share = num_rows / len(going)
            more = (wider_s + share * draft_s) / (wider_s + draft_s) if wider_s + draft_s else share
            brought, needed = brought + rule.value(row), needed + max(0.0, rule.least[k]) * more
        return brought >= needed

    def _stop(self, row: Row) -> Stop | None:
        """Why a row takes no further candidate; in the order of `rounds.host.propose`."""
        if row.tokens and row.tokens[-1] in row.ends:
            return END_OF_TEXT
        if row.num_tokens >= row.decision.limit:
            return row.decision.at_limit
        stop = row.decision.stop(row)
        if stop is not None and self.policy.drops_last and row.tokens:
            row.drop_last()
        return stop

    def close(self) -> list[list[int]]:
        """End the round: the candidates of every row, none where the prompt is still being read."""
        self._left_s = perf_counter()
        self._draft_s = self._left_s - self._entered_s
        if self._is_steady and self._num_steps:
            later_s = self._draft_s - self._first_s
            self._clock.drafted(len(self._rows), self._first_s, later_s, self._num_steps - 1)
        self._batch = ()  # a state that is held here would not be dropped by the engine
        return [[] if row is None else list(row.tokens) for row in self._rows]


def parameter_ratio(draft: int, target: int) -> float:
    """A draft step over a target pass before either was timed: at small batches both read all of their weights."""
    return draft / target if target and math.isfinite(draft / target) else 0.1
