"""Drawing in SVG: axes, marks, and labels that keep clear of each other; no more than the pictures need.

A `Canvas` collects marks and remembers where ink is, so that a label can be put where there is room; `Picture` is what comes
out, as a file of its own (with both themes in it, chosen by the viewer's setting) or as a part of a page. Text stays text.
Colours are plain classes, so that a program that knows no media queries still draws the light theme. Everything is 400 units
wide, about the width of a phone: there the text keeps its size, and a wider page puts pictures side by side.
"""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree as Xml

import numpy as np
from jaxtyping import Bool, Float

from specdecpp.bench.geometry import SIZE, Box, Places, Point, Scale, Units, boxed, cross, meet, number, run_through, text_width
from specdecpp.look import DARK, FONT, LIGHT

WIDTH = 400
LARGE = 10
"""Marks at least this wide are what a picture is about: no leader runs over them."""


def style() -> str:
    """The classes of a picture: `.x` fills with colour x, `.x-line` draws a line in it, as the viewer's theme has it."""
    text = f"svg.picture text{{font:{SIZE}px {FONT};font-variant-numeric:tabular-nums}}svg.picture .strong{{font-weight:600}}"
    dark = f"@media (prefers-color-scheme:dark){{{_colours(DARK)}}}"
    return f"{text}svg.picture .dashed{{stroke-dasharray:4 3}}{_colours(LIGHT)}{dark}"


def _colours(theme: dict[str, str]) -> str:
    rules = (
        f"svg.picture .{name}{{fill:{colour}}}svg.picture .{name}-line{{stroke:{colour};fill:none}}"
        for name, colour in theme.items()
    )
    return "".join(rules) + f"svg.picture .over{{stroke:{theme['surface']}}}"


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
        attributes = {"class": "picture", "viewBox": f"0 0 {_short(WIDTH)} {_short(self.height)}", "role": "img"}
        attributes["aria-labelledby"] = f"{self.name}-title {self.name}-desc"
        if is_alone:
            attributes |= {"xmlns": "http://www.w3.org/2000/svg", "width": _short(WIDTH), "height": _short(self.height)}
        root = Xml.Element("svg", attributes)
        for tag, text in (("title", self.title), ("desc", self.description)):
            Xml.SubElement(root, tag, {"id": f"{self.name}-{tag}"}).text = text
        if is_alone:
            Xml.SubElement(root, "style").text = style()
        root.append(_element("rect", "surface", width=WIDTH, height=self.height, rx=6))
        root.extend(self.body)
        return Xml.tostring(root, encoding="unicode")


def slug(*parts: object) -> str:
    """A name for files and ids: letters, digits and hyphens."""
    return "-".join(filter(None, (re.sub(r"[\W_]+", "-", str(part).lower()).strip("-") for part in parts)))


