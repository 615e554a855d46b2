"""The halves of a step in compiled code, one call each (`cpp/step.h`), with the decisions and uniforms of `step.Host`.

    propose   forward, draw, the head's estimate, the stop test, for each draft token
    verify    the target's pass and the acceptance test

Requests over the same weights share both, and pieces of prompts are read in the first pass of either model. Draft tokens that
are copied from the text (`copying`) are only verified here.
"""

import ctypes
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from time import perf_counter as _now
from typing import Any
from weakref import WeakKeyDictionary

import torch

from specdecpp.backends.native.following import Columns, Following
from specdecpp.backends.native.library import ENDED, ON, STOPPED, UNSCORED, Drafting, Filters, Head, Verifying
from specdecpp.backends.native.model import NativeCache
from specdecpp.drafters import SuffixDrafter
from specdecpp.drafters.copying import COMPARED, Copying, propose
from specdecpp.grammar import allowed_rows
from specdecpp.head import SCALARS, RowEstimator
from specdecpp.policies.head import heads, judge_of, judges_by_q, judges_plainly, skips_forced
from specdecpp.policies.protocol import END_OF_TEXT, Evidence, Stop
from specdecpp.sampling import Uniforms, seen_rows
from specdecpp.scheduler import Reading
from specdecpp.step import NOT_SCORED, Engine, Host, Plan, Request, Result, Rows
from specdecpp.verify import BlockVerification, CompareVerification, GreedyVerification, TokenVerification, Verification

_SCALARS = {name: i for i, name in enumerate(SCALARS)}
_EVIDENCE = {evidence: i for i, evidence in enumerate(Evidence)}
_OF_Q = Evidence.LAST_Q, Evidence.PRODUCT_OF_Q, Evidence.NEGATIVE_ENTROPY
_COMPARE = 2
_SAMPLED = {TokenVerification: 0, BlockVerification: 1, CompareVerification: _COMPARE}
_GREEDY = {GreedyVerification: 0, CompareVerification: _COMPARE}
_LONG = 32
"""Tokens of a prompt that are quicker read by its two models in one pass than beside the steps of others."""


class Native(Engine):
    """Takes requests whose target is a `NativeModel`, and the draft another or a `SuffixDrafter`. A policy that has to be
    asked draft token by draft token, and another verification or way to judge, are run by the host."""

    def __init__(self) -> None:
        self._requests: WeakKeyDictionary[Request, _Steps] = WeakKeyDictionary()

    def refusal(self, request: Request) -> str | None:
        """Reason why a request cannot be run here; None where it can."""
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

    def shares(self, request: Request) -> bool:
        return True

    def run(self, plans: Sequence[Plan], readings: Sequence[Reading] = ()) -> list[Result]:
        results: dict[int, Any] = {}
        batches: dict[Any, list[tuple[Any, Any]]] = defaultdict(list)  # requests over the same weights
        for plan in plans:
            request = plan.request
            if plan.decision.rule is None:
                aside = Copying() if isinstance(request.draft, SuffixDrafter) else Host()
                (results[id(plan)],) = aside.run([plan])
                continue
            if request not in self._requests:
                self._requests[request] = (_CopiedSteps if isinstance(request.draft, SuffixDrafter) else _DraftedSteps)(request)
            batches[request.target.model, _draft_model(request)].append((self._requests[request], plan))
        least = _LONG if len(plans) + len(readings) > 1 else 1
        for reading in readings:
            if not reading.by_both(least):
                request = reading.request
                batches[request.target.model, _draft_model(request)].append((_Prompt(request), reading))
        for batch in batches.values():
            results |= _together(batch)
        return [results[id(plan)] for plan in plans]


def _code(request: Request) -> int | None:
    """The compiled code's number for the verification of a request; None for one that it does not know."""
    known: dict[type[Verification], int] = _GREEDY if request.sampling.is_greedy else _SAMPLED
    if isinstance(request.draft, SuffixDrafter) and type(request.verification) not in (*COMPARED, *_GREEDY):
        return None
    return known.get(type(request.verification))


def _draft_model(request: Request) -> Any:
    return None if isinstance(request.draft, SuffixDrafter) else request.draft.model


