"""The step in compiled code, one call for each half (`backends/native/cpp/step.h`): what happens between the forward passes
would otherwise take longer than it may. On a small pair the steps of Python and torch are a fifth of a step.

    propose   forward, draw, the head's estimate, the stop test, for each draft token
    verify    the target's pass and the acceptance test

Requests over the same weights share both, and pieces of prompts are read in the first pass of either model. Where draft tokens
are copied from the text (`copying`) there is only the second half.
What is decided is what `host` decides, with the same uniforms (up to the rounding of exponentials).
"""

import ctypes
import math
from collections import defaultdict
from collections.abc import Sequence
from time import perf_counter as _now
from typing import Any
from weakref import WeakKeyDictionary

import torch

from specdecpp.backends.native import Drafting, Filters, Head, NativeCache, Verifying
from specdecpp.drafters import SuffixDrafter
from specdecpp.drafters.copying import Copying, propose
from specdecpp.head import SCALARS, RowEstimator
from specdecpp.policies.head import heads, judge_of, judges_by_q, judges_plainly
from specdecpp.policies.protocol import END_OF_TEXT, Decision, Evidence, Stop
from specdecpp.sampling import Uniforms, seen_rows
from specdecpp.scheduler import Reading
from specdecpp.step import Host, Plan, Request, Result, Rows
from specdecpp.verify import BlockVerification, CompareVerification, GreedyVerification, TokenVerification, Verification

_SCALARS = {name: i for i, name in enumerate(SCALARS)}
_EVIDENCE = {evidence: i for i, evidence in enumerate(Evidence)}
_OF_Q = Evidence.LAST_Q, Evidence.PRODUCT_OF_Q, Evidence.NEGATIVE_ENTROPY
_STOPPED, _ENDED = 1, 2
COMPARE = 2
_SAMPLED = {TokenVerification: 0, BlockVerification: 1, CompareVerification: COMPARE}
_GREEDY = {GreedyVerification: 0, CompareVerification: COMPARE}
_LONG = 32
"""Tokens of a prompt that are quicker read by its two models in one pass than beside the steps of others."""


class Native:
    """Takes requests whose target is a `NativeModel`, and the draft another or a `SuffixDrafter`. A policy that has to be
    asked draft token by draft token, and another verification or way to judge, are run by the host."""

    has_batches = True

    def __init__(self) -> None:
        self._requests: WeakKeyDictionary[Request, _Steps | _CopiedSteps] = WeakKeyDictionary()
        self._heads: WeakKeyDictionary[RowEstimator, _CompiledHead] = WeakKeyDictionary()
        self._host, self._copying = Host(), Copying()

    def refusal(self, request: Request) -> str | None:
        """Why a request cannot be run here; None where it can."""
        if not (type(request.target) is NativeCache and type(request.draft) in (NativeCache, SuffixDrafter)):
            return "its models are not both run by compiled code"
        if not all(isinstance(stream, Uniforms) for stream in request.randomness):
            return "its randomness is no stream of uniforms"
        if _code(request) is None:
            return f"{type(request.verification).__name__} is not known to it at temperature {request.sampling.temperature:g}"
        judge = judge_of(request.policy)
        if judge is not None and not judges_plainly(judge):
            return f"{type(judge).__name__} judges draft tokens in a way of its own"
        if any(head.output.weight.device.type != "cpu" for head in heads(request.policy)):
            return "its head lies elsewhere"
        return None

    def run(self, plans: Sequence[Plan], readings: Sequence[Reading] = ()) -> list[Result]:
        results: dict[int, Result] = {}
        groups: dict[Any, tuple[list[int], list[Reading]]] = defaultdict(lambda: ([], []))
        for i, plan in enumerate(plans):
            if plan.decision.rule is None:
                aside = self._copying if isinstance(plan.request.draft, SuffixDrafter) else self._host
                (results[i],) = aside.run([plan])
            else:
                groups[_weights(plan.request)][0].append(i)
        least = _LONG if len(plans) + len(readings) > 1 else 1
        for reading in readings:
            if not reading.by_both(least):
                groups[_weights(reading.request)][1].append(reading)
        for group, beside in groups.values():
            made = _together([(self._steps(plans[i].request), plans[i]) for i in group], beside)
            results.update(zip(group, made, strict=True))
        return [results[i] for i in range(len(plans))]

    def _steps(self, request: Request) -> "_Steps | _CopiedSteps":
        steps = self._requests.get(request)
        if steps is None:
            copies = isinstance(request.draft, SuffixDrafter)
            steps = self._requests[request] = _CopiedSteps(request) if copies else _Steps(request, self._head_of(request))
        return steps

    def _head_of(self, request: Request) -> "_CompiledHead | None":
        judge: Any = judge_of(request.policy)
        if judge is None or judges_by_q(judge):
            return None
        estimator = judge.estimator(is_greedy=request.sampling.is_greedy)
        if estimator not in self._heads:
            self._heads[estimator] = _CompiledHead(estimator)
        return self._heads[estimator]


