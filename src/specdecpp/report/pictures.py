"""Pictures of results, drawn by matplotlib, and the page that holds them with every row. Our own policies have the accent
colour; every picture has its words.
"""

import io
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from specdecpp import __version__
from specdecpp.errors import MissingExtraError
from specdecpp.report import tables
from specdecpp.report.tables import Board
from specdecpp.report.theme import DARK, FONT, LIGHT, PAGE, TIMES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["grid"],
    "svg.fonttype": "none",  # texts stay texts
    "svg.hashsalt": "specdecpp",  # the same figures give the same file
    "text.parse_math": False,  # a name may have a dollar
}
LOOKS = {
    "fixed": ("fixed K", "o", LIGHT["soft"]),
    "free": ("free rules", "^", LIGHT["soft"]),
    "other": ("others", "x", LIGHT["soft"]),
    "specdecpp": ("SpecDec++", "s", LIGHT["tint"]),
    "cost_aware": ("cost-aware", "D", LIGHT["accent"]),
    "oracle": ("oracles", "*", LIGHT["ink"]),
}
"""Name, mark and colour of each role."""
NAMED = {"fixed": (5, 4), "specdecpp": (5, -11), "cost_aware": (5, 4), "oracle": (-7, -2)}
"""Roles whose chosen rows have their names in the picture, and how many points away; free rules crowd there."""
NEAR = 0.8
"""Rows with at least this share of the best fixed K's speed-up are in the picture."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A finished picture: a name for files, its words, and its SVG."""

    name: str
    description: str
    svg: str

    @property
    def data(self) -> str:
        """The address under which a page holds it: elements of several pictures in one page would share their ids."""
        return f"data:image/svg+xml;base64,{b64encode(self.svg.encode()).decode()}"


@contextmanager
def styled() -> Iterator[None]:
    """Draw in our style meanwhile, as a block or as a decorator. Raises `MissingExtraError` without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingExtraError(
            "pictures are drawn by matplotlib, which is not installed. Install it with: pip install 'specdecpp[plots]' "
            "(tables in the terminal need nothing)."
        ) from error

    with mpl.rc_context(STYLE):
        yield


def figure(title: str, *, height: float, width: float = 5.6) -> "Figure":
    """An empty figure of so many inches, with a title."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    made.suptitle(title, x=0.01, ha="left", fontsize=10)
    return made


def finished(drawn: "Figure", description: str, *, name: str) -> Picture:
    """The figure as SVG, with its words for those who cannot see it."""
    file = io.StringIO()
    drawn.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    start = f'<svg role="img" aria-label="{escape(description)}" '
    return Picture(name=name, description=description, svg=start + text[text.index("<svg ") + 5 :])


def gallery(boards: Sequence[Board]) -> list[list[Picture]]:
    """The pictures of every board, as far as its rows have the figures. Raises `MissingExtraError` without matplotlib."""
    found = [[pareto(board, verification) for verification in board.verifications] for board in boards]
    return [[picture for picture in of if picture] for of in found]


@styled()
def pareto(board: Board, verification: str) -> Picture | None:
    """Every setting of every policy, chosen ones large, some with name and speed-up. None without a fixed K.

    Time per token is t_draft (1 + R_d - R_v) for draft tokens and one pass for every R_v (paper, section 3), so a policy is
    better where it lies nearer to the lower left.
    """
    headline = board.under(verification, is_whole=False)
    best = next((row for row in headline if row.role == "fixed"), None)
    if best is None:
        return None
    rows = board.under(verification)
    shown = [row for row in rows if row.speedup >= NEAR * best.speedup]
    drawn = figure(f"Passes against discards: {board.title}, {verification}, {board.costs}", height=4.6, width=7.0)
    axes = drawn.subplots()
    for role, (name, mark, colour) in LOOKS.items():
        for is_chosen in (False, True):
            some = [row for row in shown if row.role == role and (row in headline) == is_chosen]
            points = [row.discard_rate for row in some], [row.verification_rate for row in some]
            looks: dict[str, Any] = {"marker": mark, "color": colour, "s": 34 if is_chosen else 9}
            if some:
                axes.scatter(*points, label=name if is_chosen else None, **looks)
    axes.margins(x=0.25, y=0.1)
    for row in headline:
        if row in shown and row.role in NAMED:
            text, at = f"{row.label}, {row.speedup:.2f} {TIMES}", (row.discard_rate, row.verification_rate)
            side = "right" if row.role == "oracle" else "left"
            axes.annotate(text, at, NAMED[row.role], textcoords="offset points", fontsize="small", ha=side)
    axes.legend(fontsize="small", framealpha=0.85, edgecolor="none")
    hidden = f" ({len(rows) - len(shown)} slower settings are not shown)" if len(shown) < len(rows) else ""
    axes.set(xlabel=f"discarded draft tokens per token, R_d{hidden}", ylabel="target passes per token, R_v")
    words = "; ".join(f"{row.label} {row.discard_rate:.2f} and {row.verification_rate:.2f}" for row in headline)
    text = f"Discarded draft tokens and target passes per token: {words}."
    return finished(drawn, text, name=re.sub(r"[\W_]+", "-", f"pareto {board.name} {verification}".lower()))


def page(boards: Sequence[Board], drawn: Sequence[Sequence[Picture]]) -> str:
    """One HTML page that needs nothing else (`page.html.j2`); `drawn` are the pictures of each board.

    >>> Path("report.html").write_text(page(found, gallery(found)), encoding="utf-8")           # doctest: +SKIP
    """
    themes = (LIGHT | {"page": PAGE[0]}, DARK | {"page": PAGE[1]})
    light, dark = (";".join(f"--{name}:{colour}" for name, colour in theme.items()) for theme in themes)
    loader = PackageLoader("specdecpp.report", ".")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    return environment.get_template("page.html.j2").render(
        title=f"Stopping rules on {', '.join(dict.fromkeys(board.rows[0].dataset for board in boards))}",
        boards=list(zip(boards, drawn, strict=True)),
        files=tables.files(boards),
        tables=tables,
        light=light,
        dark=dark,
        font=FONT,
        version=__version__,
    )
