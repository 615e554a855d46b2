"""The record of a step on a device, and the two pieces of work that write there: a draft step and a verdict.

Both only launch kernels on fixed addresses, so that they can be recorded (`cache.Program`). They hold the record and the
caches, never a session, whose end frees the caches for the next request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdecpp.backends.graphs.cache import WIDTHS, RecordedPasses, StaticCache
from specdecpp.backends.graphs.launches import RowKernels
from specdecpp.backends.graphs.slots import Slot
from specdecpp.backends.graphs.verdicts import agreed, pick, verdict
from specdecpp.head import AcceptanceHead, Calibration, features
from specdecpp.policies import score
from specdecpp.policies.protocol import Evidence
from specdecpp.sampling import Sampling, at_least_float32, penalised, probabilities
from specdecpp.verify import BlockVerification, CompareVerification, Verification, overlap

MOST = WIDTHS[-1] - 1
"""The most draft tokens of a step on a device: the widest recorded pass reads them and the token before them."""
_WHOLE, _REAL = 8 + MOST, 4 + 2 * MOST + WIDTHS[-1] + 1  # an even sum: addresses of all sheets are alike
_TINY = 1e-30
STOP, END = 1, 2
"""Flags of a record: the rule stops here; the text ends here."""


class Records:
    """The tensors of steps of `num` requests, on their device, and their mirrors in pinned memory. What the host knows when a
    step begins is a sheet; all are sent at once: whole numbers, then real ones by their bits."""

    def __init__(self, cache: RecordedPasses, num: int = 1):
        wide = {"dtype": torch.float64, "device": cache.device}
        self.sheets = torch.zeros(num, _WHOLE + _REAL, dtype=torch.long, device=cache.device)
        self._mirror = _pinned(self.sheets)
        self.pending, self.tasks = self.sheets[:, 3:6], self.sheets[:, 6:_WHOLE]
        self.records = torch.zeros(num, MOST, 5, **wide)  # token, q, the head's estimate, flags, evidence
        self.outcomes = torch.zeros(num, 2 + MOST, **wide)  # accepted, the token after them, overlaps of the ratio test
        # The host writes to a mirror only after the step that read it is over.
        self.mirrors = {name: _pinned(getattr(self, name)) for name in ("records", "outcomes")}
        self.each = [DeviceRecord(cache, *tensors) for tensors in zip(self.sheets, self.records, self.outcomes, strict=True)]

    def send(self, sheets: Sequence[tuple[Sequence[int], Sequence[float]]]) -> None:
        """Begin steps: sheets of (whole, real) numbers to the device, without waiting. Slots behind them stand still."""
        numbers = self._mirror.numpy()
        numbers[len(sheets) :, :_WHOLE] = 0
        numbers[len(sheets) :, 1:3] = 1
        for line, (whole, real) in zip(numbers, sheets, strict=False):
            line[: len(whole)] = whole
            line[_WHOLE : _WHOLE + len(real)].view("f8")[:] = real
        self.sheets.copy_(self._mirror, non_blocking=True)


class DeviceRecord:
    """The tensors of one request's steps, on its device."""

    def __init__(self, cache: RecordedPasses, sheet: Tensor, records: Tensor, outcome: Tensor):
        device, body, self._sheet = cache.device, cache.body, sheet
        self.records, self.outcome = records, outcome
        whole, real = sheet[:_WHOLE], sheet[_WHOLE:].view(torch.float64)
        self.order = whole[:3]  # draft tokens so far, whether drafting has stopped, tokens that the coming step reads
        self.count, self.halt, self.width = self.order[:1], self.order[1:2], self.order[2:]
        self.pending = whole[3:6]  # where the draft stands, and what it reads first
        self.task = whole[6:]  # where the target stands, and the line: the last token and the draft tokens
        self.line = self.task[1:]
        self.evidence, self.score, self.least = real[:1], real[1:3], real[3 : MOST + 4]  # score: bias, slope; thresholds
        self.uniforms, self.verify_uniforms = real[MOST + 4 : 2 * MOST + 4], real[2 * MOST + 4 : -1]
        wider = at_least_float32(torch.empty(0, dtype=body._embedding.dtype)).dtype
        self.rows = torch.zeros(WIDTHS[-1], body.vocab_size, dtype=wider, device=device)  # q, of any positive scale
        self.totals = torch.zeros(WIDTHS[-1], dtype=torch.long, device=device)  # of their weights, for our kernels
        self.scalars = torch.zeros(1, 4, device=device)
        self.context = torch.zeros(body.vocab_size, dtype=torch.bool, device=device)  # its tokens, for a repetition penalty
        self.seen = self.context.clone()  # and those of the draft tokens

    def rest(self) -> None:
        """Make it one that a rehearsal may write to."""
        self._sheet.zero_()
        self.width.fill_(1)


