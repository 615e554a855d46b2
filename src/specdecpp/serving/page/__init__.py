"""The page at `/`: one HTML document that needs nothing else, made of page.html, page.css and page.js."""

from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent


@cache
def page() -> str:
    """The whole page, as text.

    >>> page().startswith("<!doctype html>")
    True
    """
    html, css, script = ((FOLDER / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js"))
    return html.replace("/* style */", css).replace("/* script */", script)
