"""A pair by the clock beside other engines: three sets of unseen prompts, greedy, at 0.7 with top_p 0.9 and, SmolLM2, at 1.

    (in benchmarks/) ../.engines/peers-torch/bin/python -m peers.cells --data FOLDER
    ... -m peers.cells --data FOLDER --target FILE --draft FILE --other llama.cpp --other openvino

Without files it is the pair `smollm2`, with them Qwen2.5-Coder 1.5B and .5B (`realpair/files.py`). Ours as `load_pair` gives
it: the target alone, the default rule, SpecDec++ where there is a head, cumulative q and fixed lengths, no seed. The others
plain and with the same draft: llama.cpp's server on the very same two files, OpenVINO on the same values packed by itself,
transformers and vLLM, which read no such file, on those values in bfloat16. All answer a prompt before the next one comes, in
a random order; answers end where the model ends them. Rates are ratios of sums over prompts, intervals resample prompts. The
others answer the first prompts of a cell only, and are compared on those. Where tokens are drawn OpenVINO and vLLM with a
draft are left out: there they write what the target would not (vLLM's issue 55005). Nothing else should run
meanwhile.

All that are asked are in memory at once. Where that is too much, `--other` names some, and a second run has the rest: each has
ours beside it, and both write one file. `--work` keeps what is measured at once; the same command goes on where a killed one
was. Writes its cells with a `summary`, with the acceptance of `recipes/smollm2/evaluate.py` where that has this draft.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from realpair.files import DRAFT, TARGET, WrongFileError
from realpair.log import Log, Run, Turn
from realpair.parts import linked
from realpair.prompts import BENCHMARKS, prompts

from peers import environments as env
from peers.engines.ours import Ours
from peers.pool import QWEN_CODER, SMOLLM2, workers
from peers.protocol import Answer, Load, Request, Worker, WorkerError
from peers.provenance import provenance
from peers.smollm2 import checkpoint
from specdecpp.costs.measuring import measure
from specdecpp.decoder import encode
from specdecpp.errors import SpecdecError
from specdecpp.loading import shipped
from specdecpp.loading.pair import Pair
from specdecpp.replay.intervals import ratio, ratio_of_ratios

RESULTS, WORK = env.ROOT / "benchmarks/results", env.ROOT / "runs/cells"
SAMPLINGS = {SMOLLM2: ((0.0, 1.0), (0.7, 0.9), (1.0, 1.0)), QWEN_CODER: ((0.0, 1.0), (0.7, 0.9))}
"""Temperature and top_p."""
ALONE, DEFAULT, BY_HEAD = "target", "default", "specdecpp"
OURS = {
    SMOLLM2: (BY_HEAD, "cumulative:0.2", "fixed:1", "fixed:2", "fixed:3"),
    QWEN_CODER: (BY_HEAD, "cumulative:0.3", "fixed:1", "fixed:2", "fixed:3", "fixed:4", "fixed:6"),
}
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
"""By engine and setting: the worker (`peers.pool.workers`), and its options."""
LEFT_OUT = {SMOLLM2: (), QWEN_CODER: ("n-max 1", "n-max 8, p-min 0.4", "K = 1")}
FORMS = {SMOLLM2: "q4_1", QWEN_CODER: "q4_k_m"}
OTHER_FORMS = {"openvino": "q4_1", "transformers": "bf16", "vllm": "bf16"}
LIMIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An engine with one of its settings."""

    engine: str
    name: str

    @property
    def key(self) -> str:
        return f"{self.engine} | {self.name}"

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

    def num_of_ours(self) -> int:
        return sum(len(runs) for setting, runs in self.runs.items() if setting.engine == "ours")