def _code(request: Request) -> int | None:
    """The compiled code's number for the verification of a request; None for one that it does not know."""
    known: dict[type[Verification], int] = _GREEDY if request.sampling.is_greedy else _SAMPLED
    return known.get(type(request.verification))


def _weights(request: Request) -> tuple[Any, Any]:
    """Equal for requests that share passes."""
    draft = request.draft
    return request.target.model, None if isinstance(draft, SuffixDrafter) else draft.model


def _together(batch: "Sequence[tuple[_Steps | _CopiedSteps, Plan]]", beside: Sequence[Reading]) -> list[Result]:
    """Steps of requests over the same weights: one pass of the draft a draft token, and one of the target. Seconds are shared
    by the rows that were read."""
    started = _now()
    all_of_them: list[tuple[Any, Any]] = [*batch, *((_Prompt(reading), reading) for reading in beside)]
    drafting = [(one, told) for one, what in all_of_them if (told := one.drafts(what)) is not None]
    nums = []
    if drafting:
        nums = drafting[0][0].draft.model.propose([one.draft for one, _ in drafting], [told for _, told in drafting])
    for (one, _), num in zip(drafting, nums, strict=True):
        one.drafted(num)
    drafted = _now()
    reading = [(one, told) for one, what in all_of_them if (told := one.verifies(what)) is not None]
    if reading:
        reading[0][0].target.model.verify([one.target for one, _ in reading], [told for _, told in reading])
    draft_rows = {one: told.num_unread + max(0, num - 1) for (one, told), num in zip(drafting, nums, strict=True)}
    draft_s = _shared(drafted - started, draft_rows)
    verify_s = _shared(_now() - drafted, {one: told.num_tokens for one, told in reading})
    for one, what in all_of_them[len(batch) :]:
        what.took_s = draft_s.get(one, 0.0) + verify_s.get(one, 0.0)
    return [steps.result(plan, draft_s.get(steps, 0.0), verify_s[steps]) for steps, plan in batch]


def _shared(seconds: float, rows: dict[Any, int]) -> dict[Any, float]:
    return {one: seconds * num / sum(rows.values()) for one, num in rows.items()}


class _Prompt:
    """A piece of a prompt, as arguments of the two calls."""

    def __init__(self, reading: Reading):
        self.target: Any = reading.request.target
        self.draft: Any = reading.request.draft

    def drafts(self, reading: Reading) -> Drafting | None:
        if isinstance(self.draft, SuffixDrafter):
            self.draft.extend(reading.draft, rows=1)
            return None
        self.draft.model.check_ids(reading.draft)
        self._unread = (ctypes.c_int64 * len(reading.draft))(*reading.draft)
        return Drafting(unread=ctypes.addressof(self._unread), num_unread=len(reading.draft)) if reading.draft else None

    def drafted(self, num: int) -> None:
        """A prompt draws no draft tokens."""

    def verifies(self, reading: Reading) -> Verifying | None:
        self.target.model.check_ids(reading.target)
        self._tokens = (ctypes.c_int64 * len(reading.target))(*reading.target)
        told = Verifying(tokens=ctypes.addressof(self._tokens), num_tokens=len(reading.target), num=-1)
        return told if reading.target else None


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


