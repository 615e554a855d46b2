"""Results as one HTML page: pictures, sentences and every row, in a file that needs nothing else.

No script, no font, no request: what folds is `<details>`, light and dark follow the reader's setting, and on a narrow screen
pictures stand below each other at about their own size while tables scroll by themselves.
"""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from specdecpp import __version__
from specdecpp.bench.results import Row
from specdecpp.errors import MissingExtraError
from specdecpp.report import drawing, pictures, tables
from specdecpp.report.boards import Board
from specdecpp.report.drawing import Picture
from specdecpp.report.theme import DARK, FONT, LIGHT, PAGE, variables

STYLE = """
:root{color-scheme:light dark;LIGHT}
@media (prefers-color-scheme:dark){:root{DARK}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:82rem;padding:1rem;background:var(--page);color:var(--ink);font:1rem/1.5 FONT}
h1{font-size:1.5rem;margin:.5rem 0}h2{font-size:1.2rem;margin:2.5rem 0 .25rem}h3{font-size:1rem;margin:1.5rem 0 .5rem}
p,ul{max-width:46rem;margin:.25rem 0 .75rem;overflow-wrap:anywhere}ul{padding-left:1.2rem}
.muted{color:var(--muted)}
.pictures{columns:22rem;column-gap:.75rem;margin:1rem 0}
svg.picture{display:block;width:100%;max-width:34rem;height:auto;margin-bottom:.75rem;break-inside:avoid}
svg.picture{border:1px solid var(--grid);border-radius:6px}
.table{overflow-x:auto;margin:.75rem 0}
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--grid)}
thead th{white-space:pre;vertical-align:bottom;color:var(--muted);font-weight:400}
th:first-child{text-align:left;font-weight:400;position:sticky;left:0;background:var(--page)}
tbody.group th{color:var(--muted);padding-top:.75rem}
tr.ours *{color:var(--accent);font-weight:600}tr.best *{font-weight:600}
@media(max-width:40rem){th,td{padding:.25rem .4rem}tbody th{white-space:normal;min-width:7rem}}
summary{cursor:pointer;color:var(--accent);padding:.35rem 0}
.file{border-top:1px solid var(--grid);margin-top:1.5rem}.file>summary{font-size:1.2rem;font-weight:600}
"""


def page(boards: Sequence[Board], drawn: Sequence[list[Picture]] | None = None) -> str:
    """The whole page, as text; `drawn` is what `gallery` gave, if that was called already.

    Without matplotlib the page has everything but pictures, and says so.

    >>> Path("report.html").write_text(page(boards([results])), encoding="utf-8")                # doctest: +SKIP
    """
    missing = "" if drawn else without_pictures()
    *drawn, over = [[]] * (len(boards) + 1) if missing else drawn or pictures.gallery(boards)
    files = [list(pairs) for _, pairs in groupby(zip(boards, drawn, strict=True), key=lambda pair: id(pair[0].results))]
    body = [_notes([*tables.notes(boards), *([f"This page is without pictures: {missing}"] if missing else [])])]
    body += [_section("Other hardware", over)]
    body += [_file(files[0])] if len(files) == 1 else [_folded(pairs, is_open=pairs is files[0]) for pairs in files]
    names = ", ".join(dict.fromkeys(board.dataset for board in boards))
    title = f"Stopping rules on {names}"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{_style()}</style></head>\n<body><main><h1>{escape(title)}</h1>\n"
        + "\n".join(filter(None, body))
        + f'\n</main><footer class="muted"><p>specdecpp {__version__}</p></footer></body></html>\n'
    )


def without_pictures() -> str:
    """Why there are none, if so."""
    try:
        drawing.check()
    except MissingExtraError as error:
        return str(error)
    return ""


def _style() -> str:
    light, dark = (variables(theme, page=page) for theme, page in zip((LIGHT, DARK), PAGE, strict=True))
    return STYLE.replace("LIGHT", light).replace("DARK", dark).replace("FONT", FONT) + drawing.style()


def _file(pairs: Sequence[tuple[Board, list[Picture]]]) -> str:
    """One results file: its boards, then where it comes from."""
    made = "".join(f"<li>{escape(line)}</li>" for line in tables.sources(pairs[0][0].results))
    parts = [_board(board, drawn) for board, drawn in pairs]
    return "\n".join([*parts, f"<details><summary>Where these figures come from</summary><ul>{made}</ul></details>"])


def _folded(pairs: Sequence[tuple[Board, list[Picture]]], *, is_open: bool) -> str:
    """One of several files."""
    costs = escape(pairs[0][0].costs)
    return f'<details class="file"{" open" * is_open}><summary>{costs[:1].upper()}{costs[1:]}</summary>{_file(pairs)}</details>'


def _board(board: Board, drawn: Sequence[Picture]) -> str:
    """One data set at one temperature: sentences, the chosen settings, pictures, and every setting folded away."""
    said = "".join(f"<li>{escape(sentence)}</li>" for sentence in tables.told(board))
    whole = f"<details><summary>Every setting</summary>{_table(board, is_whole=True)}</details>"
    return "\n".join(
        [
            f'<section><h2>{escape(board.title)}</h2><p class="muted">{escape(board.costs)}</p>',
            f"<ul>{said}</ul>" if said else "",
            _table(board, is_whole=False),
            f'<div class="pictures">{_inline(drawn)}</div>',
            whole if len(board.rows) > sum(len(rows) for _, rows in tables.sections(board, is_whole=False)) else "",
            "</section>",
        ]
    )


def _section(title: str, drawn: Sequence[Picture]) -> str:
    return f'<section><h2>{title}</h2><div class="pictures">{_inline(drawn)}</div></section>' if drawn else ""


def _notes(notes: Iterable[str]) -> str:
    found = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<ul>{found}</ul>" if found else ""


def _inline(drawn: Iterable[Picture]) -> str:
    return "\n".join(picture.svg(is_alone=False) for picture in drawn)


def _table(board: Board, *, is_whole: bool) -> str:
    """Rows under each kind of verification."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("policy", *(name for name, _ in tables.COLUMNS)))
    found = tables.sections(board, is_whole=is_whole)
    best = max((row for _, rows in found for row in rows if row.role != "oracle"), key=lambda row: row.speedup, default=None)
    groups = "".join(
        f'<tbody class="group"><tr><th scope="rowgroup" colspan="{1 + len(tables.COLUMNS)}">{escape(name)}</th></tr></tbody>'
        f"<tbody>{''.join(_row(row, is_best=row is best) for row in rows)}</tbody>"
        for name, rows in found
    )
    return f'<div class="table"><table><thead><tr>{head}</tr></thead>{groups}</table></div>'


def _row(row: Row, *, is_best: bool) -> str:
    kinds = ["ours"] * tables.is_marked(row) + ["best"] * is_best
    cells = "".join(f"<td>{escape(cell(row))}</td>" for _, cell in tables.COLUMNS)
    return f'<tr class="{" ".join(kinds)}"><th scope="row">{escape(row.label)}</th>{cells}</tr>'
