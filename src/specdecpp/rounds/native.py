"""The round in compiled code, one call for each half (`runners/native/cpp/round.h`): what happens between the forward passes
would otherwise take longer than it may. On a small pair the steps of Python and torch are a fifth of a round.

    propose   forward, draw, the head's estimate, the stop test, for each candidate
    verify    the target's pass and the acceptance test

What is decided is what `host` decides, with the same uniforms (up to the rounding of exponentials).
"""

import ctypes
import math
from collections.abc import Sequence
from time import perf_counter as _now
from typing import Any
from weakref import WeakKeyDictionary

import torch

from specdecpp.head import SCALARS, RowEstimator
from specdecpp.policies.head import heads, judge_of, judges_by_q, judges_plainly
from specdecpp.policies.protocol import END_OF_TEXT, Decision, Evidence, Stop
from specdecpp.rounds.host import Host
from specdecpp.rounds.plan import Plan, Request, Result, Rows
from specdecpp.rounds.verification import BlockVerification, CompareVerification, GreedyVerification, TokenVerification
from specdecpp.runners.native import Drafting, Filters, Head, NativeRunner, Verifying
from specdecpp.sampling import Sampling, Uniforms, seen_rows

_SCALARS = {name: i for i, name in enumerate(SCALARS)}
_SAMPLED = {TokenVerification: 0, BlockVerification: 1, CompareVerification: 2}
_GREEDY = {GreedyVerification: 0, CompareVerification: 2}
_EVIDENCE = {evidence: i for i, evidence in enumerate(Evidence)}
_OF_Q = Evidence.LAST_Q, Evidence.PRODUCT_OF_Q, Evidence.NEGATIVE_ENTROPY
_STOPPED, _ENDED = 1, 2


class Native:
    """Takes requests whose models are both `NativeRunner`s. A policy that has to be asked candidate by candidate, and a
    verification or a way to judge of somebody's own, are the host's."""

    def __init__(self) -> None:
        self._requests: WeakKeyDictionary[Request, _Rounds] = WeakKeyDictionary()
        self._heads: WeakKeyDictionary[RowEstimator, _CompiledHead] = WeakKeyDictionary()
        self._host = Host()

    def refusal(self, request: Request) -> str | None:
        """Why a request cannot be run here; None where it can."""
        if not (type(request.target) is NativeRunner and type(request.draft) is NativeRunner):
            return "its models are not both run by compiled code"
        if not all(isinstance(stream, Uniforms) for stream in request.randomness):
            return "its randomness is no stream of uniforms"
        if type(request.verification) not in (_GREEDY if request.sampling.is_greedy else _SAMPLED):
            return f"{type(request.verification).__name__} is not known to it at temperature {request.sampling.temperature:g}"
        judge = judge_of(request.policy)
        if judge is not None and not judges_plainly(judge):
            return f"{type(judge).__name__} judges candidates in a way of its own"
        if any(head.output.weight.device.type != "cpu" for head in heads(request.policy)):
            return "its head lies elsewhere"
        return None

    def run(self, plans: Sequence[Plan]) -> list[Result]:
        return [self._one(plan) for plan in plans]

    def _one(self, plan: Plan) -> Result:
        if plan.decision.rule is None:
            return self._host.run([plan])[0]
        rounds = self._requests.get(plan.request)
        if rounds is None:
            rounds = self._requests[plan.request] = _Rounds(plan.request, self._head_of(plan.request))
        return rounds.run(plan)

    def _head_of(self, request: Request) -> "_CompiledHead | None":
        judge: Any = judge_of(request.policy)
        if judge is None or judges_by_q(judge):
            return None
        estimator = judge.estimator(is_greedy=request.sampling.is_greedy)
        if estimator not in self._heads:
            self._heads[estimator] = _CompiledHead(estimator)
        return self._heads[estimator]


class _CompiledHead:
    """A head as the compiled code reads it, and the arrays that its addresses are of."""

    def __init__(self, estimator: RowEstimator):
        card, self._arrays, calibration = estimator.card, estimator.arrays, estimator.calibration
        weight, table, block, block_bias, output, output_bias = self._arrays
        self.lags = card.form == "lagged"
        self.told = Head(
            input=card.hidden_size,
            scalars=len(card.scalars),
            width=len(output),
            blocks=len(block),
            lags=self.lags,
            kinds=(ctypes.c_int32 * 4)(*(_SCALARS[name] for name in card.scalars)),
            weight=None if weight is None else weight.ctypes.data,
            table=table.ctypes.data,
            block=block.ctypes.data,
            block_bias=block_bias.ctypes.data,
            output=output.ctypes.data,
            shift=output_bias + math.log(calibration.rejection_weight),
            slope=1 / calibration.temperature,
            bias=calibration.bias,
        )


def filters(sampling: Sampling, seen: torch.Tensor | None) -> Filters:
    """How tokens are drawn, for the compiled code; `seen` must live as long as this is used."""
    return Filters(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        penalty=sampling.repetition_penalty,
        top_k=sampling.top_k or 0,
        seen=seen.data_ptr() if seen is not None and sampling.needs_seen else None,
    )


