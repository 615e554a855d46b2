"""Results as tables: for a terminal of 80 columns, and the columns of the page (`pictures.page`).

    results (one file or several) -> boards: rows of the same prompts, temperature and costs -> tables, pictures, page

The terminal shows the chosen setting of every rule, oracles, and what follows in words, where a loss is stated as plainly
as a win. The page has every row, with intervals.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from specdecpp.bench.results import Interval, Results, Role, Row
from specdecpp.errors import DataError
from specdecpp.report import render
from specdecpp.report.theme import TIMES

NONE = "-"
Column = tuple[str, Callable[[Row], str]]


@dataclass(frozen=True, kw_only=True)
class Board:
    """The rows of one data set at one temperature in one results file, in the order in which they are shown."""

    results: Results
    name: str
    """For files: data set, temperature, and where there are several results, which."""
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        return f"{self.rows[0].dataset}, T = {self.rows[0].temperature:g}"

    @property
    def costs(self) -> str:
        """Source of the times: the clock, or a replay and its costs."""
        name, c = str(self.results.costs["name"]), f"c = {self.results.costs['c']:.2f}"
        how = "decoded on the clock" if self.results.kind == "bench" else "replayed"
        return f"{how}, {name if name.startswith('c =') else f'{name} costs, {c}'}"

    @property
    def verifications(self) -> list[str]:
        """Kinds of verification, in the order of the file."""
        return list(dict.fromkeys(row.verification for row in self.rows if row.role != "target")) or ["token"]

    @property
    def target(self) -> Row | None:
        return next((row for row in self.rows if row.role == "target"), None)

    def under(self, verification: str, *, is_whole: bool = True) -> list[Row]:
        """The rows of one kind of verification, the target's own aside: all, or the chosen setting of every rule, all settings
        of a rule that has none, and the oracles."""
        rows = [row for row in self.rows if row.verification == verification and row.role != "target"]
        decided = {_stem(row) for row in rows if row.chosen}
        return [row for row in rows if is_whole or row.chosen or row.role == "oracle" or _stem(row) not in decided]

    def sections(self, *, is_whole: bool) -> list[tuple[str, list[Row]]]:
        """The rows under each kind of verification, the target alone among the first."""
        found = [(f"{name} verification", self.under(name, is_whole=is_whole)) for name in self.verifications]
        if self.target:
            found[0][1].insert(0, self.target)
        return found

    def best(self, *, is_whole: bool) -> Row | None:
        """The fastest of the rows that are shown, oracles aside."""
        rows = [row for _, rows in self.sections(is_whole=is_whole) for row in rows if row.role != "oracle"]
        return max(rows, key=lambda row: row.speedup, default=None)

    @property
    def num_hidden(self) -> int:
        """Number of settings that were run and not chosen."""
        return len(self.rows) - sum(len(rows) for _, rows in self.sections(is_whole=False))


def boards(files: Sequence[Results], *, dataset: str | None = None) -> list[Board]:
    """A board for every file, data set and temperature. Raises `DataError` without rows, ValueError if none has the data set.

    >>> [board.title for board in boards([results], dataset="gsm8k")]                            # doctest: +SKIP
    ['gsm8k, T = 0', 'gsm8k, T = 1']
    """
    known = list(dict.fromkeys(row.dataset for file in files for row in file.rows))
    if not known:
        raise DataError("the results have no row. Make them again with bench.")
    if dataset is not None and dataset not in known:
        raise ValueError(f"there is no data set {dataset!r} in the results, only {', '.join(known)}. Name one of them.")
    found = []
    for i, file in enumerate(files, 1):
        key = f" {file.costs['name']} {i}" if len(files) > 1 else ""
        for name in known if dataset is None else [dataset]:
            rows = sorted((row for row in file.rows if row.dataset == name), key=_order)
            for temperature in sorted({row.temperature for row in rows}):
                own = tuple(row for row in rows if row.temperature == temperature)
                found.append(Board(results=file, name=f"{name} t{temperature:g}{key}", rows=own))
    return found


def _order(row: Row) -> tuple[int, float]:
    """By role; then as in the file, but oracles by what they know."""
    return get_args(Role).index(row.role), row.tokens_per_second if row.role == "oracle" else 0.0


def _stem(row: Row) -> str:
    """The rule without its setting: the label without its numbers."""
    return re.sub(r"[\s=:]*\d[\d.]*", "", row.label).strip() or row.label


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
    """Part of the way from the best fixed K to an oracle, in percent."""
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


def said(rows: Sequence[Row]) -> Iterator[str]:
    """Sentences about the rows of one data set and temperature: the fastest rule, and the rule without a threshold."""
    drafting = [row for row in rows if row.chosen and row.role != "target"]
    if not drafting or all(row.role != "target" for row in rows):
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


def times(value: float, interval: Interval | None, unit: str = " times") -> str:
    """Text such as "1.25 times [1.20, 1.31]"."""
    return f"{value:.2f}{unit}" + ("" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]")


def _gain(row: Row) -> str:
    gain, interval = row.gain_over_best_fixed, row.gain_interval
    if gain is None or (interval is None and gain == 0):
        return ""
    spread = "" if interval is None else f" [{100 * interval[0]:+.1f}, {100 * interval[1]:+.1f}]"
    doubt = ": too close to call" if interval is not None and interval[0] < 0 < interval[1] else ""
    return f", {100 * gain:+.1f} %{spread} on the best fixed K{doubt}"


def is_marked(row: Row) -> bool:
    """True for the rule without a threshold, which the accent colour shows."""
    return row.role == "cost_aware"


def files(boards: Iterable[Board]) -> list[Results]:
    """The files that boards are from, each once."""
    return list({id(board.results): board.results for board in boards}.values())


def sources(results: Results) -> list[str]:
    """Notes and provenance of a file, in short lines: the command, versions, machine, models."""
    about = results.provenance
    names = ("command", "date", "machine", "threads", "specdecpp", "git", "python", "torch", "transformers", "seed")
    lines = [*results.notes, *(f"{name}: {about[name]}" for name in names if about.get(name) is not None)]
    models = about.get("pair")
    models = {role: models[role] for role in ("target", "draft") if role in models} if isinstance(models, dict) else {}
    return lines + [f"{role}: {of['name'] if isinstance(of, dict) else of}" for role, of in models.items()]


def terminal(boards: Sequence[Board]) -> RenderableType:
    """Tables and sentences, at most 80 columns wide."""
    parts: list[RenderableType] = []
    for board in boards:
        parts += [render.heading(board.title, board.costs), Padding(_table(board), (0, 1)), ""]
        if board.num_hidden:
            parts.append(Padding(Text(f"{board.num_hidden} more settings are in the page: report --html.", "dim"), (0, 1)))
        parts += [Padding(Text(sentence), (0, 1)) for sentence in said(board.rows)]
    notes = dict.fromkeys(note for results in files(boards) for note in results.notes)
    return Group(*parts, *(Padding(Text(f"note: {note}", "dim"), (0, 1)) for note in notes))


def _table(board: Board) -> Table:
    """The chosen rows: the fastest in bold, the rule without a threshold in the accent colour, oracles dim."""
    table = render.plain_table("policy", *(header for header, _ in SHORT), gap=1)
    found, fastest = board.sections(is_whole=False), board.best(is_whole=False)
    for name, rows in found:
        if len(found) > 1:
            table.add_row(Text(name, "dim"))
        for row in rows:
            style = ["bold"] * (row is fastest) + [render.ACCENT] * is_marked(row) + ["dim"] * (row.role == "oracle")
            table.add_row(row.label, *(cell(row) for _, cell in SHORT), style=" ".join(style))
    return table
