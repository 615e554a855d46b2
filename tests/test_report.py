"""Reports: tables that fit and agree with the file, pictures whose texts keep apart, and a page that needs nothing else."""

import dataclasses
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as Xml

import matplotlib as mpl
import pytest
from result_files import DATASETS, NOTE, results
from rich.console import Console
from typer.testing import CliRunner, Result

from specdecpp import cli
from specdecpp.bench.results import Results, Row
from specdecpp.errors import MissingExtraError
from specdecpp.lab.mdp import speed_up
from specdecpp.report import page, render, tables
from specdecpp.report.boards import Board, boards
from specdecpp.report.pictures import NEAR, Picture, gallery, linear_c, over_costs, styled
from specdecpp.report.theme import DARK, LIGHT

COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9\d|10\d)[;m]")
SVG = "{http://www.w3.org/2000/svg}"
FILES = {
    "whole": results(),
    "cheap": results(c=0.05),
    "clock": results(c=0.6, kind="bench"),
    "bare": results(is_bare=True),
}
WHOLE, CHEAP, CLOCK, BARE = FILES.values()
CROWDED = ("whole", "cheap", "clock")


def call(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, ["report", *map(str, arguments)], prog_name="specdecpp")


def shown(files: Sequence[Results], **options: object) -> str:
    """What the terminal shows."""
    out = Console(file=io.StringIO(), width=80, highlight=False, markup=False, emoji=False, **options)  # type: ignore[arg-type]
    out.print(tables.terminal(boards(files)), width=render.width_of(out))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


@cache
def drawn(*names: str) -> list[Picture]:
    """The pictures of files by their names; drawing a hundred takes seconds where every type is checked."""
    return [picture for of in galleries(*names) for picture in of]


@cache
def galleries(*names: str) -> list[list[Picture]]:
    return gallery(boards([FILES[name] for name in names]))


@cache
def pages(*names: str) -> str:
    return page.page(boards([FILES[name] for name in names]), galleries(*names))


def changed(file: Results, **values: object) -> Results:
    return dataclasses.replace(file, **values)  # type: ignore[arg-type]


def only(file: Results, *roles: str) -> Results:
    return changed(file, rows=tuple(row for row in file.rows if row.role in roles))


# What stands together


def test_a_board_tells_the_chosen_rows_and_those_that_development_did_not_judge():
    """Catches a table flooded by every K, one without the paper's own setting, and one that lost the oracles."""
    board = boards([WHOLE])[1]
    found = [row.label for row in board.headline("token")]
    assert sum(label.startswith("fixed") for label in found) == 1
    assert sum(label.startswith("cumulative") for label in found) == 1
    assert {"SpecDec++ 0.7 raw", "cost-aware", "hindsight", "perfect probability", "heuristic 5"} <= set(found)
    assert len(found) < len(board.under("token")) / 2
    swept = changed(WHOLE, rows=tuple(dataclasses.replace(r, chosen=False) for r in only(WHOLE, "fixed").rows))
    assert len(boards([swept])[1].headline("token")) == 20  # nothing was chosen, so nothing is hidden


def test_the_ladder_climbs_by_kind():
    """Catches a rung that is no rung (a rule that lost), and oracles in front of what can be had."""
    rungs = boards([WHOLE])[1].rungs("token")
    roles = [row.role for row in rungs]
    assert roles == ["fixed", "free", "specdecpp", "specdecpp", "cost_aware", "oracle", "oracle"]
    assert rungs[1].policy.startswith("cumulative")
    assert "lagged" in rungs[2].label
    assert [row.label for row in rungs[-2:]] == ["perfect probability", "hindsight"]


def test_gains_are_over_the_chosen_k_under_token_verification():
    """Catches a best fixed K that is taken from block verification because it comes first in the file."""
    board = boards([changed(WHOLE, rows=WHOLE.rows[::-1])])[1]
    assert board.best_fixed is not None
    assert board.best_fixed.verification == "token"
    assert board.best_fixed.gain_over_best_fixed == 0


# Tables


@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
def test_the_terminal_shows_every_chosen_row_within_80_columns(file: Results):
    """Catches a column that is cut at the edge, a rule that is left out because it lost, and a table that needs intervals."""
    text = shown([file])
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for board in boards([file]):
        part = text.partition(board.title + " ")[2]
        for verification in board.verifications:
            for row in board.headline(verification):
                line = next(line for line in part.splitlines() if line.strip().startswith(row.label + " "))
                part = part[part.index(line) + len(line) :]
                assert tables.speed(row) in line
                assert f"{row.speedup:.2f}" in line
    assert (NOTE in text) == bool(file.notes)