def main() -> None:
    args = _arguments()
    log = Log(args.work / "log.jsonl")
    try:
        log.agree(tokens=args.tokens, threads=args.threads)
        folder, others, missing = made(args)
        pool = workers({OTHERS[of.engine][of.name][0] for of in others})
        try:
            engines, versions = ready(pool, folder, args)
            pair = engines["ours"].pair
            about = provenance("python", "-m", "peers.cells") | log.origin | {"versions": versions, "missing": missing}
            log.add(pair=args.pair, part="sitting", setting=_sitting(others), about=about)
            answers(log, engines, others, args)
            costs = measure(pair)
        finally:
            for worker in pool.values():
                worker.stop()
    except (WrongFileError, ValueError, SpecdecError, WorkerError, env.CannotMakeError) as error:
        sys.exit(f"{error}\nWhat was measured is in {log.path}; the same command goes on from there.")
    found = told(log, pair, costs.draft_s / costs.verify_s(1), args)
    print(json.dumps(found["summary"], indent=1))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="the data files with the prompts")
    parser.add_argument("--target", type=Path, metavar="FILE", help=f"{TARGET.model} as Q4_K_M; without it SmolLM2")
    parser.add_argument("--draft", type=Path, metavar="FILE", help=f"{DRAFT.model} as Q4_K_M")
    parser.add_argument("--head", type=Path, metavar="FOLDER", help="a head of these two")
    parser.add_argument("--smollm2", type=Path, metavar="FILE", help="SmolLM2's file, where its package is not installed")
    parser.add_argument("--prompts", type=int, default=16, help="of each set (default: 16)")
    parser.add_argument("--other-prompts", type=int, default=4, help="of each set, for the other engines (default: 4)")
    parser.add_argument("--tokens", type=int, default=96, help="the most of an answer (default: 96)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend", help="of ours (default: what people get)")
    parser.add_argument("--ours", action="append", help="of ours this beside no draft and the default; repeatable")
    parser.add_argument("--other", action="append", choices=[*OTHERS], help="only this of the others; repeatable")
    parser.add_argument("--no-others", action="store_true", help="ours alone")
    parser.add_argument("--quick", action="store_true", help="a smoke run: two prompts, few tokens; writes --out only")
    parser.add_argument("--work", type=Path, help="keeps what was measured (default: runs/cells/PAIR)")
    parser.add_argument("--out", type=Path, help="(default: benchmarks/results/PAIR_pair.json)")
    args = parser.parse_args()
    args.pair = QWEN_CODER if args.target or args.draft else SMOLLM2
    if args.smollm2:
        os.environ[shipped.VARIABLE] = str(args.smollm2.resolve())
    if args.quick:
        args.prompts, args.other_prompts, args.tokens = 2, 1, 12
    args.work = args.work or (Path(tempfile.mkdtemp()) if args.quick else WORK / args.pair)
    args.out = args.out or (None if args.quick else RESULTS / f"{args.pair}_pair.json")
    return args


def made(args: argparse.Namespace) -> tuple[Path, list[Setting], dict[str, str]]:
    """Makes the others' environments and the pair in their forms: its folder, who is there, and why the rest is not."""
    asked, folder = [] if args.no_others else args.other or [*OTHERS], env.MODELS / args.pair
    if args.pair == QWEN_CODER:
        files = {"target": TARGET.checked(args.target), "draft": DRAFT.checked(args.draft)}
        linked(folder, **files)
        for role, file in files.items() if {*asked} - {"llama.cpp"} else ():
            if not (folder / role / "tokenizer_config.json").exists():
                checkpoint(file, folder / role)
    missing = env.prepare((args.pair,), smollm2=args.smollm2, engines=asked)
    there = [name for name in asked if name not in missing]
    return (
        folder,
        [Setting(engine=e, name=name) for e in there for name in OTHERS[e] if name not in LEFT_OUT[args.pair]],
        missing,
    )


