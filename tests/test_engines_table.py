"""The table of what works where: that it says what the tests said, and names tests that exist."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

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


def test_the_page_has_the_counts_of_the_suites_of_others() -> None:
    """Catches counts of an earlier run, and a suite in which a test fails."""
    page = (table.ROOT / "docs/lossless.md").read_text(encoding="utf-8")
    found = json.loads((table.ROOT / "benchmarks/results/foreign.json").read_text(encoding="utf-8"))
    assert len(found) == len(list((TESTS / "engines/foreign").glob("test_*_suite.py")))
    for counts in found.values():
        assert counts["passed"] + counts.get("skipped", 0) == counts["of"]
        assert f"| {counts['passed']} of {counts['of']} |" in page


def test_only_tests_that_passed_make_a_claim_hold() -> None:
    """Catches a skipped or a failed test that is written as working."""
    ends = [({"passed": 3}, "works"), ({"passed": 3, "failed": 1}, "**FAILS**"), ({"passed": 3, "skipped": 1}, "not run")]
    for ended, word in [*ends, ({"skipped": 1}, "not run"), ({}, "not run")]:
        assert table.verdict(claim(), {"s": {"tests": {"f.py::t": ended}}}) == word
    assert table.verdict(claim(), {}) == "not run"


def test_a_claim_knows_its_tests() -> None:
    """Catches a claim that is shown by the tests of another."""
    whole, part = claim(test="f.py::t"), claim(test="f.py::t[a")
    shown = [whole.is_shown_by(name) for name in ("f.py::t", "f.py::t[a]", "f.py::tt")]
    shown += [part.is_shown_by(name) for name in ("f.py::t[a-b]", "f.py::t[b]", "f.py::t")]
    assert shown == [True, True, False, True, False, False]


def test_tests_are_run_and_counted() -> None:
    """Catches names in pytest's report that are read otherwise than claims have them, and versions that are not found."""
    one = claim(test="test_engines_table.py::test_a_claim_knows_its_tests", suite=table.LIBRARY)
    found = table.run(table.LIBRARY, Path(sys.executable), [one])
    assert found["tests"] == {one.test: {"passed": 1}}
    assert set(found["versions"]) >= {"torch", "transformers"}
    ends = {"<testcase><failure/></testcase>": "failed", "<testcase><error/></testcase>": "failed"}
    ends |= {"<testcase><skipped/></testcase>": "skipped", "<testcase/>": "passed"}
    assert [table.outcome(ElementTree.fromstring(case)) for case in ends] == list(ends.values())
