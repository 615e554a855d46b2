"""Results as one HTML page (`page.html.j2`): pictures, sentences and every row, in a file that needs nothing else."""

from collections.abc import Sequence
from itertools import groupby

from jinja2 import Environment, PackageLoader, StrictUndefined

from specdecpp import __version__
from specdecpp.errors import MissingExtraError
from specdecpp.report import pictures, tables
from specdecpp.report.boards import Board
from specdecpp.report.pictures import Picture
from specdecpp.report.theme import DARK, FONT, LIGHT, PAGE, variables


def page(boards: Sequence[Board], drawn: Sequence[list[Picture]] | None = None) -> str:
    """The whole page, as text; `drawn` is what `gallery` gave, if that was called already.

    Without matplotlib the page has everything but pictures, and says so.

    >>> Path("report.html").write_text(page(boards([results])), encoding="utf-8")                # doctest: +SKIP
    """
    missing = "" if drawn else without_pictures()
    *own, over = [[]] * (len(boards) + 1) if missing else drawn or pictures.gallery(boards)
    files = [list(pairs) for _, pairs in groupby(zip(boards, own, strict=True), key=lambda pair: id(pair[0].results))]
    light, dark = (variables(theme, page=behind) for theme, behind in zip((LIGHT, DARK), PAGE, strict=True))
    environment = Environment(
        loader=PackageLoader("specdecpp.report", "."),
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    names = ", ".join(dict.fromkeys(board.dataset for board in boards))
    return environment.get_template("page.html.j2").render(
        title=f"Stopping rules on {names}",
        notes=[*tables.notes(boards), *([f"This page is without pictures: {missing}"] if missing else [])],
        files=files,
        over=over,
        columns=tables.COLUMNS,
        sections=tables.sections,
        told=tables.told,
        sources=tables.sources,
        is_marked=tables.is_marked,
        best=tables.best,
        num_hidden=tables.num_hidden,
        light=light,
        dark=dark,
        font=FONT,
        version=__version__,
    )


def without_pictures() -> str:
    """The reason why there are none, if so."""
    try:
        pictures.check()
    except MissingExtraError as error:
        return str(error)
    return ""
