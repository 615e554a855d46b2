"""How many tests of each suite passed, of all that it has."""

from collections import Counter, defaultdict
from typing import Any

import pytest

MARKERS = """generate accelerate_tests not_device_test is_agent_test is_captured_test is_pipeline_test is_staging_test
    is_tensor_parallel_test is_training_distributed_test is_training_test training_ci tensor_parallel_ci
    torch_compile_test torch_export_test flash_attn_test flash_attn_3_test flash_attn_4_test all_flash_attn_test""".split()


def pytest_configure(config: pytest.Config) -> None:
    """Know the markers of their code, which are strict here."""
    for name in MARKERS:
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
            suite = report.nodeid.partition("::")[0].rpartition("/")[2].removesuffix(".py")
            ended[suite][outcome] += 1
            if outcome == "skipped":
                reasons[suite][report.longrepr[2].removeprefix("Skipped: ")] += 1
    for suite, counts in sorted(ended.items()):
        terminalreporter.write_line(f"{suite}: passed {counts['passed']} of {counts.total()}")
        for reason, num in reasons[suite].most_common():
            terminalreporter.write_line(f"    {num} left out: {reason}")
