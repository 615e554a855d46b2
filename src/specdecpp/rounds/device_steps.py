"""What a round on a device is written down in, and the two pieces of work that write there: a draft step and a verdict.

Everything has a fixed address: tokens, the rows of q, the uniforms of the round, the thresholds of the stop rule, a line for
every candidate. Both pieces only launch kernels, so that they can be recorded (`static_cache.Program`); they hold the record
and the caches, never a runner or a session, whose end frees the caches for the next request.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdecpp.head import AcceptanceHead, Calibration, features
from specdecpp.policies import score
from specdecpp.policies.protocol import Evidence
from specdecpp.rounds.device_verification import block_verdict, compare_verdict, greedy_verdict, pick, token_verdict
from specdecpp.rounds.ratio import overlap
from specdecpp.rounds.verification import BlockVerification, CompareVerification, Verification
from specdecpp.runners.static_cache import WIDTHS, StaticCache
from specdecpp.sampling import Sampling, at_least_float32, penalised, probabilities

_SENT = ("records", "task", "verdict", "overlaps", "weights", "uniforms", "verify_uniforms")
MOST = WIDTHS[-1] - 1
"""The most candidates of a round on a device: the widest recorded pass reads them and the token before them."""
STOP, END = 1, 2
"""Flags of a record: the rule stops here; the text ends here."""


class Record:
    """The tensors of one draft's rounds, on its device, and their mirrors in pinned memory."""

    def __init__(self, cache: StaticCache):
        device, body = cache.device, cache.body
        whole = {"dtype": torch.long, "device": device}
        wide = {"dtype": torch.float64, "device": device}
        self.order = torch.zeros(3 + MOST + 1, **whole)  # candidates so far, where the draft stands, a token before, the line
        self.count, self.start, self.tail, self.line = self.order[:1], self.order[1:2], self.order[2:4], self.order[3:]
        self.weights = torch.zeros(3 + MOST + 1, **wide)  # the evidence, bias and slope of its score, its thresholds
        self.evidence, self.score, self.least = self.weights[:1], self.weights[1:3], self.weights[3:]
        self.uniforms = torch.zeros(MOST, **wide)
        self.verify_uniforms = torch.zeros(WIDTHS[-1], **wide)
        wider = at_least_float32(torch.empty(0, dtype=body._embedding.dtype)).dtype
        self.rows = torch.zeros(WIDTHS[-1], body.vocab_size, dtype=wider, device=device)  # q, under greedy drafting logits
        self.scalars = torch.zeros(1, 4, device=device)
        self.context = torch.zeros(body.vocab_size, dtype=torch.bool, device=device)  # its tokens, for a repetition penalty
        self.seen = self.context.clone()  # and those of the candidates
        self.records = torch.zeros(MOST, 5, **wide)  # token, q, the head's estimate, flags, evidence
        self.task = torch.zeros(1, **whole)  # number of candidates
        self.verdict = torch.zeros(2, **whole)
        self.overlaps = torch.zeros(MOST, **wide)  # of the ratio test, behind the candidates of no meaning
        # The host writes to a mirror only after the round that read it is over.
        self.mirrors = {name: _mirror(getattr(self, name)) for name in _SENT}
        self.mirrors["order"] = _mirror(self.order[:4])


