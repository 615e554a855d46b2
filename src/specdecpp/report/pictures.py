"""Pictures of results, each a function of a board, drawn by matplotlib.

    bars          the speed-up of every policy, with its interval
    pareto        target passes against discarded draft tokens, with lines of equal speed-up
    reliability   predicted against observed acceptance
    over_costs    the speed-up on other hardware, where files with several costs are given

Our own policies have the accent colour; every picture says in words what it shows.
"""

import io
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from specdecpp.bench.results import Row
from specdecpp.costs import Costs
from specdecpp.errors import MissingExtraError
from specdecpp.report.boards import Board, is_cumulative, stem
from specdecpp.report.theme import LIGHT, TIMES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RC: dict[Any, Any] = {
    "font.size": 9,
    "axes.edgecolor": LIGHT["soft"],
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["grid"],
    "figure.facecolor": LIGHT["surface"],
    "svg.fonttype": "none",  # texts stay texts
    "svg.hashsalt": "specdecpp",  # the same figures give the same file
    "text.parse_math": False,  # a name may have a dollar
}
MARKS = {"fixed": "o", "free": "^", "other": "x", "specdecpp": "s", "cost_aware": "D", "oracle": "*"}
NAMES = {
    "fixed": "fixed K",
    "free": "free rules",
    "other": "others",
    "specdecpp": "SpecDec++",
    "cost_aware": "cost-aware",
    "oracle": "oracles",
}
NAMED = ("fixed", "specdecpp", "cost_aware", "oracle")
"""Roles whose chosen rows have their names in the pareto picture, where free rules crowd; cumulative q stands for these."""
NEAR = 0.8
"""Rows with at least this share of the best fixed K's speed-up are in the pareto picture."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A finished picture: a name for files, its words, and its SVG."""

    name: str
    description: str
    text: str = field(repr=False)

    def svg(self) -> str:
        """The text of a file of its own."""
        return self.text

    @property
    def data(self) -> str:
        """The address under which a page holds it: elements of several pictures in one page would share their ids."""
        return f"data:image/svg+xml;base64,{b64encode(self.text.encode()).decode()}"


def check() -> None:
    """Raise `MissingExtraError` without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "pictures are drawn by matplotlib, which is not installed. Install it with: pip install 'specdecpp[plots]' "
            "(what the terminal shows and tables need nothing)."
        ) from error


@contextmanager
def styled() -> Iterator[None]:
    """Draw in our style meanwhile, as a block or as a decorator. Raises `MissingExtraError` without matplotlib."""
    check()
    import matplotlib as mpl

    with mpl.rc_context(RC):
        yield


def figure(title: str, *, height: float, width: float = 5.6) -> "Figure":
    """An empty figure of so many inches, with a title."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    made.suptitle(title, x=0.01, ha="left", fontsize=10)
    return made


def finished(drawn: "Figure", description: str, *, name: str) -> Picture:
    """The figure as SVG, with its words for those who cannot see it."""
    file = io.StringIO()
    drawn.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    said = f'<svg role="img" aria-label="{escape(description)}" '
    return Picture(name=name, description=description, text=said + text[text.index("<svg ") + 5 :].rstrip())


def slug(*parts: object) -> str:
    """A name for files and ids: letters, digits and hyphens."""
    return "-".join(filter(None, (re.sub(r"[\W_]+", "-", str(part).lower()).strip("-") for part in parts)))


def gallery(boards: Sequence[Board]) -> list[list[Picture]]:
    """The pictures of every board that its rows have the figures for, and as a last list those of all together.

    Reliability is with the last board of its data set. Raises `MissingExtraError` without matplotlib.
    """
    last = {(id(board.results), board.dataset): i for i, board in enumerate(boards)}
    drawn = []
    for i, board in enumerate(boards):
        found = [bars(board), *(pareto(board, v) for v in board.verifications)]
        found += [reliability(board)] if i in last.values() else []
        drawn.append([picture for picture in found if picture])
    return [*drawn, over_costs(boards)]


