"""`specdecpp report`: results as tables in the terminal, as pictures, and as one page."""

import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdecpp.report.tables import Board

EXAMPLES = (
    "specdecpp report results.json",
    "specdecpp report c005.json c022.json --html report.html --svg pictures",
)


def report(
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS", help="Files of bench.")],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="One page that needs nothing else.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Every picture as a file.")] = None,
    dataset: Annotated[str | None, typer.Option(metavar="NAME", help="This data set only.")] = None,
) -> None:
    """Show results that bench has written.

    Without an option: tables in the terminal. --html and --svg need matplotlib (the extra `plots`).
    """
    from specdecpp.bench.results import Results
    from specdecpp.report.tables import boards

    found = boards([Results.read(path) for path in results], dataset=dataset)
    if not (html or svg):
        show(found)
        return
    from specdecpp.bench.results import write
    from specdecpp.report import pictures

    drawn = pictures.gallery(found)
    if svg:
        for picture in chain(*drawn):
            write(svg / f"{picture.name}.svg", picture.svg)
    if html:
        write(html, pictures.page(found, drawn))
    for path in filter(None, (html, svg)):
        print(f"wrote {path}", file=sys.stderr)


def show(boards: "Sequence[Board]") -> None:
    """The tables, on stdout."""
    from specdecpp.report import render, tables

    out = render.console()
    out.print(tables.terminal(boards), width=render.width_of(out))
