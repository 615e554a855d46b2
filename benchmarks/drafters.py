"""Drafters by the clock: copies from the text and a draft model, beside the target alone and the copies of others.

    python benchmarks/drafters.py --target smollm2 --gsm8k FILE --humaneval FILE --alpaca FILE --contexts FILE
                                  [--llama PYTHON] [--out benchmarks/results/drafters.json]

Text to copy: contexts (the field `input` of rows as Alpaca's and dolly's) or without a file the longest questions, to be
repeated word for word, to be repeated with a word changed, and to be quoted from. transformers' prompt lookup has the same
weights in float32; `--llama` names a Python with llama-cpp-python, for llama.cpp's n-grams on the same file. Every setting
answers a prompt before the next one comes, in an order that rotates; greedy, and at 0.7 with top_p 0.9. Rates are ratios of
sums over prompts, reading them included, with intervals over prompts. `summary` is the worst over sets and samplings. With
`--only-ours` others are as they are in the file: they take ten times as long, and so answer fewer prompts. Nothing else may run
meanwhile.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import environments
from peers.protocol import Load, Request, Worker
from peers.provenance import provenance

import specdecpp as sd
from specdecpp.bench.contest import in_turn
from specdecpp.decoder import encode
from specdecpp.drafters import SuffixDrafter
from specdecpp.loading import gguf_writing, shipped
from specdecpp.loading.gguf import GGUF
from specdecpp.policies import Fixed
from specdecpp.replay.intervals import ratio_of_ratios
from specdecpp.training.prompts import Source, gather

SAMPLINGS = ((0.0, 1.0), (0.7, 0.9))
COPYING = {
    "repeat": "Repeat the following text word for word, twice.\n\n{}",
    "edit": 'Write the following text again, with every "the" replaced by "this", and then once more.\n\n{}',
    "extract": "Quote the two most important sentences of the following text, then every sentence with a name in it.\n\n{}",
}
OWN, MODEL = "copies, default", "model, default"
OTHERS = "transformers", "llama.cpp"
LOOKUP, NGRAMS = (3, 10), (4, 10)
"""Copies a step of the others': each is asked with both, and the better one of a cell counts."""
Run = Callable[[list[int], int, float, float], int]
"""(Prompt, most tokens, temperature, top_p) to the number of tokens."""


def ours(pair: sd.Pair, alone: sd.Pair) -> dict[str, Run]:
    """By name; the first is the target alone."""

    def of(decoder: sd.Decoder) -> Run:
        return lambda ids, num, t, top_p: len(decoder.generate(ids, max_tokens=num, temperature=t, top_p=top_p).tokens)

    decoders = {"target": sd.Decoder(pair, policy=Fixed(k=0), reuses=False)}
    for name, rule in {OWN: None, "copies, fixed 4": Fixed(k=4), "copies, fixed 10": Fixed(k=10)}.items():
        decoders[name] = sd.Decoder(alone, policy=rule, reuses=False)
    decoders[MODEL] = sd.Decoder(pair, reuses=False)
    return {name: of(decoder) for name, decoder in decoders.items()}


def transformers(model: Any, ends: Sequence[int]) -> dict[str, Run]:
    """`generate` alone and with prompt lookup."""
    model.generation_config.eos_token_id = list(ends)

    def of(num_copies: int | None) -> Run:
        def run(ids: list[int], num: int, temperature: float, top_p: float) -> int:
            how = {"do_sample": False} if temperature == 0 else {"do_sample": True, "temperature": temperature, "top_p": top_p}
            copies = {} if num_copies is None else {"prompt_lookup_num_tokens": num_copies}
            given, how = torch.tensor([ids]), {**how, **({"top_k": 0} if temperature else {}), **copies}
            with torch.inference_mode():
                out = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=num, pad_token_id=0, **how)
            return out.shape[1] - len(ids)

        return run

    return {"transformers": of(None)} | {f"transformers, prompt lookup {k}": of(k) for k in LOOKUP}


def llama(python: Path, file: Path, threads: int) -> dict[str, Run]:
    """llama.cpp's n-grams, in a process of its own."""
    log = Path(tempfile.gettempdir()) / "ngrams.log"
    worker = Worker("ngrams", python, "peers.engines.ngrams", (str(file),), environments.environment(), log)
    worker.start()
    worker.load(Load(folder="", dtype="", threads=threads), limit_s=120)

    def of(num_copies: int | None) -> Run:
        def run(ids: list[int], num: int, temperature: float, top_p: float) -> int:
            told = Request(
                prompt=ids,
                max_tokens=num,
                temperature=temperature,
                seed=0,
                options={"n_max": num_copies},
                top_p=top_p,
                ignore_eos=False,
            )
            return len(worker.run(told, limit_s=300)["tokens"])

        return run

    return {"llama.cpp": of(None)} | {f"llama.cpp, n-grams {k}": of(k) for k in NGRAMS}


