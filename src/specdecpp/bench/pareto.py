"""The Pareto picture: target passes per token against discarded candidates per token, and the speed-up both lead to.

Time per token is t_draft (1 + R_d - R_v) for candidates and one pass for every R_v (method.md 1; paper, section 3), so
settings of equal speed lie on a straight line, and a rule is better where it lies nearer to the lower left.
"""

from collections.abc import Mapping, Sequence

from specdecpp.bench.boards import Board, is_cumulative
from specdecpp.bench.drawing import WIDTH, Canvas, Picture, axis_x, axis_y, heading, legend, remark, slug
from specdecpp.bench.geometry import TIMES, Box, Point, Scale, Units, nice_step
from specdecpp.bench.results import Row
from specdecpp.costs import Costs

MARKS = {  # shape and colour of a role
    "fixed": ("ring", "muted"),
    "free": ("triangle", "muted"),
    "other": ("cross", "muted"),
    "specdecpp": ("dot", "accent"),
    "cost_aware": ("diamond", "accent"),
    "oracle": ("square", "ink"),
}
NAMES = {"fixed": "fixed K", "free": "free rules", "other": "others", "specdecpp": "SpecDec++", "oracle": "oracles"}
NAMES |= {"cost_aware": "cost-aware"}
LABELLED = ("cost_aware", "oracle", "free", "specdecpp")
"""In the order in which chosen rows get their labels."""
NEAR = 0.8
"""Rows with at least this share of the best fixed K's speed-up are drawn; the others are counted below."""


def pareto(board: Board, verification: str) -> Picture | None:
    """Every setting of every rule, chosen ones large. None without a fixed K."""
    headline = board.headline(verification)
    best = next((row for row in headline if row.role == "fixed"), None)
    if best is None:
        return None
    rows = board.under(verification)
    shown = [row for row in rows if row.speedup >= NEAR * best.speedup]
    canvas = Canvas()
    title, note = "Passes against discards", f"{board.title}, {verification}, {board.costs}"
    top = heading(canvas, title, note)
    area = Box(46, top + 32, WIDTH - 50, top + 322)
    x = _padded([row.discard_rate for row in shown], start=area.left, end=area.right)
    y = _padded([row.verification_rate for row in shown], start=area.bottom, end=area.top)
    axis_x(canvas, x, area._replace(top=area.bottom - 4), "discarded candidates per token, R_d")
    axis_y(canvas, y, area._replace(right=area.left + 4), "target passes per token, R_v")
    canvas.line([(area.left, area.top), (area.left, area.bottom), (area.right, area.bottom)], "faint")
    lines = equal_speeds(x, y, linear_c(board))
    for ends in lines.values():
        canvas.line([(x(a), y(b)) for a, b in ends], "faint")
    fixed = sorted((row for row in shown if row.role == "fixed"), key=lambda row: -row.verification_rate)
    curve = [(x(row.discard_rate), y(row.verification_rate)) for row in fixed]
    canvas.line(curve, "muted")
    canvas.keep_clear(curve)
    _marks(canvas, shown, headline, x, y)
    _labels(canvas, shown, [row for row in shown if row in headline], x, y, area)
    _speeds(canvas, lines, x, y, area)
    bottom = legend(canvas, area.bottom + 46, [(*MARKS[r], NAMES[r]) for r in MARKS if any(row.role == r for row in shown)])
    for text in _remarks(rows, shown, board):
        bottom = remark(canvas, bottom, text)
    said = "; ".join(f"{row.label} {row.discard_rate:.2f} and {row.verification_rate:.2f}" for row in headline)
    text = f"Discarded candidates and target passes per token: {said}."
    return canvas.picture(bottom + 4, title, note, text, name=slug("pareto", board.name, verification))


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