class _Rounds:
    """The rounds of one request: what the two calls are told, and the memory that they write to.

    It holds what it needs of the request and not the request itself, whose end frees it.
    """

    def __init__(self, request: Request, head: _CompiledHead | None):
        self._target: Any = request.target
        self._draft: Any = request.draft
        self._sampling, self._drops = request.sampling, request.policy.drops_last
        self._uniforms: Any = request.randomness
        self._seen, self._head, ends = request.seen, head, tuple(request.ends)
        self._ends, self._most = (ctypes.c_int64 * len(ends))(*ends), -1
        sampling = filters(request.sampling, request.seen)
        self._drafting = Drafting(ends=ctypes.addressof(self._ends), num_ends=len(ends), sampling=sampling)
        self._verifying = Verifying(sampling=sampling, verification=(_SAMPLED | _GREEDY)[type(request.verification)])
        self._compares = type(request.verification) is CompareVerification
        self._judges = head is not None or judges_by_q(judge_of(request.policy))
        if head is not None:
            self._drafting.head = ctypes.addressof(head.told)
        else:
            self._drafting.judges_by_q = self._judges

    def run(self, plan: Plan) -> Result:
        started = _now()
        num, stop = self._propose(plan)
        drafted = _now()
        tokens = self._tokens[: num - (self._drops and num > 0 and self._drafting.why == _STOPPED)]
        rows = self._verify(plan, tokens)
        told, said = self._drafting, self._verifying
        rule: Any = plan.decision.rule
        reads_q = not self._sampling.is_greedy or self._judges or rule.evidence in _OF_Q
        has_drafted, num_judged = num > 0, max(0, num - 1) if self._head is not None and self._head.lags else num
        head_s = told.head_s if has_drafted else 0.0
        return Result(
            tokens=tokens,
            num_accepted=said.num_accepted,
            next_token=said.next,
            stop=stop,
            q=self._confidence[: len(tokens)] if reads_q else (),
            judged=() if not self._judges else self._accept[: min(num_judged, len(tokens))],
            draft_s=drafted - started - head_s,
            head_s=head_s,
            verify_s=_now() - drafted,
            forward_s=(told.forward_s if has_drafted else 0.0) + said.forward_s,
            rows=rows,
        )

    def _propose(self, plan: Plan) -> tuple[int, Stop]:
        """How many candidates were drawn, and why no more."""
        decision, limit = plan.decision, plan.decision.limit
        rule: Any = decision.rule
        self._make_room(limit)
        least = rule.least
        if not limit:
            return 0, decision.at_limit
        if least and not least[0] <= 1.0:
            return 0, rule.why(0, 1.0)
        unread = plan.tokens[self._draft.length :]
        if len(unread) > 2:
            self._draft.extend(unread[:-1], rows=1)
            unread = unread[-1:]
        least = (*least[:limit], *(-math.inf,) * (limit - len(least)))
        uniforms = () if self._sampling.is_greedy else self._uniforms[0].peek(limit)
        given = (ctypes.c_int64 * len(unread))(*unread), (ctypes.c_double * limit)(*least), (ctypes.c_double * limit)(*uniforms)
        told = self._drafting
        told.unread, told.least, told.uniforms = map(ctypes.addressof, given)
        told.num_unread, told.limit, told.evidence = len(unread), limit, _EVIDENCE[rule.evidence]
        told.scores = rule.score is not None
        if rule.score is not None:
            told.bias, told.slope = rule.score.bias, rule.score.slope
        num = self._draft.propose(told)
        if uniforms:
            self._uniforms[0].take(num)
        return num, self._why(decision, num)

    def _why(self, decision: Decision, num: int) -> Stop:
        if self._drafting.why == _ENDED:
            return END_OF_TEXT
        rule: Any = decision.rule
        return rule.why(num, self._drafting.value) if self._drafting.why == _STOPPED else decision.at_limit

    def _make_room(self, limit: int) -> None:
        """Memory for a round of so many candidates; what an earlier round wrote there is over."""
        if limit <= self._most:
            return
        self._most = limit
        self._rows = torch.empty(limit, self._draft.vocab_size)
        self._logits = torch.empty(limit + 1, self._target.vocab_size)
        self._states = torch.empty(limit + 1, self._target.hidden_size)
        self._tokens = (ctypes.c_int64 * limit)()
        self._confidence, self._accept = (ctypes.c_double * limit)(), (ctypes.c_double * limit)()
        told = self._drafting
        told.tokens, told.confidence, told.accept = map(ctypes.addressof, (self._tokens, self._confidence, self._accept))
        told.rows = self._verifying.q = self._rows.data_ptr()
        self._verifying.logits, self._verifying.states = self._logits.data_ptr(), self._states.data_ptr()

    def _verify(self, plan: Plan, tokens: list[int]) -> Rows | None:
        unread, num = plan.tokens[self._target.length :], len(tokens)
        if len(unread) > 1:
            self._target.extend(unread[:-1], rows=1)
            unread = unread[-1:]
        uniforms = () if self._sampling.is_greedy else self._uniforms[1].peek(num + 1)
        given = (ctypes.c_int64 * (num + 1))(*unread, *tokens), (ctypes.c_double * (num + 1))(*uniforms)
        told = self._verifying
        told.tokens, told.uniforms = map(ctypes.addressof, given)
        told.num_tokens, told.num = num + 1, num
        raw = torch.empty(num + 1, self._target.vocab_size) if plan.wants_rows else None
        told.raw = None if raw is None else raw.data_ptr()
        self._target.verify(told)
        if uniforms:
            self._uniforms[1].take(told.num_accepted + 1 if self._compares else num + 1)
        return None if raw is None else self._said(raw, tokens)

    def _said(self, logits: torch.Tensor, tokens: list[int]) -> Rows:
        """What was decided on."""
        drawn = self._rows[: len(tokens)]
        seen = None if self._seen is None else seen_rows(self._seen, torch.tensor(tokens, dtype=torch.long))
        q = drawn.softmax(-1) if self._sampling.is_greedy else drawn.clone()
        return Rows(q=q, logits=logits, sampling=self._sampling, seen=seen)
