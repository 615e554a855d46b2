"""The loop for transformers' `generate` with a target in two shards: two processes, gloo, and the draft beside each."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "ranks.py"
CASES = ("greedy", "processed", "sampled", "unseeded", "head", "measured", "clocks", "again")


def run(folder: Path, *launcher: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, *launcher, str(PROGRAM), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks answered."""
    folder = tmp_path_factory.mktemp("two")
    run(folder, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process answered, which has the whole target."""
    folder = tmp_path_factory.mktemp("one")
    run(folder)
    return json.loads((folder / "0.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_say_the_same(case: str, ranks: list[dict[str, Any]]) -> None:
    """Catches ranks that decide for themselves: their own seed, their own costs, their own clock. Most often they hang."""
    assert ranks[0][case] == ranks[1][case]
    assert ranks[0][case]["steps"][1] > 0, "it drafts"


@pytest.mark.parametrize("case", ["plain", "greedy", "processed", "sampled", "unseeded", "head", "measured", "clocks"])
def test_two_ranks_say_what_one_process_says(case: str, ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Catches a loop that reads shards as if they were whole; these tokens do not feel the last digits of the sums."""
    assert ranks[0][case]["tokens"] == alone[case]["tokens"]
    if case in ("greedy", "sampled", "head"):
        assert ranks[0][case]["steps"] == alone[case]["steps"]


@pytest.mark.parametrize(("ours", "plain"), [("greedy", "plain"), ("measured", "plain"), ("processed", "plain-processed")])
def test_shards_with_a_draft_say_what_they_say_without(ours: str, plain: str, ranks: list[dict[str, Any]]) -> None:
    assert ranks[0][ours]["tokens"] == ranks[0][plain]["tokens"]


def test_a_seed_gives_its_answer_again(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["again"] == ranks[0]["sampled"]


def test_the_first_ranks_clock_ends_the_answer(ranks: list[dict[str, Any]]) -> None:
    """Catches ranks that end an answer at different tokens, after which one of them waits for ever."""
    assert len(ranks[0]["clocks"]["tokens"]) == 20
