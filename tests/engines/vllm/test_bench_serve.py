"""`vllm bench serve` over `specdecpp serve`, with prompts of ours."""

import sys
from pathlib import Path

import pytest


def test_the_client_reports_what_the_server_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches counters that vLLM's client does not find, and draft tokens that it counts otherwise."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    from foreign_clients import main  # pyright: ignore[reportMissingImports]

    main(["--vllm", sys.executable, "--out", str(tmp_path / "out.json")])