def ready(pool: dict[str, Worker], folder: Path, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """The engines, and their versions."""
    ours, form = Ours(args.backend, args.head), FORMS[args.pair]
    versions = ours.load(Load(folder=str(folder), dtype=form, threads=args.threads))
    for name, worker in pool.items():
        dtype = OTHER_FORMS.get(name.replace(",", "").split()[0], form)
        worker.start()
        worker.load(Load(folder=str(folder), dtype=dtype, threads=args.threads), limit_s=LIMIT_S)
        versions |= worker.versions
    return {"ours": ours, **pool}, versions


def answers(log: Log, engines: dict[str, Any], others: Sequence[Setting], args: argparse.Namespace) -> None:
    """Adds the answers that are missing: of all to the first prompts, of ours to the rest."""
    pair: Pair = engines["ours"].pair
    texts = prompts(args.data, args.prompts, BENCHMARKS)
    asked = [name for name in args.ours or OURS[args.pair] if name != BY_HEAD or pair.head]
    ours = [Setting(engine="ours", name=name) for name in dict.fromkeys([ALONE, DEFAULT, *asked])]
    for is_first in (True, False):
        for is_greedy in (True, False):
            settings = [*ours, *(of for of in others if is_first and of.keeps_the_law(0.0 if is_greedy else 1.0))]
            runs: dict[str, Run] = {of.key: partial(answered, engines, of, [*pair.ends]) for of in settings}
            waiting = [
                turn
                for i in range(args.prompts)
                for name in texts
                for t, p in SAMPLINGS[args.pair]
                if (i < args.other_prompts, t == 0) == (is_first, is_greedy)
                and not log.has(args.pair, _sitting(others), turn := Turn(set=name, temperature=t, top_p=p, prompt=i), runs)
            ]
            log.measure(
                args.pair,
                _sitting(others),
                runs,
                waiting,
                lambda turn: encode(pair, texts[turn.set][turn.prompt]),
                tokens=args.tokens,
            )


def _sitting(others: Sequence[Setting]) -> str:
    """The name of a run: who else is in memory."""
    return ", ".join(["ours", *dict.fromkeys(of.engine for of in others)])


def answered(
    engines: dict[str, Any], setting: Setting, ends: list[int], prompt: list[int], turn: Turn, tokens: int
) -> dict[str, float]:
    """An answer, its seconds with the reading of the prompt."""
    is_ours = setting.engine == "ours"
    worker, options = ("ours", {"policy": setting.name}) if is_ours else OTHERS[setting.engine][setting.name]
    request = Request(
        prompt=prompt,
        max_tokens=tokens,
        temperature=turn.temperature,
        top_p=turn.top_p,
        ignore_eos=False,
        ends=ends,
        seed=0 if is_ours else turn.prompt + 1,
        options=options,
    )
    if not is_ours:
        answer = engines[worker].run(request, limit_s=LIMIT_S)
        return {"tokens": max(1, len(answer["tokens"])), "seconds": answer["seconds"], "steps": answer["steps"]}
    began = time.perf_counter()
    own: Answer = engines[worker].run(request)
    return {"tokens": max(1, len(own.tokens)), "seconds": time.perf_counter() - began, "steps": own.steps}


def told(log: Log, pair: Pair, step: float, args: argparse.Namespace) -> dict[str, Any]:
    """All that is written."""
    sittings = {record["setting"]: record["about"] for record in log.of(args.pair, "sitting")}
    rows = [
        row([cell for name in sittings if (cell := cell_of(log, args.pair, name, dataset, *sampling)).runs])
        for dataset in BENCHMARKS
        for sampling in SAMPLINGS[args.pair]
    ]
    over_target = [of["default_over_target"][0] for of in rows]
    over = {engine: [of["others"][engine]["default_over"] for of in rows] for engine in rows[0]["others"]}
    nums = [(of["engine"] == "ours", of["prompts"]) for row in rows for of in row["rows"]]
    return {
        **sittings[[*sittings][-1]],
        "sittings": sittings,
        "versions": {name: of for about in sittings.values() for name, of in about["versions"].items()},
        "missing": {name: of for about in sittings.values() for name, of in about["missing"].items()},
        "pair": {"target": pair.target_fingerprint, "draft": pair.draft_fingerprint, "runners": pair.backends},
        "plan": {
            "prompts": max(num for _, num in nums),
            "other_prompts": max((num for is_ours, num in nums if not is_ours), default=0),
            "tokens": args.tokens,
            "threads": args.threads,
            "backend": args.backend,
        },
        "summary": {
            "default_over_target": summed(over_target),
            "default_over_others": {engine: summed(values) for engine, values in over.items()},
            "acceptance": acceptance(pair),
            "draft_step_over_pass": rounded(step),
        },
        "cells": rows,
    }


def cell_of(log: Log, pair: str, sitting: str, dataset: str, temperature: float, top_p: float) -> Cell:
    """What one run measured of a cell."""
    runs: dict[Setting, list[tuple[int, float, int]]] = defaultdict(list)
    for of in sorted(log.of(pair, sitting), key=lambda record: record["prompt"]):
        if (of["set"], of["temperature"]) == (dataset, temperature):
            engine, _, name = of["setting"].partition(" | ")
            runs[Setting(engine=engine, name=name)].append((of["tokens"], of["seconds"], of["steps"]))
    return Cell(dataset=dataset, temperature=temperature, top_p=top_p, runs=runs)


def row(cells: Sequence[Cell]) -> dict[str, Any]:
    """A cell of one or more runs: every setting, and the default rule over the target alone and, in the same run, over each of
    the others at its best. Of ours the run that has most is shown."""
    alone, default = (Setting(engine="ours", name=name) for name in (ALONE, DEFAULT))
    main = max(cells, key=Cell.num_of_ours)
    num = min(len(main.runs[setting]) for setting in (alone, default))
    others: dict[str, Any] = {}
    shown = [(main, setting) for setting in main.runs if setting.engine == "ours"]
    for cell in cells:
        theirs = [setting for setting in cell.runs if setting.engine != "ours"]
        shown += [(cell, setting) for setting in theirs]
        few = min((len(cell.runs[setting]) for setting in (default, *theirs)), default=0)
        for engine in dict.fromkeys(setting.engine for setting in theirs):
            best = max((s for s in theirs if s.engine == engine), key=lambda s: cell.speed(s, few))
            ours = cell.speed(default, few)
            over = rounded(ours / cell.speed(best, few))
            others[engine] = {"default_over": over, "best": best.name, "default_beside": rounded(ours)}
    return {
        "dataset": main.dataset,
        "temperature": main.temperature,
        "top_p": main.top_p,
        "default_over_target": interval(ratio_of_ratios(*main.columns(default, num), *main.columns(alone, num))),
        "others": others,
        "rows": [
            {
                "engine": setting.engine,
                "setting": setting.name,
                "prompts": len(runs),
                "tokens_per_second": interval(ratio(*cell.columns(setting, len(runs))) if len(runs) > 1 else None)
                or [rounded(cell.speed(setting, len(runs)))],
                "tokens_per_round": _per_round(runs),
            }
            for cell, setting in shown
            for runs in [cell.runs[setting]]
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
    return {name: own[0][name]["0.7"] for name in BENCHMARKS} if own else None


def summed(values: Sequence[float]) -> dict[str, float] | None:
    return {"mean": rounded(mean(values)), "worst": rounded(min(values))} if values else None


def interval(found: Any) -> list[float]:
    """Value and bounds; empty for None."""
    return [] if found is None else [rounded(x) for x in (found.value, found.low, found.high)]


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()
