"""What a forward pass costs on this machine: t_draft, and t_target(n) for n rows, with the runner that ships, and the same
through transformers ("eager").

    python benchmarks/costs.py [--out benchmarks/results/costs.json]

Medians over interleaved repetitions after warm-up, at a context of 128 tokens, batch 1. c = t_draft / t_target(1).
Nothing else should run meanwhile.
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

CONTEXT, ROWS = 128, (1, 2, 3, 4, 5, 6, 8, 12)


def once(runner: sd.Runner, rows: int) -> float:
    """Seconds of one forward over `rows` new tokens, rolled back afterwards."""
    started = time.perf_counter()
    runner.extend([5] * rows, rows=rows)
    seconds = time.perf_counter() - started
    runner.rollback(CONTEXT)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    times: dict[str, list[float]] = {}
    for kind, lean in (("", None), ("eager ", False)):  # one after the other: two pairs at a time do not fit the CPU's cache
        pair = sd.load_pair(lean=lean)
        target, draft = pair.target.fresh(), pair.draft.fresh()
        for runner in (target, draft):
            runner.extend([5] * CONTEXT, rows=1)
        for repetition in range(args.repetitions + 5):
            measured = {f"{kind}draft": once(draft, 1)} | {f"{kind}target({n})": once(target, n) for n in ROWS}
            if repetition >= 5:
                for name, seconds in measured.items():
                    times.setdefault(name, []).append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{'forward':>18}  {'ms':>6}  {'/ target(1)':>11}")
    for name, seconds in medians.items():
        print(f"{name:>18}  {seconds * 1e3:6.2f}  {seconds / medians['target(1)']:11.2f}")
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
            "ms": {name: round(seconds * 1e3, 4) for name, seconds in medians.items()},
            "c": round(medians["draft"] / medians["target(1)"], 4),
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
