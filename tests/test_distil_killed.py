"""A distillation whose process is killed (-9) in every phase, from the choice of a shape to the check.

    python test_distil_killed.py FOLDER layers|small    # the killing; FOLDER has target/, prompts.jsonl and small/

Each attempt is a fork that goes on from what the one before left (`interrupted`).
"""

import hashlib
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from interrupted import Moment, at_file, attempted, attempts, before, see_killed
from test_distil import filled, plan_of
from test_pruning import with_small

from specdecpp.backends import NativeModel
from specdecpp.bench import check
from specdecpp.bench.turns import Turns
from specdecpp.distillation import finishing, measuring, start, trials
from specdecpp.distillation import training as course
from specdecpp.distillation.run import CARD, DistilPlan, distil

SAME = "text/*", "draft/*"
"""What must be the same to the byte; other files say when or where they were made."""

PHASES: dict[str, dict[str, Moment]] = {
    "layers": {
        "choosing a shape": before(NativeModel, "forward_seen", 9),
        "half a plan": at_file("plan.json", is_half=True),
        "writing": before(NativeModel, "forward_seen", 30),
        "half a shard": at_file(".safetensors", 2, is_half=True),
        "the start": before(start, "caught", 30),
        "training": before(course.Trainer, "learn", 5),
        "half a state": at_file("training.pt", 3, is_half=True),
        "measuring": before(measuring, "probabilities", 30),
        "saving": before(Path, "rename"),
        "checking": before(Turns, "_visit", 2),
        "half a card": at_file("card.json", 2, is_half=True),
    },
    "small": {
        "choosing layers": before(trials, "accepted_with", 3),
        "writing for a trial": at_file(".safetensors", 2, is_half=True),
        "trying": before(course.Trainer, "learn", 4),
        "half a plan": at_file("plan.json", is_half=True),
        "training": at_file("training.pt", 2, is_half=True),
        "saving": before(Path, "rename"),
    },
}


def made(out: Path) -> dict[str, str]:
    files = [path for pattern in SAME for path in out.glob(pattern) if not path.name.endswith(".part")]
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("start", ["layers", "small"])
def test_killed_in_every_phase_it_ends_with_the_same_draft(start: str, tmp_path: Path) -> None:
    """Catches half a file taken for a whole one, work lost or done twice, a training that goes on with less than it had, and a
    trial whose weights stay in the draft."""
    folder = with_small(filled(tmp_path))
    see_killed(__file__, PHASES[start], str(folder), start)
    assert len(made(folder / "whole")) > 5
    assert made(folder / "killed") == made(folder / "whole")
    cards = [json.loads((folder / name / CARD).read_text()) for name in ("whole", "killed")]
    assert cards[0]["acceptance"] == cards[1]["acceptance"]
    assert all(("check" in card) == (start == "layers") for card in cards)


def finished(plan: DistilPlan) -> None:
    card = distil(plan)
    if plan.start is None:
        finishing.finish(plan, card)


def main() -> None:
    import forks  # noqa: F401

    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    finishing.CHECKED, check.REQUESTS = 2, 16
    course.SAVED_S = -1.0  # after every step
    more = {"tokens": 6000}
    if sys.argv[2] == "small":
        more = {"tokens": 3000, "start": str(folder / "small"), "shape": None, "layers": 2}
    whole, killed = (replace(plan_of(folder, folder / name), **more) for name in ("whole", "killed"))
    assert attempted(partial(finished, whole)) == "0"
    attempts(partial(finished, killed), PHASES[sys.argv[2]])
    assert attempted(partial(finished, killed)) == "0"


if __name__ == "__main__":
    main()