@styled()
def bars(board: Board) -> Picture | None:
    """The speed-up of every chosen policy over the target alone, with 95 % intervals; rows that lose are among them."""
    rows = [row for v in board.verifications for row in board.headline(v) if row.role != "oracle"]
    if not rows:
        return None
    several = len(board.verifications) > 1
    names = [f"{_cut(row.label)}, {row.verification}" if several else _cut(row.label) for row in rows]
    drawn = figure(f"Speed-up over the target alone: {board.title}, {board.costs}", height=0.9 + 0.24 * len(rows))
    axes = drawn.subplots()
    places = range(len(rows))
    axes.barh(places, [row.speedup for row in rows], 0.7, color=[_colour(row.role) for row in rows])
    for i, row in enumerate(rows):
        low, high = row.speedup_interval or (row.speedup, row.speedup)
        axes.errorbar((low + high) / 2, i, xerr=(high - low) / 2, color=LIGHT["ink"], capsize=2, linewidth=1)
        axes.annotate(f"{row.speedup:.2f}", (high, i), (4, 0), textcoords="offset points", va="center")
    axes.axvline(1, color=LIGHT["ink"], linewidth=1)
    axes.set(ylim=(len(rows) - 0.5, -0.5), yticks=places, yticklabels=names, xlabel=f"tokens/s over the target alone, {TIMES}")
    axes.margins(x=0.12)
    axes.grid(visible=False, axis="y")
    said = "; ".join(f"{row.label}, {row.verification}, {row.speedup:.2f}{_interval(row)}" for row in rows)
    return finished(drawn, f"Speed-up: {said}.", name=slug("speed-up", board.name))


@styled()
def pareto(board: Board, verification: str) -> Picture | None:
    """Every setting of every policy, chosen ones large and named. None without a fixed K.

    Time per token is t_draft (1 + R_d - R_v) for draft tokens and one pass for every R_v (paper, section 3), so settings of
    equal speed lie on a line, and a policy is better where it lies nearer to the lower left.
    """
    headline = board.headline(verification)
    best = next((row for row in headline if row.role == "fixed"), None)
    if best is None:
        return None
    rows = board.under(verification)
    shown = [row for row in rows if row.speedup >= NEAR * best.speedup]
    drawn = figure(f"Passes against discards: {board.title}, {verification}, {board.costs}", height=4.6)
    axes = drawn.subplots()
    for role, name in NAMES.items():
        for is_chosen in (False, True):
            some = [row for row in shown if row.role == role and (row in headline) == is_chosen]
            looks: dict[str, Any] = {"marker": MARKS[role], "color": _colour(role), "s": 34 if is_chosen else 9}
            points = [row.discard_rate for row in some], [row.verification_rate for row in some]
            if some:
                axes.scatter(*points, label=name if is_chosen else None, zorder=3, **looks)
    axes.margins(0.1)
    for row in headline:
        if row in shown and (row.role in NAMED or is_cumulative(row)):
            axes.annotate(_cut(row.label), (row.discard_rate, row.verification_rate), (5, 4), textcoords="offset points")
    if 0 < (c := linear_c(board)) < 1:
        x, y = (np.linspace(*limits, 60) for limits in (axes.get_xlim(), axes.get_ylim()))
        speeds = 1 / np.maximum(c * (1 + x[None]) + (1 - c) * y[:, None], 1e-6)
        lines = axes.contour(x, y, speeds, levels=8, colors=LIGHT["faint"], linewidths=0.8)
        axes.clabel(lines, fmt=f"%.3g{TIMES}", fontsize=7, colors=LIGHT["muted"])
    axes.legend(fontsize="small", framealpha=0.85, edgecolor="none")
    hidden = f" ({len(rows) - len(shown)} slower settings are not shown)" if len(shown) < len(rows) else ""
    axes.set(xlabel=f"discarded draft tokens per token, R_d{hidden}", ylabel="target passes per token, R_v")
    said = "; ".join(f"{row.label} {row.discard_rate:.2f} and {row.verification_rate:.2f}" for row in headline)
    text = f"Discarded draft tokens and target passes per token: {said}."
    return finished(drawn, text, name=slug("pareto", board.name, verification))