class Canvas:
    """Marks in the order in which they are drawn, and the boxes that labels should keep clear of."""

    def __init__(self) -> None:
        self.body: list[Xml.Element] = []
        self.marks: list[Box] = []
        self.texts: list[Box] = []
        self.lines: list[Box] = []
        self.leaders: list[np.ndarray] = []

    def picture(self, height: Units, title: str, note: str, description: str, *, name: str) -> Picture:
        """What has been drawn, down to a height."""
        return Picture(name=name, title=f"{title}: {note}", description=description, height=height, body=tuple(self.body))

    def line(self, points: Iterable[Point], kind: str) -> None:
        self._add("polyline", f"{kind}-line", points=" ".join(f"{_short(x)},{_short(y)}" for x, y in points))

    def keep_clear(self, points: Sequence[Point]) -> None:
        """No label on the line through these points."""
        for (x, y), (to_x, to_y) in itertools.pairwise(points):
            num = max(1, round(math.hypot(to_x - x, to_y - y) / 5))
            spots = ((x + (to_x - x) * i / num, y + (to_y - y) * i / num) for i in range(num + 1))
            self.lines += [Box(a - 1, b - 1, a + 1, b + 1) for a, b in spots]

    def rect(self, box: Box, kind: str) -> None:
        self._add("rect", kind, x=box.left, y=box.top, width=box.right - box.left, height=box.bottom - box.top)

    def mark(self, shape: str, at: Point, kind: str, *, size: Units = 4.0) -> None:
        """A dot, ring, cross, square, diamond or triangle; labels keep clear of it."""
        x, y = at
        self.marks.append(Box(x - size, y - size, x + size, y + size))
        if shape in ("dot", "ring"):
            kinds = f"{kind} over" if shape == "dot" else f"{kind}-line"
            self._add("circle", kinds, cx=x, cy=y, r=size)
            return
        corners = {
            "cross": "M{l},{t}L{r},{b}M{l},{b}L{r},{t}",
            "square": "M{l},{t}H{r}V{b}H{l}Z",
            "diamond": "M{x},{T}L{R},{y}L{x},{B}L{L},{y}Z",
            "triangle": "M{x},{T}L{r},{b}H{l}Z",
        }[shape]
        near, far = size * 0.85, size * 1.25
        ends = {"x": x, "y": y, "l": x - near, "r": x + near, "t": y - near, "b": y + near}
        ends |= {"L": x - far, "R": x + far, "T": y - far, "B": y + far}
        path = corners.format(**{name: _short(value) for name, value in ends.items()})
        self._add("path", f"{kind}-line" if shape == "cross" else f"{kind} over", d=path)

    def text(self, at: Point, text: str, kind: str = "ink", *, anchor: str = "start") -> None:
        """A text at its base line, where it is wanted whatever stands there."""
        if not text:
            return
        self.texts.append(Box.of_text(at, text, anchor, is_strong="strong" in kind))
        element = self._add("text", kind, x=at[0], y=at[1], **({} if anchor == "start" else {"text-anchor": anchor}))
        element.text = text

    def label(self, at: Point, text: str, kind: str, *, within: Box, reach: Units = 100, is_needed: bool = False) -> bool:
        """A text beside a point where nothing else is, within a box and no farther than `reach`; far off it gets a leader.

        Without room it is left out, unless needed: then it stands where it meets least. Says whether it was drawn.
        """
        places = Places.around(at, text, is_strong="strong" in kind)
        room = np.array(within, float)
        is_open = (places.boxes[:, :2] >= room[:2]).all(1) & (places.boxes[:, 2:] <= room[2:]).all(1)
        is_free, price = self._judged(places)
        is_open &= (places.distances <= reach) & (is_needed | is_free)
        if not is_open.any():
            return False
        i = int(np.where(is_open, price, np.inf).argmin())
        if places.distances[i] > SIZE:
            leader = [(x, y) for x, y in places.leaders[i].tolist()]
            self.line(leader, "muted")
            self.keep_clear(leader)
            self.leaders.append(places.leaders[i])
        x, y = places.at[i].tolist()
        self.text((x, y), text, kind, anchor=places.anchors[i])
        return True

    def _judged(self, places: Places) -> tuple[Bool[np.ndarray, " P"], Float[np.ndarray, " P"]]:
        """Whether a place, and the leader to it, hides nothing; and its price: texts first, then marks, then distance."""
        texts, marks, lines = boxed(self.texts), boxed(self.marks), boxed(self.lines)
        on_texts = meet(places.boxes, texts).sum(1) + run_through(places.leaders, texts).sum(1)
        on_marks = meet(places.boxes, marks).sum(1) + meet(places.boxes, lines).sum(1)
        through = run_through(places.leaders, marks)
        leaders = np.array(self.leaders, float).reshape(-1, 2, 2)
        crossed = through.sum(1) + 5 * cross(places.leaders, leaders).sum(1)
        is_large = marks[:, 2] - marks[:, 0] >= LARGE
        is_free = (on_texts + on_marks + through[:, is_large].sum(1)) == 0
        return is_free, 1000.0 * on_texts + 100 * on_marks + 8 * crossed + places.distances

    def _add(self, tag: str, kind: str, **values: Units | str) -> Xml.Element:
        self.body.append(_element(tag, kind, **values))
        return self.body[-1]


def axis_x(canvas: Canvas, scale: Scale, area: Box, title: str) -> None:
    """Ticks with grid lines below an area, and what they count below them."""
    for tick in scale.ticks():
        canvas.line([(scale(tick), area.top), (scale(tick), area.bottom)], "grid")
        canvas.text((scale(tick), area.bottom + 16), number(tick), "muted", anchor="middle")
    title_at(canvas, area, title)


def title_at(canvas: Canvas, area: Box, title: str) -> None:
    """What the axis below an area counts: at its left edge, or farther left where that is too near to the picture's."""
    canvas.text((min(area.left, WIDTH - 10 - text_width(title)), area.bottom + 33), title, "ink")


def axis_y(canvas: Canvas, scale: Scale, area: Box, title: str, *, room: Units = 36) -> None:
    """Ticks with grid lines left of an area, and what they count above it, level with the reader's eyes."""
    for tick in scale.ticks(room=room):
        canvas.line([(area.left, scale(tick)), (area.right, scale(tick))], "grid")
        canvas.text((area.left - 6, scale(tick) + 4), number(tick), "muted", anchor="end")
    canvas.text((10, area.top - 12), title, "ink")


def heading(canvas: Canvas, title: str, note: str) -> Units:
    """What a picture shows, and of what; returns the height that takes."""
    canvas.text((10, 22), title, "ink strong")
    return remark(canvas, 31, note)


def remark(canvas: Canvas, top: Units, text: str) -> Units:
    """A sentence in as many lines as it takes; returns the height reached."""
    line = ""
    for word in text.split():
        if line and text_width(f"{line} {word}") > WIDTH - 20:
            canvas.text((10, top + 8), line, "muted")
            line, top = "", top + 17
        line = f"{line} {word}".strip()
    canvas.text((10, top + 8), line, "muted")
    return top + 17


def legend(canvas: Canvas, top: Units, entries: Sequence[tuple[str, str, str]]) -> Units:
    """(shape, kind, text) in as many lines as it takes; returns the height reached."""
    x, y = 16.0, top + 8
    for shape, kind, text in entries:
        width = 12 + text_width(text) + 16
        if x + width > WIDTH and x > 16:
            x, y = 16.0, y + 19
        canvas.mark(shape, (x, y), kind)
        canvas.text((x + 10, y + 4), text, "ink")
        x += width
    return y + 14


def _element(tag: str, kind: str, **values: Units | str) -> Xml.Element:
    attributes = {name: value if isinstance(value, str) else _short(value) for name, value in values.items()}
    return Xml.Element(tag, {"class": kind, **attributes})


def _short(value: Units) -> str:
    return f"{value:.1f}".removesuffix(".0")
