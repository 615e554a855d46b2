"""A distillation whose process is killed (-9) in every phase, from the choice of a shape to the check.

    python test_distil_killed.py FOLDER layers|small    # the killing; FOLDER has target/, prompts.jsonl and small/

Each attempt is a fork that goes on from what the one before left. It dies at the n-th call of a function, before or after it,
or when half of a file is written. One line for each says the phase and how it ended.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_distil import filled, plan_of
from test_pruning import with_small

from specdecpp import cache_dir
from specdecpp.backends import NativeModel
from specdecpp.bench import check
from specdecpp.bench.turns import Turns
from specdecpp.distillation import finishing, measuring, saving, start, trials
from specdecpp.distillation import training as course
from specdecpp.distillation.run import CARD, DistilPlan, distil

SAME = "text/*", "draft/*"
"""What must be the same to the byte; other files say when or where they were made."""
Moment = Callable[[], None]
"""Arms a kill."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, number: int = 1, *, is_after: bool = False) -> Moment:
    """At the n-th call of a function, once it is armed."""

    def arm() -> None:
        own, calls = getattr(owner, name), 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number and not is_after:
                die()
            found = own(*args, **kwargs)
            if calls == number:
                die()
            return found

        setattr(owner, name, counted)

    return arm


def after(owner: Any, name: str, number: int = 1) -> Moment:
    return before(owner, name, number, is_after=True)


def half_of(ending: str, number: int = 1) -> Moment:
    """When half of the n-th file is written whose name ends so."""

    def arm() -> None:
        own, calls = cache_dir.whole, 0

        @contextmanager
        def torn(path: str | Path) -> Iterator[Path]:
            nonlocal calls
            with own(path) as part:
                yield part
                calls += str(path).endswith(ending)
                if calls == number and str(path).endswith(ending):
                    os.truncate(part, part.stat().st_size // 2)
                    die()

        cache_dir.whole = torn

    return arm


PHASES: dict[str, dict[str, Moment]] = {
    "layers": {
        "choosing a shape": before(NativeModel, "forward_seen", 9),
        "half a plan": half_of("plan.json"),
        "writing": before(NativeModel, "forward_seen", 30),
        "half a shard": half_of(".safetensors", 2),
        "the start": before(start, "caught", 30),
        "training": after(course.Trainer, "learn", 4),
        "half a state": half_of("training.pt", 3),
        "measuring": before(measuring, "probabilities", 30),
        "saving": after(saving.shutil, "rmtree", 2),
        "checking": before(Turns, "_visit", 2),
        "half a card": half_of("card.json", 2),
    },
    "small": {
        "choosing layers": before(trials, "accepted_with", 3),
        "writing for a trial": half_of(".safetensors", 2),
        "trying": after(course.Trainer, "learn", 3),
        "half a plan": half_of("plan.json"),
        "training": half_of("training.pt", 2),
        "saving": after(saving.shutil, "rmtree", 2),
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
    command = [sys.executable, __file__, str(folder), start]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"})
    lines = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    ends = {"whole": "0", **dict.fromkeys(PHASES[start], str(int(signal.SIGKILL))), "resumed": "0"}
    assert lines == ends, done.stderr[-3000:]
    assert len(made(folder / "whole")) > 5
    assert made(folder / "killed") == made(folder / "whole")
    cards = [json.loads((folder / name / CARD).read_text()) for name in ("whole", "killed")]
    assert cards[0]["acceptance"] == cards[1]["acceptance"]
    assert all(("check" in card) == (start == "layers") for card in cards)


def attempted(plan: DistilPlan, moment: Moment = lambda: None) -> int:
    """How an attempt ended, as `waitpid` has it."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        moment()
        card = distil(plan)
        if plan.start is None:
            finishing.finish(plan, card)
        os._exit(0)
    except BaseException as error:  # whatever it is must not go on in the fork
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


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
    print("whole", attempted(whole), flush=True)
    for phase, moment in PHASES[sys.argv[2]].items():
        print(phase, attempted(killed, moment), flush=True)
    print("resumed", attempted(killed), flush=True)


if __name__ == "__main__":
    main()
