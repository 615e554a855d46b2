"""Where the time of a token goes, for the rules that matter most: the table that shows where a slow pair loses."""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from specdecpp import render
from specdecpp.bench.results import Row
from specdecpp.bench.sentences import by_heat, name_of

ROLES = ("target", "fixed", "specdecpp", "cost_aware")


def terminal(rows: Sequence[Row], out: Console) -> RenderableType:
    """A table for every data set and temperature: milliseconds of a token, their parts in percent, and a bar."""
    blocks = render.PLAIN_BLOCKS if out.options.ascii_only else render.BLOCKS
    parts: list[RenderableType] = []
    for heat in by_heat(rows):
        heading = render.heading("Time", f"of a token, {heat[0].dataset}, T = {heat[0].temperature:g}")
        parts += [heading, Padding(_table(telling(heat), blocks), (0, 1))]
    return Group(*parts)


def telling(rows: Sequence[Row]) -> list[Row]:
    """The target alone, the chosen fixed K, SpecDec++ and cost-aware rows, and the fastest of the others."""
    chosen = [row for row in rows if row.chosen and row.time_shares]
    rest = [row for row in chosen if row.role not in ROLES]
    best = max(rest, key=lambda row: row.speedup, default=None)
    return [row for row in chosen if row.role in ROLES or row is best]


def _table(rows: Sequence[Row], blocks: dict[str, str]) -> Table:
    table = render.plain_table("policy", "ms\n/token", *(f"{block} {name}\n%" for name, block in blocks.items()), gap=1)
    table.add_column("", no_wrap=True)
    slowest = min(row.tokens_per_second for row in rows)
    for row in rows:
        shares = {name: (row.time_shares or {}).get(name, 0.0) for name in blocks}
        table.add_row(
            name_of(row),
            f"{1000 / row.tokens_per_second:.2f}",
            *(f"{100 * share:.0f}" for share in shares.values()),
            render.bar(shares, blocks, width=render.BAR_WIDTH * slowest / row.tokens_per_second),
            style=render.ACCENT if row.role == "cost_aware" else "",
        )
    return table
