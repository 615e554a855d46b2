"""Sheets to draw on with matplotlib, and the SVG that comes of them: small, in both themes, its text still text.

    Sheet -> axes() -> matplotlib draws in the colours of theme.LIGHT -> picture() -> Picture.svg()

Colours become classes, so that the viewer's setting chooses the theme, and a program that knows no media queries still draws
the light one. Everything is 400 units wide, about the width of a phone: there the text keeps its size, and a wider page puts
pictures side by side. A unit is a point of matplotlib's; `Sheet` counts from the upper left corner, as SVG does.
"""

import io
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as Xml

from specdecpp.errors import MissingExtraError
from specdecpp.report.theme import DARK, FONT, LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, SIZE = 400, 12
TIMES = "\N{MULTIPLICATION SIGN}"
Units = int | float
"""A length or a place on a sheet."""
RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, and is the widest of `FONT`: labels that fit in it fit in the others
    "font.size": SIZE,
    "text.color": LIGHT["ink"],
    "text.parse_math": False,  # a name may have a dollar
    "svg.fonttype": "none",
    "svg.hashsalt": "specdecpp",  # the same figures give the same file
    "path.simplify": False,
    "lines.linewidth": 1,
    "lines.solid_capstyle": "butt",
    "patch.linewidth": 0,
    "axes.axisbelow": True,
    "axes.edgecolor": LIGHT["muted"],
    "axes.formatter.useoffset": False,
    "axes.labelcolor": LIGHT["ink"],
    "axes.linewidth": 1,
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 1,
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 6,
    "ytick.major.pad": 6,
}
SVG, HREF = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
KEPT = ("stroke-width", "stroke-dasharray", "text-anchor")
_NAMES = {colour: name for name, colour in LIGHT.items()}


def check() -> None:
    """Raise `MissingExtraError` without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "pictures are drawn by matplotlib, which is not installed. Install it with: pip install 'specdecpp[plots]' "
            "(what the terminal shows and tables need nothing)."
        ) from error


@contextmanager
def styled() -> Iterator[None]:
    """What draws on a sheet does so under this, as a block or as a decorator. Raises what `check` does."""
    check()
    import matplotlib as mpl

    with mpl.rc_context(RC):
        yield


def style() -> str:
    """The classes of a picture: `.x` fills with colour x, `.x-line` draws a line in it, as the viewer's theme has it."""
    text = f"svg.picture text{{font:{SIZE}px {FONT};font-variant-numeric:tabular-nums}}svg.picture .strong{{font-weight:600}}"
    return f"{text}{_colours(LIGHT)}@media (prefers-color-scheme:dark){{{_colours(DARK)}}}"


def _colours(theme: dict[str, str]) -> str:
    """Lines before fills, so that a mark may have both."""
    lines = (f"svg.picture .{name}-line{{stroke:{colour};fill:none}}" for name, colour in theme.items())
    return "".join([*lines, *(f"svg.picture .{name}{{fill:{colour}}}" for name, colour in theme.items())])


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A finished picture."""

    name: str
    """For a file and for an id: letters, digits and hyphens."""
    title: str
    description: str
    """What a reader who cannot see it should know."""
    height: Units
    body: tuple[Xml.Element, ...] = field(repr=False)

    def svg(self, *, is_alone: bool = True) -> str:
        """As text: a file of its own, or (not alone) an element of a page that has `style()` once."""
        attributes = {"class": "picture", "viewBox": f"0 0 {WIDTH} {_short(self.height)}", "role": "img"}
        attributes["aria-labelledby"] = f"{self.name}-title {self.name}-desc"
        if is_alone:
            attributes |= {"xmlns": SVG[1:-1], "width": str(WIDTH), "height": _short(self.height)}
        root = Xml.Element("svg", attributes)
        for tag, text in (("title", self.title), ("desc", self.description)):
            Xml.SubElement(root, tag, {"id": f"{self.name}-{tag}"}).text = text
        if is_alone:
            Xml.SubElement(root, "style").text = style()
        Xml.SubElement(root, "rect", {"class": "surface", "width": str(WIDTH), "height": _short(self.height), "rx": "6"})
        root.extend(self.body)
        return Xml.tostring(root, encoding="unicode")


def slug(*parts: object) -> str:
    """A name for files and ids: letters, digits and hyphens."""
    return "-".join(filter(None, (re.sub(r"[\W_]+", "-", str(part).lower()).strip("-") for part in parts)))


class Sheet:
    """A picture in the making: a title and a note above a height that is left to fill, remarks below it."""

    def __init__(self, title: str, note: str, height: Units, *, remarks: Sequence[str] = ()):
        from matplotlib.figure import Figure

        above, below = _wrapped(note), [line for text in remarks for line in _wrapped(text)]
        self.title, self.top = f"{title}: {note}", 31 + 17.0 * len(above)
        self.height = self.top + height + 17 * len(below)
        self.figure = Figure(figsize=(WIDTH / 72, self.height / 72), dpi=72)
        self.text(10, 22, title, "ink strong")
        for i, line in enumerate(above):
            self.text(10, 39 + 17 * i, line, "muted")
        for i, line in enumerate(below):
            self.text(10, self.top + height + 17 * i, line, "muted")

    def text(self, x: Units, y: Units, text: str, kind: str = "ink", *, side: str = "left") -> None:
        """A text at its base line, in a colour, and bold if the kind says "strong" too."""
        colour, _, strong = kind.partition(" ")
        put = self.figure.text(x / WIDTH, 1 - y / self.height, text, color=LIGHT[colour], va="baseline")
        put.set(ha=side, weight="bold" if strong else "normal")

    def line(self, start: Sequence[Units], end: Sequence[Units], colour: str) -> None:
        """A line between two points of matplotlib's: from the lower left corner."""
        from matplotlib.lines import Line2D

        self.figure.add_artist(Line2D(*zip(start, end, strict=True), color=LIGHT[colour], transform=None))

    def axes(self, left: Units, top: Units, right: Units, bottom: Units, *, x: str = "", y: str = "", grid: str = "") -> "Axes":
        """Axes between these edges, the upper and lower counted from `top`, and what they count: x below, y above, both
        level with the reader's eyes. `grid` has lines for the ticks of these axes."""
        from matplotlib.ticker import MaxNLocator

        top, bottom = top + self.top, bottom + self.top
        if x:
            self.text(min(left, WIDTH - 10 - text_width(x)), bottom + 33, x)
        self.text(10, top - 12, y)
        place = (left / WIDTH, 1 - bottom / self.height, (right - left) / WIDTH, (bottom - top) / self.height)
        axes = self.figure.add_axes(place)
        for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
            axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10]))
            axis.set_major_formatter(lambda value, _: number(value))
            axis.grid(name in grid)
        return axes

    def picture(self, description: str, *, name: str) -> Picture:
        """What has been drawn."""
        file = io.BytesIO()
        self.figure.patch.set_visible(False)
        for axes in self.figure.axes:
            axes.patch.set_visible(False)
        self.figure.savefig(file, format="svg", metadata={"Date": None})
        body = tuple(_marks(Xml.fromstring(file.getvalue())))
        return Picture(name=name, title=self.title, description=description, height=self.height, body=body)


