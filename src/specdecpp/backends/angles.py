"""Rotary angles as a table of cosines and sines, which grows with the text.

Source: transformers, modeling_rope_utils.py: the frequencies and their scaling are its own, read from the model.
"""

from typing import Any

import torch
from torch import Tensor

_ROOM = 256  # positions the table has at least


class Angles:
    """Cosines and sines [n, 1, head size] of a rotary embedding.

    The sign of the rotation is with the sines. Dimensions of a head that are not turned have cosines of one and sines of zero.
    """

    def __init__(self, rotary: Any, *, dtype: torch.dtype, kind: str | None = None, head_size: int | None = None):
        """`kind` is `families.View.angles`; `head_size` where not all of a head is turned."""
        found = frequencies(rotary, kind)
        self._frequencies = found.detach().float().clone()
        self._scaling = float(getattr(rotary, f"{kind}_attention_scaling" if kind else "attention_scaling"))
        self._rest, self._dtype = (head_size or 2 * len(found)) - 2 * len(found), dtype
        self._cos = self._sin = torch.empty(0)

    def is_like(self, other: "Angles") -> bool:
        """True where both give the same."""
        are_alike = torch.equal(self._frequencies, other._frequencies)
        return are_alike and (self._scaling, self._rest) == (other._scaling, other._rest)

    def at(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Tables of the positions from `start` to before `end`."""
        cos, sin = self.to(end)
        return cos[start:end], sin[start:end]

    def to(self, end: int) -> tuple[Tensor, Tensor]:
        """The whole table, which goes to `end` or further."""
        if end > len(self._cos):
            positions = torch.arange(max(end, 2 * len(self._cos), _ROOM), device=self._frequencies.device)
            angles = positions[:, None, None].float() * self._frequencies
            cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
            one, zero = (like(*cos.shape[:2], self._rest) for like in (cos.new_ones, sin.new_zeros))
            self._cos = torch.cat((cos, cos, one), -1).to(self._dtype)
            self._sin = torch.cat((-sin, sin, zero), -1).to(self._dtype)
        return self._cos, self._sin


def frequencies(rotary: Any, kind: str | None) -> Tensor:
    """Radians from one position to the next, of each pair of dimensions; with LongRoPE those of short texts."""
    found = rotary.rope_type[kind] if kind else rotary.rope_type
    name = "original_inv_freq" if found == "longrope" else "inv_freq"
    return getattr(rotary, f"{kind}_{name}" if kind else name)
