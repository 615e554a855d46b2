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

    has_batches = True

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
        results: dict[int, Result] = {}
        groups: dict[Any, list[int]] = {}  # of requests over the same weights
        for i, plan in enumerate(plans):
            if plan.decision.rule is None:
                (results[i],) = self._host.run([plan])
            else:
                target: Any = plan.request.target
                draft: Any = plan.request.draft
                groups.setdefault((target.batch_key, draft.batch_key), []).append(i)
        for group in groups.values():
            results.update(zip(group, _together([(self._rounds(plans[i].request), plans[i]) for i in group]), strict=True))
        return [results[i] for i in range(len(plans))]

    def _rounds(self, request: Request) -> "_Rounds":
        rounds = self._requests.get(request)
        if rounds is None:
            rounds = self._requests[request] = _Rounds(request, self._head_of(request))
        return rounds

    def _head_of(self, request: Request) -> "_CompiledHead | None":
        judge: Any = judge_of(request.policy)
        if judge is None or judges_by_q(judge):
            return None
        estimator = judge.estimator(is_greedy=request.sampling.is_greedy)
        if estimator not in self._heads:
            self._heads[estimator] = _CompiledHead(estimator)
        return self._heads[estimator]


def _together(batch: "Sequence[tuple[_Rounds, Plan]]") -> list[Result]:
    """Rounds of requests over the same weights: one pass of the draft a candidate, and one of the target."""
    started = _now()
    asked = [(rounds, told) for rounds, plan in batch if (told := rounds.drafts(plan)) is not None]
    if asked:
        nums = NativeRunner.propose([rounds.draft for rounds, _ in asked], [told for _, told in asked])
        for (rounds, _), num in zip(asked, nums, strict=True):
            rounds.drafted(num)
    drafted = _now()
    NativeRunner.verify([rounds.target for rounds, _ in batch], [rounds.verifies(plan) for rounds, plan in batch])
    draft_s, verify_s = (drafted - started) / max(1, len(asked)), (_now() - drafted) / len(batch)
    drafting = {id(rounds) for rounds, _ in asked}
    return [rounds.result(plan, draft_s if id(rounds) in drafting else 0.0, verify_s) for rounds, plan in batch]


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
        self.target: Any = request.target
        self.draft: Any = request.draft
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

    def drafts(self, plan: Plan) -> Drafting | None:
        """What the draft is told; None where there is to be no candidate."""
        self._num, self._stop, self._decision = 0, None, plan.decision
        decision, limit = plan.decision, plan.decision.limit
        rule: Any = decision.rule
        self._make_room(limit)
        least = rule.least
        if not limit:
            self._stop = decision.at_limit
        elif least and not least[0] <= 1.0:
            self._stop = rule.why(0, 1.0)
        if self._stop is not None:
            return None
        unread = plan.tokens[self.draft.length :]
        if len(unread) > 2:
            self.draft.extend(unread[:-1], rows=1)
            unread = unread[-1:]
        least = (*least[:limit], *(-math.inf,) * (limit - len(least)))
        uniforms = () if self._sampling.is_greedy else self._uniforms[0].peek(limit)
        self._given = given = (
            (ctypes.c_int64 * len(unread))(*unread),
            (ctypes.c_double * limit)(*least),
            (ctypes.c_double * limit)(*uniforms),
        )
        told = self._drafting
        told.unread, told.least, told.uniforms = map(ctypes.addressof, given)
        told.num_unread, told.limit, told.evidence = len(unread), limit, _EVIDENCE[rule.evidence]
        told.scores = rule.score is not None
        if rule.score is not None:
            told.bias, told.slope = rule.score.bias, rule.score.slope
        return told

    def drafted(self, num: int) -> None:
        """So many candidates have been drawn."""
        self._num, self._stop = num, self._why(self._decision, num)
        if not self._sampling.is_greedy:
            self._uniforms[0].take(num)

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
        self._rows = torch.empty(limit, self.draft.vocab_size)
        self._logits = torch.empty(limit + 1, self.target.vocab_size)
        self._states = torch.empty(limit + 1, self.target.hidden_size)
        self._tokens = (ctypes.c_int64 * limit)()
        self._confidence, self._accept = (ctypes.c_double * limit)(), (ctypes.c_double * limit)()
        told = self._drafting
        told.tokens, told.confidence, told.accept = map(ctypes.addressof, (self._tokens, self._confidence, self._accept))
        told.rows = self._verifying.q = self._rows.data_ptr()
        self._verifying.logits, self._verifying.states = self._logits.data_ptr(), self._states.data_ptr()

    def verifies(self, plan: Plan) -> Verifying:
        """What the target is told."""
        self._kept = tokens = self._tokens[: self._num - (self._drops and self._num > 0 and self._drafting.why == _STOPPED)]
        unread, num = plan.tokens[self.target.length :], len(tokens)
        if len(unread) > 1:
            self.target.extend(unread[:-1], rows=1)
            unread = unread[-1:]
        uniforms = () if self._sampling.is_greedy else self._uniforms[1].peek(num + 1)
        self._given = (ctypes.c_int64 * (num + 1))(*unread, *tokens), (ctypes.c_double * (num + 1))(*uniforms)
        told = self._verifying
        told.tokens, told.uniforms = map(ctypes.addressof, self._given)
        told.num_tokens, told.num = num + 1, num
        self._raw = torch.empty(num + 1, self.target.vocab_size) if plan.wants_rows else None
        told.raw = None if self._raw is None else self._raw.data_ptr()
        return told

    def result(self, plan: Plan, draft_s: float, verify_s: float) -> Result:
        """What became of the round; the seconds are this request's share of what its batch took."""
        told, said, num, tokens = self._drafting, self._verifying, self._num, self._kept
        if not self._sampling.is_greedy:
            self._uniforms[1].take(said.num_accepted + 1 if self._compares else said.num_tokens)
        rule: Any = plan.decision.rule
        reads_q = not self._sampling.is_greedy or self._judges or rule.evidence in _OF_Q
        has_drafted, num_judged = num > 0, max(0, num - 1) if self._head is not None and self._head.lags else num
        head_s = told.head_s if has_drafted else 0.0
        assert self._stop is not None, "drafting has ended"
        return Result(
            tokens=tokens,
            num_accepted=said.num_accepted,
            next_token=said.next,
            stop=self._stop,
            q=self._confidence[: len(tokens)] if reads_q else (),
            judged=() if not self._judges else self._accept[: min(num_judged, len(tokens))],
            draft_s=max(0.0, draft_s - head_s),
            head_s=head_s,
            verify_s=verify_s,
            forward_s=(told.forward_s if has_drafted else 0.0) + said.forward_s,
            rows=None if self._raw is None else self._said(self._raw, tokens),
        )

    def _said(self, logits: torch.Tensor, tokens: list[int]) -> Rows:
        """What was decided on."""
        drawn = self._rows[: len(tokens)]
        seen = None if self._seen is None else seen_rows(self._seen, torch.tensor(tokens, dtype=torch.long))
        q = drawn.softmax(-1) if self._sampling.is_greedy else drawn.clone()
        return Rows(q=q, logits=logits, sampling=self._sampling, seen=seen)
