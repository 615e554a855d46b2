"""What results look like: six pictures, each a pure function of a board, drawn by matplotlib.

    pareto        target passes against discards, with lines of equal speed-up
    bars          the speed-up of every rule, with its interval
    ladder        how far each kind of rule gets on the way from the best fixed K to hindsight
    lengths       how many candidates a round drafts
    reliability   what a score said against what was true
    over_costs    the speed-up on other hardware, where files with several costs are given

One accent colour, for our own rules: filled for the cost-aware one, lighter for SpecDec++. Shapes say the same without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdecpp.bench.results import Row
from specdecpp.report.boards import Board, is_hindsight, mean_drafted, stem
from specdecpp.report.drawing import TIMES, WIDTH, Picture, Sheet, Units, slug, styled, text_width
from specdecpp.report.labels import spread
from specdecpp.report.pareto import MARKS, is_flat, linear_c, mark, pareto
from specdecpp.report.theme import LIGHT

FILLS = {"specdecpp": LIGHT["tint"], "cost_aware": LIGHT["accent"]}
RIGHT = WIDTH - 12
MOST = 24
"""Letters of a name beside what it names."""
SPEED = f"tokens/s over those of the target alone, {TIMES}"
GAIN = "gain in tokens/s over the best fixed K, %"
COLUMNS = {"perfect": RIGHT - 92, "hindsight": RIGHT}


def gallery(boards: Sequence[Board]) -> list[list[Picture]]:
    """The pictures of every board that its rows have the figures for, and as a last list those of all together.

    Reliability is with the last board of its data set. Raises `MissingExtraError` without matplotlib.
    """
    last = {(id(board.results), board.dataset): i for i, board in enumerate(boards)}
    of_boards = [
        [*_of_board(board), *([picture] if i in last.values() and (picture := reliability(board)) else [])]
        for i, board in enumerate(boards)
    ]
    return [*of_boards, over_costs(boards)]


def _of_board(board: Board) -> list[Picture]:
    drawn = [bars(board), *(of(board, v) for of in (ladder, pareto, lengths) for v in board.verifications)]
    return [picture for picture in drawn if picture]


@styled()
def bars(board: Board) -> Picture | None:
    """The speed-up of every chosen rule over the target alone, with 95 % intervals; rows that lose are among them."""
    groups = {v: [row for row in board.headline(v) if row.role != "oracle"] for v in board.verifications}
    rows = [row for group in groups.values() for row in group]
    if not rows:
        return None
    lines = [line for v, group in groups.items() for line in (f"{v} verification", *group)]
    sheet = Sheet("Speed-up over the target alone", f"{board.title}, {board.costs}", 20 * len(lines) + 50)
    left = 18 + max(text_width(_cut(row.label), is_strong=True) for row in rows)
    most = max(1.1, *(end for row in rows for end in row.speedup_interval or (row.speedup,)))
    axes = sheet.axes(left, 6, RIGHT - 46, 6 + 20 * len(lines), x=SPEED, grid="x")
    axes.set(xlim=(0, 1.01 * most), ylim=(len(lines), 0), yticks=[])
    axes.axvline(1, color=LIGHT["ink"])
    for i, line in enumerate(lines):
        base = sheet.top + 20 * i + 20
        if isinstance(line, str):
            sheet.text(10, base, line, "muted")
            continue
        sheet.text(10, base, _cut(line.label), _kind(line.role))
        axes.barh(i + 0.5, line.speedup, 0.7, color=FILLS.get(line.role, LIGHT["soft"]))
        if line.speedup_interval:
            low, high = line.speedup_interval
            axes.errorbar((low + high) / 2, i + 0.5, xerr=(high - low) / 2, color=LIGHT["ink"], capsize=3)
        sheet.text(RIGHT, base, f"{line.speedup:.2f}{TIMES}", side="right")
    said = "; ".join(f"{row.label}, {row.verification}, {row.speedup:.2f}{TIMES}{_interval(row)}" for row in rows)
    return sheet.picture(f"Speed-up: {said}.", name=slug("speed-up", board.name))


@styled()
def ladder(board: Board, verification: str) -> Picture | None:
    """What each rung gains over the best fixed K, and which share of what hindsight and a perfect probability would."""
    rungs = [row for row in board.rungs(verification) if row.gain_over_best_fixed is not None]
    if len(rungs) < 2:
        return None
    shares = [name for name in COLUMNS if any(row.share_of_headroom.get(name) is not None for row in rungs)]
    note, top = f"{board.title}, {verification} verification, {board.costs}", 22 if shares else 4
    sheet = Sheet("The ladder: what limits the gain", note, top + 40 * len(rungs) + 44)
    gains = [100 * (row.gain_over_best_fixed or 0) for row in rungs]
    low, high = min(0, *gains), max(0.5, *gains)
    axes = sheet.axes(12, top, RIGHT, top + 40 * len(rungs), x=GAIN)
    axes.set(xlim=(low, high + (high - low) / 6), ylim=(40 * len(rungs), 0), yticks=[])  # a sixth for the figure at the end
    axes.axvline(0, color=LIGHT["ink"])
    for name in shares:
        sheet.text(COLUMNS[name], sheet.top + top - 6, f"of {name}", "muted", side="right")
    for i, (row, gain) in enumerate(zip(rungs, gains, strict=True)):
        base = sheet.top + top + 40 * i + 16
        sheet.text(17, base, _cut(row.label, 28), _kind(row.role))
        for name in shares:
            sheet.text(COLUMNS[name], base, _share(row, name), side="right")
        axes.barh(40 * i + 28, gain, 14, color=FILLS.get(row.role, LIGHT["soft"]))
        axes.annotate(_signed(gain), (max(0, gain), 40 * i + 33), (5, 0), textcoords="offset points")
    said = "; ".join(f"{row.label} {_signed(gain)} %" for row, gain in zip(rungs, gains, strict=True))
    return sheet.picture(f"Gain over the best fixed K: {said}.", name=slug("ladder", board.name, verification))


@styled()
def lengths(board: Board, verification: str) -> Picture | None:
    """How many candidates rounds draft, a strip for each of our rules, with the best fixed K as a stroke through all."""
    shown = [row for row in board.headline(verification) if row.chosen and row.drafted_histogram]
    rows, fixed = [row for row in shown if row.role in FILLS], [row for row in shown if row.role == "fixed"]
    if not rows:
        return None
    counts = [{int(k): 100 * n / sum(row.drafted_histogram.values()) for k, n in row.drafted_histogram.items()} for row in rows]
    most, share = max(max(count) for count in counts), max(max(count.values()) for count in counts)
    note, strip, gap = f"{board.title}, {verification} verification, {board.costs}", 84, 34
    sheet = Sheet("Candidates of a round", note, 26 + len(rows) * (strip + gap) - gap + 44)
    counted = "candidates drafted" + "".join(f" (dashed: {_cut(best.label)})" for best in fixed)
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        top, is_last = 26 + i * (strip + gap), i == len(rows) - 1
        titles = {"x": counted if is_last else "", "y": "" if i else "share of rounds, %"}
        axes = sheet.axes(46, top, RIGHT, top + strip, **titles, grid="y")
        axes.set(xlim=(-0.7, most + 0.7), ylim=(0, 1.05 * share))
        axes.locator_params("x", integer=True)
        axes.locator_params("y", nbins=4)
        axes.tick_params(labelbottom=is_last)
        axes.axhline(0, color=LIGHT["muted"])
        axes.bar(list(count), list(count.values()), 0.8, color=FILLS[row.role])
        for best in fixed:
            axes.axvline(mean_drafted(best.drafted_histogram), color=LIGHT["ink"], dashes=(4, 3))
        label = f"{_cut(row.label)}, mean {mean_drafted(row.drafted_histogram):.1f}"
        sheet.text(RIGHT, sheet.top + top - 8, label, "ink strong", side="right")
    said = "; ".join(f"{row.label} {mean_drafted(row.drafted_histogram):.1f}" for row in (*rows, *fixed))
    return sheet.picture(f"Mean candidates of a round: {said}.", name=slug("lengths", board.name, verification))


@styled()
def reliability(board: Board) -> Picture | None:
    """What the score said against what was true; bins as dots whose area is their weight. None where it was not measured."""
    found = board.results.reliability.get(board.dataset)
    if not found:
        return None
    points = list(zip(found["confidence"], found["frequency"], found["weight"], strict=True))
    total = sum(weight for *_, weight in points)
    error = sum(weight * abs(said - true) for said, true, weight in points) / total
    note = f"{board.dataset}, expected calibration error {error:.3f}"
    remark = "Dashed: perfect. Area of a dot: its share of the tokens."
    sheet = Sheet("Reliability of the score", note, 386, remarks=[remark])
    axes = sheet.axes(46, 32, 346, 332, x="predicted probability", y="share accepted", grid="xy")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.plot([0, 1], [0, 1], color=LIGHT["muted"], dashes=(4, 3))
    axes.plot([said for said, *_ in points], [true for _, true, _ in points], color=LIGHT["accent"])
    for said, true, weight in points:
        mark(axes, said, true, "specdecpp", size=2 + 8 * (weight / total) ** 0.5)
    text = "; ".join(f"{said:.2f} and {true:.2f}" for said, true, _ in points)
    return sheet.picture(f"Predicted and true, by bin: {text}.", name=slug("reliability", board.dataset, board.key))


def over_costs(boards: Sequence[Board]) -> list[Picture]:
    """The speed-up and the gain over the best fixed K against c, for each set of rows that several costs have."""
    arenas = dict.fromkeys((b.dataset, b.temperature, v) for b in boards for v in b.verifications)
    return [picture for arena in arenas for picture in _over_costs(boards, *arena)]


def _over_costs(boards: Sequence[Board], dataset: str, temperature: Units, verification: str) -> list[Picture]:
    """Both pictures of one set of rows; none where there is only one c."""
    shown = [board for board in boards if (board.dataset, board.temperature) == (dataset, temperature)]
    rungs = sorted(
        ((linear_c(board), board, row) for board in shown for row in board.rungs(verification)), key=lambda rung: rung[0]
    )
    if len({round(board.results.costs["c"], 3) for _, board, _ in rungs}) < 2:
        return []
    speeds, gains = _Lines(), _Lines()
    for c, board, row in sorted(rungs, key=lambda rung: rung[2].role == "cost_aware"):  # drawn last, on top
        is_clock = board.results.kind == "bench"
        speeds.add(row, c, row.speedup, is_clock=is_clock)
        if row.gain_over_best_fixed is not None and not is_hindsight(row):
            gains.add(row, c, 100 * row.gain_over_best_fixed, is_clock=is_clock)
    note = f"{dataset}, T = {temperature:g}, {verification} verification"
    remarks = ["Rings: measured on the clock."] if any(board.results.kind == "bench" for board in shown) else []
    remarks += [] if all(map(is_flat, shown)) else ["Where wider passes take longer, c counts that in."]
    name = slug(dataset, f"t{temperature:g}", verification)
    drawn = [speeds.picture("Speed-up by hardware", note, SPEED, remarks, name=f"speed-by-c-{name}")]
    if gains.num_costs > 1:
        drawn.append(gains.picture("Gain by hardware", note, GAIN, remarks, name=f"gain-by-c-{name}"))
    return drawn


@dataclass
class _Lines:
    """One line for each kind of rule: (c, value, whether it was measured on the clock), rising in c."""

    points: dict[str, list[tuple[Units, Units, bool]]] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)

    @property
    def num_costs(self) -> int:
        return len({c for points in self.points.values() for c, *_ in points})

    def add(self, row: Row, c: Units, value: Units, *, is_clock: bool) -> None:
        self.roles[stem(row)] = row.role
        self.points.setdefault(stem(row), []).append((c, value, is_clock))

    @styled()
    def picture(self, title: str, note: str, axis: str, remarks: Sequence[str], *, name: str) -> Picture:
        right = RIGHT - 10 - max(text_width(_cut(rule), is_strong=True) for rule in self.points)
        sheet = Sheet(title, note, 384, remarks=remarks)
        cs, values = ([point[i] for points in self.points.values() for point in points] for i in (0, 1))
        axes = sheet.axes(46, 32, right, 332, x="c, cost of one more candidate / of a target pass", y=axis, grid="xy")
        axes.set(xlim=(0, 1.05 * max(cs)), ylim=(1.04 * min(0, *values), 1.04 * max(0.1, *values)))
        axes.axhline(0, color=LIGHT["muted"])
        replayed = {rule: [p for p in points if not p[2]] or points for rule, points in self.points.items()}
        ends = [axes.transData.transform(points[-1][:2]).tolist() for points in replayed.values()]
        bottom = sheet.height - sheet.top - 332
        heights = spread([y for _, y in ends], gap=15, low=bottom, high=bottom + 300)
        for (rule, points), (x, y), height in zip(self.points.items(), ends, heights, strict=True):
            role = self.roles[rule]
            sheet.line((x + 6, y), (right + 6, height), "faint")
            joined = [point[:2] for point in points if not point[2]]
            axes.plot([c for c, _ in joined], [value for _, value in joined], color=LIGHT[MARKS[role][1]])
            for c, value, is_clock in points:
                mark(axes, c, value, role, size=4, is_ring=is_clock)
            sheet.text(right + 10, sheet.height - height + 4, _cut(rule), _kind(role))
        said = "; ".join(f"{rule} " + ", ".join(f"{v:.2f} at {c:.2f}" for c, v, _ in ps) for rule, ps in self.points.items())
        return sheet.picture(f"{axis}, by c: {said}.", name=name)


def _cut(name: str, most: int = MOST) -> str:
    return name if len(name) <= most else f"{name[: most - 1].rstrip()}…"


def _kind(role: str) -> str:
    """Of the text that names a rule."""
    return "accent strong" if role == "cost_aware" else "ink"


def _share(row: Row, oracle: str) -> str:
    """The share of the way to an oracle; nothing for an oracle that is beyond it."""
    share = row.share_of_headroom.get(oracle)
    text = "" if share is None or (row.role == "oracle" and share > 1.005) else f"{round(100 * share)} %"
    return text.replace("-", "\N{MINUS SIGN}")


def _interval(row: Row) -> str:
    return "" if row.speedup_interval is None else " ({:.2f} to {:.2f})".format(*row.speedup_interval)


def _signed(value: Units) -> str:
    return f"{value:+.1f}".replace("-", "\N{MINUS SIGN}")