def prompts(pair: sd.Pair, args: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Ids by set."""
    num, texts = args.count, {}
    for name in ("gsm8k", "humaneval", "alpaca"):
        texts[name] = [p.text for p in gather([Source(path=getattr(args, name), prompt=name)], seed=0)][: 8 * num]
    if args.contexts:
        with open(args.contexts, encoding="utf-8") as rows:
            found = (json.loads(row).get("input", "") for row in rows)
            copied = list(islice((text for text in found if 300 < len(text) < 900), num))
    else:
        copied = sorted((t for found in texts.values() for t in found if len(t) < 900), key=len)[-num:]
    sets = {name: [form.format(text) for text in copied] for name, form in COPYING.items()}
    sets |= {name: found[:num] for name, found in texts.items()}
    return {name: [encode(pair, [{"role": "user", "content": text}]) for text in found] for name, found in sets.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    for name in ("gsm8k", "humaneval", "alpaca"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--contexts", help="rows with a long `input`, JSON lines: what is to be copied")
    parser.add_argument("--llama", type=Path, metavar="PYTHON", help="of an environment with llama-cpp-python")
    parser.add_argument("--only-ours", action="store_true", help="leave other engines as they are in the file")
    parser.add_argument("--set", action="append", help="only this set; repeatable")
    parser.add_argument("--count", type=int, default=12, help="prompts of each set, of texts to copy as many as there are")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    pair = sd.load_pair(args.target)
    parts = shipped.names(args.target)
    target = parts.target if parts else Path(args.target)
    drafter = SuffixDrafter(pair.target.vocab_size)
    alone = replace(pair, draft=drafter, head=None, draft_name="copies", draft_fingerprint="suffix-1")  # the very same backend
    runs = ours(pair, alone)
    if not args.only_ours:
        model, file = same_weights(pair, target)
        runs |= transformers(model, pair.ends)
        runs |= llama(args.llama, file, os.cpu_count() or 1) if args.llama else {}
    others = others_of(args.out) if args.only_ours and args.out and args.out.exists() else {}
    cells = []
    for temperature, top_p in SAMPLINGS:
        for name, asked in prompts(pair, args).items():
            if args.set and name not in args.set:
                continue
            found: dict[str, list[tuple[int, float]]] = {rule: [] for rule in runs}
            for rule in runs:  # what is measured once is measured before
                runs[rule](asked[0], min(16, args.tokens), temperature, top_p)
            for i, ids in enumerate(asked):
                for rule in in_turn([*runs], i, num_turns=len(asked)):
                    started = time.perf_counter()
                    num = runs[rule](ids, args.tokens, temperature, top_p)
                    found[rule].append((num, time.perf_counter() - started))
            cells.append(cell(name, temperature, top_p, found))
            cells[-1]["over_target"] |= others.get((name, temperature), {})
            print(json.dumps(cells[-1]), flush=True)
    told = provenance("python", "benchmarks/drafters.py") | {"cells": cells, "summary": summary(cells)}
    print(json.dumps(told["summary"], indent=1))
    if args.out:
        args.out.write_text(json.dumps(told, indent=1) + "\n")


def others_of(file: Path) -> dict[tuple[str, float], dict[str, list[float]]]:
    """What a file has of other engines, by set and temperature."""
    kept: list[dict[str, Any]] = json.loads(file.read_text())["cells"]
    return {
        (c["set"], c["temperature"]): {rule: v for rule, v in c["over_target"].items() if rule.startswith(OTHERS)} for c in kept
    }


def same_weights(pair: sd.Pair, target: Path) -> tuple[Any, Path]:
    """The target as a model of transformers in float32, and as a GGUF file."""
    if target.suffix == ".gguf":
        return GGUF(target).model, target
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    file = Path(tempfile.mkdtemp()) / "target.gguf"
    gguf_writing.write(model, pair.tokenizer, file, precision=gguf_writing.Precision.f32, name="target")
    return model, file


def cell(name: str, temperature: float, top_p: float, runs: dict[str, list[tuple[int, float]]]) -> dict[str, Any]:
    columns = {rule: np.array(found).T for rule, found in runs.items()}
    tokens, seconds = columns["target"]
    over = {}
    for rule, (t, s) in columns.items():
        interval = ratio_of_ratios(t, s, tokens, seconds)
        over[rule] = [round(x, 3) for x in (interval.value, interval.low, interval.high)]
    rate = round(float(tokens.sum() / seconds.sum()), 1)
    return {"set": name, "temperature": temperature, "top_p": top_p, "target_tokens_per_second": rate, "over_target": over}


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """The worst cell of each: the default of copies over the target alone, on text to copy and elsewhere, and over the best
    setting of others on text to copy."""

    def value(of: dict[str, Any], *starts: str) -> float | None:
        return max((v[0] for rule, v in of["over_target"].items() if rule.startswith(starts)), default=None)

    def least(ratios: Sequence[tuple[float | None, float | None]]) -> float | None:
        return min((round(a / b, 3) for a, b in ratios if a and b), default=None)

    copying = [c for c in cells if c["set"] in COPYING]
    return {
        "suffix_over_target_on_copying": least([(value(c, OWN), 1.0) for c in copying]),
        "suffix_worst_elsewhere": least([(value(c, OWN), 1.0) for c in cells if c["set"] not in COPYING]),
        "over_prompt_lookup": least([(value(c, OWN), value(c, "transformers")) for c in copying]),
        "over_llama_cpp_ngram": least([(value(c, OWN), value(c, "llama.cpp")) for c in copying]),
    }


if __name__ == "__main__":
    main()
