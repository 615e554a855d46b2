"""Reliability diagrams for a terminal of 80 columns: predicted against observed acceptance, per token and for whole steps."""

from collections.abc import Mapping
from typing import Any

from specdecpp.training.measures import Reliability

PANELS = {"token": "per token", "product": "whole step"}
_WIDTH = 78
_SCALE = ("0", ".5", "1")


def text(figures: Mapping[str, Any], *, ascii_only: bool = False) -> str:
    """The diagram of one score as text of at most 80 columns: a line for each bin, per token and whole steps side by side.

    The bar is what was true, the upright stroke what was said: a bar that falls short of its stroke was promised too much.
    """
    columns = [_column(figures[f"bins_{of}"], title, ascii_only=ascii_only) for of, title in PANELS.items()]
    columns = [column for column in columns if column]
    height = max(map(len, columns), default=0)
    width = _WIDTH // len(PANELS) - 1
    padded = [column + [""] * (height - len(column)) for column in columns]
    return "\n".join("  ".join(f"{cell:{width}}" for cell in line).rstrip() for line in zip(*padded, strict=True))


def _column(lists: Mapping[str, Any] | None, title: str, *, ascii_only: bool) -> list[str]:
    """The lines of one panel; none where the score has no bins."""
    if lists is None:
        return []
    found = Reliability.from_lists(lists)
    block, stroke = ("#", "|") if ascii_only else ("█", "│")
    room = _WIDTH // len(PANELS) - 1 - len("said  true  ")
    scale = f"{_SCALE[0]}{_SCALE[1]:^{room - 2}}{_SCALE[2]}"
    lines = [f"{title}, ECE {found.ece:.3f}", f"said  true  {scale}"]
    for said, true in zip(found.probability, found.label, strict=True):
        bar = list(f"{block * round(room * true):{room}}")
        bar[min(int(room * said), room - 1)] = stroke
        lines.append(f"{said:.2f}  {true:.2f}  {''.join(bar).rstrip()}")
    return lines
