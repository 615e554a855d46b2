"""The halves of a step in compiled code, one call each (`cpp/step.h`), with the decisions and uniforms of `step.Host`.

    propose   forward, draw, the head's estimate, the stop test, for each draft token
    verify    the target's pass and the acceptance test

Requests over the same weights share both, and pieces of prompts are read in the first pass of either model. Draft tokens that
are copied from the text (`copying`) are only verified here.
"""

import ctypes
import math
from collections import defaultdict
from collections.abc import Sequence
from time import perf_counter as _now
from typing import Any
from weakref import WeakKeyDictionary

import torch

from specdecpp.backends.native.library import Drafting, Filters, Head, Verifying
from specdecpp.backends.native.model import NativeCache
from specdecpp.drafters import SuffixDrafter
from specdecpp.drafters.copying import Copying, propose
from specdecpp.head import SCALARS, RowEstimator
from specdecpp.policies.head import heads, judge_of, judges_by_q, judges_plainly
from specdecpp.policies.protocol import END_OF_TEXT, Evidence, Stop
from specdecpp.sampling import Uniforms, seen_rows
from specdecpp.scheduler import Reading
from specdecpp.step import Host, Plan, Request, Result, Rows
from specdecpp.verify import BlockVerification, CompareVerification, GreedyVerification, TokenVerification, Verification

_SCALARS = {name: i for i, name in enumerate(SCALARS)}
_EVIDENCE = {evidence: i for i, evidence in enumerate(Evidence)}
_OF_Q = Evidence.LAST_Q, Evidence.PRODUCT_OF_Q, Evidence.NEGATIVE_ENTROPY
_STOPPED, _ENDED = 1, 2
_COMPARE = 2
_SAMPLED = {TokenVerification: 0, BlockVerification: 1, CompareVerification: _COMPARE}
_GREEDY = {GreedyVerification: 0, CompareVerification: _COMPARE}
_LONG = 32
"""Tokens of a prompt that are quicker read by its two models in one pass than beside the steps of others."""


class Native:
    """Takes requests whose target is a `NativeModel`, and the draft another or a `SuffixDrafter`. A policy that has to be
    asked draft token by draft token, and another verification or way to judge, are run by the host."""

    has_batches = True

    def __init__(self) -> None:
        self._requests: WeakKeyDictionary[Request, _Steps] = WeakKeyDictionary()
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
        batches: dict[Any, list[tuple[_Half, Any]]] = defaultdict(list)
        for i, plan in enumerate(plans):
            if plan.decision.rule is None:
                aside = self._copying if isinstance(plan.request.draft, SuffixDrafter) else self._host
                (results[i],) = aside.run([plan])
            else:
                batches[_weights(plan.request)].append((self._steps(plan.request), plan))
        least = _LONG if len(plans) + len(readings) > 1 else 1
        for reading in readings:
            if not reading.by_both(least):
                batches[_weights(reading.request)].append((_Prompt(reading), reading))
        made = {id(what): result for batch in batches.values() for what, result in _together(batch)}
        return [results[i] if i in results else made[id(plan)] for i, plan in enumerate(plans)]

    def _steps(self, request: Request) -> "_Steps":
        steps = self._requests.get(request)
        if steps is None:
            copies = isinstance(request.draft, SuffixDrafter)
            steps = self._requests[request] = (
                _CopiedSteps(request) if copies else _DraftedSteps(request, self._head_of(request))
            )
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


def _together(batch: "list[tuple[_Half, Any]]") -> list[tuple[Any, Any]]:
    """(what was asked, its result) of steps and pieces of prompts over the same weights: one pass of the draft a draft token,
    and one of the target. Seconds are shared by the rows that were read."""
    started = _now()
    drafting = [(half, task) for half, what in batch if (task := half.drafts(what)) is not None]
    draft_rows: dict[_Half, int] = {}
    if drafting:
        nums = drafting[0][0].draft.model.propose([half.draft for half, _ in drafting], [task for _, task in drafting])
        for (half, task), num in zip(drafting, nums, strict=True):
            half.drafted(num)
            draft_rows[half] = task.num_unread + max(0, num - 1)
    drafted = _now()
    verifying = [(half, task) for half, what in batch if (task := half.verifies(what)) is not None]
    if verifying:
        verifying[0][0].target.model.verify([half.target for half, _ in verifying], [task for _, task in verifying])
    draft_s = _shared(drafted - started, draft_rows)
    verify_s = _shared(_now() - drafted, {half: task.num_tokens for half, task in verifying})
    return [(what, half.result(what, draft_s.get(half, 0.0), verify_s.get(half, 0.0))) for half, what in batch]


def _shared(seconds: float, rows: dict[Any, int]) -> dict[Any, float]:
    return {one: seconds * num / sum(rows.values()) for one, num in rows.items()}


