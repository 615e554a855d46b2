"""Prompts: every kind of file and data set gives the same rows, the split never moves, and bad data is told by its place."""

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specdecpp import DataError
from specdecpp.errors import MissingExtraError
from specdecpp.training.prompts import Prompt, Source, alpaca, gather, gsm8k, humaneval, split_of

ROWS = [{"question": f"How many is {i} and {i}? ", "answer": str(2 * i)} for i in range(30)]
TEXTS = [f"How many is {i} and {i}?\nLet's think step by step." for i in range(30)]


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "maths.jsonl", ROWS)


def source(path: Path, **options: Any) -> Source:
    return Source(path=str(path), prompt="gsm8k", **options)


def texts(of: Source) -> list[str]:
    return [p.text for p in of.prompts()]


# Builders


def test_builders_use_prompts_only() -> None:
    """Catches an answer of the data set that slips into its prompt."""
    assert gsm8k(ROWS[2]) == TEXTS[2]
    assert alpaca({"instruction": " Sum up. ", "input": "", "output": "X"}) == "Sum up."
    assert alpaca({"instruction": "Sum up.", "input": " This. ", "output": "X"}) == "Sum up.\nInput: This."
    told = humaneval({"prompt": "def f(x):\n", "canonical_solution": "X"})
    assert told == "Write a Python script for this problem:\n\ndef f(x):"


def test_a_column_is_a_prompt_as_it_is(file: Path) -> None:
    assert texts(Source(path=str(file), prompt="field:question"))[1] == "How many is 1 and 1?"


def test_a_row_without_its_columns_is_named(tmp_path: Path) -> None:
    """Catches a KeyError from somewhere, for rows of any wrong form."""
    for row in ({"q": "?"}, {"question": None}, {"question": 3}, ["?"], "?"):
        file = jsonl(tmp_path / "x.jsonl", [ROWS[0], row])
        with pytest.raises(DataError, match=r"row 2 of .*x.jsonl does not suit the prompt 'gsm8k'"):
            source(file).prompts()


# Files and data sets


def test_every_kind_of_file_gives_the_same_prompts(tmp_path: Path, file: Path) -> None:
    """Catches a reader that loses or reorders rows."""
    text = file.read_text()
    with gzip.open(tmp_path / "maths.jsonl.gz", "wt") as out:
        out.write(text + "\n")
    (tmp_path / "maths.json").write_text(json.dumps(ROWS))
    (tmp_path / "maths.marked.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "maths.parquet")
    for name in ("maths.jsonl", "maths.jsonl.gz", "maths.json", "maths.parquet", "maths.marked.jsonl"):
        assert texts(source(tmp_path / name)) == TEXTS
        assert source(tmp_path / name).label == "maths"


def test_what_is_no_data_set_is_told_in_a_line(tmp_path: Path) -> None:
    """Catches a traceback of the hub, for a folder of other things and for a name without a network."""
    pytest.importorskip("datasets")
    for name in (tmp_path, "nobody/nothing"):
        with pytest.raises(DataError, match=r"the data set .* cannot be read \(.+\)\. Give a .*$"):
            source(Path(name)).prompts()


def test_a_missing_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'specdecpp\[data\]'"):
        Source(path="openai/gsm8k", prompt="gsm8k").prompts()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.jsonl", b'{"question": "?"}\n{"question"', "line 2 of .*x.jsonl is not JSON"),
        ("x.jsonl", b"\xff\xfe\x00", "x.jsonl is not readable as .jsonl"),
        ("x.jsonl.gz", b"not gzip", "x.jsonl.gz is not readable as .jsonl.gz"),
        ("x.json", b'{"question": "?"}', "holds a dict, not a list of rows"),
        ("x.json", b"[", "x.json is not readable as .json"),
        ("x.parquet", b"PAR1", "x.parquet is not readable as .parquet"),
        ("x.csv", b"a,b", "x.csv is of an unknown kind. Give a .jsonl"),
        ("x.jsonl", b"", "the sources hold no prompts"),
        (
            "x.jsonl",
            b'{"question": "?"}\n{"question": "ab\\ud83d"}',
            r"row 2 .* half of a character \(U\+D83D at character 3\)",
        ),
    ],
)
def test_an_unreadable_file_is_named_with_the_place(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    """Catches errors of gzip, json and pyarrow that reach the reader."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        gather([source(tmp_path / name)], seed=0)


def test_a_file_that_is_not_there_is_not_looked_up_on_the_hub() -> None:
    with pytest.raises(DataError, match=r"there is no file nowhere\.jsonl"):
        source(Path("nowhere.jsonl")).prompts()


# Choice and split


def test_rows_are_spread_evenly_and_keep_their_side(file: Path) -> None:
    """Catches a split that moves when fewer rows are used."""
    all_of_them = {p.text: p.split for p in source(file, dev_share=0.3).prompts()}
    some = source(file, dev_share=0.3, rows=10).prompts()
    assert [p.text for p in some] == TEXTS[::3]
    assert all(all_of_them[p.text] == p.split for p in some)
    assert source(file, rows=99).prompts() == source(file).prompts()


def test_the_split_is_by_hash_and_of_the_share_asked_for() -> None:
    """Catches a split by position; alarms once in 1e6."""
    num = 4000
    sides = Counter(split_of(f"prompt {i}", dev_share=0.2) for i in range(num))
    assert abs(sides["dev"] / num - 0.2) < 5 * (0.2 * 0.8 / num) ** 0.5
    assert {split_of("a", dev_share=0.0), split_of("b", dev_share=0.0)} == {"train"}
    assert split_of("How many?", dev_share=0.1) == "train", "a change here changes everybody's splits"


def test_a_forced_side_wins_also_over_other_sources(tmp_path: Path, file: Path) -> None:
    """Catches a test prompt that is trained on because another source has it too."""
    test = source(jsonl(tmp_path / "held_out.jsonl", ROWS[:5]), split="test")
    for sources in ([source(file), test], [test, source(file)]):
        found = {p.text: p for p in gather(sources, seed=0)}
        assert len(found) == 30
        assert found[TEXTS[3]] == Prompt(text=TEXTS[3], source="held_out", split="test")
        assert found[TEXTS[7]].source == "maths"


def test_the_order_depends_on_the_texts_and_the_seed_only(tmp_path: Path, file: Path) -> None:
    """Catches an order that follows the file, in which neighbours are alike."""
    backwards = source(jsonl(tmp_path / "maths_2.jsonl", ROWS[::-1]), name="maths")
    order = [p.text for p in gather([source(file)], seed=0)]
    assert order == [p.text for p in gather([backwards], seed=0)]
    assert order != [p.text for p in gather([source(file)], seed=1)]
    assert sorted(order) == sorted(TEXTS) != order


def test_repeated_and_empty_prompts_count_once_and_not_at_all(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": " a "}, {"text": " "}, {"text": "b"}]
    assert texts(Source(path=str(jsonl(tmp_path / "x.jsonl", rows)), prompt="text")) == ["a", "b"]


def test_values_out_of_range_are_refused() -> None:
    for options in ({"dev_share": 1.0}, {"dev_share": -0.1}, {"rows": 0}):
        with pytest.raises(ValueError, match=r"dev_share must lie|rows must be at least 1"):
            Source(path="x", prompt="text", **options)
