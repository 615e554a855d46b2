"""Many at once: tokens a second of requests that share passes, over one alone and over turns; and what a server makes of it.

    python benchmarks/batch.py --pair reference --pair smollm2 --prompts gsm8k_test.jsonl --out results/batch.json

A pair is one that ships, or a folder with `target` and `draft`. All ways and rules get the same prompts in one sitting, in a
random order. A seed gives one answer in all of them, which is checked. Of the default rule without a seed, lengths follow the
load. In turns each of eight requests has a step by itself, as before passes were shared. The server streams to clients on
loopback, who share the cores with it (`clients`); its rate is compared with a decoder's for the same work. What `peers.batch`
measured stays in the file.
"""

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import clients
from peers.provenance import provenance

import specdecpp as sd
from specdecpp.bench.contest import in_turn
from specdecpp.decoder import encode
from specdecpp.policies import CostAware, Fixed
from specdecpp.policy_spec import as_prompt
from specdecpp.training import prompts as prompt_files

AT_ONCE = 1, 2, 4, 8, 16, 32
WAYS: tuple[int | str, ...] = (*AT_ONCE, "turns", "alone")
CLIENTS = {1: 4, 16: 48}
"""How many requests so many clients send."""
SAMPLINGS: dict[str, dict[str, Any]] = {"0": {"temperature": 0}, "1": {"temperature": 1.0}}


