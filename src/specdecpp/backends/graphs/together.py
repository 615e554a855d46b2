"""One step of up to eight requests over the same two models, whose passes they share (`slots`).

    pass over all that draft -> each one's draw, judge, stop test -> ... -> target's pass over all -> each one's verdict

A request keeps its slot for the step: those that draft come first, and requests that are decoded alike follow one another,
since what follows a pass is one program for each way. A slot that has stopped draws nothing; the host stops when all have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from time import perf_counter
from typing import Any

import torch

from specdecpp.backends.graphs.cache import WIDTHS, Program, RecordedPasses, StaticCache, bucket
from specdecpp.backends.graphs.launches import RowKernels, launches_over
from specdecpp.backends.graphs.slots import NUMS, Slot, Slots, num_slots
from specdecpp.backends.graphs.steps import END, DeviceRecord, DraftStep, Records, VerdictStep
from specdecpp.step import Plan, Result


def has_ended(records: list[list[float]]) -> bool:
    """Tell whether the last draft token ends the text."""
    return bool(records) and bool(int(records[-1][3]) & END)


@dataclass(slots=True)
class Turn:
    """A step that is under way, of the request of `steps` (`engine.DeviceSteps`). `way` is how it is decoded: its judge, the
    rule's evidence and whether it is scored, ids of ends, the verification. `num` is how many draft tokens are verified."""

    steps: Any
    plan: Plan
    way: tuple[Any, ...]
    sheet: tuple[list[int], list[float]]
    """Whole and real numbers that `Records.send` takes to the device."""
    num_unread: int
    """Tokens that the draft reads first; 0 where nothing is drafted."""
    num_ahead: int
    num: int = 0
    num_drawn: int = 0

    @property
    def limit(self) -> int:
        return self.plan.decision.limit

    def drop(self, records: list[list[float]], record: DeviceRecord) -> None:
        """Take back the last draft token, which a rule has stopped at."""
        if not has_ended(records):
            self.num -= 1
            record.count.fill_(self.num)


def draft_step(
    way: tuple[Any, ...], cache: RecordedPasses, slot: StaticCache | Slot, record: DeviceRecord, launches: RowKernels | None
) -> DraftStep:
    """Work behind a pass of the draft: one draft token. `cache` outlives the request, and holds the ids of ends."""
    judge, evidence, scores, ids, _ = way
    if ids not in cache.ends:
        cache.ends[ids] = torch.tensor(ids, dtype=torch.long, device=cache.device)
    return DraftStep(slot, record, judge, evidence, scores, cache.ends[ids], launches)


@dataclass(eq=False)
class _After:
    """Work behind a pass of `width` rows for slots `first` to `last`, one after the other."""

    cache: Slots
    records: Records
    launches: RowKernels | None
    width: int
    first: int
    last: int
    way: tuple[Any, ...]
    is_draft: bool

    @cached_property
    def _works(self) -> list[Program]:
        return [self._work(i) for i in range(self.first, self.last + 1)]

    def _work(self, i: int) -> Program:
        slot, record = self.cache.slot(i, self.width), self.records.each[i]
        launches = None if self.launches is None else self.launches.over(slot.logits)
        if self.is_draft:
            return draft_step(self.way, self.cache, slot, record, launches)
        return VerdictStep(slot, record, self.way[0].sampling, self.way[-1], self.width, launches)

    def __call__(self) -> None:
        for work in self._works:
            work()

    def rest(self) -> None:
        """Make records ones that a rehearsal may write to."""
        for record in self.records.each if self.is_draft else ():
            record.rest()


def together(turns: Sequence[Turn]) -> list[tuple[Turn, Result]]:
    """Results of steps that have begun, in some order. Seconds are shared by the rows that were read."""
    return _Step(turns).run()


