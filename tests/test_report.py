"""Reports: tables that fit and agree with the file, pictures with words, and a page that needs nothing else."""

import dataclasses
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import command_line
import matplotlib as mpl
import pytest
from rich.console import Console
from typer.testing import Result

from specdecpp.bench.results import Results, Row
from specdecpp.report import pictures, render, tables
from specdecpp.report.pictures import NEAR, Picture, gallery
from specdecpp.report.tables import boards

COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9\d|10\d)[;m]")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
HARD = "a<b>|&*c*"
"""A name that must stay text."""


def changed(file: Results, **values: object) -> Results:
    return dataclasses.replace(file, **values)  # type: ignore[arg-type]


def only(file: Results, *roles: str) -> Results:
    return changed(file, rows=tuple(row for row in file.rows if row.role in roles))


WHOLE, CLOCK = (Results.read(RESULTS / f"{name}.json") for name in ("replay_qwen_coder", "bench"))
CHEAP = changed(WHOLE, costs={**WHOLE.costs, "name": "c = 0.05", "c": 0.05}, notes=())
NOTHING = {"speedup_interval": None, "gain_interval": None, "time_shares": None, "share_of_headroom": {}}
BARE = changed(WHOLE, rows=tuple(dataclasses.replace(row, **NOTHING) for row in WHOLE.rows if row.role != "oracle"), notes=())
FILES = {"whole": WHOLE, "cheap": CHEAP, "clock": CLOCK, "bare": BARE}
DATASETS = ("alpaca", "gsm8k", "humaneval")


def call(*arguments: object) -> Result:
    return command_line.call("report", *arguments)


def shown(files: Sequence[Results], **options: object) -> str:
    """The terminal's text."""
    out = Console(file=io.StringIO(), width=80, highlight=False, markup=False, emoji=False, **options)  # type: ignore[arg-type]
    out.print(tables.terminal(boards(files)), width=render.width_of(out))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


@cache
def drawn(*names: str) -> list[list[Picture]]:
    return gallery(boards([FILES[name] for name in names]))


def page_of(file: Results) -> "Page":
    found = boards([file])
    return Page(pictures.page(found, gallery(found)))


# Tables


def test_a_board_shows_the_chosen_rows_and_those_that_development_did_not_judge():
    """Catches a table flooded by every K, one without a setting as its paper has it, and one that lost the oracles."""
    board = boards([WHOLE])[1]
    found = [row.label for row in board.under("token", is_whole=False)]
    assert sum(label.startswith("fixed") for label in found) == 1
    assert sum(label.startswith("cumulative") for label in found) == 1
    assert {"cost-aware by q", "hindsight", "perfect probability", "heuristic 5"} <= set(found)
    assert len(found) < 0.7 * len(board.under("token"))
    swept = changed(WHOLE, rows=tuple(dataclasses.replace(r, chosen=False) for r in only(WHOLE, "fixed").rows))
    assert len(boards([swept])[1].under("token", is_whole=False)) == 8  # nothing was chosen, so nothing is hidden


@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
def test_the_terminal_shows_every_chosen_row_within_80_columns(file: Results):
    """Catches a figure that is cut at the edge, a rule that is left out because it lost, and a table that needs intervals."""
    text = shown([file])
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for board in boards([file]):
        part = text.partition(board.title + " ")[2]
        for row in (row for v in board.verifications for row in board.under(v, is_whole=False)):
            line = next(line for line in part.splitlines() if tables.speed(row) in line)
            part = part[part.index(line) + len(line) :]
            assert line.strip().startswith(row.label[:18])
            assert f"{row.speedup:.2f}" in line
    assert "note: " in text if file.notes else "note: " not in text


def test_gains_have_a_sign_and_no_negative_zero():
    """Catches a loss, or a gain, of nothing."""
    assert [tables.signed(x) for x in (0.0816, -0.0816, -0.0004, 0.0, None)] == ["+8.2", "-8.2", "0.0", "0.0", "-"]


