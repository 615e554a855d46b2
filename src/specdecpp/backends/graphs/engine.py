"""A step on a device: the host launches draft steps, reads where drafting stops, and launches the verdict.

    a rule that may stop     launch 1   read flag 1   launch 2   read flag 2 (stop)   launch verify(2)   wait ... verdict
    a fixed length of 3      launch 1   launch 2   launch 3   read flags 1, 2, 3      launch verify(3)   wait ... verdict

Draft steps that are queued behind a stop draw nothing (`steps.DraftStep`): their passes read the last draft token again, which
is rolled back. How many are queued depends on the rule and on no clock, so that a seed gives the same answer: a pass over two
tokens rounds otherwise than two passes.
"""

from collections import defaultdict
from collections.abc import Sequence
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch

from specdecpp.backends import Model
from specdecpp.backends.graphs.cache import WIDTHS, Program, StaticCache, bucket
from specdecpp.backends.graphs.launches import RowKernels, launches_over
from specdecpp.backends.graphs.model import GraphCache, GraphModel
from specdecpp.backends.graphs.slots import NUMS, Slot
from specdecpp.backends.graphs.steps import MOST, DeviceRecord, Judge, Records, VerdictStep
from specdecpp.backends.graphs.together import Turn, draft_step, has_ended, together
from specdecpp.head import Calibration
from specdecpp.policies.head import heads, judge_of, judges_by_q, judges_plainly
from specdecpp.policies.protocol import END_OF_TEXT, Decision, Stop
from specdecpp.sampling import Uniforms, at_least_float32, seen_rows
from specdecpp.scheduler import Reading
from specdecpp.step import Engine, Host, Plan, Request, Result, Rows
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


class Device(Engine):
    """Takes requests whose models are both `GraphModel`s on one device. A policy that has to be asked draft token by draft
    token, another verification or way to judge, and a step of more than 32 draft tokens are run by the host."""

    reads_alone = True

    def __init__(self) -> None:
        self._requests: WeakKeyDictionary[Request, DeviceSteps] = WeakKeyDictionary()

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

    def shares(self, request: Request) -> bool:
        """True without a seed (products over other numbers of rows round otherwise), where recorded passes know any cache."""
        caches: Any = (request.target, request.draft)
        uniforms: Any = request.randomness[0]
        return not uniforms.has_seed and all(cache.model.can_share for cache in caches)

    def run(self, plans: Sequence[Plan], readings: Sequence[Reading] = ()) -> list[Result]:
        for reading in readings:
            reading.read()
        results: dict[int, Result] = {}
        batches: dict[Any, list[Plan]] = defaultdict(list)  # requests over the same weights
        for plan in plans:
            if plan.decision.rule is None or plan.decision.limit > MOST:
                (results[id(plan)],) = Host().run([plan])
            else:
                apart = None if self.shares(plan.request) else id(plan)
                batches[plan.request.target.model, plan.request.draft.model, apart].append(plan)
        for batch in batches.values():
            for some in (batch[at : at + NUMS[-1]] for at in range(0, len(batch), NUMS[-1])):
                steps = [self._steps(plan.request) for plan in some]
                if len(some) == 1:
                    results[id(some[0])] = steps[0].run(some[0])
                else:
                    turns = [of.begin(plan) for of, plan in zip(steps, some, strict=True)]
                    results |= {id(turn.plan): result for turn, result in together(turns)}
        return [results[id(plan)] for plan in plans]

    def _steps(self, request: Request) -> "DeviceSteps":
        if request not in self._requests:
            self._requests[request] = DeviceSteps(request)
        return self._requests[request]