@cache
def text_width(text: str, *, is_strong: bool = False) -> float:
    """In units."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=RC["font.family"], weight="bold" if is_strong else "normal", size=SIZE)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])


def _wrapped(text: str) -> list[str]:
    """A text in lines that a sheet has room for."""
    tries = (textwrap.wrap(text, num) for num in range(64, 8, -4))
    return next((lines for lines in tries if all(text_width(line) <= WIDTH - 20 for line in lines)), [text])


def number(value: Units) -> str:
    """As short as can be: 0.5, 1, -20."""
    return f"{value:.6g}".replace("-", "\N{MINUS SIGN}")


def _marks(root: Xml.Element) -> Iterator[Xml.Element]:
    """Matplotlib's texts and paths, one after the other, without groups, references and all that is not seen."""
    shapes = {f"#{path.get('id')}": path for path in root.iter(f"{SVG}path")}
    defined = {element for defs in root.iter(f"{SVG}defs") for element in defs.iter()}
    for element in root.iter():
        tag = str(element.tag).removeprefix(SVG)
        if element in defined or tag not in ("text", "path", "use"):
            continue
        drawn = {name: value for part in element.get("style", "").split("; ") for name, _, value in [part.partition(": ")]}
        kinds = [_NAMES[drawn["fill"]]] if drawn.get("fill", "none") != "none" else []
        kinds += [f"{_NAMES[drawn['stroke']]}-line"] if drawn.get("stroke", "none") != "none" else []
        kinds += ["strong"] if any("700" in drawn.get(name, "") for name in ("font", "font-weight")) else []
        values = {"class": " ".join(kinds)} | {name: _rounded(drawn[name]) for name in KEPT if name in drawn}
        if tag == "text":
            values |= {name: _short(float(element.get(name, 0))) for name in ("x", "y")}
        else:
            values["d"] = _rounded(shapes[element.get(HREF, "")].get("d", "") if tag == "use" else element.get("d", ""))
        if tag == "use":
            values["transform"] = f"translate({_short(float(element.get('x', 0)))},{_short(float(element.get('y', 0)))})"
        mark = Xml.Element("text" if tag == "text" else "path", values)
        mark.text = element.text if tag == "text" else None
        yield mark


def _rounded(text: str) -> str:
    """Numbers to a tenth, blanks only where they are needed."""
    short = re.sub(r"-?\d+\.\d+(e-?\d+)?", lambda number: _short(float(number[0])), " ".join(text.split()))
    return re.sub(r" ?([A-Za-z]) ?", r"\1", short)


def _short(value: Units) -> str:
    return f"{value:.1f}".removesuffix(".0").replace("-0", "0") if abs(value) < 0.05 else f"{value:.1f}".removesuffix(".0")