class _Step:
    def __init__(self, turns: Sequence[Turn]):
        ways = {way: i for i, way in enumerate(dict.fromkeys(turn.way for turn in turns))}
        self._turns = sorted(turns, key=lambda turn: (not turn.num_unread, ways[turn.way]))
        self._drafting = [turn for turn in self._turns if turn.num_unread]
        self._target: Slots = turns[0].steps.target.model.slots
        self._draft: Slots = turns[0].steps.draft.model.slots
        if self._draft.record is None:
            self._draft.record = Records(self._draft, NUMS[-1])
        self._records: Records = self._draft.record
        self._mirror, self._outcomes = self._records.mirrors["records"], self._records.mirrors["outcomes"]
        device = self._draft.device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @property
    def _recording_s(self) -> float:
        return self._target.recording_s + self._draft.recording_s

    @torch.inference_mode()
    def run(self) -> list[tuple[Turn, Result]]:
        recorded_s, started = self._recording_s, perf_counter()
        marks = [self._mark(enable_timing=True)]
        self._propose()
        marks.append(self._mark(enable_timing=True))
        drafted, drafting_s = perf_counter(), self._recording_s - recorded_s
        for turn, mirror, record in zip(self._turns, self._mirror, self._records.each, strict=False):
            if turn.steps.drops and 0 < turn.num < turn.limit:
                turn.drop(mirror[: turn.num].tolist(), record)
        width = bucket(max(turn.num for turn in self._turns) + 1)
        self._verify(width)
        if self._stream is not None:
            self._stream.synchronize()
            drafted += max(0.0, marks[0].elapsed_time(marks[1]) / 1e3 - (drafted - started))
        once_s = self._recording_s - recorded_s
        draft_s, verify_s = drafted - started - drafting_s, perf_counter() - drafted - (once_s - drafting_s)
        num_read = sum(turn.num_unread + turn.num for turn in self._drafting) or 1
        num_tested = sum(turn.num + 1 for turn in self._turns)
        results = []
        for i, turn in enumerate(self._turns):
            drawn, outcome = self._mirror[i, : turn.num_drawn].tolist(), self._outcomes[i].tolist()
            result = turn.steps.result(turn, drawn, outcome, self._records.each[i], self._target.slot(i, width))
            result.draft_s = draft_s * (turn.num_unread + turn.num) / num_read if turn.num_unread else 0.0
            result.verify_s, result.once_s = verify_s * (turn.num + 1) / num_tested, once_s / len(self._turns)
            results.append((turn, result))
        return results

    def _propose(self) -> None:
        """Queue draft steps of all that draft, until all have stopped."""
        turns, slots, records, passes = self._drafting, self._draft, self._records, []
        most = max((turn.limit for turn in turns), default=0)
        if turns:
            span = max(turn.steps.room(turn) for turn in turns)
            for width in (max(turn.num_unread for turn in turns), 1)[:most]:
                read = slots.pass_over(len(turns), width, span)
                passes.append([read, *self._after(slots, turns, width, is_draft=True)])
            slots.place([turn.steps.draft.static for turn in turns])
        records.send([turn.sheet for turn in self._turns])
        if not turns:
            return
        for turn, record in zip(turns, records.each, strict=False):
            if turn.steps.seen is not None:
                record.seen.copy_(turn.steps.seen)
        num = num_slots(len(turns))
        slots.inputs[:num, :3].copy_(records.pending[:num])
        num_queued = self._queue(passes, most)
        for turn, flags in zip(turns, self._mirror[:, : num_queued - 1, 3].tolist(), strict=False):
            num = next((k for k, flag in enumerate(flags, 1) if flag), min(turn.limit, num_queued))
            turn.steps.drafted(turn, num, num_queued)

    def _queue(self, passes: Sequence[Sequence[Program]], most: int) -> int:
        """The steps that were queued: as many as one is sure to take, then one by one. All flags but the last are read."""
        sure = max(turn.limit if turn.num_ahead else 1 for turn in self._drafting)
        flags, marks = self._mirror.numpy()[: len(self._drafting), :, 3], []
        for i in range(most):
            for program in passes[min(i, len(passes) - 1)]:
                program()
            self._mirror.copy_(self._records.records, non_blocking=True)
            marks.append(self._mark())
            if sure <= i + 1 < most:
                self._wait(marks[i])
                if flags[:, : i + 1].any(1).all():
                    return i + 1
        if most > 1:
            self._wait(marks[-2])
        return most

    def _verify(self, width: int) -> None:
        """One target pass over the last token and the draft tokens of all, and the acceptance tests."""
        turns, slots, records = self._turns, self._target, self._records
        span = max(turn.steps.room_to_verify(turn) for turn in turns)
        read = slots.pass_over(len(turns), width, span)
        judges = self._after(slots, turns, width, is_draft=False)
        slots.place([turn.steps.target.static for turn in turns])
        for turn, record in zip(turns, records.each, strict=False):
            if turn.steps.seen is not None:
                record.context.copy_(turn.steps.seen)
        num = num_slots(len(turns))
        slots.inputs[:num].copy_(records.tasks[:num])
        for program in (read, *judges):
            program()
        self._outcomes.copy_(records.outcomes, non_blocking=True)

    def _after(self, cache: Slots, turns: Sequence[Turn], width: int, *, is_draft: bool) -> list[Program]:
        """Programs behind a pass: one for each run of slots that are decoded alike."""
        launches = launches_over(cache, 1 if is_draft else WIDTHS[-1], self._draft, self._target)
        programs = []
        for way, run in groupby(range(len(turns)), key=lambda i: turns[i].way):
            first, *more = run
            last = more[-1] if more else first
            if last + 1 == len(turns):  # idle slots draw nothing, and nobody reads their verdicts
                last = num_slots(len(turns)) - 1
            work = _After(cache, self._records, launches, width, first, last, way, is_draft)
            key = ("draft" if is_draft else "verdict", width, first, last, way, self._records, launches)
            programs.append(cache.program(key, work, reset=work.rest))
        return programs

    def _mark(self, **how: Any) -> Any:
        if self._stream is None:
            return None
        event = torch.cuda.Event(**how)
        event.record(self._stream)
        return event

    def _wait(self, mark: Any) -> None:
        if mark is not None:
            mark.synchronize()
