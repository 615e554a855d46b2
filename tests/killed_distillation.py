"""A distillation that is killed (-9) in every phase, and one that is not: `test_distil.py` runs it in a process of its own.

    python killed_distillation.py FOLDER 10     # ten times in each phase; FOLDER has target/ and prompts.jsonl

Each attempt is a fork that goes on from what the one before left. It dies at the n-th call of a function, before or after it,
or when half of a file is written. One line for each says the phase and how it ended.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from specdecpp import cache_dir
from specdecpp.backends import NativeModel
from specdecpp.bench import check
from specdecpp.bench.turns import Turns
from specdecpp.distillation import finishing, measuring, saving, start
from specdecpp.distillation import training as course
from specdecpp.distillation.network import Shape
from specdecpp.distillation.plan import DistilPlan
from specdecpp.distillation.run import distil
from specdecpp.distillation.training import Course
from specdecpp.sampling import Sampling
from specdecpp.training import pipeline, responses, shards, train
from specdecpp.training.prompts import Source

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


def passes(*numbers: int) -> list[Moment]:
    return [before(NativeModel, "forward_seen", n) for n in numbers]


PHASES: dict[str, list[Moment]] = {
    "choosing a shape": [
        *passes(9),
        half_of("plan.json"),
        before(start, "_solved"),
        *passes(1, 20, 40),
        after(start, "_solved"),
    ],
    "writing": [*passes(30), half_of(".safetensors"), *passes(80, 10), half_of(".safetensors", 2), *passes(70, 20)],
    "the start": [before(start, "caught", 30), half_of("start.pt"), before(start, "_solved"), before(start, "caught")],
    "training": [after(course.Student, "learn", 4), half_of("training.pt", 3), before(course.Student, "learn", 3)],
    "measuring": [before(measuring, "probabilities", n) for n in (30, 1, 90)],
    "saving": [
        after(saving.shutil, "rmtree", 2),
        before(saving.Path, "rename"),
        half_of("card.json"),
        before(saving.shutil, "rmtree"),
        after(saving.shutil, "rmtree"),
        after(saving.Path, "rename"),
    ],
    "labels of the head": [
        half_of("collection.json"),
        before(responses, "draw", 8),
        *(half_of(".parquet"), half_of(".safetensors")) * 2,
        *(before(responses, "draw", n) for n in (3, 12)),
        before(shards, "write"),
        after(shards, "write"),
    ],
    "training the head": [after(train, "step", 9), half_of("state.pt"), half_of("metrics.jsonl"), after(train, "step", 2)],
    "calibrating": [before(pipeline, "calibrate_head"), after(pipeline, "calibrate_head"), half_of("head.json")],
    "keeping the head": [
        half_of("evaluation.json"),
        half_of("head.safetensors"),
        half_of("head.json"),
        before(pipeline, "evaluate_heads"),
    ],
    "checking": [before(Turns, "_note", 5), before(check, "check"), half_of("card.json", 2), before(Turns, "_note", 20)],
}


def plan_of(folder: Path, out: str) -> DistilPlan:
    return DistilPlan(
        target=str(folder / "target"),
        sources=(Source(path=str(folder / "prompts.jsonl"), prompt="text"),),
        out=folder / out,
        tokens=6000,
        sampling=Sampling(temperature=0.8),
        shape=Shape(kept=1, own=1, tokens=40),
        course=Course(epochs=2, rows=128),
        max_tokens=12,
    )


def attempted(plan: DistilPlan, moment: Moment = lambda: None) -> int:
    """How an attempt ended, as `waitpid` has it."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        moment()
        finishing.finish(plan, distil(plan))
        os._exit(0)
    except BaseException as error:  # whatever it is must not go on in the fork
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def main() -> None:
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    finishing.ROWS, finishing.CHECKED = 48, 2
    course.SAVED_S = -1.0  # after every step
    print("whole", attempted(plan_of(folder, "whole")), flush=True)
    for phase, moments in PHASES.items():
        for i in range(kills):
            print(phase, attempted(plan_of(folder, "killed"), moments[i % len(moments)]), flush=True)
    print("whole", attempted(plan_of(folder, "killed")), flush=True)


if __name__ == "__main__":
    main()
