"""`specdecpp report`: results as tables in the terminal, as markdown, as pictures, and as one page."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdecpp.cli.common import told

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specdecpp.bench.boards import Board

EXAMPLES = (
    "specdecpp report results.json",
    "specdecpp report c005.json c022.json --html report.html --svg pictures",
)


def report(
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS", help="Files of bench or replay.")],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="One page that needs nothing else.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Every picture as a file, light and dark.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Every table, as markdown.")] = None,
    dataset: Annotated[str | None, typer.Option(metavar="NAME", help="This data set only.")] = None,
) -> None:
    """Show results that bench or replay has written.

    Without an option: tables in the terminal. Files of several costs together also show how each rule fares on other
    hardware.
    """
    with told():
        from specdecpp.bench.boards import boards
        from specdecpp.bench.results import Results

        found = boards([Results.read(path) for path in results], dataset=dataset)
        if not (html or svg or markdown):
            show(found)
            return
        for path, text in _files(found, html=html, svg=svg, markdown=markdown).items():
            _write(path, text)
        for path in filter(None, (html, svg, markdown)):
            print(f"wrote {path}", file=sys.stderr)


def show(boards: "Sequence[Board]", *, is_whole: bool = False) -> None:
    """The tables, on stdout; whole: with every setting."""
    from specdecpp import render
    from specdecpp.bench import report

    out = render.console()
    out.print(report.terminal(boards, is_whole=is_whole), width=render.width_of(out))


def _files(boards: "Sequence[Board]", *, html: Path | None, svg: Path | None, markdown: Path | None) -> "Mapping[Path, str]":
    """What is to be written where."""
    from specdecpp.bench import page, pictures, report

    files: dict[Path, str] = {}
    if markdown:
        files[markdown] = report.markdown(boards)
    if svg:
        drawn = [picture for board in pictures.gallery(boards) for picture in board] + pictures.over_costs(boards)
        files |= {svg / f"{picture.name}.svg": picture.svg() + "\n" for picture in drawn}
    if html:
        files[html] = page.page(boards)
    return files


def _write(path: Path, text: str) -> None:
    """Raises `DataError` where that cannot be done."""
    from specdecpp.bench.results import writable
    from specdecpp.errors import DataError

    try:
        writable(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror}). Name another file.") from error
