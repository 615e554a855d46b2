"""Results as tables: for a terminal of 80 columns, and the columns of the page (`page`).

The terminal shows the chosen setting of every rule, oracles, and what follows in words, where a loss is stated as plainly
as a win. The page has every row, with intervals.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from specdecpp.bench.results import Interval, Results, Row
from specdecpp.report import render
from specdecpp.report.boards import Board
from specdecpp.report.theme import TIMES

NONE = "-"
Column = tuple[str, Callable[[Row], str]]


def signed(value: float | None) -> str:
    """A gain in percent; one that rounds to zero has no sign.

    >>> signed(0.0816), signed(None)
    ('+8.2', '-')
    """
    if value is None:
        return NONE
    percent = round(100 * value, 1)
    return f"{percent:+.1f}" if percent else "0.0"


def share(row: Row, oracle: str) -> str:
    """How much of the way from the best fixed K to an oracle, in percent."""
    value = row.share_of_headroom.get(oracle)
    return NONE if value is None else f"{round(100 * value)}"


def speed(row: Row) -> str:
    """Tokens per second; at relative costs a second is a target pass, and there are few of them."""
    value = row.tokens_per_second
    return f"{value:.{1 if value >= 100 else 2 if value >= 10 else 3}f}"


def between(interval: Interval | None, write: Callable[[float], str]) -> str:
    return NONE if interval is None else " to ".join(map(write, interval))


COLUMNS: tuple[Column, ...] = (
    ("tokens\n/s", speed),
    (f"speed-up\n{TIMES}", lambda row: f"{row.speedup:.2f}"),
    ("95 %\ninterval", lambda row: between(row.speedup_interval, "{:.2f}".format)),
    ("gain over best\nfixed K, %", lambda row: signed(row.gain_over_best_fixed)),
    ("95 %\ninterval", lambda row: between(row.gain_interval, signed)),
    ("tokens\n/pass", lambda row: f"{row.mean_acceptance_length:.2f}"),
    ("discarded\n/token, R_d", lambda row: f"{row.discard_rate:.3f}"),
    ("passes\n/token, R_v", lambda row: f"{row.verification_rate:.3f}"),
    ("of perfect\nprobability, %", lambda row: share(row, "perfect")),
    ("of hind-\nsight, %", lambda row: share(row, "hindsight")),
)
"""Columns of the page, after the policy."""
SHORT: tuple[Column, ...] = (
    ("tokens\n/s", speed),
    ("times\ntarget", lambda row: f"{row.speedup:.2f}"),
    ("gain\n%", lambda row: signed(row.gain_over_best_fixed)),
    ("95 %\ninterval", lambda row: between(row.gain_interval, signed)),
    ("disc.\n/token", lambda row: f"{row.discard_rate:.2f}"),
    ("passes\n/token", lambda row: f"{row.verification_rate:.2f}"),
    ("head-\nroom %", lambda row: share(row, "hindsight")),
)
"""Columns of a terminal."""


def told(board: Board) -> list[str]:
    """Sentences about the rows."""
    return list(said(board.rows)) if board.target else []


def said(rows: Sequence[Row]) -> Iterator[str]:
    """Sentences about the rows of one data set and temperature: the fastest rule, and the rule without a threshold."""
    drafting = [row for row in rows if row.chosen and row.role != "target"]
    if not drafting:
        return
    best = max(drafting, key=lambda row: row.speedup)
    speed = f"{times(best.speedup, best.speedup_interval)} the target alone"
    if round(best.speedup, 2) <= 1:
        yield f"No rule is faster than the target alone; {name_of(best)} comes closest with {speed}."
    else:
        yield f"{name_of(best)} is fastest, {speed}{_gain(best)}."
    for row in drafting:
        if row.role == "cost_aware" and row is not best:
            yield f"{name_of(row)} reaches {times(row.speedup, row.speedup_interval)}{_gain(row)}."


def name_of(row: Row) -> str:
    """The label, and the verification where it is not the usual one."""
    return row.label if row.verification in ("token", "greedy") else f"{row.label} ({row.verification})"


def times(value: float, interval: Interval | None) -> str:
    """Text such as "1.25 times [1.20, 1.31]"."""
    return f"{value:.2f} times" + ("" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]")


def _gain(row: Row) -> str:
    gain, interval = row.gain_over_best_fixed, row.gain_interval
    if gain is None or (interval is None and gain == 0):
        return ""
    spread = "" if interval is None else f" [{100 * interval[0]:+.1f}, {100 * interval[1]:+.1f}]"
    doubt = ": too close to call" if interval is not None and interval[0] < 0 < interval[1] else ""
    return f", {100 * gain:+.1f} %{spread} on the best fixed K{doubt}"


def sections(board: Board, *, is_whole: bool) -> list[tuple[str, list[Row]]]:
    """The rows under each kind of verification, the target alone among the first; whole: every setting."""
    found = []
    for verification in board.verifications:
        rows = board.under(verification) if is_whole else board.headline(verification)
        lead = [board.target] if board.target and not found else []
        found.append((f"{verification} verification", [*lead, *rows]))
    return found


def is_marked(row: Row) -> bool:
    """Tell whether it is the rule without a threshold, which the accent colour shows."""
    return row.role == "cost_aware"


def best(board: Board, *, is_whole: bool) -> Row | None:
    """The fastest of the rows that are shown, oracles aside."""
    rows = [row for _, rows in sections(board, is_whole=is_whole) for row in rows if row.role != "oracle"]
    return max(rows, key=lambda row: row.speedup, default=None)


def num_hidden(board: Board) -> int:
    """Number of settings that were run and not chosen."""
    return len(board.rows) - sum(len(rows) for _, rows in sections(board, is_whole=False))


def files(boards: Iterable[Board]) -> list[Results]:
    """The files that boards are from, each once."""
    return list({id(board.results): board.results for board in boards}.values())


def sources(results: Results) -> list[str]:
    """Notes and provenance of a file, in short lines: the command, versions, machine, models."""
    about = results.provenance
    names = ("command", "date", "machine", "threads", "specdecpp", "git", "python", "torch", "transformers", "seed")
    lines = [*results.notes, *(f"{name}: {about[name]}" for name in names if about.get(name) is not None)]
    models = about.get("pair")
    for role, model in models.items() if isinstance(models, dict) else ():
        if role in ("target", "draft"):
            lines.append(f"{role}: {model['name'] if isinstance(model, dict) and 'name' in model else model}")
    return lines


def terminal(boards: Sequence[Board]) -> RenderableType:
    """Tables and sentences, at most 80 columns wide."""
    parts: list[RenderableType] = []
    for board in boards:
        parts += [render.heading(board.title, board.costs), Padding(_table(board), (0, 1)), ""]
        if hidden := num_hidden(board):
            parts.append(Padding(Text(f"{hidden} more settings are in the page: report --html.", "dim"), (0, 1)))
        parts += [Padding(Text(sentence), (0, 1)) for sentence in told(board)]
    notes = dict.fromkeys(note for results in files(boards) for note in results.notes)
    return Group(*parts, *(Padding(Text(f"note: {note}", "dim"), (0, 1)) for note in notes))


def _table(board: Board) -> Table:
    """The chosen rows: the fastest in bold, the rule without a threshold in the accent colour, oracles dim."""
    table = render.plain_table("policy", *(header for header, _ in SHORT), gap=1)
    found, fastest = sections(board, is_whole=False), best(board, is_whole=False)
    for name, rows in found:
        if len(found) > 1:
            table.add_row(Text(name, "dim"))
        for row in rows:
            style = ["bold"] * (row is fastest) + [render.ACCENT] * is_marked(row) + ["dim"] * (row.role == "oracle")
            table.add_row(row.label, *(cell(row) for _, cell in SHORT), style=" ".join(style))
    return table
