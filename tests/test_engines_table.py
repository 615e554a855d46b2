"""The table of what works where: that it says what the tests said, and names tests that exist."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).parent / "engines"))
import table  # pyright: ignore[reportMissingImports]

TESTS = Path(__file__).parent


def claim(**changes: str) -> table.Claim:
    given = {"engine": "e", "suite": "s", "version": "v", "sampling": "greedy", "policy": "p", "test": "f.py::t"}
    return table.Claim(**given | changes)


def test_every_claim_names_a_test_that_exists() -> None:
    """Catches a claim whose test was renamed or removed."""
    assert len(table.claims()) > 30
    for one in table.claims():
        file, _, function = one.function.partition("::")
        assert f"\ndef {function}(" in (TESTS / file).read_text(encoding="utf-8"), one.test
        assert file.startswith(f"engines/{one.suite}/") or (one.suite == table.LIBRARY and "/" not in file)


def test_the_page_is_what_the_results_say() -> None:
    """Catches a table that was written by hand, or not written again."""
    page = (table.ROOT / table.PAGE).read_text(encoding="utf-8")
    assert page == table.written(page, json.loads((table.ROOT / table.RESULTS).read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        ({"passed": 3}, "works"),
        ({"passed": 3, "failed": 1}, "**FAILS**"),
        ({"passed": 3, "skipped": 1}, "not run"),
        ({"skipped": 1}, "not run"),
        ({}, "not run"),
    ],
)
def test_only_tests_that_passed_make_a_claim_hold(ended: dict[str, int], said: str) -> None:
    """Catches a skipped or a failed test that is written as working."""
    assert table.verdict(claim(), {"s": {"tests": {"f.py::t": ended}}}) == said
    assert table.verdict(claim(), {}) == "not run"


@pytest.mark.parametrize(
    ("test", "name", "is_shown"),
    [
        ("f.py::t", "f.py::t", True),
        ("f.py::t", "f.py::t[a]", True),
        ("f.py::t", "f.py::tt", False),
        ("f.py::t[a", "f.py::t[a-b]", True),
        ("f.py::t[a", "f.py::t[b]", False),
        ("f.py::t[a", "f.py::t", False),
    ],
)
def test_a_claim_knows_its_tests(test: str, name: str, is_shown: bool) -> None:
    """Catches a claim that is shown by the tests of another."""
    assert claim(test=test).is_shown_by(name) is is_shown


def test_tests_are_run_and_counted() -> None:
    """Catches names in pytest's report that are read otherwise than claims have them, and versions that are not found."""
    one = claim(test="test_engines_table.py::test_a_claim_knows_its_tests", suite=table.LIBRARY)
    found = table.run(table.LIBRARY, Path(sys.executable), [one])
    assert found["tests"] == {one.test: {"passed": 6}}
    assert set(found["versions"]) >= {"torch", "transformers"}
    ends = {"<testcase><failure/></testcase>": "failed", "<testcase><error/></testcase>": "failed"}
    ends |= {"<testcase><skipped/></testcase>": "skipped", "<testcase/>": "passed"}
    assert [table.outcome(ElementTree.fromstring(case)) for case in ends] == list(ends.values())
