"""The round on a device: drafting and verification without the host, but for one thing it must know, where drafting stops.

    host    launch 1   launch 2   read flag 1   launch 3   read flag 2 (stop)   launch verify(2)   wait ... verdict
    device             step 1     step 2                   step 3 (discarded)   pass, verdict

The host reads the flag of step k once step k + 1 is queued, so the device never waits for it: when drafting stops after k
candidates, one more is being drawn. It is discarded, unseen. That keeps the target's distribution: that drafting ends at k was
decided by Y_1..Y_k alone, and Y_{k+1} was never looked at, so its uniform may be used again. The candidates are those of the
host, an adapted stopping of the draft's own process (`policies.protocol`). Nothing but the draft's cache remembers that step:
it has read Y_k, which is rolled back like any other token.

A step that takes longer than the host needs to launch what follows a stop is not worth drawing in vain: where the draft has
much to read, the host reads flag k before it queues step k + 1. The size of its weights decides and no clock does: a step that
reads two tokens has other rounding errors than two steps, and a seed is to mean the same answer.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch

from specdecpp.head import Calibration
from specdecpp.policies.head import heads, judge_of, judges_by_q, judges_plainly
from specdecpp.policies.protocol import END_OF_TEXT, Decision, Rule, Stop
from specdecpp.rounds.device_steps import END, MOST, DraftStep, Judge, Record, Verdict
from specdecpp.rounds.host import Host
from specdecpp.rounds.plan import Plan, Reading, Request, Result, Rows
from specdecpp.rounds.verification import BlockVerification, CompareVerification, GreedyVerification, TokenVerification
from specdecpp.runners.graphs import GraphRunner
from specdecpp.runners.static_cache import Program, bucket
from specdecpp.sampling import Uniforms, at_least_float32, seen_rows

_LARGE_DRAFT = 10**9
"""Bytes that a large GPU reads in half a millisecond: more than the host needs to read a flag and launch a target's pass."""


class Device:
    """Takes requests whose models are both `GraphRunner`s on one device. A policy that has to be asked candidate by candidate,
    a verification or a way to judge of somebody's own, and a round of more than 32 candidates are the host's."""

    has_batches = False

    def __init__(self) -> None:
        self._requests: WeakKeyDictionary[Request, _Rounds] = WeakKeyDictionary()
        self._host = Host()

    def refusal(self, request: Request) -> str | None:
        """Why a request cannot be run here; None where it can."""
        target, draft, judge = request.target, request.draft, judge_of(request.policy)
        if not (isinstance(target, GraphRunner) and isinstance(draft, GraphRunner) and target.device == draft.device):
            return "its models are not both graphs on one device"
        if not all(isinstance(stream, Uniforms) for stream in request.randomness):
            return "its randomness is no stream of uniforms"
        known = (GreedyVerification,) if request.sampling.is_greedy else (TokenVerification, BlockVerification)
        if type(request.verification) not in (*known, CompareVerification):
            return f"{type(request.verification).__name__} is not known to it at temperature {request.sampling.temperature:g}"
        if judge is not None and not judges_plainly(judge):
            return f"{type(judge).__name__} judges candidates in a way of its own"
        if any(head.output.weight.device != draft.device for head in heads(request.policy)):
            return "its head lies elsewhere"
        return None

    def run(self, plans: Sequence[Plan], readings: Sequence[Reading] = ()) -> list[Result]:
        assert not readings, "sessions read their prompts themselves here"
        return [self._one(plan) for plan in plans]

    def _one(self, plan: Plan) -> Result:
        if plan.decision.rule is None or plan.decision.limit > MOST:
            return self._host.run([plan])[0]
        if plan.request not in self._requests:
            self._requests[plan.request] = _Rounds(plan.request)
        return self._requests[plan.request].run(plan)


