"""How many tests of each suite passed, of all that it has; `--write` keeps it in benchmarks/results/foreign.json."""

import json
from collections import Counter, defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[3] / "benchmarks/results/foreign.json"
MARKERS = """
    generate accelerate_tests not_device_test is_agent_test is_captured_test is_pipeline_test is_staging_test
    is_tensor_parallel_test is_training_distributed_test is_training_test training_ci tensor_parallel_ci order
    torch_compile_test torch_export_test flash_attn_test flash_attn_3_test flash_attn_4_test all_flash_attn_test
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write", action="store_true", help=f"keep the counts in {RESULTS.name}")


def pytest_configure(config: pytest.Config) -> None:
    """Know the markers of their code, which are strict here."""
    for name in MARKERS.split():
        config.addinivalue_line("markers", f"{name}: of transformers")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Let their code warn: errors are for ours."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print passed n of m, and the reasons of what was left out."""
    ended: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            name = report.nodeid.partition("::")[0].rpartition("/")[2]
            if not name.endswith("_suite.py"):  # a client
                continue
            suite = name.removeprefix("test_").removesuffix("_suite.py")
            ended[suite][outcome] += 1
            if outcome == "skipped":
                reasons[suite][report.longrepr[2].removeprefix("Skipped: ")] += 1
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for suite, counts in sorted(ended.items()):
        terminalreporter.write_line(f"{suite}: passed {counts['passed']} of {counts.total()}")
        for reason, num in reasons[suite].most_common():
            terminalreporter.write_line(f"    {num} left out: {reason}")
        day = datetime.now(UTC).date().isoformat()
        kept[suite] = {"date": day, **counts, "of": counts.total(), "left_out": dict(reasons[suite].most_common())}
    if terminalreporter.config.getoption("--write"):
        RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
