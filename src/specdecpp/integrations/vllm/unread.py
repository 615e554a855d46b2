"""What the target has read and the draft has not, by slots of the key-value cache that both share.

A draft that is not run when nobody wants a candidate misses tokens, and has to read them before it drafts again. Slots know
it better than requests do: a prefix that a request finds in the cache may have been written while nobody drafted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Positions `start` to `stop` - 1 of a row of the batch, and their slots."""

    row: int
    start: int
    stop: int
    slots: Int[Tensor, " N"]

    def __len__(self) -> int:
        return self.stop - self.start

    def cut(self, num: int) -> "tuple[Span, Span]":
        """The first `num` positions, and the others."""
        middle = self.start + num
        head, tail = self.slots[:num], self.slots[num:]
        return Span(self.row, self.start, middle, head), Span(self.row, middle, self.stop, tail)


class Unread:
    """Slots whose token the draft has not read since the target wrote it."""

    def __init__(self, num_slots: int, *, block_size: int, device: torch.device | str):
        self._marks = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self._block_size = block_size

    def mark(self, slots: Int[Tensor, " N"], *, unread: bool) -> None:
        """After a target pass over these slots: whether the draft has passed over them. Slots below 0 are padding."""
        self._marks[slots[slots >= 0].long()] = unread

    def spans(self, blocks: Int[Tensor, "B M"], lengths: Int[Tensor, " B"]) -> list[Span]:
        """For every row that has any among its first `lengths[row]` positions: from the first of these on.

        `blocks` [B, M] is the block table of the batch. What follows a missing position is read again: a draft writes a
        position from all before it.
        """
        if not self._marks.any():
            return []
        found = []
        for row, length in enumerate(lengths.tolist()):
            at = torch.arange(length, device=self._marks.device)
            slots = blocks[row, at // self._block_size].long() * self._block_size + at % self._block_size
            missing = self._marks[slots].nonzero()
            if len(missing):
                start = int(missing[0])
                found.append(Span(row, start, length, slots[start:]))
        return found


def portions(spans: Sequence[Span], most: int) -> list[list[Span]]:
    """The spans in passes of at most `most` positions together; a long one goes on in the next pass."""
    found: list[list[Span]] = []
    waiting, room = list(spans), 0
    while waiting:
        if room == 0:
            found.append([])
            room = most
        span = waiting.pop(0)
        if len(span) > room:
            span, rest = span.cut(room)
            waiting.insert(0, rest)
        found[-1].append(span)
        room -= len(span)
    return found
