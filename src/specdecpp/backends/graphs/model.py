"""Models whose passes are CUDA graphs over static caches: steps are 2.4 to 8 times as quick as those of `LeanModel` on an H100
(benchmarks/results/gpu.json). Long prompts are read by `LeanModel`'s passes.

On a CPU the same code runs without being recorded, for tests.
"""

import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from specdecpp.backends.graphs.cache import WIDTHS, StaticCache, bucket, free_bytes, sent, span_of
from specdecpp.backends.graphs.layers import FusedModel, fused
from specdecpp.backends.graphs.slots import NUMS, Slots
from specdecpp.backends.lean import LeanCache, LeanModel

_SHARE = 1 / 32
"""Share of the free memory that one cache may take in advance."""


class GraphCache(LeanCache):
    """One sequence of a `GraphModel`, in a static cache: it goes to the next request with what was recorded over it."""

    model: "GraphModel"

    def __init__(self, model: "GraphModel"):
        super().__init__(model)
        self._static: StaticCache | None = None

    @property
    def static(self) -> StaticCache:
        """The cache of this sequence, taken from the store at the first use."""
        if self._static is None:
            idle = self.model.idle
            self._static = idle.pop() if idle else StaticCache(fused(self.model))
            self.keys, self.values = self._static.keys, self._static.values
            weakref.finalize(self, idle.append, self._static)
        return self._static

    def make_room(self, length: int) -> int:
        """Room for a text of this length; the span that a pass reads which ends there: it depends on the text only, so that a
        seed gives the same bits again."""
        static, span = self.static, span_of(length)
        if span > static.capacity:
            static.forget()
            super().make_room(max(span, self.model.reserved()))
        return span

    @property
    def takes_nodes(self) -> bool:
        """True where `read_nodes` can be called: a node's place is not its position, by which windows go."""
        return all(view.window is None for view in self.model.family.views)

    @torch.inference_mode()
    def read_nodes(self, tokens: Sequence[int], masks: Sequence[int], num_before: int = 0) -> Float[Tensor, "n V"]:
        """Read nodes of a tree behind the text in one pass; logits after each, until the next pass.

        Nodes are numbered from 0 since the last `keep` or `rollback`, so that `num_before` have been read; at most 33 in all.
        The mask of a node has the bits of itself and of its ancestors. The length stays that of the text.
        """
        n, most, text, static = len(tokens), WIDTHS[-1], self.length, self.static
        if num_before + n > most:
            raise ValueError(f"a tree has at most {most} nodes, got {num_before + n}")
        program = static.pass_over(bucket(n), self.make_room(text + most), is_tree=True)  # no growth between its passes
        left, positions = [0] * (most - n), [text + mask.bit_count() - 1 for mask in masks]
        padded = [1] * (most - n)  # rows that see the first node: it has been read
        sheet = [text + num_before, *tokens, *left, text, *positions, *left, *masks, *padded]
        static.sheet.copy_(sent(sheet, self.device), non_blocking=True)
        program()
        return static.logits[:n]

    @torch.inference_mode()
    def keep(self, nodes: Sequence[int]) -> None:
        """Append the nodes of a branch, in order, to the text; the others are forgotten."""
        moved = [(self.length + to, self.length + node) for to, node in enumerate(nodes) if to != node]
        if moved:
            to, of = sent(moved, self.device).unbind(1)
            for first in (self.keys[0], self.values[0]):  # layers lie one behind the other: `LeanModel.planes`
                whole = first.as_strided((len(self.keys), *first.shape), (first.numel(), *first.stride()))
                whole.index_copy_(2, to, whole.index_select(2, of))
        self.length += len(nodes)