class _Verified:
    """The target's half of the steps of one request: the arguments of its call, and the memory that it writes to.

    It holds what it needs of the request and not the request itself, whose end frees it.
    """

    def __init__(self, request: Request, code: int | None):
        assert code is not None, "others are refused"
        self.target: Any = request.target
        self._sampling, self._seen = request.sampling, request.seen
        self._tests: Any = request.randomness[1]
        self._verifying = Verifying(sampling=Filters.of(request.sampling, request.seen), verification=code)
        self._compares, self._most = code == COMPARE, -1

    def _make_room(self, limit: int) -> bool:
        """Have memory for a step of so many draft tokens; what an earlier step wrote there is over. Tell whether it is new."""
        if limit <= self._most:
            return False
        self._most = limit
        self._logits = torch.empty(limit + 1, self.target.vocab_size)
        self._states = torch.empty(limit + 1, self.target.hidden_size)
        self._verifying.logits, self._verifying.states = self._logits.data_ptr(), self._states.data_ptr()
        return True

    def _asked(self, plan: Plan, tokens: list[int]) -> Verifying:
        """Arguments of the target's call for these draft tokens."""
        unread, num, told = plan.tokens[self.target.length :], len(tokens), self._verifying
        if len(unread) > 1:
            self.target.extend(unread[:-1], rows=1)
        uniforms = () if self._sampling.is_greedy else self._tests.peek(num + 1)
        self._given = (ctypes.c_int64 * (num + 1))(unread[-1], *tokens), (ctypes.c_double * (num + 1))(*uniforms)
        told.tokens, told.uniforms = map(ctypes.addressof, self._given)
        told.num_tokens, told.num = num + 1, num
        self._raw = torch.empty(num + 1, self.target.vocab_size) if plan.wants_rows else None
        told.raw = None if self._raw is None else self._raw.data_ptr()
        return told

    def _take(self) -> None:
        """Use up the uniforms of the tests."""
        if not self._sampling.is_greedy:
            said = self._verifying
            self._tests.take(said.num_accepted + 1 if self._compares else said.num_tokens)

    def _rows_of(self, q: torch.Tensor, tokens: list[int]) -> Rows:
        """The rows that the step was decided on."""
        assert self._raw is not None, "somebody wants them"
        seen = None if self._seen is None else seen_rows(self._seen, torch.tensor(tokens, dtype=torch.long))
        return Rows(q=q, logits=self._raw, sampling=self._sampling, seen=seen)