class _Half:
    """The part of one request in the two calls. It does not hold the request, whose end frees it."""

    def __init__(self, request: Request):
        self.target: Any = request.target
        self.draft: Any = request.draft

    def drafts(self, what: Any) -> Drafting | None:
        """Arguments of the draft's call; None where it has nothing to read."""
        raise NotImplementedError

    def drafted(self, num: int) -> None:
        """Note that `num` draft tokens have been drawn."""

    def verifies(self, what: Any) -> Verifying | None:
        """Arguments of the target's call; None where it has nothing to read."""
        raise NotImplementedError

    def result(self, what: Any, draft_s: float, verify_s: float) -> Any:
        """The result; the seconds are this request's share of what its batch took."""
        raise NotImplementedError


class _Prompt(_Half):
    """A piece of a prompt."""

    def __init__(self, reading: Reading):
        super().__init__(reading.request)

    def drafts(self, what: Reading) -> Drafting | None:
        if isinstance(self.draft, SuffixDrafter):
            self.draft.extend(what.draft, rows=1)
            return None
        self.draft.model.check_ids(what.draft)
        self._unread = (ctypes.c_int64 * len(what.draft))(*what.draft)
        return Drafting(unread=ctypes.addressof(self._unread), num_unread=len(what.draft)) if what.draft else None

    def verifies(self, what: Reading) -> Verifying | None:
        self.target.model.check_ids(what.target)
        self._tokens = (ctypes.c_int64 * len(what.target))(*what.target)
        task = Verifying(tokens=ctypes.addressof(self._tokens), num_tokens=len(what.target), num=-1)
        return task if what.target else None

    def result(self, what: Reading, draft_s: float, verify_s: float) -> None:
        what.took_s = draft_s + verify_s


