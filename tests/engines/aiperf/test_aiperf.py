"""NVIDIA's aiperf over `specdecpp serve`, with prompts of ours."""

import sys
from pathlib import Path

import pytest


def test_the_client_reports_what_the_server_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches figures of speculation that it does not find in a stream, or takes for another shape."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    from foreign_clients import main  # pyright: ignore[reportMissingImports]

    main(["--aiperf", str(Path(sys.executable).with_name("aiperf")), "--out", str(tmp_path / "out.json")])