class GraphModel(LeanModel):
    """A model of a known family. Raises `BackendError` for another, and where its logits are not those of transformers."""

    manner: ClassVar[str] = "in CUDA graphs"

    def __init__(self, model: Any, *, vocab_size: int | None = None, probe: bool = True):
        self.idle: list[StaticCache] = []
        super().__init__(model, vocab_size=vocab_size, probe=probe)

    @staticmethod
    def refusal(model: Any) -> str | None:
        """Reason why this model cannot be run so; None when it can. A CPU is no obstacle, only slow."""
        devices = {p.device.type for p in model.parameters()}
        if not devices <= {"cuda", "cpu"}:
            return f"it is on {', '.join(sorted(devices))}, and graphs are for CUDA"
        return LeanModel.refusal(model)

    @cached_property
    def can_share(self) -> bool:
        """True where several sequences share a pass: recorded operations of torch know one cache only."""
        return self.device.type == "cpu" or isinstance(fused(self), FusedModel)

    @cached_property
    def slots(self) -> Slots:
        """Memory of passes that several sequences share."""
        return Slots(fused(self))

    def new_cache(self) -> GraphCache:
        """An empty cache."""
        return GraphCache(self)

    @torch.inference_mode()
    def record(self, widths: Sequence[int], length: int) -> bool:
        """Record passes of these widths over texts up to this length, on the next request's cache; False on a CPU."""
        other = self.new_cache()
        if other.static.graphs is None:
            return False
        span, last = span_of(0), other.make_room(min(length, self.max_length or length))
        while span <= last:
            for width in widths:
                other.static.pass_over(width, span)
            span *= 2
        return True

    @torch.inference_mode()
    def read(self, cache: Any, tokens: list[int], *, rows: int) -> tuple[Float[Tensor, "rows V"], Float[Tensor, "rows D"]]:
        """Append tokens to one cache; logits [rows, V] and hidden states [rows, D] of the last `rows` of them."""
        n = len(tokens)
        if n > WIDTHS[-1]:
            return super().read(cache, tokens, rows=rows)
        static, span = cache.static, cache.make_room(cache.length + n)
        program = static.pass_over(bucket(n), span)
        static.inputs[: n + 1] = torch.tensor([cache.length, *tokens], device=self.device)
        program()
        cache.length += n
        return static.logits[n - rows : n].clone(), static.hidden[n - rows : n].clone()

    @torch.inference_mode()
    def forward(
        self, parts: Sequence[tuple[Any, list[int]]], *, rows: int
    ) -> tuple[Float[Tensor, "rows V"], Float[Tensor, "rows D"]]:
        """Read the parts (`Model.forward`): short ones in passes over eight of them, others one after the other."""
        longest = max(len(tokens) for _, tokens in parts)
        if len(parts) == 1 or longest > WIDTHS[-1] or not self.can_share:
            return super().forward(parts, rows=rows)
        found, width, slots = [], bucket(longest), self.slots
        for some in (parts[at : at + NUMS[-1]] for at in range(0, len(parts), NUMS[-1])):
            span = max(cache.make_room(cache.length + len(tokens)) for cache, tokens in some)
            program = slots.pass_over(len(some), width, span)
            slots.place([cache.static for cache, _ in some])
            lines = [[cache.length, *tokens, *[0] * (width - len(tokens))] for cache, tokens in some]
            slots.inputs[: len(some), : 1 + width] = torch.tensor(lines, device=self.device)
            program()
            for i, (cache, tokens) in enumerate(some):
                slot, end = slots.slot(i, width), len(tokens)
                found.append((slot.logits[end - rows : end].clone(), slot.hidden[end - rows : end].clone()))
                cache.length += end
        logits, hidden = zip(*found, strict=True)
        return torch.cat(logits), torch.cat(hidden)

    def reserved(self) -> int:
        """Positions of the whole context, where they take a small share of the free memory, else 0: growing throws away what
        was recorded."""
        span = span_of(self.max_length or 0)
        num_bytes = 2 * len(self._layers) * self._kv_heads * span * self._head_size * self._embedding.element_size()
        return span if num_bytes <= _SHARE * free_bytes(self.device) else 0
