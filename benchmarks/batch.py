"""Many at once: tokens a second of requests that share passes, over those of requests one after the other.

    python benchmarks/batch.py --pair reference --pair smollm2 --prompts gsm8k_test.jsonl --out results/batch.json

Every way gets the same prompts in the same sitting, in turns. A seed gives one answer in all of them, which is checked. Of the
default rule without a seed, lengths follow the load.
"""

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any

from peers.provenance import provenance

import specdecpp as sd
from specdecpp.bench.interleaving import in_turn
from specdecpp.policies import CostAware, Fixed
from specdecpp.request import as_prompt
from specdecpp.training import prompts as prompt_files

AT_ONCE = 1, 2, 4, 8, 16, 32
SAMPLINGS: dict[str, dict[str, Any]] = {"0": {"temperature": 0}, "1": {"temperature": 1.0}}


def cells(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A cell for each sampling and rule."""
    pair = sd.load_pair(name)
    source = prompt_files.Source(path=args.prompts, prompt="gsm8k", name="gsm8k", split="test")
    asked = [as_prompt(pair, prompt.text) for prompt in prompt_files.gather([source], seed=1)[: max(AT_ONCE)]]
    rules = {"target alone": Fixed(k=0), "fixed K = 2": Fixed(k=2), "cost-aware by q": CostAware()}
    found = []
    for how, sampling in SAMPLINGS.items():
        for rule, policy in rules.items():
            decoder = sd.Decoder(pair, policy=policy, reuses=False)
            answers = {
                n: [o.tokens for o in decoder.generate_all(asked[:8], at_once=n, max_tokens=args.tokens, seed=1, **sampling)]
                for n in (1, 8)
            }
            rates: dict[int, list[float]] = defaultdict(list)
            for cycle in range(args.cycles):
                for n in in_turn(list(AT_ONCE), cycle, num_turns=args.cycles):
                    some = asked[: max(8, n)]
                    started = perf_counter()
                    outputs = decoder.generate_all(some, at_once=n, max_tokens=args.tokens, **sampling)
                    rates[n].append(sum(len(o.tokens) for o in outputs) / (perf_counter() - started))
            cell = {
                "pair": name,
                "runners": str(pair.runners).split(":")[0],
                "sampling": how,
                "rule": rule,
                "same_answers": answers[1] == answers[8],
                "tokens_per_second": {n: round(statistics.median(values), 1) for n, values in sorted(rates.items())},
                "over_one": {
                    n: round(statistics.median(values) / statistics.median(rates[1]), 3) for n, values in sorted(rates.items())
                },
            }
            print(json.dumps(cell), flush=True)
            found.append(cell)
    return found


def summary(found: list[dict[str, Any]]) -> dict[str, float]:
    """The worst over pairs and samplings."""
    default = [cell for cell in found if cell["rule"].startswith("cost-aware")]
    fixed = {(c["pair"], c["sampling"], c["rule"]): c["tokens_per_second"] for c in found}
    best = [
        min(
            cell["tokens_per_second"][n]
            / max(rates[n] for key, rates in fixed.items() if key[:2] == (cell["pair"], cell["sampling"]))
            for n in cell["tokens_per_second"]
        )
        for cell in default
    ]
    at_8 = [rates.get(8, rates.get("8")) for rates in (cell["over_one"] for cell in default)]
    return {"at_8_over_turns": min(at_8), "default_over_best_rule_of_each_load": round(min(best), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pair", action="append", required=True, help="a pair that ships, by its name; repeatable")
    parser.add_argument("--prompts", required=True, help="GSM8K's test questions")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = [cell for name in args.pair for cell in cells(name, args)]
    results = {**provenance("python", "benchmarks/batch.py"), "cells": found, "summary": summary(found)}
    print(json.dumps(results["summary"], indent=1))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