class _Rounds:
    """The rounds of one request. It holds what it needs of the request and not the request itself, whose end frees it."""

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
        self._has_clock = self._draft.device.type == "cuda"
        self._flags = [torch.cuda.Event() for _ in range(MOST)] if self._has_clock else []
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._has_clock else []
        self._done = torch.cuda.Event() if self._has_clock else None

    @property
    def record(self) -> Record:
        """It stays with the draft's cache, like what was recorded over it."""
        cache = self._draft.static
        if cache.record is None:
            cache.record = Record(cache)
        return cache.record

    @property
    def _recording_s(self) -> float:
        return self._target.static.recording_s + self._draft.static.recording_s

    @torch.inference_mode()
    def run(self, plan: Plan) -> Result:
        decision, recorded_s, started = plan.decision, self._recording_s, perf_counter()
        self._mark(0)
        num = self._propose(plan.tokens, decision)
        self._mark(1)
        drafted, drafting_s = perf_counter(), self._recording_s - recorded_s
        records = None
        if self._drops and 0 < num < decision.limit:  # whether it has ended or was stopped must be known before it is verified
            records = self._records(num)
            num -= not self._has_ended(records)
        num_accepted, next_token = self._verify(plan.tokens, decision.limit, num)
        records = records or self._records(num)
        if self._has_clock and num:  # the device may have gone on drafting after the host
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
            overlaps=self.record.mirrors["overlaps"][: min(num_accepted + 1, num)].tolist() if self._has_overlaps else (),
        )

    def _propose(self, tokens: list[int], decision: Decision) -> int:
        """Queue draft steps until the flag of one says stop; how many candidates count."""
        rule: Any = decision.rule
        limit = decision.limit
        least = [*rule.least[:limit], *[-torch.inf] * (MOST + 1)][: MOST + 1]
        if not limit or not least[0] <= 1.0:
            self._send("order", [0, 0, 0, tokens[-1]])
            return 0
        unread = tokens[self._draft.length :]
        if len(unread) > 2:
            self._draft.extend(unread[:-1], rows=1)
            unread = unread[-1:]
        span = self._draft.make_room(self._draft.length + len(unread) - 1 + limit)
        later = self._step(1, span, rule)
        step = self._step(len(unread), span, rule)
        if self._seen is not None:  # now: a step that was new has been tried out
            self.record.seen.copy_(self._seen)
        self._send("order", [0, self._draft.length, unread[0], unread[-1]])
        self._send("weights", [1.0, *((rule.score.bias, rule.score.slope) if rule.score else (0.0, 1.0)), *least])
        if not self._sampling.is_greedy:
            self._send("uniforms", self._uniforms[0].peek(limit))
        num = self._run(step, later, len(unread), limit)
        if not self._sampling.is_greedy:
            self._uniforms[0].take(num)
        return num

    def _run(self, step: Program, later: Program, num_unread: int, limit: int) -> int:
        num_ahead = 1 if self._draft.num_bytes < _LARGE_DRAFT else 0
        for num in range(1, limit + 1):
            step()
            self._report(num - 1)
            self._draft.advance(num_unread if num == 1 else 1)
            step, known = later, num - num_ahead
            if 0 < known < limit and self._flag_of(known - 1):
                return known
        return limit

    def _verify(self, tokens: list[int], limit: int, num: int) -> tuple[int, int]:
        """One target pass over what it has not read and the candidates, and the acceptance test: (accepted, next token).

        Waits for the device: the one time in a round that its queue runs empty.
        """
        record = self.record
        if unread := tokens[self._target.length : -1]:
            self._target.extend(unread, rows=1)
        width, span = bucket(num + 1), self._target.make_room(self._target.length + limit + 1)
        cache = self._target.static
        read, judge = cache.pass_over(width, span), self._verdict(width)
        if self._seen is not None:
            record.context.copy_(self._seen)
        cache.inputs[:1].fill_(self._target.length)
        cache.inputs[1:].copy_(record.line)
        self._send("task", [num])
        if not self._sampling.is_greedy:
            uniforms = self._uniforms[1].peek(num + 1)
            self._send("verify_uniforms", uniforms if self._compares else [uniforms[-1], *uniforms[:-1]])
        read()
        judge()
        for name in ("verdict", "overlaps") if self._has_overlaps else ("verdict",):
            record.mirrors[name].copy_(getattr(record, name), non_blocking=True)
        if self._done is not None:
            self._mark_by(self._done)
            self._done.synchronize()
        self._target.advance(num + 1)
        num_accepted, next_token = record.mirrors["verdict"].tolist()
        if not self._sampling.is_greedy:
            self._uniforms[1].take(num_accepted + 1 if self._compares else num + 1)
        return num_accepted, next_token

    def _records(self, num: int) -> list[list[float]]:
        """Token, q, estimate and flags of each candidate, and the evidence after it."""
        if self._flags and num:
            self._flags[num - 1].synchronize()
        return self.record.mirrors["records"][:num].tolist()

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
        drawn = self.record.rows[:num]
        logits = at_least_float32(self._target.static.logits[: num + 1]).clone()
        q = drawn.softmax(-1) if self._sampling.is_greedy else drawn.clone()
        seen = None if self._seen is None else seen_rows(self._seen, self.record.line[1 : num + 1])
        return Rows(q=q, logits=logits, sampling=self._sampling, seen=seen)

    def _step(self, width: int, span: int, rule: Rule) -> Program:
        cache, record, scores = self._draft.static, self.record, rule.score is not None
        key = ("draft", width, span, self._judge, rule.evidence, scores, self._ends)
        step = DraftStep(cache, record, self._judge, rule.evidence, scores, self._ends_there, width, span)
        return cache.program(key, step, reset=lambda: (record.count.zero_(), cache.rest(record.start, span)))

    def _verdict(self, width: int) -> Program:
        cache, record = self._target.static, self.record
        key = ("verdict", width, self._sampling, self._verification, record)
        verdict = Verdict(cache, record, self._sampling, self._verification, width)
        return cache.program(key, verdict, reset=record.task.zero_)  # an earlier round's may be more than this width takes

    def _send(self, name: str, values: Sequence[int | float]) -> None:
        """Numbers to the device, without waiting."""
        mirror = self.record.mirrors[name]
        mirror[: len(values)] = torch.tensor(values, dtype=mirror.dtype)
        getattr(self.record, name)[: len(mirror)].copy_(mirror, non_blocking=True)

    def _report(self, i: int) -> None:
        """Have the record of step i written to the host."""
        self.record.mirrors["records"][i].copy_(self.record.records[i], non_blocking=True)
        if self._flags:
            self._mark_by(self._flags[i])

    def _flag_of(self, i: int) -> int:
        """The flags of step i, when it is done. Others are queued behind it."""
        if self._flags:
            self._flags[i].synchronize()
        return int(self.record.mirrors["records"][i, 3])

    def _mark(self, i: int) -> None:
        if self._marks:
            self._mark_by(self._marks[i])

    def _mark_by(self, event: torch.cuda.Event) -> None:
        event.record(torch.cuda.current_stream(self._draft.device))
