"""Where the time of a token goes, for the rules that matter most: the table that shows where a slow pair loses."""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding

from specdecpp.bench.results import Row
from specdecpp.report import render
from specdecpp.report.sentences import arenas, name_of

ROLES = ("target", "fixed", "specdecpp", "cost_aware")


def terminal(rows: Sequence[Row], out: Console) -> RenderableType:
    """A table for every data set and temperature: milliseconds of a token, their parts in percent, and a bar."""
    parts: list[RenderableType] = []
    for arena in arenas(rows):
        lines = [
            (name_of(row), row.tokens_per_second, row.time_shares or {}, render.ACCENT if row.role == "cost_aware" else "")
            for row in telling(arena)
        ]
        heading = render.heading("Time", f"of a token, {arena[0].dataset}, T = {arena[0].temperature:g}")
        parts += [heading, Padding(render.time_table("policy", lines, out), (0, 1))]
    return Group(*parts)


def telling(rows: Sequence[Row]) -> list[Row]:
    """The target alone, the chosen fixed K, SpecDec++ and cost-aware rows, and the fastest of the others."""
    chosen = [row for row in rows if row.chosen and row.time_shares]
    rest = [row for row in chosen if row.role not in ROLES]
    best = max(rest, key=lambda row: row.speedup, default=None)
    return [row for row in chosen if row.role in ROLES or row is best]