class _Steps(_Verified):
    """The steps of one request whose draft is a model: the draft's half beside the target's."""

    def __init__(self, request: Request, head: _CompiledHead | None):
        super().__init__(request, _code(request))
        self.draft: Any = request.draft
        self._drops = request.policy.drops_last
        self._draws: Any = request.randomness[0]
        self._head, ends = head, tuple(request.ends)
        self._followed: Any = None
        self._ends = (ctypes.c_int64 * len(ends))(*ends)
        sampling = Filters.of(request.sampling, request.seen)
        self._drafting = Drafting(ends=ctypes.addressof(self._ends), num_ends=len(ends), sampling=sampling)
        self._has_overlaps = type(request.verification) is TokenVerification and not request.sampling.is_greedy
        self._judges = head is not None or judges_by_q(judge_of(request.policy))
        if head is not None:
            self._drafting.head = ctypes.addressof(head.told)
        else:
            self._drafting.judges_by_q = self._judges

    def drafts(self, plan: Plan) -> Drafting | None:
        """Arguments of the draft's call; None where no draft token is to be drafted."""
        self._num, self._stop, self._decision = 0, None, plan.decision
        decision, limit = plan.decision, plan.decision.limit
        rule: Any = decision.rule
        self._make_room(limit)
        if not limit:
            self._stop = decision.at_limit
        elif not rule.threshold(0) <= 1.0:
            self._stop = rule.why(0, 1.0)
        if self._stop is not None:
            return None
        unread = plan.tokens[self.draft.length :]
        if len(unread) > 2:
            self.draft.extend(unread[:-1], rows=1)
            unread = unread[-1:]
        told = self._drafting
        if self._followed is not rule or told.limit != limit:
            self._follow(rule, limit)
        uniforms = () if self._sampling.is_greedy else self._draws.peek(len(self._least))
        self._given = given = (ctypes.c_int64 * len(unread))(*unread), (ctypes.c_double * len(uniforms))(*uniforms)
        told.unread, told.uniforms = map(ctypes.addressof, given)
        told.num_unread = len(unread)
        return told

    def _follow(self, rule: Any, limit: int) -> None:
        """Tell the draft's call of a rule; it may be that of many steps."""
        told, least = self._drafting, rule.thresholds(limit)
        reachable = next((i for i, value in enumerate(least, 1) if value > 1.0), limit)  # no evidence is above 1
        self._followed, self._least = rule, (ctypes.c_double * reachable)(*least[:reachable])
        told.least, told.limit, told.evidence = ctypes.addressof(self._least), limit, _EVIDENCE[rule.evidence]
        told.scores = rule.score is not None
        if rule.score is not None:
            told.bias, told.slope = rule.score.bias, rule.score.slope

    def drafted(self, num: int) -> None:
        """Note that `num` draft tokens have been drawn."""
        self._num, self._stop = num, self._why(self._decision, num)
        if not self._sampling.is_greedy:
            self._draws.take(num)

    def _why(self, decision: Decision, num: int) -> Stop:
        if self._drafting.why == _ENDED:
            return END_OF_TEXT
        rule: Any = decision.rule
        return rule.why(num, self._drafting.value) if self._drafting.why == _STOPPED else decision.at_limit

    def _make_room(self, limit: int) -> bool:
        """Have memory for both halves."""
        if not super()._make_room(limit):
            return False
        self._rows = torch.empty(limit, self.draft.vocab_size)
        self._tokens = (ctypes.c_int64 * limit)()
        self._confidence, self._accept = (ctypes.c_double * limit)(), (ctypes.c_double * limit)()
        told = self._drafting
        told.tokens, told.confidence, told.accept = map(ctypes.addressof, (self._tokens, self._confidence, self._accept))
        told.rows = self._verifying.q = self._rows.data_ptr()
        self._overlaps = (ctypes.c_double * limit)()
        self._verifying.overlaps = ctypes.addressof(self._overlaps)
        return True

    def verifies(self, plan: Plan) -> Verifying:
        """Arguments of the target's call."""
        is_dropped = self._drops and self._num > 0 and self._drafting.why == _STOPPED
        self._kept = self._tokens[: self._num - is_dropped]
        return self._asked(plan, self._kept)

    def result(self, plan: Plan, draft_s: float, verify_s: float) -> Result:
        """Result of the step; the seconds are this request's share of what its batch took."""
        told, said, num, tokens = self._drafting, self._verifying, self._num, self._kept
        self._take()
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
            rows=None if self._raw is None else self._rows_of(self._beliefs(len(tokens)), tokens),
            overlaps=self._overlaps[: min(said.num_accepted + 1, len(tokens))] if self._has_overlaps else (),
        )

    def _beliefs(self, num: int) -> torch.Tensor:
        """q of the first draft tokens; under greedy drafting softmaxes."""
        drawn = self._rows[:num]
        return drawn.softmax(-1) if self._sampling.is_greedy else drawn.clone()


class _CopiedSteps(_Verified):
    """The steps of a request whose draft tokens are copied: found here, compared by the target's pass."""

    def __init__(self, request: Request):
        super().__init__(request, COMPARE)

    def drafts(self, plan: Plan) -> None:
        """There is no draft model to call."""
        started = _now()
        self._draft, self._stop = plan.found or propose(plan)
        self._draft_s = _now() - started

    def verifies(self, plan: Plan) -> Verifying:
        """Arguments of the target's call."""
        self._make_room(self._draft.num_tokens)
        return self._asked(plan, self._draft.tokens)

    def result(self, plan: Plan, draft_s: float, verify_s: float) -> Result:
        """Result of the step."""
        draft, said = self._draft, self._verifying
        self._take()
        return Result(
            tokens=draft.tokens,
            num_accepted=said.num_accepted,
            next_token=said.next,
            stop=self._stop,
            q=[draft.confidence(i) for i in range(draft.num_tokens)],
            judged=draft.judged,
            draft_s=self._draft_s,
            verify_s=verify_s,
            forward_s=said.forward_s,
            rows=None if self._raw is None else self._rows_of(draft.rows(self.target.vocab_size), draft.tokens),
        )