class _CompiledHead:
    """A head as the compiled code reads it, and the arrays that its addresses are of."""

    def __init__(self, estimator: RowEstimator):
        card, self._arrays, calibration = estimator.card, estimator.arrays, estimator.calibration
        weight, table, block, block_bias, output, output_bias = self._arrays
        self.lags = card.form == "lagged"
        self.struct = Head(
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


class _Steps(_Half):
    """The target's half of the steps of one request, and the memory that its call writes to."""

    def __init__(self, request: Request, code: int | None):
        super().__init__(request)
        assert code is not None, "others are refused"
        self._sampling, self._seen = request.sampling, request.seen
        self._tests: Any = request.randomness[1]
        self._verifying = Verifying(sampling=Filters.of(request.sampling, request.seen), verification=code)
        self._compares, self._most = code == _COMPARE, -1

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
        unread, num, task = plan.tokens[self.target.length :], len(tokens), self._verifying
        if len(unread) > 1:
            self.target.extend(unread[:-1], rows=1)
        uniforms = () if self._sampling.is_greedy else self._tests.peek(num + 1)
        self._given = (ctypes.c_int64 * (num + 1))(unread[-1], *tokens), (ctypes.c_double * (num + 1))(*uniforms)
        task.tokens, task.uniforms = map(ctypes.addressof, self._given)
        task.num_tokens, task.num = num + 1, num
        self._raw = torch.empty(num + 1, self.target.vocab_size) if plan.wants_rows else None
        task.raw = None if self._raw is None else self._raw.data_ptr()
        return task

    def _result(self, tokens: list[int], *, q_rows: Any, **more: Any) -> Result:
        """The result of a verdict, whose uniforms are used up; `q_rows` gives q of the draft tokens, asked for by watchers."""
        task = self._verifying
        if not self._sampling.is_greedy:
            self._tests.take(task.num_accepted + 1 if self._compares else task.num_tokens)
        rows = None
        if self._raw is not None:
            seen = None if self._seen is None else seen_rows(self._seen, torch.tensor(tokens, dtype=torch.long))
            rows = Rows(q=q_rows(), logits=self._raw, sampling=self._sampling, seen=seen)
        return Result(tokens=tokens, num_accepted=task.num_accepted, next_token=task.next, rows=rows, **more)


class _DraftedSteps(_Steps):
    """The steps of one request whose draft is a model: the draft's half beside the target's."""

    def __init__(self, request: Request, head: _CompiledHead | None):
        super().__init__(request, _code(request))
        self._drops = request.policy.drops_last
        self._draws: Any = request.randomness[0]
        self._head, ends = head, tuple(request.ends)
        self._rule: Any = None
        self._ends = (ctypes.c_int64 * len(ends))(*ends)
        sampling = Filters.of(request.sampling, request.seen)
        self._drafting = Drafting(ends=ctypes.addressof(self._ends), num_ends=len(ends), sampling=sampling)
        self._has_overlaps = type(request.verification) is TokenVerification and not request.sampling.is_greedy
        self._judges = head is not None or judges_by_q(judge_of(request.policy))
        if head is not None:
            self._drafting.head = ctypes.addressof(head.struct)
        else:
            self._drafting.judges_by_q = self._judges

    def drafts(self, what: Plan) -> Drafting | None:
        decision, limit, task = what.decision, what.decision.limit, self._drafting
        rule: Any = decision.rule
        self._num, self._stop, self._decision = 0, None, decision
        if limit > self._most:
            self._make_room(limit)
        if not limit:
            self._stop = decision.at_limit
        elif not rule.threshold(0) <= 1.0:
            self._stop = rule.why(0, 1.0)
        if self._stop is not None:
            return None
        unread = what.tokens[self.draft.length :]
        if len(unread) > 2:
            self.draft.extend(unread[:-1], rows=1)
            unread = unread[-1:]
        if self._rule is not rule or task.limit != limit:
            self._follow(rule, limit)
        uniforms = () if self._sampling.is_greedy else self._draws.peek(len(self._least))
        self._drawing = (ctypes.c_int64 * len(unread))(*unread), (ctypes.c_double * len(uniforms))(*uniforms)
        task.unread, task.uniforms = map(ctypes.addressof, self._drawing)
        task.num_unread = len(unread)
        return task

    def _follow(self, rule: Any, limit: int) -> None:
        """Put a rule into the draft's call; it may be that of many steps."""
        task, least = self._drafting, rule.thresholds(limit)
        reachable = next((i for i, value in enumerate(least, 1) if value > 1.0), limit)  # no evidence is above 1
        self._rule, self._least = rule, (ctypes.c_double * reachable)(*least[:reachable])
        task.least, task.limit, task.evidence = ctypes.addressof(self._least), limit, _EVIDENCE[rule.evidence]
        task.scores = rule.score is not None
        if rule.score is not None:
            task.bias, task.slope = rule.score.bias, rule.score.slope

    def drafted(self, num: int) -> None:
        self._num, self._stop = num, self._why(num)
        if not self._sampling.is_greedy:
            self._draws.take(num)

    def _why(self, num: int) -> Stop:
        if self._drafting.why == _ENDED:
            return END_OF_TEXT
        return self._rule.why(num, self._drafting.value) if self._drafting.why == _STOPPED else self._decision.at_limit

    def _make_room(self, limit: int) -> bool:
        if not super()._make_room(limit):
            return False
        self._rows = torch.empty(limit, self.draft.vocab_size)
        self._tokens = (ctypes.c_int64 * limit)()
        self._confidence, self._accept, self._overlaps = ((ctypes.c_double * limit)() for _ in range(3))
        task = self._drafting
        task.tokens, task.confidence, task.accept = map(ctypes.addressof, (self._tokens, self._confidence, self._accept))
        task.rows = self._verifying.q = self._rows.data_ptr()
        self._verifying.overlaps = ctypes.addressof(self._overlaps)
        return True

    def verifies(self, what: Plan) -> Verifying:
        is_dropped = self._drops and self._num > 0 and self._drafting.why == _STOPPED
        self._verified = self._tokens[: self._num - is_dropped]
        return self._asked(what, self._verified)

    def result(self, what: Plan, draft_s: float, verify_s: float) -> Result:
        rule: Any = what.decision.rule
        task, num, num_verified = self._drafting, self._num, len(self._verified)
        reads_q = not self._sampling.is_greedy or self._judges or rule.evidence in _OF_Q
        num_judged = max(0, num - 1) if self._head is not None and self._head.lags else num
        head_s, forward_s = (task.head_s, task.forward_s) if num else (0.0, 0.0)
        num_tested = min(self._verifying.num_accepted + 1, num_verified)
        assert self._stop is not None, "drafting has ended"
        return self._result(
            self._verified,
            q_rows=lambda: self._q(num_verified),
            stop=self._stop,
            q=self._confidence[:num_verified] if reads_q else (),
            judged=self._accept[: min(num_judged, num_verified)] if self._judges else (),
            draft_s=max(0.0, draft_s - head_s),
            head_s=head_s,
            verify_s=verify_s,
            forward_s=forward_s + self._verifying.forward_s,
            overlaps=self._overlaps[:num_tested] if self._has_overlaps else (),
        )

    def _q(self, num: int) -> torch.Tensor:
        """q of the first draft tokens; under greedy drafting softmaxes."""
        drawn = self._rows[:num]
        return drawn.softmax(-1) if self._sampling.is_greedy else drawn.clone()


class _CopiedSteps(_Steps):
    """The steps of a request whose draft tokens are copied: found by Python, compared by the target's pass."""

    def __init__(self, request: Request):
        super().__init__(request, _COMPARE)

    def drafts(self, what: Plan) -> None:
        started = _now()
        self._copied, self._stop = what.found or propose(what)
        self._draft_s = _now() - started

    def verifies(self, what: Plan) -> Verifying:
        self._make_room(self._copied.num_tokens)
        return self._asked(what, self._copied.tokens)

    def result(self, what: Plan, draft_s: float, verify_s: float) -> Result:
        copied = self._copied
        return self._result(
            copied.tokens,
            q_rows=lambda: copied.rows(self.target.vocab_size),
            stop=self._stop,
            q=[copied.confidence(i) for i in range(copied.num_tokens)],
            judged=copied.judged,
            draft_s=self._draft_s,
            verify_s=verify_s,
            forward_s=self._verifying.forward_s,
        )
