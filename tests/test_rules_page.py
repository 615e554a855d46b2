"""The page "which rule" says what benchmarks/results/rules.json says."""

import json
import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
PAGE = runpy.run_path(str(ROOT / "docs/figures/rules.py"))


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks/results/rules.json").read_text(encoding="utf-8"))


def test_the_page_is_what_the_results_say(results: dict[str, Any]) -> None:
    """Catches a table that was written by hand, or not written again."""
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    assert page == PAGE["written"](page, results)


def test_the_picture_is_of_the_same_results(results: dict[str, Any]) -> None:
    """Catches a picture of an earlier run."""
    drawn = ElementTree.parse(ROOT / "docs/figures/rules.svg").getroot()
    assert drawn.attrib["aria-label"] == PAGE["said"](results)


def test_a_row_has_the_worst_and_the_mean_of_all_cells() -> None:
    """Catches a cell that is left out, a rule that is compared as it comes, and a loss that is shown as a gain."""
    speed_up = {"cost-aware by q": 1.2, "K 4": 0.9, "K, tuned": 1.5}
    cell = {"pair": "small", "sampling": "0.7 top_p 0.9", "set": "a", "prompts": 5, "speed_up": speed_up}
    speed_up = {"cost-aware by q": 2.0, "K 4": 1.1, "K, tuned": 1.0}
    other = {"pair": "large", "sampling": "1", "set": "b", "prompts": 7, "speed_up": speed_up}
    found = {row.name: row for row in PAGE["rows"]({"replay": [cell | {"costs": "c = 0.1"}, other | {"costs": "measured"}]})}
    assert list(found) == ["cost-aware by q", "K"]
    assert (found["K"].setting, found["K"].usual, found["K"].tuned) == ("4", (0.9, 1.1), (1.5, 1.0))
    assert found["K"].behind == pytest.approx((-20, 100))
    assert found["K"].worst_cell == "large, 1, measured, b"
    text = PAGE["table"]({"replay": [cell | {"costs": "c = 0.1"}, other | {"costs": "measured"}]})
    assert "| K | 1.00 | 1.25 | large, 1, measured, b | 4 | 0.90 | 1.00 | -20.0 | +40.0 |" in text
    assert "with the same coins: small at 0.7, 5 prompts a set; large at 1, 7 prompts a set." in text