def _together(batch: list[tuple[Any, Any]]) -> dict[int, Any]:
    """Results of steps and pieces of prompts over the same weights, by the `id` of the plan or reading: one pass of the draft a
    draft token, and one of the target. Seconds are shared by the rows of each pass."""
    started = _now()
    drafting = [(half, task) for half, what in batch if (task := half.drafts(what)) is not None]
    if drafting:
        drafting[0][0].draft.model.propose([half.draft for half, _ in drafting], [task for _, task in drafting])
    drafted = _now()
    verifying = [(half, task) for half, what in batch if (task := half.verifies(what)) is not None]
    if verifying:
        verifying[0][0].target.model.verify([half.target for half, _ in verifying], [task for _, task in verifying])
    draft_s = _shared(drafted - started, {half: task.forward_s for half, task in drafting})
    verify_s = _shared(_now() - drafted, {half: float(task.num_tokens) for half, task in verifying})
    return {id(what): half.result(what, draft_s.get(half, 0.0), verify_s.get(half, 0.0)) for half, what in batch}


def _shared(seconds: float, by: Mapping[Any, float]) -> dict[Any, float]:
    whole = sum(by.values()) or 1
    return {one: seconds * part / whole for one, part in by.items()}


class _Prompt:
    """A piece of a prompt: what either model reads in its call."""

    def __init__(self, request: Request):
        self.target: Any = request.target
        self.draft: Any = request.draft

    def drafts(self, reading: Reading) -> Drafting | None:
        if isinstance(self.draft, SuffixDrafter):
            self.draft.read(reading.draft)
            return None
        self.draft.model.check_ids(reading.draft)
        self.draft.note(reading.draft)
        self._unread = (ctypes.c_int64 * len(reading.draft))(*reading.draft)
        return Drafting(unread=ctypes.addressof(self._unread), num_unread=len(reading.draft)) if reading.draft else None

    def verifies(self, reading: Reading) -> Verifying | None:
        self.target.model.check_ids(reading.target)
        self._tokens = (ctypes.c_int64 * len(reading.target))(*reading.target)
        task = Verifying(tokens=ctypes.addressof(self._tokens), num_tokens=len(reading.target), num=-1)
        return task if reading.target else None

    def result(self, reading: Reading, draft_s: float, verify_s: float) -> None:
        reading.took_s = draft_s + verify_s


