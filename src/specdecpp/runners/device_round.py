"""A round on a device: drafting and verification without the host, but for one thing it must know, where drafting stops.

    host    launch 1   launch 2   read flag 1   launch 3   read flag 2 (stop)   launch verify(2)   wait ... verdict
    device             step 1     step 2                   step 3 (discarded)   verify

The host reads the flag of step k once step k + 1 is queued, so the device never waits for it: when drafting stops after k
candidates, one more is being drawn. It is discarded, unseen. That keeps the target's law: that drafting ends at k was decided
by Y_1..Y_k alone, before Y_{k+1} was drawn, and the uniform of Y_{k+1} is used for nothing else. The candidates are
those of the host's loop, an adapted stopping of the draft's own process (`policies.protocol`). Nothing but the draft's cache
remembers that step: it has read Y_k, which is rolled back like any other token.

All uniforms of a round are drawn before it, from the two streams of the session, and as many whatever happens in it.

Not every request can be decoded so, `device_round` says which; the others are, and give the same law, by the host's loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from specdecpp.drafting import Draft, Room
from specdecpp.head import Calibration
from specdecpp.policies import Costs, Policy
from specdecpp.policies.head import heads, judge_of
from specdecpp.policies.protocol import Floors, says_its_floors
from specdecpp.runners.desk import END, MOST, Desk, DraftStep, Manner, VerifyPass
from specdecpp.runners.graphs import GraphRunner
from specdecpp.runners.protocol import Runner
from specdecpp.runners.static_cache import Program, bucket
from specdecpp.sampling import Dice, Sampling
from specdecpp.verification import BlockVerification, Coins, GreedyVerification, TokenVerification, Verdict, Verification


@dataclass
class DeviceDraft(Draft):
    """A draft whose tokens lie on the device. Its columns are filled once it has been verified."""

    num_drafted: int = 0
    limit: int = 0
    memory: Any = field(default=None, repr=False)
    proposed_s: float = 0.0


def device_round(
    *,
    target: Runner,
    draft: Runner,
    policy: Policy,
    verification: Verification,
    sampling: Sampling,
    coins: tuple[Coins, Coins],
    ends: Sequence[int] = (),
) -> "DeviceRound | None":
    """Rounds on the device of both runners; None where the host has to run them:

    runners that are not graphs, head included on one device; a repetition penalty; a verification by comparison; a rule that
    does not say its `floors`, or may want more than 32 candidates; coins that are not `Dice`.
    """
    if not (isinstance(target, GraphRunner) and isinstance(draft, GraphRunner) and target.device == draft.device):
        return None
    if not all(isinstance(c, Dice) and c.generator.device.type == draft.device.type for c in coins):
        return None
    is_known = isinstance(verification, GreedyVerification if sampling.is_greedy else TokenVerification | BlockVerification)
    if sampling.needs_seen or not is_known or policy.max_tokens > MOST or not says_its_floors(policy):
        return None
    if any(head.output.weight.device != draft.device for head in heads(policy)):
        return None
    return DeviceRound(target, draft, policy, verification, sampling, coins, tuple(sorted(ends)))


class DeviceRound:
    """Runs the rounds of one session on the device of its runners: `propose`, then `verify`, as a session's step does."""

    def __init__(
        self,
        target: GraphRunner,
        draft: GraphRunner,
        policy: Policy,
        verification: Verification,
        sampling: Sampling,
        coins: tuple[Any, Any],
        ends: tuple[int, ...],
    ):
        self.target, self.draft, self.policy = target, draft, policy
        self._verification, self._sampling = verification, sampling
        self._ends, self._ends_there = ends, torch.tensor(ends, dtype=torch.long, device=draft.device)
        self._generators = [c.generator for c in coins]
        judge = judge_of(policy)
        calibration = (
            judge.head.card.calibration_at(is_greedy=sampling.is_greedy) if judge and judge.calibrated else Calibration()
        )
        self._manner = Manner(sampling, judge and judge.head, calibration)
        self._has_clock = draft.device.type == "cuda"
        self._flags = [torch.cuda.Event() for _ in range(MOST)] if self._has_clock else []
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._has_clock else []
        self._done = torch.cuda.Event() if self._has_clock else None

    @property
    def desk(self) -> Desk:
        """It stays with the draft's cache, like what was recorded over it."""
        cache = self.draft.static
        if cache.desk is None:
            cache.desk = Desk(cache)
        return cache.desk

    @torch.inference_mode()
    def propose(self, tokens: list[int], *, memory: Any, room: Room, costs: Costs | None = None) -> DeviceDraft | None:
        """Draft candidates after `tokens`, the whole context; None where the policy has no floors for this round."""
        started = perf_counter()
        limit = min(self.policy.limit(memory), room.num_tokens)
        floors = self.policy.floors(memory, costs, limit)
        if floors is None or limit > MOST:
            return None
        draft = DeviceDraft(costs=costs, limit=limit, memory=memory)
        draft.stop_reason = "tokens left" if limit == room.num_tokens else "limit"
        least = self._least(floors, limit)
        self._mark(0)
        if limit and least[0] > 1.0:
            draft.stop_reason = self.policy.stop(draft, memory) or draft.stop_reason
        elif limit:
            draft.num_drafted = self._run(tokens, floors, least, limit)
        else:
            self._send("order", [0, 0, 0, tokens[-1]])
        self._mark(1)
        draft.proposed_s = perf_counter() - started
        return draft

    def _least(self, floors: Floors, limit: int) -> list[float]:
        """Floors after 0..MOST candidates. None holds below the rule's least number."""
        least = [-torch.inf] * (MOST + 1)
        for k, floor in enumerate(floors.least[:limit]):
            least[k] = floor if k >= self.policy.min_tokens else -torch.inf
        return least

    def _run(self, tokens: list[int], floors: Floors, least: list[float], limit: int) -> int:
        """Queue draft steps until the flag of the last but one says stop; how many candidates count."""
        unread = tokens[self.draft.length :]
        if len(unread) > 2:
            self.draft.extend(unread[:-1], rows=1)
            unread = unread[-1:]
        span = self.draft.make_room(self.draft.length + len(unread) - 1 + limit)
        later = self._step(1, span, floors)
        step = self._step(len(unread), span, floors)
        self._send("order", [0, self.draft.length, unread[0], unread[-1]])
        self._send("weights", [1.0, *least])
        self._shake(self.desk.uniforms, 0)
        for num in range(1, limit + 1):
            step()
            self._report(num - 1)
            self.draft.advance(len(unread) if num == 1 else 1)
            step = later
            if num > 1 and self._flag_of(num - 2):
                return num - 1
        return limit

    @torch.inference_mode()
    def verify(self, tokens: list[int], draft: Draft) -> Verdict:
        """One target pass over what it has not read and the candidates, and the acceptance test; fills in the draft.

        Waits for the device: the one time in a round that its queue runs empty.
        """
        assert isinstance(draft, DeviceDraft), "a draft that `propose` has made"
        num, desk = draft.num_drafted, self.desk
        if unread := tokens[self.target.length : -1]:
            self.target.extend(unread, rows=1)
        width, span = bucket(num + 1), self.target.make_room(self.target.length + draft.limit + 1)
        program = self._verification_of(width, span)
        self._send("task", [self.target.length, num])
        self._shake(desk.coins, 1)
        program()
        desk.mirrors["verdict"].copy_(desk.verdict, non_blocking=True)
        if self._done is not None:
            self._record(self._done)
            self._done.synchronize()
        self.target.advance(num + 1)
        self._fill(draft)
        num_accepted, next_token = desk.mirrors["verdict"].tolist()
        return Verdict(num_accepted=num_accepted, next_token=next_token)

    def _fill(self, draft: DeviceDraft) -> None:
        """What the host's loop would have written down, from the records."""
        num, desk = draft.num_drafted, self.desk
        records = desk.mirrors["records"][:num].tolist()
        rows: list[Tensor | None] = list(desk.rows[:num])
        nothing: list[Tensor | None] = [None] * num
        draft.tokens = [int(record[0]) for record in records]
        draft.q, draft._logits = (nothing, rows) if self._sampling.is_greedy else (rows, nothing)
        draft._confidences = [record[1] for record in records]
        if self._manner.head is not None:
            draft.judged = [record[2] for record in records[0 if self._manner.looks_ahead else 1 :]]
        if records and int(records[-1][3]) & END:
            draft.stop_reason = "end of text"
        elif 0 < num < draft.limit:
            draft.stop_reason = self.policy.stop(draft, draft.memory) or "floor"  # equal up to rounding
        if self._has_clock and num:
            draft.late_s = max(0.0, self._marks[0].elapsed_time(self._marks[1]) / 1e3 - draft.proposed_s)

    def _step(self, width: int, span: int, floors: Floors) -> Program:
        cache, desk = self.draft.static, self.desk
        key = ("draft", width, span, self._manner, floors.evidence, self._ends)

        def reset() -> None:
            desk.count.zero_()
            cache.rest(desk.start, span)

        step = DraftStep(cache, desk, self._manner, floors.evidence, self._ends_there, width, span)
        return cache.program(key, step, reset=reset)

    def _verification_of(self, width: int, span: int) -> Program:
        cache, desk = self.target.static, self.desk
        key = ("verify", width, span, self._sampling, self._verification, desk)
        verify = VerifyPass(cache, desk, self._sampling, self._verification, width, span)
        return cache.program(key, verify, reset=lambda: cache.rest(desk.task, span))

    def _send(self, name: str, values: Sequence[int | float]) -> None:
        """Numbers to the device, without waiting."""
        mirror = self.desk.mirrors[name]
        mirror[: len(values)] = torch.tensor(values, dtype=mirror.dtype)
        getattr(self.desk, name)[: len(mirror)].copy_(mirror, non_blocking=True)

    def _shake(self, uniforms: Tensor, stream: int) -> None:
        """Fresh uniforms for a round."""
        uniforms.uniform_(generator=self._generators[stream])

    def _report(self, i: int) -> None:
        """Have the record of step i written to the host."""
        self.desk.mirrors["records"][i].copy_(self.desk.records[i], non_blocking=True)
        if self._flags:
            self._record(self._flags[i])

    def _flag_of(self, i: int) -> int:
        """The flags of step i, when it is done. Others are queued behind it."""
        if self._flags:
            self._flags[i].synchronize()
        return int(self.desk.mirrors["records"][i, 3])

    def _mark(self, i: int) -> None:
        if self._marks:
            self._record(self._marks[i])

    def _record(self, event: torch.cuda.Event) -> None:
        event.record(torch.cuda.current_stream(self.draft.device))
