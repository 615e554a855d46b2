"""How fast labels are collected on the reference pair: in batches, and one response at a time.

    python benchmarks/collection.py [--out benchmarks/results/collection.json]

500 responses of exactly 256 tokens each (the end of a text is ignored) to built-in prompts, at temperature 1: tokens of the
responses per second while the target samples them, while they are labelled (both models, the paper's mixed text), and for
the whole with the files of the shards. One at a time it is measured on a few of the same prompts, in turns with the batches,
so that both see the same machine. Nothing else should run meanwhile.
"""

import argparse
import json
import platform
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import transformers

import specdecpp as sd
from specdecpp.testing import practice_prompts
from specdecpp.training import jobs, shards
from specdecpp.training.jobs import Question, ShardWork
from specdecpp.training.prompts import Prompt, Source
from specdecpp.training.recipe import CollectPlan

STAGES = ("sampling", "labels", "files")


def work_of(pair: sd.Pair, *, max_tokens: int, batch: int) -> ShardWork:
    """Collection as a recipe with the defaults would do it, except that no text ends early."""
    plan = CollectPlan(sources=(Source(path="built in", prompt="text"),), max_tokens=max_tokens, batch=batch)
    return ShardWork(plan=plan, sampling=sd.Sampling(), ends=(), context=jobs.context_of(pair), provenance={})


def timed(pair: sd.Pair, work: ShardWork, index: int, items: list[Question], folder: Path) -> Counter[str]:
    """Seconds of each stage for one shard, and the tokens of its responses."""
    times = [time.perf_counter()]
    answers = jobs.answer_all(pair, work, index, items)
    times.append(time.perf_counter())
    records = jobs.label_all(pair, work, answers, index)
    times.append(time.perf_counter())
    shards.write(folder, index, shards.encoded(records, {}))
    times.append(time.perf_counter())
    seconds = {stage: b - a for stage, a, b in zip(STAGES, times, times[1:], strict=False)}
    return Counter({"tokens": sum(len(a.answer) for a in answers), **seconds})  # pyright: ignore[reportArgumentType]


def rates(total: Counter[str]) -> dict[str, float]:
    """Tokens per second of each stage and of the whole."""
    seconds = {stage: total[stage] for stage in STAGES} | {"whole": sum(total[stage] for stage in STAGES)}
    return {stage: round(total["tokens"] / s, 1) for stage, s in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--responses", type=int, default=500)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--alone", type=int, default=8, help="responses that are collected one at a time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pair, texts = sd.load_pair(runner="eager"), practice_prompts()
    prompts = [Prompt(text=texts[i % len(texts)], source="practice", split="train") for i in range(args.responses)]
    items = jobs.questions(pair, prompts)
    together, alone = (work_of(pair, max_tokens=args.max_tokens, batch=b) for b in (args.batch, 1))
    totals: dict[str, Counter[str]] = {"batch": Counter(), "one at a time": Counter()}
    groups = jobs.groups(items, size=together.plan.shard_size)
    with tempfile.TemporaryDirectory() as folder:
        timed(pair, jobs.trial(together, max_tokens=4), 0, groups[0][:2], Path(folder))  # warms up
        for i, group in enumerate(groups):
            totals["batch"] += timed(pair, together, i, group, Path(folder))
            for k in range(i, args.alone, len(groups)):
                totals["one at a time"] += timed(pair, alone, i, [group[k % len(group)]], Path(folder))
            print(f"{i + 1}/{len(groups)} shards", flush=True)
    figures = {way: rates(total) for way, total in totals.items() if total["tokens"]}
    print(f"{'tokens/s':>14}  " + "  ".join(f"{stage:>9}" for stage in (*STAGES, "whole")))
    for way, row in figures.items():
        print(f"{way:>14}  " + "  ".join(f"{value:9,.0f}" for value in row.values()))
    if args.out:
        result = {
            "command": f"python benchmarks/collection.py --responses {args.responses} --max-tokens {args.max_tokens} "
            f"--batch {args.batch} --alone {args.alone}",
            "threads": torch.get_num_threads(),
            "versions": {
                "specdecpp": sd.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            "tokens": {way: int(total["tokens"]) for way, total in totals.items()},
            "tokens_per_second": figures,
            "times_faster": {s: round(figures["batch"][s] / figures["one at a time"][s], 2) for s in (*STAGES, "whole")}
            if "one at a time" in figures
            else None,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
