"""The Pareto picture: target passes per token against discarded candidates per token, and the speed-up both lead to.

Time per token is t_draft (1 + R_d - R_v) for candidates and one pass for every R_v (paper, section 3), so
settings of equal speed lie on a straight line, and a rule is better where it lies nearer to the lower left.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from specdecpp.bench.results import Row
from specdecpp.costs import Costs
from specdecpp.report.boards import Board, is_cumulative
from specdecpp.report.drawing import TIMES, WIDTH, Picture, Sheet, Units, slug, styled
from specdecpp.report.labels import Box, Labels, Point
from specdecpp.report.theme import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

MARKS = {  # shape and colour of a role
    "fixed": ("ring", "muted"),
    "free": ("^", "muted"),
    "other": ("x", "muted"),
    "specdecpp": ("o", "accent"),
    "cost_aware": ("D", "accent"),
    "oracle": ("s", "ink"),
}
NAMES = {"fixed": "fixed K", "free": "free rules", "other": "others", "specdecpp": "SpecDec++", "oracle": "oracles"}
NAMES |= {"cost_aware": "cost-aware"}
LABELLED = ("cost_aware", "oracle", "free", "specdecpp")
"""In the order in which chosen rows get their labels."""
NEAR = 0.8
"""Rows with at least this share of the best fixed K's speed-up are drawn; the others are counted below."""


