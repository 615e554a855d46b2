"""A target without a draft by the clock: candidates copied from the text, beside the target alone and the pair with its draft.

    python benchmarks/drafters.py --target smollm2 --gsm8k FILE --humaneval FILE --alpaca FILE --out results/drafters.json

Text to copy: the questions of these sets, to be repeated word for word and to be repeated with one word changed. Every
setting answers a prompt before the next one comes, in an order that rotates; greedy, and at 0.7 with top_p 0.9. Rates are
ratios of sums over prompts, with intervals over prompts. `summary` is the worst over sampling. Nothing else may run meanwhile.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers.provenance import provenance

import specdecpp as sd
from specdecpp.bench.interleaving import in_turn
from specdecpp.loading import shipped
from specdecpp.policies import Fixed, Policy
from specdecpp.theory.intervals import ratio_of_ratios
from specdecpp.training.prompts import Source, gather

SAMPLINGS = ((0.0, 1.0), (0.7, 0.9))
COPYING = {
    "repeat": "Repeat the following text word for word, twice.\n\n{}",
    "edit": 'Write the following text again, with every "the" replaced by "this", and then once more.\n\n{}',
}


def settings(pair: sd.Pair, alone: sd.Pair) -> dict[str, sd.Decoder]:
    """By name; the first is the target alone."""
    rules: dict[str, Policy | None] = {"copies, default": None, "copies, fixed 4": Fixed(k=4), "copies, fixed 10": Fixed(k=10)}
    found = {"target": sd.Decoder(pair, policy=Fixed(k=0), reuses=False)}
    return (
        found
        | {name: sd.Decoder(alone, policy=rule, reuses=False) for name, rule in rules.items()}
        | {"model, default": sd.Decoder(pair, reuses=False)}
    )


def prompts(pair: sd.Pair, files: dict[str, str], num: int) -> dict[str, list[Any]]:
    """Messages by set; those to copy from are made of the longest questions."""
    texts = {
        name: [p.text for p in gather([Source(path=path, prompt=name)], seed=0)][: 8 * num] for name, path in files.items()
    }
    longest = sorted((t for found in texts.values() for t in found if len(t) < 900), key=len)[-num:]
    sets = {name: [form.format(text) for text in longest] for name, form in COPYING.items()}
    sets |= {name: found[:num] for name, found in texts.items()}
    return {name: [[{"role": "user", "content": text}] for text in found] for name, found in sets.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    for name in ("gsm8k", "humaneval", "alpaca"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--count", type=int, default=12, help="prompts of each set")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    pair = sd.load_pair(args.target)
    parts = shipped.names(args.target)
    alone = sd.load_pair(parts.target if parts else args.target)
    decoders = settings(pair, alone)
    cells = []
    for temperature, top_p in SAMPLINGS:
        for name, asked in prompts(pair, {n: getattr(args, n) for n in ("gsm8k", "humaneval", "alpaca")}, args.count).items():
            runs: dict[str, list[tuple[int, float]]] = {rule: [] for rule in decoders}

            def run(rule: str, prompt: Any, runs: Any = runs, how: Any = (temperature, top_p)) -> None:
                started = time.perf_counter()
                done = decoders[rule].generate(prompt, max_tokens=args.tokens, temperature=how[0], top_p=how[1])
                runs[rule].append((len(done.tokens), time.perf_counter() - started))

            for rule in decoders:  # what is measured once is measured before
                run(rule, asked[0])
            for found in runs.values():
                found.clear()
            for i, prompt in enumerate(asked):
                for rule in in_turn([*decoders], i, num_turns=len(asked)):
                    run(rule, prompt)
            cells.append(cell(name, temperature, top_p, runs))
            print(json.dumps(cells[-1]), flush=True)
    found = provenance("python", "benchmarks/drafters.py") | {"cells": cells, "summary": summary(cells)}
    print(json.dumps(found["summary"], indent=1))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def cell(name: str, temperature: float, top_p: float, runs: dict[str, list[tuple[int, float]]]) -> dict[str, Any]:
    columns = {rule: np.array(found).T for rule, found in runs.items()}
    tokens, seconds = columns["target"]
    over = {}
    for rule, (t, s) in columns.items():
        interval = ratio_of_ratios(t, s, tokens, seconds)
        over[rule] = [round(x, 3) for x in (interval.value, interval.low, interval.high)]
    rate = round(float(tokens.sum() / seconds.sum()), 1)
    return {"set": name, "temperature": temperature, "top_p": top_p, "target_tokens_per_second": rate, "over_target": over}


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The worst of the default on text to copy and elsewhere, over the target alone."""
    values = [(c["set"] in COPYING, c["over_target"]["copies, default"][0]) for c in cells]
    return {
        "suffix_over_target_on_copying": min(v for copies, v in values if copies),
        "suffix_worst_elsewhere": min(v for copies, v in values if not copies),
        "over_prompt_lookup": None,
        "over_llama_cpp_ngram": None,
        "both_vs_better_of_two": None,
    }


if __name__ == "__main__":
    main()
