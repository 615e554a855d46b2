"""What results look like: six pictures, each a pure function of a board.

    pareto        target passes against discards, with lines of equal speed-up (method.md 1)
    bars          the speed-up of every rule, with its interval
    ladder        how far each kind of rule gets on the way from the best fixed K to hindsight
    lengths       how many candidates a round drafts
    reliability   what a score said against what was true
    over_costs    the speed-up on other hardware, where files with several costs are given

One accent colour, for our own rules: filled for the cost-aware one, lighter for SpecDec++. Shapes say the same without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdecpp.bench.boards import Board, is_hindsight, mean_drafted, stem
from specdecpp.bench.drawing import WIDTH, Canvas, Picture, axis_x, axis_y, heading, remark, slug, title_at
from specdecpp.bench.geometry import TIMES, Box, Scale, Units, fitted, nice_step, number, spread, text_width
from specdecpp.bench.pareto import MARKS, is_flat, linear_c, pareto
from specdecpp.bench.results import Row

FILLS = {"specdecpp": "tint", "cost_aware": "accent"}
RIGHT = WIDTH - 12
MOST = 168
"""The room for a name beside what it names."""
SPEED = f"tokens/s over those of the target alone, {TIMES}"
GAIN = "gain in tokens/s over the best fixed K, %"
COLUMNS = {"perfect": RIGHT - 92, "hindsight": RIGHT}


def gallery(boards: Sequence[Board]) -> list[list[Picture]]:
    """The pictures of every board that its rows have the figures for; reliability is with the last board of its data set."""
    last = {(id(board.results), board.dataset): i for i, board in enumerate(boards)}
    return [
        [*_of_board(board), *([picture] if i in last.values() and (picture := reliability(board)) else [])]
        for i, board in enumerate(boards)
    ]


def _of_board(board: Board) -> list[Picture]:
    drawn = [bars(board), *(of(board, v) for of in (ladder, pareto, lengths) for v in board.verifications)]
    return [picture for picture in drawn if picture]


def bars(board: Board) -> Picture | None:
    """The speed-up of every chosen rule over the target alone, with 95 % intervals; rows that lose are among them."""
    groups = {v: [row for row in board.headline(v) if row.role != "oracle"] for v in board.verifications}
    rows = [row for group in groups.values() for row in group]
    if not rows:
        return None
    canvas = Canvas()
    title, note = "Speed-up over the target alone", f"{board.title}, {board.costs}"
    top = heading(canvas, title, note)
    names = {row.label: fitted(row.label, MOST) for row in rows}
    left = 18 + max(map(text_width, names.values()))
    height = 20 * len(rows) + 24 * len(groups)
    area = Box(left, top + 6, RIGHT - 46, top + 6 + height)
    ends = [end for row in rows for end in row.speedup_interval or (row.speedup,)]
    x = Scale(low=0, high=max(1.1, *ends) * 1.01, start=area.left, end=area.right)
    axis_x(canvas, x, area, SPEED)
    y = area.top
    for verification, group in groups.items():
        canvas.text((10, y + 16), f"{verification} verification", "muted")
        y += 24
        for row in group:
            canvas.text((10, y + 14), names[row.label], "accent strong" if row.role == "cost_aware" else "ink")
            _bar(canvas, x, y + 3, row.speedup, FILLS.get(row.role, "soft"))
            if row.speedup_interval:
                low, high = (x(end) for end in row.speedup_interval)
                canvas.line([(low, y + 10), (high, y + 10)], "ink")
                for end in (low, high):
                    canvas.line([(end, y + 7), (end, y + 13)], "ink")
            canvas.text((RIGHT, y + 14), f"{row.speedup:.2f}{TIMES}", "ink", anchor="end")
            y += 20
    canvas.line([(x(1), area.top), (x(1), area.bottom)], "ink")
    said = "; ".join(f"{row.label}, {row.verification}, {row.speedup:.2f}{TIMES}{_interval(row)}" for row in rows)
    return canvas.picture(area.bottom + 44, title, note, f"Speed-up: {said}.", name=slug("speed-up", board.name))


def ladder(board: Board, verification: str) -> Picture | None:
    """What each rung gains over the best fixed K, and which share of what hindsight and a perfect probability would."""
    rungs = [row for row in board.rungs(verification) if row.gain_over_best_fixed is not None]
    if len(rungs) < 2:
        return None
    shares = [name for name in COLUMNS if any(row.share_of_headroom.get(name) is not None for row in rungs)]
    canvas = Canvas()
    title, note = "The ladder: what limits the gain", f"{board.title}, {verification} verification, {board.costs}"
    top = heading(canvas, title, note) + (22 if shares else 4)
    area = Box(12, top, RIGHT, top + 40 * len(rungs))
    gains = [100 * (row.gain_over_best_fixed or 0) for row in rungs]
    low, high = min(0, *gains), max(0.5, *gains)
    x = Scale(low=low, high=high + (high - low) / 6, start=area.left, end=area.right)  # a sixth for the figure at the end
    axis_x(canvas, x, area._replace(top=area.bottom - 4), GAIN)
    for name in shares:
        canvas.text((COLUMNS[name], top - 6), f"of {name}", "muted", anchor="end")
    for i, (row, gain) in enumerate(zip(rungs, gains, strict=True)):
        y = top + 40 * i
        canvas.text(
            (area.left + 5, y + 16),
            fitted(row.label, COLUMNS["perfect"] - 90),
            "accent strong" if row.role == "cost_aware" else "ink",
        )
        for name in shares:
            canvas.text((COLUMNS[name], y + 16), _share(row, name), "ink", anchor="end")
        _bar(canvas, x, y + 21, gain, FILLS.get(row.role, "soft"))
        canvas.text((x(max(0, gain)) + 5, y + 33), _signed(gain), "ink")
    canvas.line([(x(0), area.top), (x(0), area.bottom)], "ink")
    said = "; ".join(f"{row.label} {_signed(gain)} %" for row, gain in zip(rungs, gains, strict=True))
    name = slug("ladder", board.name, verification)
    return canvas.picture(area.bottom + 44, title, note, f"Gain over the best fixed K: {said}.", name=name)


def lengths(board: Board, verification: str) -> Picture | None:
    """How many candidates rounds draft, a strip for each of our rules, with the best fixed K as a stroke through all."""
    rows = [row for row in board.headline(verification) if row.role in FILLS and row.chosen and row.drafted_histogram]
    fixed = [row for row in board.headline(verification) if row.role == "fixed" and row.chosen and row.drafted_histogram]
    if not rows:
        return None
    canvas = Canvas()
    title, note = "Candidates of a round", f"{board.title}, {verification} verification, {board.costs}"
    top = heading(canvas, title, note) + 26
    counts = [{int(k): n for k, n in row.drafted_histogram.items()} for row in rows]
    most = max(max(count) for count in counts)
    share = max(100 * n / sum(count.values()) for count in counts for n in count.values())
    strip, gap = 84.0, 34.0
    area = Box(46, top, RIGHT, top + len(rows) * (strip + gap) - gap)
    x = Scale(low=-0.7, high=most + 0.7, start=area.left, end=area.right)
    half = 0.4 * (x(1) - x(0))
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        own = Box(area.left, top + i * (strip + gap), area.right, top + i * (strip + gap) + strip)
        y = Scale(low=0, high=share * 1.05, start=own.bottom, end=own.top)
        axis_y(canvas, y, own, "" if i else "share of rounds, %", room=26)
        label = f"{fitted(row.label, MOST)}, mean {mean_drafted(row.drafted_histogram):.1f}"
        canvas.text((own.right, own.top - 8), label, "ink strong", anchor="end")
        for k, n in count.items():
            canvas.rect(Box(x(k) - half, y(100 * n / sum(count.values())), x(k) + half, own.bottom), FILLS[row.role])
        canvas.line([(own.left, own.bottom), (own.right, own.bottom)], "muted")
        for best in fixed:
            at = x(mean_drafted(best.drafted_histogram))
            canvas.line([(at, own.top), (at, own.bottom)], "dashed ink")
    step = max(1, round(nice_step(most * 22 / (area.right - area.left))))
    for k in range(0, most + 1, step):
        canvas.text((x(k), area.bottom + 16), str(k), "muted", anchor="middle")
    title_at(canvas, area, "candidates drafted" + "".join(f" (dashed: {fitted(best.label, MOST)})" for best in fixed))
    said = "; ".join(f"{row.label} {mean_drafted(row.drafted_histogram):.1f}" for row in (*rows, *fixed))
    name = slug("lengths", board.name, verification)
    return canvas.picture(area.bottom + 44, title, note, f"Mean candidates of a round: {said}.", name=name)


def reliability(board: Board) -> Picture | None:
    """What the score said against what was true; bins as dots whose area is their weight. None where it was not measured."""
    found = board.results.reliability.get(board.dataset)
    if not found:
        return None
    points = list(zip(found["confidence"], found["frequency"], found["weight"], strict=True))
    total = sum(weight for *_, weight in points)
    error = sum(weight * abs(said - true) for said, true, weight in points) / total
    canvas = Canvas()
    title, note = "Reliability of the score", f"{board.dataset}, expected calibration error {error:.3f}"
    top = heading(canvas, title, note)
    area = Box(46, top + 32, 46 + 300, top + 332)
    x = Scale(low=0, high=1, start=area.left, end=area.right)
    y = Scale(low=0, high=1, start=area.bottom, end=area.top)
    axis_x(canvas, x, area, "predicted probability")
    axis_y(canvas, y, area, "share accepted")
    canvas.line([(x(0), y(0)), (x(1), y(1))], "dashed muted")
    canvas.line([(x(said), y(true)) for said, true, _ in points], "accent")
    for said, true, weight in points:
        canvas.mark("dot", (x(said), y(true)), "accent", size=2 + 8 * (weight / total) ** 0.5)
    bottom = remark(canvas, area.bottom + 46, "Dashed: perfect. Area of a dot: its share of the tokens.")
    said = "; ".join(f"{said:.2f} and {true:.2f}" for said, true, _ in points)
    text = f"Predicted and true, by bin: {said}."
    return canvas.picture(bottom + 4, title, note, text, name=slug("reliability", board.dataset, board.key))


def over_costs(boards: Sequence[Board]) -> list[Picture]:
    """The speed-up and the gain over the best fixed K against c, for each set of rows that several costs have."""
    arenas = dict.fromkeys((b.dataset, b.temperature, v) for b in boards for v in b.verifications)
    return [picture for arena in arenas for picture in _over_costs(boards, *arena)]


def _over_costs(boards: Sequence[Board], dataset: str, temperature: float, verification: str) -> list[Picture]:
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

    def picture(self, title: str, note: str, axis: str, remarks: Sequence[str], *, name: str) -> Picture:
        canvas = Canvas()
        top = heading(canvas, title, note)
        names = {rule: fitted(rule, MOST) for rule in self.points}
        area = Box(46, top + 32, RIGHT - max(map(text_width, names.values())) - 10, top + 332)
        cs, values = ([point[i] for points in self.points.values() for point in points] for i in (0, 1))
        x = Scale(low=0, high=1.05 * max(cs), start=area.left, end=area.right)
        low, high = min(0, *values), max(0.1, *values)
        y = Scale(low=low * 1.04, high=high * 1.04, start=area.bottom, end=area.top)
        axis_x(canvas, x, area, "c, cost of one more candidate / of a target pass")
        axis_y(canvas, y, area, axis)
        canvas.line([(area.left, y(0)), (area.right, y(0))], "muted")
        replayed = {rule: [p for p in points if not p[2]] or points for rule, points in self.points.items()}
        ends = {rule: (x(points[-1][0]), y(points[-1][1])) for rule, points in replayed.items()}
        heights = spread([at for _, at in ends.values()], gap=15, low=area.top, high=area.bottom)
        for (rule, points), height in zip(self.points.items(), heights, strict=True):
            shape, kind = MARKS[self.roles[rule]]
            canvas.line([(ends[rule][0] + 6, ends[rule][1]), (area.right + 6, height)], "faint")
            canvas.line([(x(c), y(value)) for c, value, is_clock in points if not is_clock], kind)
            for c, value, is_clock in points:
                canvas.mark("ring" if is_clock else shape, (x(c), y(value)), kind)
            is_ours = self.roles[rule] == "cost_aware"
            canvas.text((area.right + 10, height + 4), names[rule], "accent strong" if is_ours else "ink")
        bottom = area.bottom + 44
        for text in remarks:
            bottom = remark(canvas, bottom + 2, text)
        said = "; ".join(f"{rule} " + ", ".join(f"{v:.2f} at {c:.2f}" for c, v, _ in ps) for rule, ps in self.points.items())
        return canvas.picture(bottom + 4, title, note, f"{axis}, by c: {said}.", name=name)


def _bar(canvas: Canvas, x: Scale, top: Units, value: Units, kind: str) -> None:
    """A bar from 0."""
    left, right = sorted((x(0), x(value)))
    canvas.rect(Box(left, top, right, top + 14), kind)


def _share(row: Row, oracle: str) -> str:
    """The share of the way to an oracle; nothing for an oracle that is beyond it."""
    share = row.share_of_headroom.get(oracle)
    return "" if share is None or (row.role == "oracle" and share > 1.005) else f"{number(round(100 * share))} %"


def _interval(row: Row) -> str:
    return "" if row.speedup_interval is None else " ({:.2f} to {:.2f})".format(*row.speedup_interval)


def _signed(value: Units) -> str:
    return f"{value:+.1f}".replace("-", "\N{MINUS SIGN}")
