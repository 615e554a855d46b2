"""Up to eight sequences of a model in one pass: slots of equally many rows, which share every product.

A recorded pass reads on the device where a slot's text ends, and where its keys and values lie, so that it serves any
sequences. Slots behind the last sequence write to a spare place. By operations of torch attention is called slot by slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdecpp.backends.graphs.cache import WIDTHS, Program, RecordedPasses, StaticCache
from specdecpp.backends.graphs.layers import Nodes
from specdecpp.backends.lean import Attend, LeanModel

NUMS = (2, 4, 8)
"""Slots of a recorded pass."""


def num_slots(num: int) -> int:
    """The slots of a pass over so many sequences."""
    return next(slots for slots in NUMS if slots >= num)


@dataclass(frozen=True, eq=False)
class Slot:
    """Inputs and outputs of one sequence in a pass."""

    inputs: Int[Tensor, " n"]
    hidden: Float[Tensor, "W D"]
    logits: Float[Tensor, "W V"]


class Slots(RecordedPasses):
    """Inputs [slots, 1 + W] and outputs of shared passes: rows of slot s follow those of slot s - 1."""

    def __init__(self, body: LeanModel):
        super().__init__(body, NUMS[-1])
        self.inputs = torch.zeros(NUMS[-1], 1 + WIDTHS[-1], dtype=torch.long, device=self.device)
        self._spare = body._embedding.new_zeros(body._kv_heads, WIDTHS[-1], body._head_size)
        num_layers = len(body._layers)
        self._idle = torch.tensor([[0, 0, WIDTHS[-1]]] * num_layers, device=self.device)
        self._table = self._idle.unsqueeze(-1).repeat(1, 1, NUMS[-1])
        self._held: list[tuple[StaticCache, int]] = []

    def slot(self, i: int, width: int) -> Slot:
        """Slot i in a pass of this width."""
        rows = slice(i * width, (i + 1) * width)
        return Slot(self.inputs[i], self.hidden[rows], self.logits[rows])

    def place(self, caches: Sequence[StaticCache]) -> None:
        """Give slots to sequences, in order: no pass is made new behind it."""
        held = [(cache, cache.capacity) for cache in caches]
        if held != self._held:
            idle = [self._idle] * (NUMS[-1] - len(caches))
            self._table.copy_(torch.stack([*(cache.places(self._spare) for cache in caches), *idle], -1))
            self._held = held

    def pass_over(self, num: int, width: int, span: int) -> Program:
        """Reads `inputs` of slots for `num` sequences, fills `hidden` and `logits`."""
        slots = num_slots(num)
        return self.program(("pass", slots, width, span), partial(self._pass, slots, width, span), reset=self._clear)

    def _clear(self) -> None:
        self._table.copy_(self._idle.unsqueeze(-1))
        self.inputs.zero_()
        self._held = []

    def _pass(self, slots: int, width: int, span: int) -> None:
        spare = [self._spare] * len(self._table)
        tokens, start = self.inputs[:slots, 1 : 1 + width].reshape(-1).contiguous(), self.inputs[:slots, 0].contiguous()
        self._read(tokens, start, span, spare, spare, self._table)

    def attending(self, x: Float[Tensor, "n D"], start: Int[Tensor, " slots"], span: int, nodes: Nodes | None = None) -> Attend:
        assert nodes is None, "a tree is read alone"
        parts = x.chunk(len(start))
        attends = [
            cache.attending(part, one, min(span, capacity))
            for (cache, capacity), part, one in zip(self._held, parts, start.split(1), strict=False)
        ]

        def attend(i: int, qkv: Tensor) -> Tensor:
            own = qkv.chunk(len(start))
            mixed = [one(i, rows) for one, rows in zip(attends, own, strict=False)]
            size = self.body._heads * self.body._head_size
            return torch.cat([*mixed, qkv.new_zeros(len(qkv) - len(mixed) * len(own[0]), size)])

        return attend