def test_long_names_and_large_numbers_keep_within_80_columns():
    """Catches figures that are cut to make room for a name: names wrap, figures never."""
    wide = {"tokens_per_second": 123456.7, "label": "adaptive-entropy 0.25 gamma=0.15 min_tokens=2 max_tokens=40"}
    rows = tuple(dataclasses.replace(row, **wide) if row.role == "free" else row for row in WHOLE.rows)
    text = shown([changed(WHOLE, rows=rows)])
    assert max(map(len, text.splitlines())) <= 80
    assert "123456.7" in text
    assert "gamma=0.15" in text


def test_colour_marks_our_rule_and_is_not_needed():
    """Catches colour under NO_COLOR or in a pipe, and a second accent colour."""
    terminal = {"force_terminal": True, "color_system": "standard", "legacy_windows": False}
    coloured = {line for line in shown([WHOLE], **terminal).splitlines() if COLOUR.search(line)}
    assert coloured
    assert all("cost-aware" in line for line in coloured)
    assert not COLOUR.search(shown([WHOLE], **terminal, no_color=True))
    assert "\x1b" not in shown([WHOLE])


@pytest.mark.parametrize("file", [WHOLE, CLOCK, BARE], ids=["whole", "clock", "bare"])
def test_the_page_has_the_figures_of_the_file(file: Results):
    """Catches a figure under the wrong header, a fraction shown as percent, and rounding that changes a sign."""
    for row in file.rows:
        cells = [cell(row) for _, cell in tables.COLUMNS]
        gain = row.gain_over_best_fixed or 0.0
        oracles = [row.share_of_headroom.get(name) for name in ("perfect", "hindsight")]
        assert [float(cells[i]) for i in (0, 1, 3, 5, 6, 7)] == [
            pytest.approx(row.tokens_per_second, abs=0.051),
            pytest.approx(row.speedup, abs=0.0051),
            pytest.approx(100 * gain, abs=0.051),
            pytest.approx(row.mean_acceptance_length, abs=0.0051),
            pytest.approx(row.discard_rate, abs=0.00051),
            pytest.approx(row.verification_rate, abs=0.00051),
        ]
        for cell, interval, unit in ((cells[2], row.speedup_interval, 1), (cells[4], row.gain_interval, 100)):
            ends = None if cell == "-" else tuple(map(float, cell.split(" to ")))
            assert ends == (interval and pytest.approx(tuple(unit * end for end in interval), abs=0.051))
        for cell, share in zip(cells[8:], oracles, strict=True):
            assert cell == "-" if share is None else float(cell) == pytest.approx(100 * share, abs=0.51)


def test_a_win_is_told_with_its_doubt_and_a_loss_as_a_loss():
    """Catches a victory by luck that is announced as one, the block row taken for the token row, and a loss told as a win."""

    def row(role: str, label: str, speedup: float, **more: Any) -> Row:
        own = {"role": role, "label": label, "speedup": speedup, "speedup_interval": (1.13, 1.39), "verification": "token"}
        return dataclasses.replace(WHOLE.rows[0], **own | {"gain_over_best_fixed": 0.0, "gain_interval": None} | more)

    target, fixed = row("target", "target alone", 1.0), row("fixed", "fixed K = 2", 1.2)
    ours = row("cost_aware", "cost-aware", 1.26, gain_over_best_fixed=0.05, gain_interval=(-0.01, 0.11))
    gains = {"gain_over_best_fixed": 0.25, "gain_interval": (0.2, 0.3)}
    block = row("cost_aware", "cost-aware", 1.5, verification="block", **gains)
    assert [*tables.said([target, fixed, ours, block])] == [
        "cost-aware (block) is fastest, 1.50 times [1.13, 1.39] the target alone, +25.0 % [+20.0, +30.0] on the best fixed K.",
        "cost-aware reaches 1.26 times [1.13, 1.39], +5.0 % [-1.0, +11.0] on the best fixed K: too close to call.",
    ]
    assert [*tables.said([target, row("fixed", "fixed K = 2", 0.8)])] == [
        "No rule is faster than the target alone; fixed K = 2 comes closest with 0.80 times [1.13, 1.39] the target alone."
    ]
    assert [*tables.said([fixed, ours])] == [], "there is nothing to compare with"


