"""Two models that strangers made for each other, by the clock: what somebody gets who brings two files.

    python benchmarks/real_pair.py --target FILE --draft FILE --data FOLDER
    python benchmarks/real_pair.py --target FILE --draft FILE --data FOLDER --only load --only check --pair real

Parts, each for the real pair, for `smollm2` and for the reference pair, in the same form; with `--pair gpu` those of the last
two kinds for the real pair on a GPU, `gpu_pair` in the file:

    load     seconds to the pair in a process of its own: the first time (compiling apart), later, and importing alone
    check    seconds to the verdict of `specdecpp check`
    rows     passes of 1 to 16 rows beside llama.cpp's, by widths.py, in the environment of `make bench-peers`
    cells    five kinds of prompts that nobody tuned on, greedy and at 0.7 with top-p 0.9, no seed: no draft, fixed K and the
             default answer each prompt in a random order; whole answers, their prompts read in full by whoever needs them
    first    first requests of the default, each with a cache folder of compiled code alone: what it measures is counted,
             but for costs, which a decoder measures when it is made (`decoder_s`)
    llama    llama.cpp plain and with the same draft at four settings, beside the default

The plan comes first, with minutes. What is measured is kept in `--work` at once: the same command goes on where a killed one
was, and parts that are run one by one meet in the same file. What an earlier file has of other parts stays, `gpu_pair` too.
Nothing else may run meanwhile.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from peers import environments as env
from peers.provenance import provenance
from realpair import figures
from realpair.files import DRAFT, GPU, PAIRS, REAL, REFERENCE, TARGET, WrongFileError, names_of
from realpair.log import Log, turns
from realpair.parts import CONTESTANTS, LLAMA, PARTS, Bench, Plan, copy_compiled
from realpair.prompts import prompts

from specdecpp import cache_dir
from specdecpp.errors import SpecdecError

OUT, WORK = env.ROOT / "benchmarks/results/real_pair.json", env.ROOT / "runs/real_pair"
SECONDS = {
    "real": (7.0, 60.0, 180.0, 3.5),
    "smollm2": (6.0, 40.0, 60.0, 0.9),
    "reference": (4.0, 30.0, 0.0, 0.2),
    "gpu": (10.0, 60.0, 0.0, 0.25),
}
"""By pair, roughly: a load, a check, passes by their rows, an answer of 96 tokens."""
GPU_PARTS = "cells", "first"
PLACES = {GPU: "gpu_pair"}
COMPILING_S = 60.0


def main() -> None:
    args = _arguments()
    plan = Plan(
        prompts=args.prompts, llama_prompts=args.llama_prompts, first=args.first, tokens=args.tokens, is_quick=args.quick
    )
    pairs = [pair for pair in (*PAIRS, GPU) if pair in (args.pair or PAIRS)]
    parts = [part for part in PARTS if part in (args.only or (GPU_PARTS if args.pair == [GPU] else PARTS))]
    log = Log(args.work / "log.jsonl")
    try:
        names = {pair: names_of(pair, args.target, args.draft) for pair in pairs}
        texts = prompts(args.data, max(plan.prompts, plan.llama_prompts, plan.first))
        log.agree(tokens=plan.tokens)
        _print_plan(log, pairs, parts, plan)
        if args.plan:
            return
        _prepare({part for part in parts for pair in pairs if left(log, pair, part, plan)[0]}, args.work)
        for pair in pairs:
            bench = Bench(pair=pair, names=names[pair], prompts=texts, plan=plan, work=args.work, log=log)
            _measure(bench, parts, args.out)
    except (WrongFileError, ValueError, SpecdecError, env.CannotMakeError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(f"\nStopped. What was measured is in {log.path}; the same command goes on from there.")
    found = written(log, args.out)
    of = {pair: found[PLACES.get(pair, pair)] if pair != REAL else found for pair in pairs}
    for pair in pairs:
        print(figures.table(pair, of[pair]), end="\n\n")
    print(json.dumps({pair: of[pair]["summary"] for pair in pairs}, indent=1))
    print(f"gpu_pair {'is there' if found['gpu_pair'] else 'waits for a card'}. All of it is in {args.out}.")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target", type=Path, metavar="FILE", help=f"{TARGET.model} as Q4_K_M; without it you are told how to get it"
    )
    parser.add_argument("--draft", type=Path, metavar="FILE", help=f"{DRAFT.model} as Q4_K_M")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="the data files with the prompts")
    parser.add_argument("--pair", action="append", choices=(*PAIRS, GPU), help="only this one; repeatable")
    parser.add_argument("--only", action="append", choices=[*PARTS], help="only this part; repeatable")
    parser.add_argument("--prompts", type=int, default=8, help="of each set (default: 8)")
    parser.add_argument("--llama-prompts", type=int, default=4, help="of each set, beside llama.cpp (default: 4)")
    parser.add_argument("--first", type=int, default=2, help="first requests of each set and sampling (default: 2)")
    parser.add_argument("--tokens", type=int, default=96, help="of every answer (default: 96)")
    parser.add_argument("--plan", action="store_true", help="print the plan and measure nothing")
    parser.add_argument(
        "--quick", action="store_true", help="try everything: one prompt, 16 tokens; writes into its own folder"
    )
    parser.add_argument("--work", type=Path, help="keeps what was measured (default: runs/real_pair)")
    parser.add_argument("--out", type=Path, help="(default: benchmarks/results/real_pair.json)")
    args = parser.parse_args()
    if args.quick:
        args.prompts = args.llama_prompts = args.first = 1
        args.tokens = 16
    args.work = (args.work or (WORK.with_name("real_pair_quick") if args.quick else WORK)).resolve()
    args.out = args.out or (args.work / OUT.name if args.quick else OUT)
    return args


def left(log: Log, pair: str, part: str, plan: Plan) -> tuple[int, float]:
    """How much of a part is left, in loads, checks or answers, and the minutes that takes."""
    load_s, check_s, rows_s, answer_s = SECONDS[pair]
    answer_s *= plan.tokens / 96
    if part in ("cells", "llama"):
        settings, num = (CONTESTANTS, plan.prompts) if part == "cells" else (("default", *LLAMA), plan.llama_prompts)
        waiting = len(settings) * sum(not log.has(pair, part, turn, settings) for turn in turns(num))
        waiting *= not (part == "llama" and pair == REFERENCE)
        return waiting, (bool(waiting) * load_s + waiting * answer_s) / 60
    if part == "first":
        waiting = sum(not log.has(pair, part, turn, ["default"]) for turn in plan.first_turns)
        return waiting, waiting * (2 * load_s + 2 * answer_s) / 60
    if part == "load":
        waiting = 0 if log.has(pair, part, None, plan.loads) else len(plan.loads)
        return waiting, bool(waiting) * (COMPILING_S + (waiting + 2) * load_s) / 60
    waiting = int(not log.has(pair, part, None, [part]))
    seconds = check_s if part == "check" else rows_s
    return waiting * bool(seconds), waiting * seconds / 60


def _print_plan(log: Log, pairs: list[str], parts: list[str], plan: Plan) -> None:
    print(f"{'pair':<11}{'part':<7}{'left':>6}{'minutes':>9}")
    total = 0.0
    for pair in pairs:
        for part in parts:
            num, minutes = left(log, pair, part, plan)
            total += minutes
            print(f"{pair:<11}{part:<7}{num:>6}{minutes:>9.1f}")
    print(f"{'together':<24}{total:>9.0f}\n", flush=True)


def _prepare(parts: set[str], work: Path) -> None:
    """What llama.cpp needs, if it is asked for; compiled code of this machine, so that it is compiled once."""
    if parts & {"rows", "llama"}:
        env.make_torch()
    if "llama" in parts:
        env.make_llama()
    copy_compiled(cache_dir.folder().parent, work / "cache")
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")


def _measure(bench: Bench, parts: list[str], out: Path) -> None:
    """The parts of a pair that are not there yet; the file is written after each."""
    for part in parts:
        if left(bench.log, bench.pair, part, bench.plan)[0]:
            print(f"{bench.pair}, {part}", file=sys.stderr, flush=True)
            about = provenance("python", "benchmarks/real_pair.py")
            sitting = {name: about[name] for name in ("date", "git")} | {"load": about["machine"]["load"]}
            if bench.pair == GPU:
                sitting |= {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
            bench.add("sitting", part, about=sitting)
            PARTS[part](bench)
            written(bench.log, out)
    bench.close()


def written(log: Log, out: Path) -> dict[str, Any]:
    """The file: the real pair at the top, the others under their names, and what an earlier file has of parts that are not in
    the log."""
    earlier = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    has_gpu = any(True for part in GPU_PARTS for _ in log.of(GPU, part))
    whole = {pair: figures.pair_figures(log, pair, earlier if pair == REAL else earlier.get(pair, {})) for pair in PAIRS}
    found = {
        **provenance("python", "benchmarks/real_pair.py"),
        "files": {part.role: {"model": part.model, "sha256": part.sha256} for part in (TARGET, DRAFT)},
        "plan": next(log.of("all", "plan"), {"plan": earlier.get("plan")})["plan"],
        **whole.pop(REAL),
        **whole,
        "gpu_pair": figures.pair_figures(log, GPU, earlier.get("gpu_pair") or {}) if has_gpu else earlier.get("gpu_pair"),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with cache_dir.whole(out) as part:
        part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