@pytest.mark.parametrize(("value", "text"), [(1.3349, "1.335"), (33.349, "33.35"), (12345.67, "12345.7")])
def test_speeds_keep_three_figures_at_least(value: float, text: str):
    """Catches 1.3 tokens a second for all rules alike, at costs where a target pass is the unit of time."""
    assert tables.speed(dataclasses.replace(WHOLE.rows[0], tokens_per_second=value)) == text


@pytest.mark.parametrize(("value", "text"), [(0.0816, "+8.2"), (-0.0816, "-8.2"), (-0.0004, "0.0"), (0.0, "0.0"), (None, "-")])
def test_gains_have_a_sign_and_no_negative_zero(value: float | None, text: str):
    """Catches a loss, or a gain, of nothing."""
    assert tables.signed(value) == text


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


def markdown_rows(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """(heading, cells by column) of every line of every table; a column that stands twice counts its second time as such."""
    heading, names = "", []
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("| policy"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            names = [f"{name} again" if name in cells[:i] else name for i, name in enumerate(cells)]
        elif line.startswith("| "):
            yield heading, dict(zip(names, (cell.strip() for cell in line.strip("|").split("|")), strict=True))


@pytest.mark.parametrize("file", [WHOLE, BARE], ids=["whole", "bare"])
def test_markdown_has_every_row_with_the_figures_of_the_file(file: Results):
    """Catches a figure under the wrong header, a fraction shown as percent, rounding that changes a sign, and lost rows."""
    found = {(head, c["verification"], c["policy"].strip("*")): c for head, c in markdown_rows(tables.markdown(boards([file])))}
    for row in file.rows:
        name = row.dataset.replace("<", "&lt;").replace("& ", "&amp; ")
        cells = found[f"{name}, T = {row.temperature:g}", row.verification, row.label]

        def value(name: str, cells: dict[str, str] = cells) -> list[float]:
            return [float(number) for number in cells[name].split(" to ")]

        half = 0.5001
        assert value("tokens/s") == pytest.approx([row.tokens_per_second], abs=half * 0.1)
        assert value("speed-up \N{MULTIPLICATION SIGN}") == pytest.approx([row.speedup], abs=half * 0.01)
        assert row.gain_over_best_fixed is not None
        assert value("gain over best fixed K, %") == pytest.approx([100 * row.gain_over_best_fixed], abs=half * 0.1)
        assert value("tokens/pass") == pytest.approx([row.mean_acceptance_length], abs=half * 0.01)
        assert value("discarded/token, R_d") == pytest.approx([row.discard_rate], abs=half * 0.001)
        assert value("passes/token, R_v") == pytest.approx([row.verification_rate], abs=half * 0.001)
        for column, interval, unit in (
            ("95 % interval", row.speedup_interval, 1),
            ("95 % interval again", row.gain_interval, 100),
        ):
            if interval is None:
                assert cells[column] == "-"
            else:
                assert value(column) == pytest.approx([unit * end for end in interval], abs=half * (0.01 if unit == 1 else 0.1))
        for oracle, column in (("hindsight", "of hindsight, %"), ("perfect", "of perfect probability, %")):
            share = row.share_of_headroom[oracle]
            assert cells[column] == "-" if share is None else value(column) == pytest.approx([100 * share], abs=half)


# Pictures


def test_every_picture_is_there():
    """Catches a kind of picture that is skipped, and two that share a name and so a file."""
    found = [picture.name for picture in drawn(*CROWDED)]
    assert len(found) == len(set(found))
    kinds = Counter(re.split(r"-(?:gsm8k|al-pa-ca-co)", name)[0] for name in found)
    arenas, files = 6, len(CROWDED)  # arenas: two data sets, each greedy, token and block
    expected = {"pareto": arenas * files, "speed-up": 4 * files, "reliability": 2 * files, "speed-by-c": arenas}
    assert kinds == expected


@pytest.mark.parametrize("names", [CROWDED, ("bare",)], ids=["crowded", "bare"])
def test_a_picture_is_well_formed_and_says_what_it_is(names: tuple[str, ...]):
    """Catches markup in a name that breaks the file, and a picture without words for those who cannot see it."""
    for picture in drawn(*names):
        root = Xml.fromstring(picture.svg())
        assert root.attrib["role"] == "img"
        assert len(root.attrib["aria-label"]) > 30
        assert root.attrib["aria-label"] == picture.description


def test_axes_have_units_and_ours_is_named():
    """Catches an axis that does not say what it counts, and a picture whose main point has no name."""
    expected = {
        "pareto": ("R_d", "R_v", "cost-aware", "hindsight"),
        "speed-up": ("\N{MULTIPLICATION SIGN}", "cost-aware"),
        "reliability": ("predicted probability", "share accepted"),
        "speed-by-c": ("c, cost of one more draft token", "cost-aware"),
    }
    kinds = set()
    for picture in drawn(*CROWDED):
        words = picture.svg()
        kind = next((kind for kind in expected if picture.name.startswith(kind)), "")
        kinds.add(kind)
        wanted = [word for word in expected.get(kind, ()) if "block" not in picture.name or "hindsight" not in word]
        assert all(word in words for word in wanted), (picture.name, wanted)
    assert kinds == set(expected), kinds


def test_speed_ups_are_named_also_where_a_rule_loses():
    """Catches a loser left out."""
    board = boards([CLOCK])[1]
    picture = next(p for p in drawn(*CROWDED) if p.name == "speed-up-gsm8k-t1-measured")
    rows = [row for v in board.verifications for row in board.headline(v) if row.role != "oracle"]
    assert min(row.speedup for row in rows) < 0.7
    for row in rows:
        assert f"{row.label}, {row.verification}, {row.speedup:.2f}" in picture.description
        assert f">{row.speedup:.2f}<" in picture.svg()


@pytest.mark.parametrize(("c", "kind"), [(0.05, "replay"), (0.22, "replay"), (0.28, "bench")])
def test_the_costs_of_lines_count_what_wider_passes_take(c: float, kind: str):
    """Catches lines of equal speed-up that forget what wider passes cost: at every row it is the one that is written."""
    file = results(c=c, kind=kind)  # type: ignore[arg-type]
    for board in boards([file]):
        effective = linear_c(board)
        assert (effective == pytest.approx(c)) == (kind == "replay")
        for row in board.rows:
            rates = {"discard_rate": row.discard_rate, "verification_rate": row.verification_rate}
            assert speed_up(**rates, c=effective) == pytest.approx(row.speedup)


def test_rows_outside_the_pareto_picture_are_counted():
    """Catches slow settings that vanish without a word."""
    board = boards([WHOLE])[1]
    picture = next(p for p in drawn("whole") if p.name == "pareto-gsm8k-t1-token")
    best = next(row for row in board.headline("token") if row.role == "fixed")
    num = sum(row.speedup < NEAR * best.speedup for row in board.under("token"))
    assert num
    assert f"({num} slower settings are not shown)" in picture.svg()


def test_over_costs_needs_several_costs():
    """Catches a line through one point, and points out of order."""
    assert not over_costs(boards([WHOLE]))
    assert not over_costs(boards([WHOLE, changed(WHOLE, kind="bench")])), "the same costs twice"
    picture = next(p for p in drawn(*CROWDED) if p.name == "speed-by-c-gsm8k-t1-token")
    for line in picture.description.removeprefix("Speed-up by c: ").removesuffix(".").split("; "):
        costs = [float(c) for c in re.findall(r" at (\d+\.\d+)", line)]
        assert len(costs) > 1
        assert costs == sorted(costs)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_colours_can_be_told_from_the_ground(theme: dict[str, str]):
    """Catches text below 4.5:1 and marks below 3:1 (WCAG 2.1, 1.4.3 and 1.4.11)."""

    def light(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True)) + 0.05

    for names, ratio in ((("ink", "muted", "accent"), 4.5), (("soft", "tint"), 3.0)):
        for name in names:
            dim, bright = sorted((light(theme[name]), light(theme["surface"])))
            assert bright / dim >= ratio, name


# Missing parts


@pytest.mark.parametrize(
    "file",
    [
        only(WHOLE, "target"),
        only(WHOLE, "target", "fixed"),
        only(WHOLE, "free"),
        only(WHOLE, "oracle", "cost_aware"),
        changed(WHOLE, rows=tuple(dataclasses.replace(row, gain_over_best_fixed=None) for row in WHOLE.rows)),
        changed(WHOLE, rows=WHOLE.rows[:1]),
        changed(WHOLE, rows=tuple(row for row in WHOLE.rows if row.chosen and row.role == "fixed"), provenance={}),
    ],
    ids=["target", "fixed", "free", "oracles", "no gains", "one row", "best fixed"],
)
def test_what_is_missing_is_left_out(file: Results):
    """Catches a picture or a table that fails for want of an oracle, a best fixed K, gains, or more than one point."""
    found = boards([file, changed(file, costs={**file.costs, "draft_s": 0.5 * file.costs["draft_s"]})])
    assert shown([file])
    assert tables.markdown(found).startswith("# Results")
    assert "</html>" in page.page(found)


def test_the_bare_file_has_the_pictures_it_can():
    """Catches an empty picture of what was not measured."""
    kinds = {picture.name.split("-")[0] for picture in drawn("bare")}
    assert kinds == {"pareto", "speed"}
    assert not [p.name for p in drawn("bare") if ">nan<" in p.svg()]


# The page


class Page(HTMLParser):
    """Tags in balance, attributes and texts."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("names", [("whole",), CROWDED, ("bare",)], ids=["one", "several", "bare"])
def test_the_page_stands_alone_and_has_everything(names: tuple[str, ...]):
    """Catches a page that asks for a file or runs a script, loses a row, follows one theme only, or repeats an id."""
    text, files = pages(*names), [FILES[name] for name in names]
    found = Page(text)
    assert not {"script", "link", "iframe", "object"} & set(found.tags)
    assert not {"href", "srcset", "data", "style", "onload"} & {name for name, _ in found.attributes}
    assert all(value.startswith("data:image/svg+xml") for name, value in found.attributes if name == "src")
    assert not re.search(r"https?:|url\(|@import|@font-face", text)
    assert "prefers-color-scheme:dark" in text
    ids = [value for name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    said = Counter(found.texts)
    assert all(f"{name}, T = 1" in said for name in DATASETS)
    labels = Counter(row.label for file in files for row in file.rows)
    assert all(said[label] >= num for label, num in labels.items())
    assert all(note in said for file in files for note in file.notes)
    assert f"command: {files[0].provenance['command']}" in said
    assert found.tags["img"] == len(drawn(*names))


def test_names_are_text_in_every_form():
    """Catches markup in a label that becomes markup of the page, of a picture or of a table."""
    name = "a<b>|&*c*"
    rows = tuple(dataclasses.replace(row, label=name) for row in only(WHOLE, "target", "free").rows if row.chosen)
    found = boards([changed(WHOLE, rows=rows)])
    html = Page(page.page(found))
    assert html.texts.count(name) >= len(rows)
    assert not {"b", "em"} & set(html.tags)
    assert "| a&lt;b>\\|&amp;\\*c\\* |" in tables.markdown(found)
    assert name in shown([changed(WHOLE, rows=rows)])


def test_several_files_fold_and_the_first_is_open():
    """Catches a page of several costs that must be scrolled through to be read."""
    text = pages(*CROWDED)
    assert len(re.findall(r"<details open><summary>", text)) == 1
    assert text.count("Where these figures come from") == len(CROWDED)
    assert text.index("Other hardware") < text.index("<details open>")


# Without matplotlib


def test_without_matplotlib_the_page_has_the_rest_and_pictures_are_refused(
    written: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Catches a page that is lost for want of its pictures, pictures that are missing without a word, and a traceback."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = call(written / "a.json", "--html", tmp_path / "r.html")
    assert result.exit_code == 0, result.stderr
    assert "pip install 'specdecpp[plots]'" in result.stderr
    found = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert found.tags["img"] == 0
    assert found.tags["table"] > 0
    assert any("pip install 'specdecpp[plots]'" in text for text in found.texts)
    refused = call(written / "a.json", "--svg", tmp_path / "pictures", "--markdown", tmp_path / "r.md")
    assert refused.exit_code == 1
    assert "pip install 'specdecpp[plots]'" in refused.stderr
    assert not (tmp_path / "pictures").exists()
    assert call(written / "a.json").exit_code == 0
    with pytest.raises(MissingExtraError), styled():
        pass


# Drawing


def test_drawing_is_repeatable_and_leaves_matplotlib_as_it_was():
    """Catches a file that differs from run to run, and settings that leak into the user's own figures."""
    before = dict(mpl.rcParams)
    board = boards([BARE])[1]
    once, again = ([picture.svg() for of in gallery([board]) for picture in of] for _ in range(2))
    assert once == again
    assert dict(mpl.rcParams) == before


# The verb


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.json and, at other costs, b.json; chosen rows at T = 1 only."""
    folder = tmp_path_factory.mktemp("results")
    for name, file in (("a", WHOLE), ("b", CHEAP)):
        rows = tuple(row for row in file.rows if (row.chosen or row.role == "oracle") and row.temperature == 1)
        changed(file, rows=rows).write(folder / f"{name}.json")
    return folder


def test_the_verb_shows_tables_and_writes_nothing(written: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Catches tables on stderr, lines wider than a terminal, escape codes in a pipe, and a file nobody asked for."""
    monkeypatch.chdir(tmp_path)
    result = call(written / "a.json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert all(name in result.stdout for name in DATASETS)
    assert "\x1b" not in result.stdout
    assert not list(tmp_path.iterdir())


def test_the_verb_writes_what_was_asked_for(written: Path, tmp_path: Path):
    """Catches an option without effect, tables on stdout beside it, and pictures of a file that is not UTF-8."""
    paths = {"--html": tmp_path / "new" / "r.html", "--svg": tmp_path / "pictures", "--markdown": tmp_path / "r.md"}
    options = [str(part) for pair in paths.items() for part in pair]
    result = call(written / "a.json", written / "b.json", *options)
    assert (result.exit_code, result.stdout) == (0, ""), result.stderr
    assert result.stderr.splitlines() == [f"wrote {path}" for path in paths.values()]
    found = boards([Results.read(written / f"{name}.json") for name in "ab"])
    assert paths["--markdown"].read_text(encoding="utf-8") == tables.markdown(found)
    html, files = Page(paths["--html"].read_text(encoding="utf-8")), list(paths["--svg"].iterdir())
    assert all(board.title in html.texts for board in found)
    assert len(files) == html.tags["img"]
    said = {value for name, value in html.attributes if name == "alt"}
    assert {Xml.parse(path).getroot().attrib["aria-label"] for path in files} == said


def test_one_data_set_can_be_asked_for(written: Path):
    """Catches a filter that is parsed and then forgotten."""
    text = call(written / "a.json", "--dataset", "gsm8k").stdout
    assert "gsm8k, T = 1" in text
    assert not any(name in text for name in DATASETS if name != "gsm8k")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["{f}/nowhere.json"], 1, "the results {f}/nowhere.json cannot be read"),
        (["{f}/text.json"], 1, "{f}/text.json is not readable JSON"),
        (["{f}/other.json"], 1, "{f}/other.json lacks kind"),
        (["{f}/empty.json"], 1, "the results have no row"),
        (["{f}/a.json", "--dataset", "mbpp"], 2, "there is no data set 'mbpp' in the results, only gsm8k"),
        (["{f}/a.json", "--html", "{f}"], 1, "{f} is a folder"),
        (["{f}/a.json", "--svg", "{f}/a.json"], 1, "the folder {f}/a.json cannot be made"),
        (["{f}/a.json", "--markdown", "{f}/a.json/r.md"], 1, "the folder {f}/a.json cannot be made"),
        ([], 2, "Missing argument"),
    ],
)
def test_what_cannot_be_reported_is_refused_in_a_sentence(arguments: list[str], code: int, words: str, written: Path):
    """Catches a traceback, a wrong exit code, and a report of something else."""
    (written / "text.json").write_text("no json")
    (written / "other.json").write_text(json.dumps({"rows": []}))
    changed(BARE, rows=()).write(written / "empty.json")
    result = call(*(argument.replace("{f}", str(written)) for argument in arguments))
    assert (result.exit_code, result.stdout) == (code, "")
    assert words.replace("{f}", str(written)) in result.stderr
    assert "Traceback" not in result.stderr


def test_boards_and_rows_are_the_files_own(written: Path):
    """Catches a board that loses rows on the way from the file."""
    found = boards([Results.read(written / "a.json")])
    assert all(isinstance(board, Board) for board in found)
    rows: list[Row] = [row for board in found for row in board.rows]
    assert Counter(map(str, rows)) == Counter(map(str, Results.read(written / "a.json").rows))