# Pictures


@pytest.mark.parametrize("names", [("whole", "cheap", "clock"), ("bare",)], ids=["crowded", "bare"])
def test_every_picture_is_well_formed_and_has_its_words(names: tuple[str, ...]):
    """Catches a picture that is skipped, two that share a file, markup that breaks one, axes without units, and a picture
    without words for those who cannot see it."""
    found = [picture for of in drawn(*names) for picture in of]
    assert len({picture.name for picture in found}) == len(found)
    assert len(found) == (3 if names == ("bare",) else 12)
    for picture in found:
        root = Xml.fromstring(picture.svg)
        assert root.attrib["role"] == "img"
        assert root.attrib["aria-label"] == picture.description
        assert all(word in picture.svg for word in ("R_d", "R_v", "cost-aware"))
        assert ">nan<" not in picture.svg


def test_rows_outside_the_pareto_picture_are_counted():
    """Catches slow settings that vanish without a word."""
    board = boards([WHOLE])[1]
    picture = drawn("whole")[1][0]
    best = next(row for row in board.under("token", is_whole=False) if row.role == "fixed")
    num = sum(row.speedup < NEAR * best.speedup for row in board.under("token"))
    assert num
    assert f"({num} slower settings are not shown)" in picture.svg


def test_drawing_is_repeatable_and_leaves_matplotlib_as_it_was():
    """Catches a file that differs from run to run, and settings that leak into the user's own figures."""
    before = dict(mpl.rcParams)
    assert gallery(boards([WHOLE], dataset="gsm8k")) == drawn("whole")[1:2]
    assert dict(mpl.rcParams) == before


# The page


class Page(HTMLParser):
    """Tags in balance, attributes and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs
        self.open += [tag] if tag not in ("meta", "img") else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_stands_alone_and_has_everything():
    """Catches a page that asks for a file or runs a script, loses a row, or follows one theme only."""
    names = ("whole", "cheap", "clock")
    text = pictures.page(boards([FILES[name] for name in names]), drawn(*names))
    found = Page(text)
    assert not {"script", "link", "iframe", "object"} & set(found.tags)
    assert not {"href", "srcset", "data", "style", "onload"} & {name for name, _ in found.attributes}
    assert all(str(value).startswith("data:image/svg+xml") for name, value in found.attributes if name == "src")
    assert not re.search(r"https?:|url\(|@import|@font-face", text)
    assert "prefers-color-scheme:dark" in text
    texts = Counter(found.texts)
    labels = Counter(row.label for name in names for row in FILES[name].rows)
    assert all(texts[label] >= num for label, num in labels.items())
    assert all(note in texts for name in names for note in FILES[name].notes)
    assert f"command: {WHOLE.provenance['command']}" in texts
    assert found.tags["img"] == sum(map(len, drawn(*names)))


@pytest.mark.parametrize(
    "file",
    [
        only(WHOLE, "target"),
        only(WHOLE, "free"),
        only(WHOLE, "oracle", "cost_aware"),
        changed(WHOLE, rows=tuple(dataclasses.replace(row, gain_over_best_fixed=None) for row in WHOLE.rows)),
        changed(WHOLE, rows=tuple(row for row in WHOLE.rows if row.chosen and row.role == "fixed"), provenance={}),
    ],
    ids=["target", "free", "oracles", "no gains", "best fixed"],
)
def test_missing_parts_are_left_out(file: Results):
    """Catches a picture or a table that fails for want of an oracle, a best fixed K, gains, or more than one point."""
    assert shown([file])
    assert page_of(file).tags["table"]


def test_names_are_text_in_every_form():
    """Catches markup in a label that becomes markup of the page, of a picture or of a table."""
    rows = tuple(dataclasses.replace(row, label=HARD) for row in only(WHOLE, "target", "free", "fixed").rows if row.chosen)
    file = changed(WHOLE, rows=rows)
    html = page_of(file)
    assert html.texts.count(HARD) >= len(rows)
    assert not {"b", "em"} & set(html.tags)
    assert HARD in shown([file])


# The verb


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.json and, at other costs, b.json."""
    folder = tmp_path_factory.mktemp("results")
    for name, file in (("a", WHOLE), ("b", CHEAP)):
        changed(file, rows=tuple(row for row in file.rows if row.dataset == "gsm8k")).write(folder / f"{name}.json")
    return folder


