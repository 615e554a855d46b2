"""Known families on a GPU: every pass is a CUDA graph over static caches.

A small model's step on a GPU is bound by launching its kernels one by one, and a graph launches all of them at once: rounds
are 2.4 to 8 times as quick as those of `LeanRunner` on an H100 (benchmarks/results/gpu.json). The passes are those of
`LeanRunner`, which reads long prompts for this runner too, with kernels of our own between the products (`fused`);
`static_cache` says how they are recorded.

Two such runners on one device can do a whole round there (`rounds.device`). On a CPU the same code runs without being
recorded, on more positions than `LeanRunner` reads: that is for tests.
"""

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from specdecpp.runners.fused import fused
from specdecpp.runners.lean import LeanRunner
from specdecpp.runners.static_cache import WIDTHS, StaticCache, bucket, free_bytes, span_of

_SHARE = 1 / 32
"""Of the free memory: what one cache may take in advance."""


class GraphRunner(LeanRunner):
    """A model of a known family and one sequence in a static cache. See `runners.Runner` for the contract.

    A cache goes back to a common store when its runner is gone, with what was recorded over it: the next request records
    nothing anew.

    Raises `RunnerError` for a model outside the families, and where its logits are not those of transformers.

    >>> runner = GraphRunner(model.to("cuda"))                       # doctest: +SKIP
    """

    manner: ClassVar[str] = "in CUDA graphs"

    def __init__(self, model: Any, *, vocab_size: int | None = None, probe: bool = True):
        self._idle: list[StaticCache] = []
        self._static: StaticCache | None = None
        self._give_back: Any = None
        super().__init__(model, vocab_size=vocab_size, probe=probe)

    @staticmethod
    def refusal(model: Any) -> str | None:
        """Why this model cannot be run so; None when it can. A CPU is no obstacle, only slow."""
        devices = {p.device.type for p in model.parameters()}
        if not devices <= {"cuda", "cpu"}:
            return f"it is on {', '.join(sorted(devices))}, and graphs are for CUDA"
        return LeanRunner.refusal(model)

    def _reset(self) -> None:
        super()._reset()
        if self._give_back is not None:
            self._give_back()
        self._static = self._give_back = None

    def fresh(self) -> "GraphRunner":
        """An empty runner over the same weights."""
        other = object.__new__(GraphRunner)
        other.__dict__.update(self.__dict__ | {"_give_back": None})
        other._reset()
        return other

    @torch.inference_mode()
    def record(self, widths: Sequence[int], length: int) -> bool:
        """Record passes of these widths over texts up to this length, on the cache of the next request: recorded when they are
        first needed they would hold a request up. Tells whether there are any: nothing is recorded on a CPU."""
        other = self.fresh()
        if not other.static.is_recorded:
            return False
        span, last = span_of(0), other.make_room(min(length, self.max_length or length))
        while span <= last:
            for width in widths:
                other.static.pass_over(width, span)
            span *= 2
        return True

    @property
    def static(self) -> StaticCache:
        """The cache of this sequence, taken from the store at the first use."""
        if self._static is None:
            self._static = self._idle.pop() if self._idle else StaticCache(fused(self))
            self._keys, self._values = self._static.keys, self._static.values
            self._give_back = weakref.finalize(self, self._idle.append, self._static)
        return self._static

    @torch.inference_mode()
    def extend(self, tokens: list[int], *, rows: int) -> tuple[Float[Tensor, "rows V"], Float[Tensor, "rows D"]]:
        """Append tokens to the cache; logits [rows, V] and hidden states [rows, D] of the last `rows` of them."""
        n = len(tokens)
        if n > WIDTHS[-1]:
            return super().extend(tokens, rows=rows)
        static, span = self.static, self.make_room(self._length + n)
        program = static.pass_over(bucket(n), span)
        static.inputs[: n + 1] = torch.tensor([self._length, *tokens], device=self.device)
        program()
        self.advance(n)
        return static.logits[n - rows : n].clone(), static.hidden[n - rows : n].clone()

    def advance(self, num_tokens: int) -> None:
        """Count tokens that a pass on the device has put into the cache."""
        self._length += num_tokens

    def make_room(self, length: int) -> int:
        """Room for a text of this length; the span that a pass reads which ends there."""
        self._make_room(length)
        return span_of(length)

    def _make_room(self, length: int) -> None:
        """The span depends on the text only, not on what the cache held before, so that a seed gives the same bits again."""
        static, span = self.static, span_of(length)
        if span > static.capacity:
            static.forget()
            super()._make_room(max(span, self._reserved()))
        static.prepare(span)

    def _reserved(self) -> int:
        """Positions of the whole context, where they take a small share of the memory that is free: growing throws away what
        was recorded, which takes seconds to record anew. 0 where they do not."""
        span = span_of(self.max_length or 0)
        num_bytes = 2 * len(self._layers) * self._kv_heads * span * self._head_size * self._embedding.element_size()
        return span if num_bytes <= _SHARE * free_bytes(self.device) else 0
