"""Results as one HTML page (`page.html.j2`): pictures, sentences and every row, in a file that needs nothing else."""

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from specdecpp import __version__
from specdecpp.report import tables
from specdecpp.report.boards import Board
from specdecpp.report.pictures import Picture
from specdecpp.report.theme import DARK, FONT, LIGHT, PAGE


def page(boards: Sequence[Board], drawn: Sequence[Sequence[Picture]]) -> str:
    """The whole page, as text; `drawn` are the pictures of each board.

    >>> Path("report.html").write_text(page(found, gallery(found)), encoding="utf-8")           # doctest: +SKIP
    """
    themes = (LIGHT | {"page": PAGE[0]}, DARK | {"page": PAGE[1]})
    light, dark = (";".join(f"--{name}:{colour}" for name, colour in theme.items()) for theme in themes)
    loader = PackageLoader("specdecpp.report", ".")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    names = ", ".join(dict.fromkeys(board.dataset for board in boards))
    return environment.get_template("page.html.j2").render(
        title=f"Stopping rules on {names}",
        boards=list(zip(boards, drawn, strict=True)),
        files=tables.files(boards),
        tables=tables,
        light=light,
        dark=dark,
        font=FONT,
        version=__version__,
    )