def test_the_verb_shows_tables_and_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Catches tables on stderr, lines wider than a terminal, a file nobody asked for, and a filter that is forgotten."""
    monkeypatch.chdir(tmp_path)
    result = call(RESULTS / "replay_qwen_coder.json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert all(f"{name}, T = 0.7" in result.stdout for name in DATASETS)
    assert not list(tmp_path.iterdir())
    text = call(RESULTS / "replay_qwen_coder.json", "--dataset", "gsm8k").stdout
    assert [name for name in DATASETS if f"{name}, T = 0.7" in text] == ["gsm8k"]


def test_the_verb_writes_what_was_asked_for(written: Path, tmp_path: Path):
    """Catches an option without effect, tables on stdout beside it, and pictures of a file that is not UTF-8."""
    paths = {"--html": tmp_path / "new" / "r.html", "--svg": tmp_path / "pictures"}
    options = [str(part) for pair in paths.items() for part in pair]
    result = call(written / "a.json", written / "b.json", *options)
    assert (result.exit_code, result.stdout) == (0, ""), result.stderr
    assert result.stderr.splitlines() == [f"wrote {path}" for path in paths.values()]
    found = boards([Results.read(written / f"{name}.json") for name in "ab"])
    html, files = Page(paths["--html"].read_text(encoding="utf-8")), list(paths["--svg"].iterdir())
    assert all(board.title in html.texts for board in found)
    words = {value for name, value in html.attributes if name == "alt"}
    assert {Xml.parse(path).getroot().attrib["aria-label"] for path in files} == words
    assert len(files) == 2


def test_without_matplotlib_pictures_are_refused(written: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Catches a traceback, and tables that need it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for option in ("--html", "--svg"):
        refused = call(written / "a.json", option, tmp_path / "out")
        assert refused.exit_code == 1
        assert "pip install 'specdecpp[plots]'" in refused.stderr
        assert not (tmp_path / "out").exists()
    assert call(written / "a.json").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("nowhere.json", 1, "the results nowhere.json cannot be read"),
        ("text.json", 1, "text.json is no file of bench, or damaged (Invalid JSON"),
        ("other.json", 1, "other.json is no file of bench, or damaged (kind: Field required"),
        ("empty.json", 1, "the results have no row"),
        ("a.json --dataset mbpp", 2, "there is no data set 'mbpp' in the results, only gsm8k"),
        ("a.json --html .", 1, ". is a folder"),
        ("a.json --svg a.json", 1, "the folder a.json cannot be made"),
        ("", 2, "Missing argument"),
    ],
)
def test_what_cannot_be_reported_is_refused(arguments: str, code: int, words: str, written: Path, monkeypatch: Any):
    """Catches a traceback, a wrong exit code, and a report of something else."""
    monkeypatch.chdir(written)
    Path("text.json").write_text("no json")
    Path("other.json").write_text(json.dumps({"rows": []}))
    changed(BARE, rows=()).write("empty.json")
    assert words in command_line.refused("report", *arguments.split(), code=code)


# Live text


@pytest.mark.parametrize("no_color", [True, False])
def test_origins_differ_with_and_without_colour(no_color: bool):
    """Catches two origins that look the same once colour is gone."""
    looks = set()
    for style in render.ORIGINS.values():
        out = Console(file=io.StringIO(), force_terminal=True, color_system="standard", no_color=no_color, legacy_windows=False)
        out.print("x", style=style)
        looks.add(out.file.getvalue())  # type: ignore[attr-defined]
    assert len(looks) == 3
    assert any(COLOUR.search(look) for look in looks) is not no_color
