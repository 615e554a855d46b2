"""Reliability diagrams: what a score said against what was true, per token and for whole rounds.

As a file (SVG, PNG or PDF, drawn by matplotlib: the extra `plots`), and as plain text for a terminal of 80 columns,
which needs neither colour nor matplotlib. Both are drawn from the figures of `evaluate`, so also from its JSON.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdecpp.report import drawing
from specdecpp.report.theme import LIGHT
from specdecpp.training.measures import Reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENDINGS = (".svg", ".png", ".pdf")
PANELS = {"token": "per token", "product": "whole round"}
NOT_DRAWN = ("max_q", "entropy")
"""Scores that do not claim to be the probability that a round survives."""
COLOURS, MARKERS = (LIGHT["accent"], "#c2571a", "#6a4c93", "#3a7d44"), "osD^"
_WIDTH = 78
_SCALE = ("0", ".5", "1")


def save(evaluation: Mapping[str, Mapping[str, Mapping[str, Any]]], path: str | Path) -> None:
    """Draw an evaluation (`evaluate.evaluate`) into a file: a row for each source, per token and whole rounds side by side.

    Bins have equal mass. Raises what `check` does.

    >>> save(evaluation, "reliability.svg")                                                      # doctest: +SKIP
    """
    check(path)
    from matplotlib.figure import Figure

    with drawing.styled():
        figure = Figure(figsize=(9.0, 4.6 * len(evaluation)), layout="constrained")
        grid = figure.subplots(len(evaluation), len(PANELS), squeeze=False)
        for row, (source, scores) in zip(grid, evaluation.items(), strict=True):
            for axes, (of, title) in zip(row, PANELS.items(), strict=True):
                _panel(axes, {name: figures[f"bins_{of}"] for name, figures in scores.items()}, f"{source}, {title}")
        figure.savefig(path, dpi=150, metadata={"Date": None} if Path(path).suffix == ".svg" else None)


def check(path: str | Path) -> None:
    """Raise, before anything is measured, ValueError for a file of another kind and `MissingExtraError` without matplotlib."""
    if Path(path).suffix not in ENDINGS:
        raise ValueError(f"a diagram cannot be written to {path}. Give a name that ends in {', '.join(ENDINGS)}.")
    drawing.check()


def text(figures: Mapping[str, Any], *, ascii_only: bool = False) -> str:
    """The diagram of one score as text of at most 80 columns: a line for each bin, per token and whole rounds side by side.

    The bar is what was true, the upright stroke what was said: a bar that falls short of its stroke was promised too much.
    """
    columns = [_column(figures[f"bins_{of}"], title, ascii_only=ascii_only) for of, title in PANELS.items()]
    columns = [column for column in columns if column]
    height = max(map(len, columns), default=0)
    width = _WIDTH // len(PANELS) - 1
    padded = [column + [""] * (height - len(column)) for column in columns]
    return "\n".join("  ".join(f"{cell:{width}}" for cell in line).rstrip() for line in zip(*padded, strict=True))


def _panel(axes: "Axes", bins: Mapping[str, Any], title: str) -> None:
    """One panel: a line for each score on the diagonal of perfect calibration."""
    axes.plot([0, 1], [0, 1], color=LIGHT["faint"], linewidth=1, zorder=0)
    heads = 0
    for name, lists in bins.items():
        if lists is None or name in NOT_DRAWN:
            continue
        is_free = name == "cumulative_q"
        colour = LIGHT["soft"] if is_free else COLOURS[heads % len(COLOURS)]
        marker = "x" if is_free else MARKERS[heads % len(MARKERS)]
        heads += not is_free
        found = Reliability.from_lists(lists)
        label = f"{name.replace('_', ' ')}, ECE {found.ece:.3f}"
        line = {"color": colour, "marker": marker, "markersize": 3.5, "label": label}
        axes.plot(found.probability, found.label, clip_on=False, zorder=1 if is_free else 2, **line)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="best", fontsize="small", framealpha=0.85, edgecolor="none")
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", title=title, xlabel="predicted probability", ylabel="share accepted")


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