@styled()
def reliability(board: Board) -> Picture | None:
    """The head's probabilities against the share that was accepted, in bins of equal mass; None without figures."""
    bins = board.results.reliability.get(board.dataset)
    if not bins:
        return None
    said, true = np.array(bins["confidence"]), np.array(bins["frequency"])
    drawn = figure(f"Predicted and observed acceptance: {board.dataset}", height=4.2, width=4.2)
    axes = drawn.subplots()
    axes.plot([0, 1], [0, 1], color=LIGHT["muted"], linestyle="--", linewidth=1)
    axes.plot(said, true, "o-", color=LIGHT["accent"], markersize=4)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="predicted probability", ylabel="share accepted")
    text = "; ".join(f"{a:.2f} and {b:.2f}" for a, b in zip(said, true, strict=True))
    return finished(drawn, f"Predicted and observed, by bin: {text}.", name=slug("reliability", board.dataset, board.key))


def over_costs(boards: Sequence[Board]) -> list[Picture]:
    """The speed-up against c, for each set of rows that several costs have."""
    arenas = dict.fromkeys((b.dataset, b.temperature, v) for b in boards for v in b.verifications)
    return [picture for arena in arenas if (picture := _over_costs(boards, *arena))]


@styled()
def _over_costs(boards: Sequence[Board], dataset: str, temperature: float, verification: str) -> Picture | None:
    """One line for each kind of policy, rising in c; None where there is only one c."""
    shown = [board for board in boards if (board.dataset, board.temperature) == (dataset, temperature)]
    lines: dict[str, list[tuple[float, float]]] = {}
    roles: dict[str, str] = {}
    for board in sorted(shown, key=linear_c):
        for row in board.rungs(verification):
            lines.setdefault(stem(row), []).append((linear_c(board), row.speedup))
            roles[stem(row)] = row.role
    if len({round(board.results.costs["c"], 3) for board in shown}) < 2:
        return None
    drawn = figure(f"Speed-up by hardware: {dataset}, T = {temperature:g}, {verification} verification", height=4.2)
    axes = drawn.subplots()
    for name, points in lines.items():
        role = roles[name]
        axes.plot(*zip(*points, strict=True), marker=MARKS[role], markersize=4, color=_colour(role), label=_cut(name))
    axes.set(xlim=(0, None), xlabel="c, cost of one more draft token / of a target pass", ylabel=f"speed-up, {TIMES}")
    axes.legend(fontsize="small", framealpha=0.85, edgecolor="none")
    said = "; ".join(f"{name} " + ", ".join(f"{v:.2f} at {c:.2f}" for c, v in ps) for name, ps in lines.items())
    return finished(drawn, f"Speed-up by c: {said}.", name=slug("speed-by-c", dataset, f"t{temperature:g}", verification))


def linear_c(board: Board) -> float:
    """Cost of one more draft token in target passes: its draft step, and what it adds to a pass around the best fixed K.

    Exact where passes are flat (it is c then) or linear in their width.
    """
    known, best = Costs.parse(board.results.costs), board.best_fixed
    drafted = 1.0 if best is None else (1 + best.discard_rate - best.verification_rate) / best.verification_rate
    width = max(1, round(drafted))
    slope = (known.verify_s(width + 1) - known.verify_s(1)) / width
    return (known.draft_s + slope) / known.verify_s(1)


def _colour(role: str) -> str:
    return {"cost_aware": LIGHT["accent"], "specdecpp": LIGHT["tint"], "oracle": LIGHT["ink"]}.get(role, LIGHT["soft"])


def _cut(name: str, most: int = 28) -> str:
    return name if len(name) <= most else f"{name[: most - 1].rstrip()}…"


def _interval(row: Row) -> str:
    return "" if row.speedup_interval is None else " ({:.2f} to {:.2f})".format(*row.speedup_interval)