def _mirror(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


@dataclass(frozen=True)
class Judge:
    """What is fixed for a request: how tokens are drawn, and what is asked about them."""

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
    """One candidate: a forward pass, a draw, the head's estimate, the stop test. See `host.propose` for the loop.

    The candidate's number, the place in the cache and the evidence are counted on by the step itself. A step of width two
    first reads the token before the last one, which the draft has missed when all its candidates were accepted.
    """

    cache: StaticCache
    record: Record
    judge: Judge
    evidence: Evidence
    scores: bool
    ends: Int[Tensor, " ends"]
    width: int
    span: int

    def __call__(self) -> None:
        record = self.record
        before, after = record.count.clone(), record.count + 1
        unread = record.line.index_select(0, before) if self.width == 1 else record.tail
        hidden = self.cache.read(unread, record.start, self.span)[-1:]
        row, belief = self._distribution(self.cache.score(hidden))
        token = row.argmax(-1) if self.judge.sampling.is_greedy else pick(row, record.uniforms.index_select(0, before))
        q = belief.gather(-1, token.unsqueeze(-1)).squeeze(-1).double()
        accept = self._judged(hidden, token, belief, after)
        if self.evidence is Evidence.LAST_Q:
            record.evidence.copy_(q)
        elif self.evidence is Evidence.NEGATIVE_ENTROPY:
            record.evidence.copy_(-features.entropy(belief))
        elif self.evidence is Evidence.PRODUCT_OF_Q:
            record.evidence.mul_(q)
        elif self.evidence is Evidence.SURVIVAL:
            record.evidence.mul_(self._scored(accept, after) if self.scores else accept)
        is_undercut = ~(record.evidence >= record.least.index_select(0, after))
        is_end = (token == self.ends).any().view(1)
        flags = STOP * is_undercut.double() + END * is_end.double()
        record.records.index_copy_(0, before, torch.stack((token.double(), q, accept, flags, record.evidence), -1))
        record.rows.index_copy_(0, before, row)
        record.line.index_copy_(0, after, token)
        if self.judge.sampling.needs_seen:
            record.seen.index_fill_(0, token, True)
        record.count.copy_(after)
        record.start.add_(self.width)

    def _distribution(self, logits: Float[Tensor, "1 V"]) -> tuple[Float[Tensor, "1 V"], Float[Tensor, "1 V"]]:
        """The row that is kept, and what the draft believes: q and q; greedy: the logits, and their softmax."""
        seen = self.record.seen if self.judge.sampling.needs_seen else None
        if self.judge.sampling.is_greedy:
            logits = penalised(logits, self.judge.sampling, seen)
            return logits, logits.softmax(-1)
        q = probabilities(logits, self.judge.sampling, seen)
        return q, q

    def _scored(self, accept: Float[Tensor, " 1"], after: Int[Tensor, " 1"]) -> Float[Tensor, " 1"]:
        """As `policies.score.Score` reads it; the 1 of a lagged head that has judged nothing stays."""
        bias, slope = self.record.score
        logit = torch.logit(accept, eps=score.LEAST)
        probability = torch.sigmoid(bias + slope * logit)
        return probability if self.judge.looks_ahead else torch.where(after > 1, probability, 1.0)

    def _judged(
        self,
        hidden: Float[Tensor, "1 D"],
        token: Int[Tensor, " 1"],
        belief: Float[Tensor, "1 V"],
        after: Int[Tensor, " 1"],
    ) -> Float[Tensor, " 1"]:
        """P(accepted) of this candidate or, by a lagged head, of the one before it (1 where there is none)."""
        head = self.judge.head
        if self.judge.judges_by_q:
            q = belief.gather(-1, token.unsqueeze(-1)).squeeze(-1).double()
            return 1 / (1 + (1 - q).clamp(min=score.REST))
        if head is None:
            return self.record.evidence.new_ones(1)
        now = features.rows(head.card.scalars, tokens=token, q=belief, depth=after)
        known = now if self.judge.looks_ahead else self.record.scalars[:, : now.shape[1]].clone()
        accept = torch.sigmoid(self.judge.calibration.apply(head(hidden, token, known)).double())
        self.record.scalars[:, : now.shape[1]] = now
        return accept if self.judge.looks_ahead else torch.where(after > 1, accept, 1.0)


@dataclass(frozen=True, eq=False)
class Verdict:
    """The acceptance test, on the logits of a target pass over the last token and the candidates, padded to `width`.

    The pass is recorded for itself (`StaticCache.pass_over`): it takes long to record, and is the same under every sampling.
    """

    cache: StaticCache
    record: Record
    sampling: Sampling
    verification: Verification
    width: int

    def __call__(self) -> None:
        record = self.record
        num, logits = record.task, self.cache.logits[: self.width]
        tokens = record.line[1 : self.width]
        seen = self._seen(tokens) if self.sampling.needs_seen else None
        if self.sampling.is_greedy:
            record.verdict.copy_(greedy_verdict(penalised(logits, self.sampling, seen), tokens, num))
            return
        p, uniforms = probabilities(logits, self.sampling, seen), record.verify_uniforms[: self.width]
        if isinstance(self.verification, CompareVerification):
            record.verdict.copy_(compare_verdict(p, tokens, num, uniforms))
            return
        q = record.rows[: self.width]
        if isinstance(self.verification, BlockVerification):
            record.verdict.copy_(block_verdict(p, q, tokens, num, uniforms))
            return
        record.verdict.copy_(token_verdict(p, q, tokens, num, uniforms))
        record.overlaps[: self.width - 1].copy_(overlap(p[:-1], q[:-1]))

    def _seen(self, tokens: Int[Tensor, " K"]) -> Bool[Tensor, "W V"]:
        """The contexts of all places, see `sampling.seen_rows`."""
        rows = self.record.context.repeat(self.width, 1)
        for i in range(len(tokens)):
            rows[i + 1 :].index_fill_(1, tokens[i : i + 1], True)
        return rows
