"""Launches of `kernels.draws` and `kernels.verdicts` over rows of one vocabulary, and the memory that they share."""

from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdecpp.backends.graphs.cache import StaticCache
from specdecpp.backends.graphs.layers import FusedModel
from specdecpp.policies import score
from specdecpp.policies.protocol import Evidence
from specdecpp.sampling import Sampling
from specdecpp.verify import BlockVerification, CompareVerification, Verification

_LARGEST = 2**20
"""Tokens of a vocabulary whose weights, each at most 2^42, add up to less than 2^63."""
_KINDS = {Evidence.LAST_Q: 1, Evidence.PRODUCT_OF_Q: 2, Evidence.NEGATIVE_ENTROPY: 3, Evidence.SURVIVAL: 4}


def has_kernels(*caches: StaticCache) -> bool:
    """True where our kernels run what follows the passes over these caches."""
    return all(isinstance(cache.body, FusedModel) and cache.logits.shape[1] <= _LARGEST for cache in caches)


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
        self._rows: Tensor | None = None

    @property
    def _own(self) -> Float[Tensor, "W V"]:
        """Rows of p."""
        if self._rows is None:
            self._rows = self._logits.new_zeros(len(self._highest), self.vocab_size, dtype=torch.float32)
        return self._rows

    def weigh(
        self, rows: Float[Tensor, "W V"], sampling: Sampling, order: Tensor, line: Tensor, seen: Tensor, num: int | None = None
    ) -> None:
        """Probabilities of a draft's last row or, with `num`, of the first so many rows of a verdict."""
        kernels, is_free = self._kernels, sampling.is_greedy
        top_k = 0 if is_free or sampling.top_k is None or sampling.top_k >= self.vocab_size else sampling.top_k
        top_p, min_p = (1.0, 0.0) if is_free else (sampling.top_p, sampling.min_p)
        self.peak(sampling, order, line, seen, num)
        grid, source, numbers, same = self._asked(sampling, order, line, seen, num)
        levels = kernels.LEVELS.value
        counts, has_top_p = levels if top_k else 0, top_p < 1.0
        same |= {"COUNTS": counts, "PARTS": self._parts}
        for is_count in [True] * (counts > 0) + [False] * has_top_p:
            for level in range(levels):
                cuts = (*numbers, top_k, top_p, level)
                kernels.narrow[grid](*source, self._sums, self._ties, *cuts, **same, IS_COUNT=is_count)
        made = (self._sums, self._ties, rows, self._masses, self._totals, self._leans)
        kernels.weigh[grid](*source, *made, *numbers, top_k, top_p, min_p, **same, HAS_TOP_P=has_top_p)

    def peak(self, sampling: Sampling, order: Tensor, line: Tensor, seen: Tensor, num: int | None) -> None:
        """The greatest logits of the same rows."""
        grid, source, numbers, same = self._asked(sampling, order, line, seen, num)
        self._kernels.tops[grid](*source, self._whose, self._sums, self._totals, *numbers, **same)

    def _asked(self, sampling: Sampling, order: Tensor, line: Tensor, seen: Tensor, num: int | None) -> Any:
        """(grid, tensors, numbers, constants) that the launches over all tokens have in common."""
        temperature = 1.0 if sampling.is_greedy else sampling.temperature
        numbers = (self.vocab_size, self.num_parts, temperature, sampling.repetition_penalty)
        same = {"HAS_SEEN": sampling.needs_seen, "DRAFTS": num is None}
        return (self.num_parts, num or 1), (self._logits, seen, line, order, self._highest), numbers, same

    def note(
        self,
        record: Any,
        inputs: Int[Tensor, " n"],
        ends: Int[Tensor, " ends"],
        *,
        is_greedy: bool,
        evidence: Evidence,
        judges: bool,
        scores: bool,
        has_seen: bool,
        draws_only: bool,
    ) -> None:
        """Draw the draft token whose row has been weighed, and write it down unless it is to be judged elsewhere."""
        self._kernels.note[(1,)](
            *(record.rows, self._highest, self._whose, self._masses, self._leans, record.order, record.line, record.evidence),
            *(record.score, record.least, record.uniforms, inputs, record.records, record.totals, record.seen, ends),
            *(self.vocab_size, self.num_parts, len(ends), score.MIN_OTHERS, score.CLIP),
            GREEDY=is_greedy,
            EVIDENCE=_KINDS.get(evidence, 0),
            JUDGES=judges,
            SCORES=scores,
            HAS_SEEN=has_seen,
            DRAWS_ONLY=draws_only,
            PARTS=self._parts,
        )

    def judge(self, record: Any, sampling: Sampling, verification: Verification, num: int) -> None:
        """The verdict on the draft tokens of a record by the first `num` rows, into its outcome."""
        verdicts, order, line = self._verdicts, record.order, record.line
        of = (self.vocab_size, self.num_parts)
        if sampling.is_greedy:
            self.peak(sampling, order, line, record.context, num)
        else:
            self.weigh(self._own, sampling, order, line, record.context, num)
        if sampling.is_greedy or isinstance(verification, CompareVerification):
            drawn = (self._masses, order, record.verify_uniforms, self._chosen, *of)
            rows = self._highest if sampling.is_greedy else self._own
            verdicts.choose[(num,)](rows, self._highest, self._whose, *drawn, GREEDY=sampling.is_greedy, PARTS=self._parts)
            verdicts.agree[(1,)](self._chosen, line, order, record.outcome)
            return
        both = (self._own, record.rows, self._totals, record.totals)
        is_block = isinstance(verification, BlockVerification)
        if is_block:
            verdicts.carry[(1,)](*both, line, order, self._carries, self.vocab_size)
        sums = (self._rests, self._commons)
        verdicts.residues[self.num_parts, num](*both, self._carries, order, *sums, *of, IS_BLOCK=is_block)
        verdicts.judge[(1,)](
            *(*both, self._carries, self._masses, *sums, line, order, record.verify_uniforms, record.outcome, *of),
            IS_BLOCK=is_block,
            PARTS=self._parts,
        )
