"""llama.cpp's client for SPEED-Bench over `specdecpp serve`, with prompts of ours."""

from pathlib import Path

import pytest
from sources import LLAMA_CPP


def test_the_client_reports_what_the_server_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches `timings` that miss draft tokens or turns, and a request that this client makes and the server refuses."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    from foreign_clients import main  # pyright: ignore[reportMissingImports]

    client = LLAMA_CPP.root / "tools/server/bench/speed-bench/speed_bench.py"
    found = main(["--speed-bench", str(client), "--out", str(tmp_path / "out.json")])
    assert found["clients"]["speed-bench"]["client"]["categories"] == 11
