"""A step on a device: the host launches draft steps, reads where drafting stops, and launches the verdict.

    a rule that may stop     launch 1   read flag 1   launch 2   read flag 2 (stop)   launch verify(2)   wait ... verdict
    a fixed length of 3      launch 1   launch 2   launch 3   read flags 1, 2, 3      launch verify(3)   wait ... verdict

Draft steps that are queued behind a stop draw nothing (`steps.DraftStep`): their passes read the last draft token again, which
is rolled back. How many are queued depends on the rule and on no clock, so that a seed gives the same answer: a pass over two
tokens rounds otherwise than two passes.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch

from specdecpp.backends import Model
from specdecpp.backends.graphs.cache import WIDTHS, Program, StaticCache, bucket
from specdecpp.backends.graphs.launches import RowKernels, has_kernels
from specdecpp.backends.graphs.model import GraphCache, GraphModel
from specdecpp.backends.graphs.steps import END, MOST, DeviceRecord, DraftStep, Judge, VerdictStep
from specdecpp.head import Calibration
from specdecpp.policies.head import heads, judge_of, judges_by_q, judges_plainly
from specdecpp.policies.protocol import END_OF_TEXT, Decision, Rule, Stop
from specdecpp.sampling import Uniforms, at_least_float32, seen_rows
from specdecpp.scheduler import Reading
from specdecpp.step import Host, Plan, Request, Result, Rows
from specdecpp.verify import BlockVerification, CompareVerification, GreedyVerification, TokenVerification

_COMMON = 900
"""Tokens of a text whose passes are recorded when a pair is loaded."""
_JUDGED = (9, WIDTHS[-1])
"""Rows of a verdict by kernels of our own: those behind the last draft token cost nothing."""


def record_passes(target: Model, draft: Model) -> bool:
    """Record the passes that steps of a pair need, when it is loaded. Tells whether both models are recorded."""
    both = (target, WIDTHS), (draft, WIDTHS[:2])
    return [model.record(widths, _COMMON) for model, widths in both if isinstance(model, GraphModel)] == [True, True]


def steps_ahead(least: Sequence[float], limit: int) -> int:
    """Draft steps that are queued before the flag of one is read: all where only the end of the text can stop, else none."""
    return 0 if any(floor > -torch.inf for floor in least[1:limit]) else limit


class Device:
    """Takes requests whose models are both `GraphModel`s on one device. A policy that has to be asked draft token by draft
    token, another verification or way to judge, and a step of more than 32 draft tokens are run by the host."""

    has_batches = False

    def __init__(self) -> None:
        self._requests: WeakKeyDictionary[Request, _DeviceSteps] = WeakKeyDictionary()

    def refusal(self, request: Request) -> str | None:
        """Reason why a request cannot be run here; None where it can."""
        target, draft, judge = request.target, request.draft, judge_of(request.policy)
        if not (isinstance(target, GraphCache) and isinstance(draft, GraphCache) and target.device == draft.device):
            return "its models are not both graphs on one device"
        if request.grammar is not None:
            return "its grammar is asked token by token"
        if not all(isinstance(stream, Uniforms) for stream in request.randomness):
            return "its randomness is no stream of uniforms"
        known = (GreedyVerification,) if request.sampling.is_greedy else (TokenVerification, BlockVerification)
        if type(request.verification) not in (*known, CompareVerification):
            return f"{type(request.verification).__name__} is not known to it at temperature {request.sampling.temperature:g}"
        if judge is not None and not judges_plainly(judge):
            return f"{type(judge).__name__} judges draft tokens in a way of its own"
        if any(head.output.weight.device != draft.device for head in heads(request.policy)):
            return "its head lies elsewhere"
        return None

    def run(self, plans: Sequence[Plan], readings: Sequence[Reading] = ()) -> list[Result]:
        assert not readings, "sessions read their prompts themselves here"
        return [self._one(plan) for plan in plans]

    def _one(self, plan: Plan) -> Result:
        if plan.decision.rule is None or plan.decision.limit > MOST:
            return Host().run([plan])[0]
        if plan.request not in self._requests:
            self._requests[plan.request] = _DeviceSteps(plan.request)
        return self._requests[plan.request].run(plan)


class _DeviceSteps:
    """The steps of one request. It holds what it needs of the request and not the request itself, whose end frees it."""

    @torch.inference_mode()
    def __init__(self, request: Request):
        self._target: Any = request.target
        self._draft: Any = request.draft
        self._verification, self._sampling = request.verification, request.sampling
        self._drops = request.policy.drops_last
        self._uniforms: Any = request.randomness
        self._seen, self._compares = request.seen, isinstance(request.verification, CompareVerification)
        self._has_overlaps = isinstance(request.verification, TokenVerification) and not request.sampling.is_greedy
        self._ends = tuple(sorted(request.ends))
        self._ends_there = torch.tensor(self._ends, dtype=torch.long, device=self._draft.device)
        judge: Any = judge_of(request.policy)
        calibration = Calibration()
        if judge is not None and judge.head is not None and judge.calibrated:
            calibration = judge.head.card.calibration_at(is_greedy=self._sampling.is_greedy)
        self._judge = Judge(self._sampling, judge and judge.head, calibration, judges_by_q=judges_by_q(judge))
        cache = self._draft.static
        if cache.record is None:  # it stays with the draft's cache, like what was recorded over it
            cache.record = DeviceRecord(cache)
        self._record: DeviceRecord = cache.record
        has_clock = self._draft.device.type == "cuda"
        self._flags = [torch.cuda.Event() for _ in range(MOST)] if has_clock else []
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if has_clock else []

    @property
    def _recording_s(self) -> float:
        return self._target.static.recording_s + self._draft.static.recording_s

    @torch.inference_mode()
    def run(self, plan: Plan) -> Result:
        decision, recorded_s, started = plan.decision, self._recording_s, perf_counter()
        self._mark(self._marks, 0)
        num = self._propose(plan.tokens, decision)
        self._mark(self._marks, 1)
        drafted, drafting_s = perf_counter(), self._recording_s - recorded_s
        records = None
        if self._drops and 0 < num < decision.limit:  # whether it has ended or was stopped must be known before it is verified
            records = self._records(num)
            if not self._has_ended(records):
                num -= 1
                self._record.count.fill_(num)
        num_accepted, next_token = self._verify(decision.limit, num)
        records = records or self._records(num)
        if self._marks and num:  # the device may have gone on drafting after the host
            drafted += max(0.0, self._marks[0].elapsed_time(self._marks[1]) / 1e3 - (drafted - started))
        once_s = self._recording_s - recorded_s
        tokens = [int(record[0]) for record in records[:num]]
        return Result(
            tokens=tokens,
            num_accepted=num_accepted,
            next_token=next_token,
            stop=self._why(decision, records),
            q=[record[1] for record in records[:num]],
            judged=self._judged(records[:num]),
            draft_s=drafted - started - drafting_s,
            verify_s=perf_counter() - drafted - (once_s - drafting_s),
            once_s=once_s,
            rows=self._rows(num) if plan.wants_rows else None,
            overlaps=self._record.mirrors["outcome"][2:][: min(num_accepted + 1, num)].tolist() if self._has_overlaps else (),
        )

    def _propose(self, tokens: list[int], decision: Decision) -> int:
        """Queue draft steps until the flag of one says stop; how many draft tokens count."""
        rule: Any = decision.rule
        limit, is_greedy = decision.limit, self._sampling.is_greedy
        least = [*rule.thresholds(limit), *[-torch.inf] * (MOST + 1)][: MOST + 1]
        draws, tests = ([], []) if is_greedy else (self._uniforms[0].peek(limit), self._uniforms[1].peek(limit + 1))
        numbers = [1.0, *(rule.score or (0.0, 1.0)), *least, *draws, *[0.0] * (MOST - len(draws)), *tests]
        if unread := tokens[self._target.length : -1]:
            self._target.extend(unread, rows=1)
        task = self._target.length, tokens[-1]  # where the target's coming pass begins
        if not limit or not least[0] <= 1.0:
            self._record.send([0, 0, 1, 0, 0, 0, *task], numbers)
            return 0
        unread = tokens[self._draft.length :]
        if len(unread) > 2:
            self._draft.extend(unread[:-1], rows=1)
            unread = unread[-1:]
        span, cache = self._draft.make_room(self._draft.length + len(unread) - 1 + limit), self._draft.static
        step = self._step(rule)
        reads = [cache.pass_over(width, span) for width in (len(unread), 1)]
        if self._seen is not None:  # now: a step that was new has been tried out
            self._record.seen.copy_(self._seen)
        self._record.send([0, 0, len(unread), self._draft.length, unread[0], unread[-1], *task], numbers)
        cache.inputs[:3].copy_(self._record.pending)
        num, num_queued = self._run(step, reads, limit, steps_ahead(least, limit))
        self._draft.length += len(unread) + min(num_queued, num + 1) - 1
        if not is_greedy:
            self._uniforms[0].take(num)
        return num

    def _run(self, step: Program, reads: Sequence[Program], limit: int, num_ahead: int) -> tuple[int, int]:
        """(draft tokens, steps that were queued)."""
        for i in range(limit + max(0, num_ahead - 1)):
            if i < limit:
                reads[i > 0]()
                step()
                self._record.mirrors["records"][i].copy_(self._record.records[i], non_blocking=True)
                self._mark(self._flags, i)
            if 0 <= (read := i - num_ahead) < limit - 1:
                self._wait(read)
                if self._record.mirrors["records"][read, 3]:
                    return read + 1, min(i + 1, limit)
        return limit, limit

    def _verify(self, limit: int, num: int) -> tuple[int, int]:
        """One target pass over the last token and the draft tokens, and the acceptance test: (accepted, next token)."""
        record, cache = self._record, self._target.static
        width, span = bucket(num + 1), self._target.make_room(self._target.length + limit + 1)
        read, judge = cache.pass_over(width, span), self._verdict(num)
        if self._seen is not None:
            record.context.copy_(self._seen)
        cache.inputs.copy_(record.task)
        read()
        judge()
        outcome = record.mirrors["outcome"]
        outcome.copy_(record.outcome, non_blocking=True)
        if self._marks:
            torch.cuda.current_stream(self._draft.device).synchronize()
        self._target.length += num + 1
        num_accepted, next_token = map(int, outcome[:2].tolist())
        if not self._sampling.is_greedy:
            self._uniforms[1].take(num_accepted + 1 if self._compares else num + 1)
        return num_accepted, next_token

    def _wait(self, i: int) -> None:
        """Wait for the record of step i; others are queued behind it."""
        if self._flags:
            self._flags[i].synchronize()

    def _records(self, num: int) -> list[list[float]]:
        """Token, q, estimate and flags of each draft token, and the evidence after it."""
        if num:
            self._wait(num - 1)
        return self._record.mirrors["records"][:num].tolist()

    def _judged(self, records: list[list[float]]) -> list[float]:
        if self._judge.head is None and not self._judge.judges_by_q:
            return []
        return [record[2] for record in records[0 if self._judge.looks_ahead else 1 :]]

    @staticmethod
    def _has_ended(records: list[list[float]]) -> bool:
        return bool(records) and bool(int(records[-1][3]) & END)

    def _why(self, decision: Decision, records: list[list[float]]) -> Stop:
        rule: Any = decision.rule
        if self._has_ended(records):
            return END_OF_TEXT
        if len(records) == decision.limit:
            return decision.at_limit
        return rule.why(len(records), records[-1][4] if records else 1.0)

    def _rows(self, num: int) -> Rows:
        drawn = self._record.rows[:num]
        logits = at_least_float32(self._target.static.logits[: num + 1]).clone()
        q = drawn / drawn.sum(-1, keepdim=True)
        seen = None if self._seen is None else seen_rows(self._seen, self._record.line[1 : num + 1])
        return Rows(q=q, logits=logits, sampling=self._sampling, seen=seen)

    def _step(self, rule: Rule) -> Program:
        cache, record, scores = self._draft.static, self._record, rule.score is not None
        launches = self._launches(cache, 1)
        key = ("draft", self._judge, rule.evidence, scores, self._ends, launches)
        step = DraftStep(cache, record, self._judge, rule.evidence, scores, self._ends_there, launches)
        return cache.program(key, step, reset=record.rest)

    def _verdict(self, num: int) -> Program:
        cache, record = self._target.static, self._record
        launches = self._launches(cache, WIDTHS[-1])
        width = bucket(num + 1) if launches is None else next(width for width in _JUDGED if width > num)
        key = ("verdict", width, self._sampling, self._verification, record, launches)
        verdict = VerdictStep(cache, record, self._sampling, self._verification, width, launches)
        return cache.program(key, verdict, reset=lambda: None)

    def _launches(self, cache: StaticCache, num_rows: int) -> RowKernels | None:
        """Memory that our kernels share beside this cache; None where one of the two caches has no such kernels."""
        if not has_kernels(self._draft.static, self._target.static):
            return None
        if num_rows not in cache.launches:
            cache.launches[num_rows] = RowKernels(cache.logits, num_rows)
        return cache.launches[num_rows]

    def _mark(self, events: Sequence[torch.cuda.Event], i: int) -> None:
        if events:
            events[i].record(torch.cuda.current_stream(self._draft.device))