class DeviceSteps:
    """The steps of one request. It holds what it needs of the request and not the request itself, whose end frees it."""

    @torch.inference_mode()
    def __init__(self, request: Request):
        self.target: Any = request.target
        self.draft: Any = request.draft
        self._verification, self._sampling = request.verification, request.sampling
        self.drops = request.policy.drops_last
        self._uniforms: Any = request.randomness
        self.seen, self._compares = request.seen, isinstance(request.verification, CompareVerification)
        self._has_overlaps = isinstance(request.verification, TokenVerification) and not request.sampling.is_greedy
        self._ends = tuple(sorted(request.ends))
        judge: Any = judge_of(request.policy)
        calibration = Calibration()
        if judge is not None and judge.head is not None and judge.calibrated:
            calibration = judge.head.card.calibration_at(is_greedy=self._sampling.is_greedy)
        self._judge = Judge(self._sampling, judge and judge.head, calibration, judges_by_q=judges_by_q(judge))
        cache = self.draft.static
        if cache.record is None:  # it stays with the draft's cache, like what was recorded over it
            cache.record = Records(cache)
        self._records: Records = cache.record
        self._record = self._records.each[0]
        has_clock = self.draft.device.type == "cuda"
        self._flags = [torch.cuda.Event() for _ in range(MOST)] if has_clock else []
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if has_clock else []

    @property
    def _recording_s(self) -> float:
        return self.target.static.recording_s + self.draft.static.recording_s

    @torch.inference_mode()
    def run(self, plan: Plan) -> Result:
        recorded_s, started = self._recording_s, perf_counter()
        self._mark(self._marks, 0)
        turn = self.begin(plan)
        self._propose(turn)
        self._mark(self._marks, 1)
        drafted, drafting_s = perf_counter(), self._recording_s - recorded_s
        if self.drops and 0 < turn.num < turn.limit:  # whether it has ended or was stopped must be known before it is verified
            turn.drop(self._drawn(turn.num), self._record)
        self._verify(turn)
        records = self._drawn(turn.num_drawn)
        if self._marks and turn.num:  # the device may have gone on drafting after the host
            drafted += max(0.0, self._marks[0].elapsed_time(self._marks[1]) / 1e3 - (drafted - started))
        once_s = self._recording_s - recorded_s
        result = self.result(turn, records, self._records.mirrors["outcomes"][0].tolist(), self._record, self.target.static)
        result.draft_s, result.once_s = drafted - started - drafting_s, once_s
        result.verify_s = perf_counter() - drafted - (once_s - drafting_s)
        return result

    @torch.inference_mode()
    def begin(self, plan: Plan) -> Turn:
        """Have the models read all but the last tokens; make the sheet of the step."""
        tokens, limit, is_greedy = plan.tokens, plan.decision.limit, self._sampling.is_greedy
        rule: Any = plan.decision.rule
        least = [*rule.thresholds(limit), *[torch.inf] * (MOST + 1)][: MOST + 1]
        draws, tests = ([], []) if is_greedy else (self._uniforms[0].peek(limit), self._uniforms[1].peek(limit + 1))
        numbers = [1.0, *(rule.score or (0.0, 1.0)), *least, *draws, *[0.0] * (MOST - len(draws)), *tests]
        if unread := tokens[self.target.length : -1]:
            self.target.extend(unread, rows=1)
        whole, unread = [0, 1, 1, 0, 0, 0], []
        if least[0] <= 1.0:
            unread = tokens[self.draft.length :]
            if len(unread) > 2:
                self.draft.extend(unread[:-1], rows=1)
                unread = unread[-1:]
            whole = [0, 0, len(unread), self.draft.length, unread[0], unread[-1]]
        sheet = [*whole, self.target.length, tokens[-1]], numbers  # where the target's coming pass begins
        way = self._judge, rule.evidence, rule.score is not None, self._ends, self._verification
        return Turn(self, plan, way, sheet, len(unread), steps_ahead(least, limit))

    def room(self, turn: Turn) -> int:
        """The span of the draft's passes in a step, with room for it."""
        return self.draft.make_room(self.draft.length + turn.num_unread - 1 + turn.limit)

    def room_to_verify(self, turn: Turn) -> int:
        return self.target.make_room(self.target.length + turn.limit + 1)

    def _propose(self, turn: Turn) -> None:
        """Queue draft steps until the flag of one says stop."""
        if not turn.num_unread:
            self._records.send([turn.sheet])
            return
        span, cache = self.room(turn), self.draft.static
        step = self._step(turn)
        reads = [cache.pass_over(width, span) for width in (turn.num_unread, 1)]
        if self.seen is not None:  # now: a step that was new has been tried out
            self._record.seen.copy_(self.seen)
        self._records.send([turn.sheet])
        cache.inputs[:3].copy_(self._record.pending)
        self.drafted(turn, *self._run(step, reads, turn.limit, turn.num_ahead))

    def drafted(self, turn: Turn, num: int, num_queued: int) -> None:
        """Count what was drawn and read."""
        turn.num = turn.num_drawn = num
        self.draft.length += turn.num_unread + min(num_queued, num + 1) - 1
        if not self._sampling.is_greedy:
            self._uniforms[0].take(num)

    def _run(self, step: Program, reads: Sequence[Program], limit: int, num_ahead: int) -> tuple[int, int]:
        """(draft tokens, steps that were queued)."""
        mirror = self._records.mirrors["records"]
        for i in range(limit + max(0, num_ahead - 1)):
            if i < limit:
                reads[i > 0]()
                step()
                mirror[0, i].copy_(self._record.records[i], non_blocking=True)
                self._mark(self._flags, i)
            if 0 <= (read := i - num_ahead) < limit - 1:
                self._wait(read)
                if mirror[0, read, 3]:
                    return read + 1, min(i + 1, limit)
        return limit, limit

    def _verify(self, turn: Turn) -> None:
        """One target pass over the last token and the draft tokens, and the acceptance test."""
        record, cache = self._record, self.target.static
        read, judge = cache.pass_over(bucket(turn.num + 1), self.room_to_verify(turn)), self._verdict(turn.num)
        if self.seen is not None:
            record.context.copy_(self.seen)
        cache.inputs.copy_(record.task)
        read()
        judge()
        self._records.mirrors["outcomes"].copy_(self._records.outcomes, non_blocking=True)
        if self._marks:
            torch.cuda.current_stream(self.draft.device).synchronize()

    def result(
        self, turn: Turn, records: list[list[float]], outcome: list[float], record: DeviceRecord, read: StaticCache | Slot
    ) -> Result:
        """Result of a step, from its records [num, 5] and its outcome; `read` has the logits of the target's pass."""
        num, num_accepted, next_token = turn.num, int(outcome[0]), int(outcome[1])
        self.target.length += num + 1
        if not self._sampling.is_greedy:
            self._uniforms[1].take(num_accepted + 1 if self._compares else num + 1)
        return Result(
            tokens=[int(record[0]) for record in records[:num]],
            num_accepted=num_accepted,
            next_token=next_token,
            stop=self._why(turn.plan.decision, records),
            q=[record[1] for record in records[:num]],
            judged=self._judged(records[:num]),
            rows=self._rows(num, record, read) if turn.plan.wants_rows else None,
            overlaps=outcome[2:][: min(num_accepted + 1, num)] if self._has_overlaps else (),
        )

    def _wait(self, i: int) -> None:
        """Wait for the record of step i; others are queued behind it."""
        if self._flags:
            self._flags[i].synchronize()

    def _drawn(self, num: int) -> list[list[float]]:
        """Token, q, estimate and flags of each draft token, and the evidence after it."""
        if num:
            self._wait(num - 1)
        return self._records.mirrors["records"][0, :num].tolist()

    def _judged(self, records: list[list[float]]) -> list[float]:
        if self._judge.head is None and not self._judge.judges_by_q:
            return []
        return [record[2] for record in records[0 if self._judge.looks_ahead else 1 :]]

    def _why(self, decision: Decision, records: list[list[float]]) -> Stop:
        rule: Any = decision.rule
        if has_ended(records):
            return END_OF_TEXT
        if len(records) == decision.limit:
            return decision.at_limit
        return rule.why(len(records), records[-1][4] if records else 1.0)

    def _rows(self, num: int, record: DeviceRecord, read: StaticCache | Slot) -> Rows:
        drawn = record.rows[:num]
        logits = at_least_float32(read.logits[: num + 1]).clone()
        q = drawn / drawn.sum(-1, keepdim=True)
        seen = None if self.seen is None else seen_rows(self.seen, record.line[1 : num + 1])
        return Rows(q=q, logits=logits, sampling=self._sampling, seen=seen)

    def _step(self, turn: Turn) -> Program:
        cache, record = self.draft.static, self._record
        launches = self._launches(cache, 1)
        step = draft_step(turn.way, cache, cache, record, launches)
        return cache.program(("draft", turn.way[:-1], launches), step, reset=record.rest)

    def _verdict(self, num: int) -> Program:
        cache, record = self.target.static, self._record
        launches = self._launches(cache, WIDTHS[-1])
        width = bucket(num + 1) if launches is None else next(width for width in _JUDGED if width > num)
        key = ("verdict", width, self._sampling, self._verification, record, launches)
        verdict = VerdictStep(cache, record, self._sampling, self._verification, width, launches)
        return cache.program(key, verdict, reset=lambda: None)

    def _launches(self, cache: StaticCache, num_rows: int) -> RowKernels | None:
        """Memory that our kernels share beside this cache; None where one of the two caches has no such kernels."""
        return launches_over(cache, num_rows, self.draft.static, self.target.static)

    def _mark(self, events: Sequence[torch.cuda.Event], i: int) -> None:
        if events:
            events[i].record(torch.cuda.current_stream(self.draft.device))