@styled()
def pareto(board: Board, verification: str) -> Picture | None:
    """Every setting of every rule, chosen ones large. None without a fixed K."""
    headline = board.headline(verification)
    best = next((row for row in headline if row.role == "fixed"), None)
    if best is None:
        return None
    rows = board.under(verification)
    shown = [row for row in rows if row.speedup >= NEAR * best.speedup]
    note, remarks = f"{board.title}, {verification}, {board.costs}", _remarks(rows, shown, board)
    roles = [role for role in MARKS if any(row.role == role for row in shown)]
    sheet = Sheet("Passes against discards", note, 378 + 18 * -(-len(roles) // 3), remarks=remarks)
    counted = {"x": "discarded candidates per token, R_d", "y": "target passes per token, R_v"}
    xs, ys = [row.discard_rate for row in shown], [row.verification_rate for row in shown]
    axes = sheet.axes(46, 32, WIDTH - 50, 322, **counted)
    axes.set(xlim=_padded(xs), ylim=_padded(ys))
    axes.spines[["left", "bottom"]].set(visible=True, color=LIGHT["faint"])
    lines = equal_speeds(axes.get_xlim(), axes.get_ylim(), linear_c(board))
    for (a, b), (d, e) in lines.values():
        axes.plot([a, d], [b, e], color=LIGHT["faint"])
    fixed = sorted((row for row in shown if row.role == "fixed"), key=lambda row: -row.verification_rate)
    axes.plot([row.discard_rate for row in fixed], [row.verification_rate for row in fixed], color=LIGHT["muted"])
    labels = Labels(sheet)
    labels.line([_at(axes, row) for row in fixed])
    for is_large in (False, True):  # the grids small, then what was chosen, on top of them
        for row in shown:
            if (row in headline) == is_large:
                mark(axes, row.discard_rate, row.verification_rate, row.role, size=6 if is_large else 3)
                labels.mark(_at(axes, row), 6 if is_large else 3, is_large=is_large)
    _named(axes, labels, shown, [row for row in shown if row in headline])
    _speeds(axes, labels, lines)
    _legend(sheet, axes, roles)
    said = "; ".join(f"{row.label} {row.discard_rate:.2f} and {row.verification_rate:.2f}" for row in headline)
    text = f"Discarded candidates and target passes per token: {said}."
    return sheet.picture(text, name=slug("pareto", board.name, verification))


def mark(axes: "Axes", x: Units, y: Units, role: str, *, size: Units, is_ring: bool = False) -> "Line2D":
    """The mark of a role, about `size` units from its middle to its edge."""
    shape, name = MARKS[role]
    colour, is_ring = LIGHT[name], is_ring or shape == "ring"
    edge = colour if is_ring or shape == "x" else LIGHT["surface"]
    width = {"o": 2.0, "ring": 2.0, "D": 1.75, "^": 1.9}.get(shape, 1.7) * size
    looks = {
        "markersize": width,
        "markeredgewidth": 1,
        "markeredgecolor": edge,
        "markerfacecolor": "none" if is_ring else colour,
    }
    return axes.plot([x], [y], marker="o" if is_ring else shape, linestyle="none", zorder=3, **looks)[0]


def linear_c(board: Board) -> Units:
    """What one more candidate costs in target passes: its draft step, and what it adds to a pass around the best fixed K.

    Exact where passes are flat (it is c then) or linear in their width.
    """
    known, best = Costs.parse(board.results.costs), board.best_fixed
    drafted = 1.0 if best is None else (1 + best.discard_rate - best.verification_rate) / best.verification_rate
    width = max(1, round(drafted))
    slope = (known.verify_s(width + 1) - known.verify_s(1)) / width
    return (known.draft_s + slope) / known.verify_s(1)


def is_flat(board: Board) -> bool:
    """Whether a target pass takes the same at any width."""
    return len(set(board.results.costs["passes"].values())) == 1


def equal_speeds(x: tuple[Units, Units], y: tuple[Units, Units], c: Units) -> dict[Units, tuple[Point, Point]]:
    """Speed-up -> both ends of its line c (1 + R_d) + (1 - c) R_v = 1/speed-up within the limits; none from c = 1 on."""
    from matplotlib.ticker import MaxNLocator

    if not 0 < c < 1:
        return {}
    slowest, fastest = (1 / (c * (1 + a) + (1 - c) * b) for a, b in ((x[1], y[1]), (x[0], y[0])))
    lines = {}
    for speed in map(float, MaxNLocator(12, steps=[1, 2, 5, 10]).tick_values(slowest, fastest)):
        if slowest < speed < fastest:
            a, d = (min(max(((1 / speed - (1 - c) * b) / c - 1), x[0]), x[1]) for b in (y[1], y[0]))
            b, e = ((1 / speed - c * (1 + r)) / (1 - c) for r in (a, d))
            lines[round(speed, 6)] = ((a, b), (d, e))
    return lines


def _padded(values: Sequence[Units]) -> tuple[Units, Units]:
    """Limits with some room around the values."""
    low, high = min(values), max(values)
    room = 0.07 * (high - low) or 0.1
    return low - room if low > room else -0.3 * room, high + room


def _at(axes: "Axes", row: Row) -> Point:
    """Where a row is, in units."""
    x, y = axes.transData.transform((row.discard_rate, row.verification_rate))
    return float(x), float(y)


def _area(axes: "Axes") -> Box:
    """Where axes are, in units."""
    return axes.bbox.x0, axes.bbox.y0, axes.bbox.x1, axes.bbox.y1


def _named(axes: "Axes", labels: Labels, shown: Sequence[Row], headline: Sequence[Row]) -> None:
    """The names of what was chosen, then K along the curve where there is room."""
    named = sorted(
        (row for row in headline if row.role in LABELLED and (row.role != "free" or is_cumulative(row))),
        key=lambda row: LABELLED.index(row.role),
    )
    fixed = sorted((row for row in shown if row.role == "fixed"), key=lambda row: row not in headline)
    chosen = [row for row in fixed if row in headline]
    for row in (*chosen, *named, *fixed[len(chosen) :]):
        is_chosen, k = row in headline, row.policy.partition(":")[2] if row.role == "fixed" else ""
        text = row.label if not k else f"K = {k}" if is_chosen else k
        kind = "accent strong" if row.role == "cost_aware" else "ink" if is_chosen else "muted"
        reach, is_needed = 101 if is_chosen else 12, row.role in LABELLED[:2]
        labels.put(_at(axes, row), text, kind, within=_area(axes), reach=reach, is_needed=is_needed)


def _speeds(axes: "Axes", labels: Labels, lines: Mapping[Units, tuple[Point, Point]]) -> None:
    """What the lines mean: right of the area where they end there, else along them where there is room."""
    area = _, bottom, right, top = _area(axes)
    beside: Box = (right, bottom - 6, WIDTH, top + 8)
    for speed, ends in lines.items():
        start, end = axes.transData.transform(ends)
        is_beside = bool(end[0] > right - 1)
        for share in (1.0,) if is_beside else (0.97, 0.85, 0.7, 0.5, 0.3, 0.1):
            x, y = (start + share * (end - start)).tolist()
            within = beside if is_beside else area
            if labels.put((x, y), f"{speed:g}{TIMES}", "muted", within=within, reach=12 if is_beside else 8):
                break


def _legend(sheet: Sheet, axes: "Axes", roles: Sequence[str]) -> None:
    """What the marks mean, three in a line."""
    from matplotlib.transforms import IdentityTransform

    for i, role in enumerate(roles):
        x, y = 16 + 128 * (i % 3), sheet.top + 372 + 18 * (i // 3)
        mark(axes, x, sheet.height - y, role, size=4).set(transform=IdentityTransform(), clip_on=False)
        sheet.text(x + 10, y + 4, NAMES[role])


def _remarks(rows: Sequence[Row], shown: Sequence[Row], board: Board) -> list[str]:
    """What the reader should know."""
    curved = "" if is_flat(board) else ", passes taken as linear in width"
    lines = f"Thin lines: equal speed-up by the costs{curved}. Large: chosen."
    if len(shown) == len(rows):
        return [lines]
    slowest = min(row.speedup for row in rows)
    return [lines, f"Not shown: {len(rows) - len(shown)} slower settings, down to {slowest:.2f}{TIMES}."]