def compiled_head(estimator: RowEstimator) -> Head:
    """A head as the compiled code reads it; the estimator must live as long as this is used."""
    card, calibration = estimator.card, estimator.calibration
    weight, table, block, block_bias, output, output_bias = estimator.arrays
    return Head(
        input=card.hidden_size,
        scalars=len(card.scalars),
        width=len(output),
        blocks=len(block),
        lags=card.form == "lagged",
        rows=len(table),
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


class _Steps:
    """The target's half of the steps of one request. It does not hold the request, whose end frees it."""

    def __init__(self, request: Request, code: int | None):
        self.target: Any = request.target
        self.draft: Any = request.draft
        self._sampling, self._seen = request.sampling, request.seen
        self._tests: Any = request.randomness[1]
        self._verifying = Verifying(sampling=Filters.of(request.sampling, request.seen), verification=code)

    def _asked(self, plan: Plan, tokens: list[int]) -> Verifying:
        """Arguments of the target's call for these draft tokens."""
        unread, num, task = plan.tokens[self.target.length :], len(tokens), self._verifying
        if len(unread) > 1:
            self.target.extend(unread[:-1], rows=1)
        uniforms = () if self._sampling.is_greedy else self._tests.peek(num + 1)
        self._given = (ctypes.c_int64 * (num + 1))(unread[-1], *tokens), (ctypes.c_double * (num + 1))(*uniforms)
        task.tokens, task.uniforms = map(ctypes.addressof, self._given)
        task.num_tokens, task.num = num + 1, num
        self._allowed = self._allowed_after(plan, tokens)
        task.allowed = None if self._allowed is None else self._allowed.data_ptr()
        self._logits = torch.empty(num + 1, self.target.vocab_size) if plan.wants_rows else None
        task.logits = None if self._logits is None else self._logits.data_ptr()
        return task

    def _allowed_after(self, plan: Plan, tokens: list[int]) -> torch.Tensor | None:
        """Tokens that a grammar allows behind none, one, ... all of the draft tokens [K + 1 V]; None without a grammar."""
        return None if plan.request.grammar is None else allowed_rows(plan.request.grammar, tokens)

    def _result(self, tokens: list[int], *, q_rows: Any, **more: Any) -> Result:
        """The result of a verdict, whose uniforms are used up; `q_rows` gives q of the draft tokens, asked for by watchers."""
        task = self._verifying
        if not self._sampling.is_greedy:
            self._tests.take(task.num_accepted + 1 if task.verification == _COMPARE else task.num_tokens)
        rows = None
        if self._logits is not None:
            seen = None if self._seen is None else seen_rows(self._seen, torch.tensor(tokens, dtype=torch.long))
            rows = Rows(q=q_rows(), logits=self._logits, sampling=self._sampling, seen=seen)
        return Result(tokens=tokens, num_accepted=task.num_accepted, next_token=task.next, rows=rows, **more)


class _DraftedSteps(_Steps):
    """The steps of one request whose draft is a model: the draft's half beside the target's."""

    def __init__(self, request: Request):
        super().__init__(request, _code(request))
        self._drafting = Drafting()
        self._drops = request.policy.drops_last
        self._draws: Any = request.randomness[0]
        self._rule: Any = None
        self._following: Following | None = None
        self._make_room(0)
        ends = tuple(request.ends)
        self._ends = (ctypes.c_int64 * len(ends))(*ends)
        task = self._drafting
        task.ends, task.num_ends, task.sampling = ctypes.addressof(self._ends), len(ends), self._verifying.sampling
        self._has_overlaps = type(request.verification) is TokenVerification and not request.sampling.is_greedy
        judge: Any = judge_of(request.policy)
        self._head, self._judges = None, judge is not None
        if self._judges and not judges_by_q(judge):
            self._estimator = judge.estimator(is_greedy=request.sampling.is_greedy)
            self._head = compiled_head(self._estimator)
            task.head = ctypes.addressof(self._head)
        task.judges_by_q = self._judges and self._head is None
        if request.grammar is not None:
            skips = skips_forced(request.policy)
            self._following = Following(task, is_greedy=request.sampling.is_greedy, skips=skips)

    def drafts(self, plan: Plan) -> Drafting | None:
        decision, task = plan.decision, self._drafting
        rule: Any = decision.rule
        limit = decision.limit
        task.num, task.drawn, task.why, task.value, task.forward_s, task.head_s = 0, 0, ON, 1.0, 0.0, 0.0
        if self._following is not None:
            self._force(plan, self._following)
        if task.why == ENDED or task.num >= (limit if self._following is None else task.limit):
            return None
        if not rule.threshold(0) <= 1.0:
            task.why = ON if task.num else STOPPED
            return None
        unread = plan.tokens[self.draft.length :]
        self.draft.settle(unread)
        unread += self._columns.tokens[: task.num]
        self.draft.note(unread)  # those that are forced too
        if len(unread) > 2:
            self.draft.extend(unread[:-1], rows=1)
            unread = unread[-1:]
        if limit > len(self._columns.tokens):
            self._make_room(limit)
        if self._following is None and (self._rule is not rule or task.limit != limit):
            self._follow(rule, limit)
        uniforms = () if self._sampling.is_greedy else self._draws.peek(len(self._least))
        self._drawing = (ctypes.c_int64 * len(unread))(*unread), (ctypes.c_double * len(uniforms))(*uniforms)
        task.unread, task.uniforms = map(ctypes.addressof, self._drawing)
        task.num_unread = len(unread)
        return task

    def _force(self, plan: Plan, following: Following) -> None:
        """Begin with the draft tokens that the grammar leaves no choice about."""
        task, decision = self._drafting, plan.decision
        rule: Any = decision.rule
        most = max(decision.limit, decision.max_with_forced)
        if most > len(self._columns.tokens):
            self._make_room(most)
        self._follow(rule, most)
        grammar: Any = plan.request.grammar
        following.begin(grammar, self._columns, limit=decision.limit, room=decision.max_with_forced)
        if task.num and rule.evidence is Evidence.SURVIVAL and self._judges:
            task.value = math.prod(rule.read([1.0] * task.num))
        if task.num and rule.evidence is Evidence.NEGATIVE_ENTROPY:
            task.value = 0.0

    def _make_room(self, limit: int) -> None:
        """Have memory for so many draft tokens; what an earlier step wrote there is over."""
        self._columns = columns = Columns(limit, self.draft.vocab_size)
        task, verifying = self._drafting, self._verifying
        task.tokens, task.confidence, task.accept = map(ctypes.addressof, (columns.tokens, columns.confidence, columns.accept))
        task.rows = verifying.q = columns.rows.data_ptr()
        verifying.overlaps = ctypes.addressof(columns.overlaps)

    def _follow(self, rule: Any, limit: int) -> None:
        """Put a rule into the draft's call; it may be that of many steps."""
        task, least = self._drafting, rule.thresholds(limit)
        reachable = limit
        if self._following is None:  # no evidence is above 1
            reachable = next((i for i, value in enumerate(least, 1) if value > 1.0), limit)
        self._rule, self._least = rule, (ctypes.c_double * reachable)(*least[:reachable])
        task.least, task.limit, task.evidence = ctypes.addressof(self._least), limit, _EVIDENCE[rule.evidence]
        task.scores = rule.score is not None
        if rule.score is not None:
            task.bias, task.slope = rule.score.bias, rule.score.slope

    def verifies(self, plan: Plan) -> Verifying:
        task = self._drafting
        if not self._sampling.is_greedy:
            self._draws.take(task.drawn)
        is_dropped = self._drops and task.num > 0 and task.why == STOPPED
        self._verified = self._columns.tokens[: task.num - is_dropped]
        return self._asked(plan, self._verified)

    def _allowed_after(self, plan: Plan, tokens: list[int]) -> torch.Tensor | None:
        return self._following and self._following.rows()

    def _stop(self, plan: Plan) -> Stop:
        """Reason why drafting ended."""
        task, rule = self._drafting, plan.decision.rule
        if task.why == STOPPED and rule is not None:
            return rule.why(task.num, task.value)
        return {ENDED: END_OF_TEXT, UNSCORED: NOT_SCORED}.get(task.why, plan.decision.at_limit)

    def result(self, plan: Plan, draft_s: float, verify_s: float) -> Result:
        rule: Any = plan.decision.rule
        task, num_verified = self._drafting, len(self._verified)
        reads_q = not self._sampling.is_greedy or self._judges or rule.evidence in _OF_Q
        num_judged = max(0, task.num - 1) if self._head is not None and self._head.lags else task.num
        num_tested = min(self._verifying.num_accepted + 1, num_verified)
        return self._result(
            self._verified,
            q_rows=lambda: self._q(num_verified),
            stop=self._stop(plan),
            q=self._columns.confidence[:num_verified] if reads_q else (),
            judged=self._columns.accept[: min(num_judged, num_verified)] if self._judges else (),
            draft_s=max(0.0, draft_s - task.head_s),
            head_s=task.head_s,
            verify_s=verify_s,
            forward_s=task.forward_s + self._verifying.forward_s,
            overlaps=self._columns.overlaps[:num_tested] if self._has_overlaps else (),
        )

    def _q(self, num: int) -> torch.Tensor:
        """q of the first draft tokens; under greedy drafting softmaxes."""
        drawn = self._columns.rows[:num]
        return drawn.softmax(-1) if self._sampling.is_greedy else drawn.clone()


class _CopiedSteps(_Steps):
    """The steps of a request whose draft tokens are copied: found by Python, compared by the target's pass."""

    def __init__(self, request: Request):
        super().__init__(request, _COMPARE)

    def drafts(self, plan: Plan) -> None:
        started = _now()
        self._copied = propose(plan)
        self._draft_s = _now() - started

    def verifies(self, plan: Plan) -> Verifying:
        return self._asked(plan, self._copied.tokens)

    def result(self, plan: Plan, draft_s: float, verify_s: float) -> Result:
        copied = self._copied
        return self._result(
            copied.tokens,
            q_rows=lambda: copied.rows(self.target.vocab_size),
            stop=copied.stop,
            q=copied.known_confidences,
            judged=copied.judged,
            draft_s=self._draft_s,
            verify_s=verify_s,
            forward_s=self._verifying.forward_s,
        )
