"""Rows of results that belong in one table and one picture: those of the same prompts, temperature and costs.

Results (one file or several) -> boards() -> Board: headline, settings -> tables, pictures, page
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from specdecpp.bench.results import Results, Role, Row
from specdecpp.errors import DataError

ORDER: tuple[Role, ...] = ("target", "fixed", "free", "other", "specdecpp", "cost_aware", "oracle")


@dataclass(frozen=True, kw_only=True)
class Board:
    """The rows of one data set at one temperature in one results file, in the order in which they are shown."""

    results: Results
    dataset: str
    temperature: float
    rows: tuple[Row, ...]
    key: str = ""
    """Tells its file from the others, where there are several."""

    @property
    def name(self) -> str:
        """For files: data set, temperature, and where there are several, the file."""
        return f"{self.dataset} t{self.temperature:g} {self.key}"

    @property
    def title(self) -> str:
        return f"{self.dataset}, T = {self.temperature:g}"

    @property
    def costs(self) -> str:
        """Source of the times: the clock, or a replay and its costs."""
        c = f"c = {self.results.costs['c']:.2f}"
        name = str(self.results.costs["name"])
        how = "decoded on the clock" if self.results.kind == "bench" else "replayed"
        return f"{how}, {name if name.startswith('c =') else f'{name} costs, {c}'}"

    @property
    def verifications(self) -> list[str]:
        """Kinds of verification, in the order of the file."""
        return list(dict.fromkeys(row.verification for row in self.rows if row.role != "target")) or ["token"]

    @property
    def target(self) -> Row | None:
        return next((row for row in self.rows if row.role == "target"), None)

    def under(self, verification: str) -> list[Row]:
        """Every row of one kind of verification, the target's own aside."""
        return [row for row in self.rows if row.verification == verification and row.role != "target"]

    def headline(self, verification: str) -> list[Row]:
        """The chosen setting of every rule, all settings of a rule that has none, and the oracles."""
        rows = self.under(verification)
        decided = {stem(row) for row in rows if row.chosen}
        return [row for row in rows if row.chosen or row.role == "oracle" or stem(row) not in decided]


def boards(files: Sequence[Results], *, dataset: str | None = None) -> list[Board]:
    """One board for every file, data set and temperature. Raises `DataError` for files without a row, ValueError where none
    has the data set.

    >>> [board.title for board in boards([results], dataset="gsm8k")]                            # doctest: +SKIP
    ['gsm8k, T = 0', 'gsm8k, T = 1']
    """
    known = list(dict.fromkeys(row.dataset for file in files for row in file.rows))
    if not known:
        raise DataError("the results have no row. Make them again with bench.")
    if dataset is not None and dataset not in known:
        raise ValueError(f"there is no data set {dataset!r} in the results, only {', '.join(known)}. Name one of them.")
    wanted = known if dataset is None else [dataset]
    names = [str(file.costs["name"]) for file in files]
    found = []
    for i, file in enumerate(files):
        key = names[i] if names.count(names[i]) == 1 else f"{names[i]} {i + 1}"
        for name in wanted:
            rows = sorted((row for row in file.rows if row.dataset == name), key=_order)
            for temperature in sorted({row.temperature for row in rows}):
                own = tuple(row for row in rows if row.temperature == temperature)
                board = Board(results=file, dataset=name, temperature=temperature, rows=own, key=key if len(files) > 1 else "")
                found.append(board)
    return found


def _order(row: Row) -> tuple[int, float]:
    """By role; then as in the file, but oracles by what they know."""
    return ORDER.index(row.role), row.tokens_per_second if row.role == "oracle" else 0.0


def stem(row: Row) -> str:
    """The rule without its setting: the label without its numbers."""
    return re.sub(r"[\s=:]*\d[\d.]*", "", row.label).strip() or row.label
