"""What a forward pass costs on this machine: t_draft, and t_target(n) for n rows, with every backend that can run the reference
pair here.

    python benchmarks/costs.py [--out benchmarks/results/costs.json]

Medians over repetitions after warm-up, one backend after the other (two pairs at a time do not fit a CPU's cache), at a
context of 128 tokens, batch 1. c = t_draft / t_target(1). Nothing else should run meanwhile.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers

import specdecpp as sd
from specdecpp.backends import Cache
from specdecpp.backends.engines import BACKENDS

CONTEXT, ROWS, WARM_UP = 128, (1, 2, 3, 4, 5, 6, 8, 12), 5


def once(cache: Cache, rows: int) -> float:
    """Seconds of one forward over `rows` new tokens, rolled back afterwards."""
    started = time.perf_counter()
    cache.extend([5] * rows, rows=rows)
    seconds = time.perf_counter() - started
    cache.rollback(CONTEXT)
    return seconds


def costs(pair: sd.Pair, repetitions: int) -> dict[str, float]:
    """Milliseconds of a draft step and of target passes."""
    target, draft = pair.target.new_cache(), pair.draft.new_cache()
    for backend in (target, draft):
        backend.extend([5] * CONTEXT, rows=1)
    times: dict[str, list[float]] = {}
    for repetition in range(repetitions + WARM_UP):
        measured = {"draft": once(draft, 1)} | {f"target({n})": once(target, n) for n in ROWS}
        if repetition >= WARM_UP:
            for name, seconds in measured.items():
                times.setdefault(name, []).append(seconds)
    return {name: round(1e3 * statistics.median(values), 4) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for kind in BACKENDS:
        try:
            pair = sd.load_pair(backend=kind)
        except sd.BackendError as error:
            print(f"{kind}: {error}")
            continue
        found[pair.backends.removesuffix(" (as asked)")] = costs(pair, args.repetitions)
    names = list(next(iter(found.values())))
    width = max(map(len, found))
    print(f"{'ms':>{width}}  " + "  ".join(f"{name:>10}" for name in (*names, "c")))
    for kind, ms in found.items():
        figures = [*(f"{ms[name]:10.3f}" for name in names), f"{ms['draft'] / ms['target(1)']:10.3f}"]
        print(f"{kind:>{width}}  " + "  ".join(figures))
    if args.out:
        result = {
            "command": "python benchmarks/costs.py",
            "threads": torch.get_num_threads(),
            "versions": {
                "specdecpp": sd.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            "ms": found,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