def cells(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A cell for each sampling and rule."""
    pair = loaded(name)
    source = prompt_files.Source(path=args.prompts, prompt="gsm8k", name="gsm8k", split="test")
    asked = [as_prompt(pair, prompt.text) for prompt in prompt_files.gather([source], seed=1)[: max(AT_ONCE)]]
    rules = {"target alone": Fixed(k=0), "fixed K = 2": Fixed(k=2), "cost-aware by q": CostAware()}
    found = []
    for how, sampling in SAMPLINGS.items():
        decoders = {rule: sd.Decoder(pair, policy=policy, reuses=False) for rule, policy in rules.items()}
        answers = {
            rule: {
                n: [o.tokens for o in decoder.generate_all(asked[:8], at_once=n, max_tokens=args.tokens, seed=1, **sampling)]
                for n in (1, 8)
            }
            for rule, decoder in decoders.items()
        }
        rates: dict[tuple[str, int | str], list[float]] = defaultdict(list)
        contests, dice = [(rule, way) for rule in rules for way in WAYS], random.Random(0)
        for _ in range(args.cycles):
            for rule, way in dice.sample(contests, len(contests)):
                rates[rule, way].append(rate(decoders[rule], way, asked, args.tokens, sampling))
        for rule in rules:
            of = {way: statistics.median(rates[rule, way]) for way in WAYS}
            cell = {
                "pair": name,
                "runners": str(pair.backends).split(":")[0],
                "sampling": how,
                "rule": rule,
                "same_answers": answers[rule][1] == answers[rule][8],
                "tokens_per_second": {n: round(of[n], 1) for n in AT_ONCE},
                "over_one": {n: round(of[n] / of[1], 3) for n in AT_ONCE},
                "turns_of_8": round(of["turns"], 1),
                "at_8_over_turns": round(of[8] / of["turns"], 3),
                "one_over_before": round(of[1] / of["alone"], 3),
            }
            print(json.dumps(cell), flush=True)
            found.append(cell)
    return found


def loaded(name: str) -> sd.Pair:
    """A pair that ships, by its name, or of a folder with target and draft."""
    folder = Path(name)
    return sd.load_pair(folder / "target", draft=folder / "draft") if folder.is_dir() else sd.load_pair(name)


def in_turns(decoder: sd.Decoder, asked: Sequence[Any], tokens: int, sampling: dict[str, Any]) -> float:
    """Tokens a second of requests that take turns, each step by itself."""
    started = perf_counter()
    sessions = [decoder.start(prompt, max_tokens=tokens, **sampling) for prompt in asked]
    for session in sessions:
        session.prefill()
    while running := [session for session in sessions if session.finish_reason is None]:
        for session in running:
            session.step()
    return sum(len(s.tokens) - s.num_prompt_tokens for s in sessions) / (perf_counter() - started)


def rate(decoder: sd.Decoder, way: int | str, asked: Sequence[Any], tokens: int, sampling: dict[str, Any]) -> float:
    """Tokens a second of so many requests at once, of eight in turns, or of eight one after another as before there were
    batches."""
    if way == "turns":
        return in_turns(decoder, asked[:8], tokens, sampling)
    started = perf_counter()
    if isinstance(way, int):
        outputs = decoder.generate_all(asked[: max(8, way)], at_once=way, max_tokens=tokens, **sampling)
    else:
        outputs = [decoder.generate(prompt, max_tokens=tokens, **sampling) for prompt in asked[:8]]
    return sum(len(o.tokens) for o in outputs) / (perf_counter() - started)


@contextmanager
def server(name: str) -> Iterator[str]:
    """Its address."""
    folder = Path(name)
    pair = ("--target", str(folder / "target"), "--draft", str(folder / "draft")) if folder.is_dir() else ("--target", name)
    command = [sys.executable, "-m", "specdecpp", "serve", *pair, "--port", "0", "--max-running", str(max(CLIENTS))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGTERM)


def served(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The default rule behind the server and in a decoder, by the number of clients: a row for each sampling."""
    pair = loaded(name)
    source = prompt_files.Source(path=args.prompts, prompt="gsm8k", name="gsm8k", split="test")
    num, cycles = max(CLIENTS.values()), 3 * args.cycles
    prompts = [encode(pair, as_prompt(pair, prompt.text)) for prompt in prompt_files.gather([source], seed=2)[: num * cycles]]
    found = []
    with server(name) as url:
        for how, sampling in SAMPLINGS.items():
            decoder, rates = sd.Decoder(pair), defaultdict(list)
            options: dict[str, Any] = {"max_tokens": args.tokens, "ignore_eos": True, **sampling}
            clients.tokens_per_second(url, [{"prompt": prompts[-1], **options}] * 2, at_once=2)
            decoder.generate_all(prompts[-2:], at_once=2, **options)
            for cycle in range(cycles):
                for n, requests in CLIENTS.items():
                    some = prompts[cycle * num :][:requests]
                    for way in in_turn(["server", "decoder"], cycle, num_turns=cycles):
                        if way == "server":
                            bodies = [{"prompt": prompt, **options} for prompt in some]
                            rates[way, n].append(clients.tokens_per_second(url, bodies, at_once=n))
                            continue
                        started = perf_counter()
                        outputs = decoder.generate_all(some, at_once=n, **options)
                        rates[way, n].append(sum(len(o.tokens) for o in outputs) / (perf_counter() - started))
            medians = {key: statistics.median(values) for key, values in rates.items()}
            row: dict[str, Any] = {"pair": name, "sampling": how}
            row |= {way: {n: round(medians[way, n], 1) for n in CLIENTS} for way in ("server", "decoder")}
            row["server_over_engine"] = {n: round(medians["server", n] / medians["decoder", n], 3) for n in CLIENTS}
            print(json.dumps(row), flush=True)
            found.append(row)
    return found


def summary(found: list[dict[str, Any]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst over pairs and samplings; the reference pair, whose weights fit into a cache, counts if it is alone."""
    if others := [cell for cell in found if cell["pair"] != "reference"]:
        found, rows = others, [row for row in rows if row["pair"] != "reference"]
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
    return {
        "at_8_over_turns": min(cell["at_8_over_turns"] for cell in default),
        "at_8_over_one": min(at_8),
        "one_over_before": min(cell["one_over_before"] for cell in default),
        "default_over_best_rule_of_each_load": round(min(best), 3),
        "server_over_engine": {str(n): min(row["server_over_engine"][n] for row in rows) for n in CLIENTS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--pair", action="append", required=True, help="a pair that ships, or a folder with target and draft; repeatable"
    )
    parser.add_argument("--prompts", required=True, help="GSM8K's test questions")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = [cell for name in args.pair for cell in cells(name, args)]
    rows = [row for name in args.pair for row in served(name, args)]
    results = {**provenance("python", "benchmarks/batch.py"), "cells": found, "served": rows, "summary": summary(found, rows)}
    print(json.dumps(results["summary"], indent=1))
    if args.out:
        kept = json.loads(args.out.read_text()) if args.out.exists() else {}
        results |= {"peers": kept["peers"]} if "peers" in kept else {}
        results["summary"] |= {key: value for key, value in kept.get("summary", {}).items() if key.startswith("over_")}
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