def _pinned(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


@dataclass(frozen=True)
class Judge:
    """Constants of a request: how tokens are drawn, and what is asked about them."""

    sampling: Sampling
    head: AcceptanceHead | None
    calibration: Calibration
    judges_by_q: bool = False
    """Without a head, as `policies.score.by_q` does."""

    @property
    def looks_ahead(self) -> bool:
        return self.judges_by_q or (self.head is not None and self.head.card.form == "look_ahead")


@dataclass(frozen=True, eq=False)
class DraftStep:
    """One draft token, once its pass is over: a draw, the head's estimate, the stop test, as `step.propose` has them.

    It counts on by itself: the draft token's number, the evidence, and in the cache's inputs what the next pass reads. Once
    drafting has stopped all of that stays as it is, and a pass reads the last draft token once more, in its place.
    """

    cache: StaticCache | Slot
    record: DeviceRecord
    judge: Judge
    evidence: Evidence
    scores: bool
    ends: Int[Tensor, " ends"]
    launches: RowKernels | None = None

    def __call__(self) -> None:
        record, launches, sampling = self.record, self.launches, self.judge.sampling
        if launches is None:
            self._write(*self._drawn())
            return
        has_head = self.judge.head is not None
        tests = {"evidence": self.evidence, "judges": self.judge.judges_by_q, "scores": self.scores}
        launches.weigh(record, sampling)
        launches.note(record, sampling, None if has_head else self.cache.inputs, self.ends, **tests)
        if has_head:
            drawn = record.records.index_select(0, record.count)
            row = record.rows.index_select(0, record.count)
            self._write(drawn[:, 0].long(), drawn[:, 1], row / row.sum(-1, keepdim=True).clamp(min=_TINY))

    def _drawn(self) -> tuple[Int[Tensor, " 1"], Float[Tensor, " 1"], Float[Tensor, "1 V"]]:
        """A token, its q, and q; under greedy drafting the softmax of the logits."""
        record, sampling = self.record, self.judge.sampling
        logits = self.cache.logits.index_select(0, record.width - 1)
        seen = record.seen if sampling.needs_seen else None
        if sampling.is_greedy:
            logits = penalised(logits, sampling, seen)
            row, token = logits.softmax(-1), logits.argmax(-1)
        else:
            row = probabilities(logits, sampling, seen)
            token = pick(row, record.uniforms.index_select(0, record.count))
        record.rows.index_copy_(0, record.count, row)
        return token, row.gather(-1, token.unsqueeze(-1)).squeeze(-1).double(), row

    def _write(self, token: Int[Tensor, " 1"], q: Float[Tensor, " 1"], belief: Float[Tensor, "1 V"]) -> None:
        """Judge, test and write down. What lies behind the draft tokens so far may be written over at any time."""
        record, inputs = self.record, self.cache.inputs
        goes_on, before = record.halt == 0, record.count.clone()
        after = before + 1
        accept = self._judged(token, q, belief, after)
        value = record.evidence
        if self.evidence is Evidence.LAST_Q:
            value = q
        elif self.evidence is Evidence.NEGATIVE_ENTROPY:
            value = -features.entropy(belief).double()
        elif self.evidence is Evidence.PRODUCT_OF_Q:
            value = value * q
        elif self.evidence is Evidence.SURVIVAL:
            value = value * (self._scored(accept, after) if self.scores else accept)
        is_undercut = ~(value >= record.least.index_select(0, after))
        is_end = (token == self.ends).any().view(1)
        flags = STOP * is_undercut.long() + END * is_end.long()
        record.records.index_copy_(0, before, torch.stack((token.double(), q, accept, flags.double(), value), -1))
        record.line.index_copy_(0, after, token)
        if self.judge.sampling.needs_seen:
            record.seen.index_copy_(0, token, record.seen.index_select(0, token) | goes_on)
        record.evidence.copy_(torch.where(goes_on, value, record.evidence))
        inputs[:1].add_(record.width * goes_on)
        inputs[1:2].copy_(torch.where(goes_on, token, inputs[1:2]))
        record.order.copy_(torch.where(goes_on, torch.cat((after, (flags != 0).long(), torch.ones_like(after))), record.order))

    def _scored(self, accept: Float[Tensor, " 1"], after: Int[Tensor, " 1"]) -> Float[Tensor, " 1"]:
        """Read it as `policies.score.Score` does; the 1 of a lagged head that has judged nothing stays."""
        bias, slope = self.record.score
        logit = torch.logit(accept, eps=score.CLIP)
        probability = torch.sigmoid(bias + slope * logit)
        return probability if self.judge.looks_ahead else torch.where(after > 1, probability, 1.0)

    def _judged(
        self, token: Int[Tensor, " 1"], q: Float[Tensor, " 1"], belief: Float[Tensor, "1 V"], after: Int[Tensor, " 1"]
    ) -> Float[Tensor, " 1"]:
        """P(accepted) of this draft token or, by a lagged head, of the one before it (1 where there is none)."""
        head, record = self.judge.head, self.record
        if self.judge.judges_by_q:
            return 1 / (1 + (1 - q).clamp(min=score.MIN_OTHERS))
        if head is None:
            return record.evidence.new_ones(1)
        now = features.rows(head.card.scalars, tokens=token, q=belief, depth=after)
        known = now if self.judge.looks_ahead else record.scalars[:, : now.shape[1]].clone()
        hidden = self.cache.hidden.index_select(0, record.width - 1)
        accept = torch.sigmoid(self.judge.calibration.apply(head(hidden, token, known)).double())
        record.scalars[:, : now.shape[1]] = now
        return accept if self.judge.looks_ahead else torch.where(after > 1, accept, 1.0)


@dataclass(frozen=True, eq=False)
class VerdictStep:
    """The acceptance test, on the logits of a target pass over the last token and at most `width - 1` draft tokens."""

    cache: StaticCache | Slot
    record: DeviceRecord
    sampling: Sampling
    verification: Verification
    width: int
    launches: RowKernels | None = None

    def __call__(self) -> None:
        record, num = self.record, self.record.count
        if self.launches is not None:
            self.launches.judge(record, self.sampling, self.verification, self.width)
            return
        logits, tokens = self.cache.logits[: self.width], record.line[1 : self.width]
        seen = self._seen(tokens) if self.sampling.needs_seen else None
        if self.sampling.is_greedy:
            record.outcome[:2] = agreed(penalised(logits, self.sampling, seen).argmax(-1), tokens, num)
            return
        p, uniforms = probabilities(logits, self.sampling, seen), record.verify_uniforms[: self.width]
        if isinstance(self.verification, CompareVerification):
            record.outcome[:2] = agreed(pick(p, uniforms), tokens, num)
            return
        q = record.rows[: self.width]
        uniforms = torch.cat((record.verify_uniforms.index_select(0, num), uniforms[:-1]))  # the last one draws
        is_block = isinstance(self.verification, BlockVerification)
        record.outcome[:2] = verdict(p, q, tokens, num, uniforms, is_block=is_block)
        if not is_block:
            record.outcome[2 : self.width + 1] = overlap(p[:-1], q[:-1])

    def _seen(self, tokens: Int[Tensor, " K"]) -> Bool[Tensor, "W V"]:
        """The contexts of all places, see `sampling.seen_rows`."""
        rows = self.record.context.repeat(self.width, 1)
        for i in range(len(tokens)):
            rows[i + 1 :].index_fill_(1, tokens[i : i + 1], True)
        return rows
