"""The page at `/`: one HTML document that needs nothing else, put together from the files beside this one.

    page.html, page.css     what is there, and what it looks like
    stream.js               a request, and its chunks as they come
    tally.js                figures of an answer, and how they are written
    roving.js, card.js      one tab stop for a row, and the card of what has the focus: p, q, estimate, outcome
    answer.js, strip.js     tokens told apart; a bar for every step
    curve.js                the survival of a step against its threshold
    lane.js, page.js        one rule with its answer; the form, runs, theme and key

Colours and typeface are those of the report (`specdecpp.report.theme`). The scripts share one scope, in the order of `SCRIPTS`.
"""

from functools import cache
from pathlib import Path

from specdecpp.report import theme

FOLDER = Path(__file__).parent
SCRIPTS = ("stream", "tally", "roving", "card", "answer", "strip", "curve", "lane", "page")


@cache
def page() -> str:
    """The whole page, as text.

    >>> page().startswith("<!doctype html>")
    True
    """
    script = "\n".join(_read(f"{name}.js") for name in SCRIPTS)
    return _read("page.html").replace("/* style */", _themes() + _read("page.css")).replace("/* script */", script)


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _themes() -> str:
    """The palette: as the reader's system has it, unless the page's own switch says otherwise."""
    themes = zip((theme.LIGHT, theme.DARK), theme.PAGE, theme.SIGNAL, strict=True)
    light, dark = (theme.variables(colours, page=page, signal=signal) for colours, page, signal in themes)
    return (
        f":root{{color-scheme:light dark;--font:{theme.FONT};{light}}}\n"
        f"@media(prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
        f":root[data-theme=light]{{color-scheme:light;{light}}}\n"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}\n"
    )