def equal_speeds(x: Scale, y: Scale, c: Units) -> dict[Units, tuple[Point, Point]]:
    """Speed-up -> both ends of its line c (1 + R_d) + (1 - c) R_v = 1/speed-up within the scales; none from c = 1 on."""
    if not 0 < c < 1:
        return {}
    slowest, fastest = (1 / (c * (1 + a) + (1 - c) * b) for a, b in ((x.high, y.high), (x.low, y.low)))
    step = nice_step((fastest - slowest) / 11)
    lines = {}
    for i in range(int(slowest / step) + 1, int(fastest / step) + 1):
        speed = round(i * step, 6)
        left, right = ((1 / speed - (1 - c) * b) / c - 1 for b in (y.high, y.low))
        ends = [min(max(a, x.low), x.high) for a in (left, right)]
        if ends[0] < ends[1]:
            (a, b), (d, e) = ((r, (1 / speed - c * (1 + r)) / (1 - c)) for r in ends)
            lines[speed] = ((a, b), (d, e))
    return lines


def _padded(values: Sequence[Units], *, start: Units, end: Units) -> Scale:
    """A scale with some room around the values."""
    low, high = min(values), max(values)
    room = 0.07 * (high - low) or 0.1
    return Scale(low=low - room if low > room else -0.3 * room, high=high + room, start=start, end=end)


def _marks(canvas: Canvas, shown: Sequence[Row], headline: Sequence[Row], x: Scale, y: Scale) -> None:
    """The grids small, then what was chosen, large, on top of them."""
    for is_large in (False, True):
        for row in shown:
            if (row in headline) == is_large:
                shape, kind = MARKS[row.role]
                canvas.mark(shape, (x(row.discard_rate), y(row.verification_rate)), kind, size=6 if is_large else 3)


def _labels(canvas: Canvas, shown: Sequence[Row], headline: Sequence[Row], x: Scale, y: Scale, area: Box) -> None:
    """The names of what was chosen, then K along the curve where there is room."""
    named = sorted(
        (row for row in headline if row.role in LABELLED and (row.role != "free" or is_cumulative(row))),
        key=lambda row: LABELLED.index(row.role),
    )
    fixed = [row for row in shown if row.role == "fixed"]
    for row in (*(row for row in fixed if row in headline), *named, *(row for row in fixed if row not in headline)):
        at = (x(row.discard_rate), y(row.verification_rate))
        k = row.policy.partition(":")[2] if row.role == "fixed" else ""
        text = row.label if not k else f"K = {k}" if row in headline else k
        kind = "accent strong" if row.role == "cost_aware" else "ink" if row in headline else "muted"
        canvas.label(at, text, kind, within=area, reach=100 if row in headline else 12, is_needed=row.role in LABELLED[:2])


def _speeds(canvas: Canvas, lines: Mapping[Units, tuple[Point, Point]], x: Scale, y: Scale, area: Box) -> None:
    """What the lines mean: right of the area where they end there, else along them where there is room."""
    for speed, ((left, high), (right, low)) in lines.items():
        text = f"{speed:g}{TIMES}"
        if right == x.high:
            canvas.label((area.right, y(low)), text, "muted", within=Box(area.right, area.top - 8, WIDTH, area.bottom + 6))
            continue
        for share in (0.97, 0.85, 0.7, 0.5, 0.3, 0.1):
            at = (x(left + share * (right - left)), y(high + share * (low - high)))
            if canvas.label(at, text, "muted", within=area, reach=8):
                break


def _remarks(rows: Sequence[Row], shown: Sequence[Row], board: Board) -> list[str]:
    """What the reader should know."""
    curved = "" if is_flat(board) else ", passes taken as linear in width"
    lines = f"Thin lines: equal speed-up by the costs{curved}. Large: chosen."
    if len(shown) == len(rows):
        return [lines]
    slowest = min(row.speedup for row in rows)
    return [lines, f"Not shown: {len(rows) - len(shown)} slower settings, down to {slowest:.2f}{TIMES}."]
