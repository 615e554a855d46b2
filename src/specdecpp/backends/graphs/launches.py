"""Launches of `kernels.draws` and `kernels.verdicts` over rows of one vocabulary, and the memory that they share."""

from copy import copy
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdecpp.backends.graphs.cache import RecordedPasses
from specdecpp.backends.graphs.layers import FusedModel
from specdecpp.policies.protocol import Evidence
from specdecpp.sampling import Sampling
from specdecpp.verify import BlockVerification, CompareVerification, Verification

_LARGEST = 2**20
"""Tokens of a vocabulary whose weights, each at most 2^42, add up to less than 2^63."""
_KINDS = {Evidence.LAST_Q: 1, Evidence.PRODUCT_OF_Q: 2, Evidence.NEGATIVE_ENTROPY: 3, Evidence.SURVIVAL: 4}


def launches_over(cache: RecordedPasses, num_rows: int, *both: RecordedPasses) -> "RowKernels | None":
    """Launches over the first rows of passes, with memory that stays with the cache; None where one of the two models has no
    kernels for what follows its passes."""
    if not all(isinstance(of.body, FusedModel) and of.logits.shape[1] <= _LARGEST for of in both):
        return None
    if num_rows not in cache.launches:
        cache.launches[num_rows] = RowKernels(cache.logits, num_rows)
    return cache.launches[num_rows]


class RowKernels:
    """Launches over at most `num_rows` rows of logits, a pass's own, and what they leave for each other.

    `order` is a record's: draft tokens so far, whether drafting has stopped, the rows of the last pass.
    """

    def __init__(self, logits: Float[Tensor, "W V"], num_rows: int):
        kernels: Any = import_module("specdecpp.backends.graphs.kernels.draws")
        verdicts: Any = import_module("specdecpp.backends.graphs.kernels.verdicts")
        self._kernels, self._verdicts = kernels, verdicts
        self._logits, self.vocab_size = logits, logits.shape[1]
        self.num_parts = -(-self.vocab_size // kernels.BLOCK.value)
        self._parts = max(256, 1 << (self.num_parts - 1).bit_length())  # compiled once for most vocabularies
        shape, device = (num_rows, self.num_parts), logits.device
        whole: dict[str, Any] = {"dtype": torch.long, "device": device}
        wide: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self._highest = logits.new_empty(shape, dtype=torch.float32)
        self._whose = logits.new_empty(shape, dtype=torch.int32)
        self._masses, self._totals = torch.zeros(shape, **whole), torch.zeros(num_rows, **whole)
        self._sums = torch.zeros(num_rows, kernels.CELLS.value, **whole)
        self._ties = logits.new_empty(*shape, kernels.FAN.value, dtype=torch.int32)
        self._leans, self._rests, self._commons = (torch.zeros(shape, **wide) for _ in range(3))
        self._carries = torch.ones(2 * verdicts.LINES.value, **wide)
        self._chosen = torch.zeros(verdicts.LINES.value, **whole)

    @cached_property
    def _own(self) -> Float[Tensor, "W V"]:
        """Rows of p, which a greedy verdict does without."""
        return self._logits.new_zeros(len(self._highest), self.vocab_size, dtype=torch.float32)

    def over(self, logits: Float[Tensor, "W V"]) -> "RowKernels":
        """The launches over other rows, by the same memory: one after the other."""
        own, _ = copy(self), self._own
        own.__dict__ |= {"_own": self._own, "_logits": logits}
        return own

    def weigh(self, record: Any, sampling: Sampling, num: int | None = None) -> None:
        """Probabilities of a draft's last row, into its record, or of the first `num` rows of a verdict."""
        kernels = self._kernels
        top_k = None if sampling.top_k is None or sampling.top_k >= self.vocab_size else sampling.top_k
        top_p, min_p = sampling.top_p if sampling.top_p < 1.0 else None, sampling.min_p
        if sampling.is_greedy:
            top_k, top_p, min_p = None, None, 0.0
        grid, source, numbers = self.peak(record, sampling, num)
        for share in [None] * (top_k is not None) + [top_p] * (top_p is not None):
            for level in range(kernels.LEVELS.value):
                cuts = (*numbers, top_k, share, level)
                kernels.narrow[grid](*source, self._sums, self._ties, *cuts, PARTS=self._parts)
        made = (record.rows if num is None else self._own, self._masses, self._totals, self._leans)
        kernels.weigh[grid](*source, self._sums, self._ties, *made, *numbers, top_k, top_p, min_p, PARTS=self._parts)

    def peak(self, record: Any, sampling: Sampling, num: int | None) -> Any:
        """The greatest logits of the same rows; (grid, tensors, numbers) that the launches over all tokens have in common."""
        seen = None if not sampling.needs_seen else record.seen if num is None else record.context
        source = self._logits, seen, None if num is None else record.line, record.order, self._highest
        numbers = self.vocab_size, 1.0 if sampling.is_greedy else sampling.temperature, sampling.repetition_penalty
        grid = self.num_parts, num or 1
        self._kernels.tops[grid](*source, self._whose, self._sums, self._totals, *numbers)
        return grid, source, numbers

    def note(
        self,
        record: Any,
        sampling: Sampling,
        inputs: Int[Tensor, " n"] | None,
        ends: Int[Tensor, " ends"],
        *,
        evidence: Evidence,
        judges: bool,
        scores: bool,
    ) -> None:
        """Draw the draft token whose row has been weighed; with the pass's inputs, judge it and write it down."""
        uniforms = None if sampling.is_greedy else record.uniforms
        self._kernels.note[(1,)](
            *(record.rows, self._highest, self._whose, self._masses, self._leans, record.order, record.line, record.evidence),
            *(record.score if scores else None, record.least, uniforms, inputs, record.records, record.totals),
            *(record.seen if sampling.needs_seen else None, ends, self.vocab_size, len(ends)),
            EVIDENCE=_KINDS.get(evidence, 0),
            JUDGES=judges,
            PARTS=self._parts,
        )

    def judge(self, record: Any, sampling: Sampling, verification: Verification, num: int) -> None:
        """The verdict on the draft tokens of a record by the first `num` rows, into its outcome."""
        verdicts, order, line, uniforms = self._verdicts, record.order, record.line, record.verify_uniforms
        if sampling.is_greedy:
            self.peak(record, sampling, num)
        else:
            self.weigh(record, sampling, num)
        if sampling.is_greedy or isinstance(verification, CompareVerification):
            rows, coins = (self._highest, None) if sampling.is_greedy else (self._own, uniforms)
            drawn = (self._masses, order, coins, self._chosen, self.vocab_size)
            verdicts.choose[(num,)](rows, self._highest, self._whose, *drawn, PARTS=self._parts)
            verdicts.agree[(1,)](self._chosen, line, order, record.outcome)
            return
        both, sums = (self._own, record.rows, self._totals, record.totals), (self._rests, self._commons)
        carries = self._carries if isinstance(verification, BlockVerification) else None
        if carries is not None:
            verdicts.carry[(1,)](*both, line, order, carries, self.vocab_size)
        verdicts.residues[self.num_parts, num](*both, carries, order, *sums, self.vocab_size)
        made = line, order, uniforms, record.outcome, self.vocab_size
        verdicts.judge[(1,)](*both, carries, self._masses, *sums, *made, PARTS=self._parts)
