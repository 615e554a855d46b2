"""Drafts for a real 1.5B model by the clock: the .5B model as it is, with a reduced vocabulary, and what `distil` makes.

    python benchmarks/qwen_coder.py --target FILE --draft FILE --data FOLDER
    python benchmarks/qwen_coder.py --target FILE --draft FILE --data FOLDER --also pruned=FILE --acceptance 4

Every draft answers each prompt with fixed K and under the default rule, and the target alone once, in a random order; answers
run on to `--tokens`, and everybody reads every prompt. What is measured is kept in `--work` at once: the same command goes on
where a killed one was, with more prompts or drafts too. llama.cpp answers `--llama` prompts of each set, plain and with each
draft file at four lengths (`make bench-peers` builds it). `summary` has the best draft of each cell under the default rule,
over the target alone and over llama.cpp's best setting. Nothing else may run meanwhile.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers import environments as env
from peers.cells import Cell, Setting, rounded
from peers.pool import workers
from peers.protocol import Load
from peers.provenance import provenance
from realpair import figures
from realpair.files import DRAFT, TARGET, WrongFileError
from realpair.log import Log, Turn
from realpair.parts import linked, theirs
from realpair.prompts import BENCHMARKS, Messages, prompts

import specdecpp as sd
from specdecpp import cache_dir
from specdecpp.decoder import encode
from specdecpp.errors import SpecdecError
from specdecpp.sampling import probabilities

OUT, WORK = env.ROOT / "benchmarks/results/qwen_coder.json", env.ROOT / "runs/qwen_coder"
CELLS = ("humaneval", 0.0, 1.0), ("gsm8k", 0.0, 1.0), ("alpaca", 0.7, 0.9)
"""Sets under the sampling that the bars are about: temperature and top_p."""
PAIR, ALONE, WHOLE, REDUCED = "qwen", "none", "whole", "reduced"
POLICIES = ("fixed:2", "fixed:3", "default")
LENGTHS = (2, 4, 8, 16)
"""Draft tokens of a step of llama.cpp, at most."""
LIMIT_S = 600.0
NUM_STEPS, CONTEXT = 12, 96


def main() -> None:
    args = _arguments()
    log = Log(args.work / "log.jsonl")
    try:
        files = {WHOLE: DRAFT.checked(args.draft), REDUCED: DRAFT.checked(args.draft)}
        files |= {name: Path(file) for name, _, file in (also.partition("=") for also in args.also)}
        texts = prompts(args.data, args.prompts, BENCHMARKS)
        log.agree(tokens=args.tokens)
        pairs = dict(_pairs(str(TARGET.checked(args.target)), files))
        _time(log, pairs)
        _measure(log, pairs, texts, args)
        _measure_llama(log, pairs, texts, files, args)
        _accept(log, pairs, texts, args)
    except (WrongFileError, ValueError, SpecdecError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(f"\nStopped. What was measured is in {log.path}; the same command goes on from there.")
    found = written(log, [*files], args.out)
    print(json.dumps({"cells": found["cells"], "summary": found["summary"]}, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, metavar="FILE", help=f"{TARGET.model} as Q4_K_M")
    parser.add_argument("--draft", type=Path, metavar="FILE", help=f"{DRAFT.model} as Q4_K_M")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="the data files with the prompts")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=FILE", help="another draft; repeatable")
    parser.add_argument("--prompts", type=int, default=24, help="of each set (default: 24)")
    parser.add_argument("--acceptance", type=int, default=8, help="prompts of each set to count acceptance on (default: 8)")
    parser.add_argument("--llama", type=int, default=0, help="prompts of each set for llama.cpp (default: 0)")
    parser.add_argument("--tokens", type=int, default=192, help="of every answer (default: 192)")
    parser.add_argument("--work", type=Path, default=WORK, help="keeps what was measured (default: runs/qwen_coder)")
    parser.add_argument("--out", type=Path, default=OUT, help="(default: benchmarks/results/qwen_coder.json)")
    return parser.parse_args()


def _pairs(target: str, files: dict[str, Path]) -> Iterator[tuple[str, sd.Pair]]:
    """A pair for each draft, over one target."""
    first = None
    for name, file in files.items():
        pair = sd.load_pair(target, draft=file, draft_vocabulary=None if name == WHOLE else "auto")
        first = first or pair
        yield name, replace(pair, target=first.target)


def _turns(num: int) -> Iterator[Turn]:
    """Cells alternate, so that a slow hour falls on all of them."""
    return (Turn(set=name, temperature=t, top_p=top_p, prompt=i) for i in range(num) for name, t, top_p in CELLS)


def _settings(drafts: Sequence[str]) -> list[str]:
    return [ALONE, *(f"{draft} {policy}" for draft in drafts for policy in POLICIES)]


def _time(log: Log, pairs: dict[str, sd.Pair]) -> None:
    """Seconds of a draft token and of a pass of the target over one row, in turns."""
    policies = [sd.NoDraft(), *(sd.Fixed(4) for _ in pairs)]
    first = next(iter(pairs.values()))
    decoders = [sd.Decoder(pair, policy=policy) for pair, policy in zip([first, *pairs.values()], policies, strict=True)]
    options: Any = {"max_tokens": 6 * NUM_STEPS, "temperature": 0.0, "ignore_eos": True}
    steps = [[*decoder.stream([*range(CONTEXT)], **options)][2:NUM_STEPS] for _ in range(2) for decoder in decoders]
    steps = steps[len(decoders) :]
    pass_s = median(step.verify_s for step in steps[0])
    for name, found in zip(pairs, steps[1:], strict=True):
        step_s = median(step.draft_s / step.num_drafted for step in found)
        log.add(pair=PAIR, part="step", setting=name, step_s=step_s, pass_s=pass_s, backends=pairs[name].backends)


def _measure(log: Log, pairs: dict[str, sd.Pair], texts: dict[str, list[Messages]], args: argparse.Namespace) -> None:
    """Everybody's answers to the prompts that are missing."""
    settings = _settings([*pairs])
    waiting = [turn for turn in _turns(args.prompts) if not log.has(PAIR, "cells", turn, settings)]
    first = next(iter(pairs.values()))
    runs = {ALONE: sd.Decoder(first, policy="none", reuses=False)}
    for draft, pair in pairs.items():
        for policy in POLICIES:
            named = None if policy == "default" else policy
            runs[f"{draft} {policy}"] = sd.Decoder(pair, policy=named, reuses=False)
    answers = {name: partial(_answer, decoder) for name, decoder in runs.items()}
    log.measure(PAIR, "cells", answers, waiting, lambda turn: encode(first, texts[turn.set][turn.prompt]), tokens=args.tokens)


def _measure_llama(
    log: Log, pairs: dict[str, sd.Pair], texts: dict[str, list[Messages]], files: dict[str, Path], args: argparse.Namespace
) -> None:
    """llama.cpp's answers to the prompts that are missing, a worker for each draft file."""
    first = next(iter(pairs.values()))
    for draft, file in files.items():
        settings = _llama_settings([draft])
        waiting = [turn for turn in _turns(args.llama) if not log.has(PAIR, "cells", turn, settings)]
        if draft == REDUCED or not waiting:  # the same file as the whole draft
            continue
        worker = workers({"llama.cpp"})["llama.cpp"]
        worker.start()
        try:
            folder = linked(args.work / "llama", target=args.target, draft=file)
            worker.load(Load(folder=str(folder), dtype="q4_k_m", threads=torch.get_num_threads()), limit_s=LIMIT_S)
            runs = {name: partial(theirs, worker, n) for name, n in settings.items()}
            prompt_of = lambda turn: encode(first, texts[turn.set][turn.prompt])  # noqa: E731
            log.measure(PAIR, "cells", runs, waiting, prompt_of, tokens=args.tokens)
        finally:
            worker.stop()


def _llama_settings(drafts: Sequence[str]) -> dict[str, int | None]:
    """Names of llama.cpp's settings and draft tokens of a step, at most; None without a draft."""
    with_drafts = {f"llama.cpp {draft} n-max {n}": n for draft in drafts if draft != REDUCED for n in LENGTHS}
    return {"llama.cpp": None} | with_drafts


def _answer(decoder: sd.Decoder, prompt: list[int], turn: Turn, tokens: int) -> dict[str, Any]:
    started = time.perf_counter()
    out = decoder.generate(prompt, max_tokens=tokens, temperature=turn.temperature, top_p=turn.top_p, top_k=0, ignore_eos=True)
    told = {"tokens": len(out.tokens), "seconds": time.perf_counter() - started, "reading_s": out.metrics.prefill_s}
    return told | {"drafted": sum(s.num_drafted for s in out.steps), "steps": len(out.steps)}


def _accept(log: Log, pairs: dict[str, sd.Pair], texts: dict[str, list[Messages]], args: argparse.Namespace) -> None:
    """Mean acceptance of each draft along the target's own answers: 1 - TV, at temperature 0 whether the argmax is the same."""
    first = next(iter(pairs.values()))
    alone = sd.Decoder(first, policy="none", remember=False)
    for turn in _turns(args.acceptance):
        waiting = [name for name in pairs if log.get(PAIR, "acceptance", turn, name) is None]
        if not waiting:
            continue
        sampling = sd.Sampling(temperature=turn.temperature, top_p=turn.top_p)
        prompt = encode(first, texts[turn.set][turn.prompt])
        answer = [*alone.generate(prompt, max_tokens=args.tokens, sampling=sampling, seed=turn.prompt).tokens]
        p, _ = first.target.new_cache().extend([*prompt, *answer[:-1]], rows=len(answer))
        for name in waiting:
            cache, found = pairs[name].draft.new_cache(), []
            for row, unread in zip(p, chain([prompt], ([token] for token in answer)), strict=False):
                cache.settle(unread)
                q = cache.extend(unread, rows=1)[0][0]
                if sampling.is_greedy:
                    found.append(float(row.argmax() == q.argmax()))
                else:
                    found.append(float(torch.minimum(*(probabilities(x[None], sampling)[0] for x in (row, q))).sum()))
            place = {"set": turn.set, "temperature": turn.temperature, "prompt": turn.prompt}
            log.add(pair=PAIR, part="acceptance", **place, setting=name, num=len(found), sum=sum(found))


def written(log: Log, drafts: list[str], out: Path) -> dict[str, Any]:
    """The file: a row for each cell, what each draft costs and how often it is accepted, and the summary."""
    cells = [row for turn in _turns(1) if (row := _row(log, turn, drafts))]
    steps = {name: log.get(PAIR, "step", None, name) or {} for name in drafts}
    about = {
        name: {
            "backends": steps[name].get("backends"),
            "step_over_pass": rounded(steps[name]["step_s"] / steps[name]["pass_s"]),
            "acceptance": {turn.set: _accepted(log, turn, name) for turn in _turns(1)},
        }
        for name in drafts
    }
    best = {row["set"]: row["best_default"] for row in cells}
    llama = [found for turn in _turns(1) if (found := _over_llama(log, turn, drafts, best))]
    found = {
        **provenance("python", "benchmarks/qwen_coder.py"),
        **log.origin,
        "files": {part.role: {"model": part.model, "sha256": part.sha256} for part in (TARGET, DRAFT)},
        "cells": cells,
        "llama_cpp": llama,
        "drafts": about,
        "summary": {
            "decoding_over_target": {row["set"]: row["decoding"][best[row["set"]]]["over_target"][0] for row in cells},
            "whole_over_target": {row["set"]: row["whole"][best[row["set"]]]["over_target"][0] for row in cells},
            "over_llama_cpp": min((row["over_best"][0] for row in llama), default=None),
            "reduced_vocabulary_step": rounded(steps[REDUCED]["step_s"] / steps[WHOLE]["step_s"]),
            "acceptance": {name: about[name]["acceptance"] for name in drafts},
            "draft_step_over_pass": {name: about[name]["step_over_pass"] for name in drafts},
        },
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with cache_dir.whole(out) as part:
        part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _accepted(log: Log, turn: Turn, draft: str) -> float | None:
    found = [r for r in log.of(PAIR, "acceptance") if (r["set"], r["setting"]) == (turn.set, draft)]
    return rounded(sum(r["sum"] for r in found) / sum(r["num"] for r in found)) if found else None


def _row(log: Log, turn: Turn, drafts: Sequence[str]) -> dict[str, Any] | None:
    """A cell: tokens/s of every setting, decoding alone and whole answers, over the target alone and over the whole draft."""
    cells = {}
    for name, is_decoding in (("decoding", True), ("whole", False)):
        found = figures.cell(log, PAIR, "cells", _settings(drafts), turn, is_decoding=is_decoding)
        if found is None:
            return None
        cells[name] = found
    defaults = [f"{draft} default" for draft in drafts]
    row: dict[str, Any] = {"set": turn.set, "temperature": turn.temperature, "top_p": turn.top_p}
    for column, cell in cells.items():
        speeds = figures.speeds(cell)
        row["prompts"] = len(next(iter(cell.runs.values())))
        row[column] = {name: {"tokens_per_second": speeds[name]} | _over(cell, name) for name in _settings(drafts)}
        row.setdefault("best_default", max(defaults, key=speeds.__getitem__))
    return row


def _over_llama(log: Log, turn: Turn, drafts: Sequence[str], best: dict[str, str]) -> dict[str, Any] | None:
    """A cell beside llama.cpp, decoding alone, on the prompts that both answered."""
    settings = [ALONE, best[turn.set], *_llama_settings(drafts)]
    cell = figures.cell(log, PAIR, "cells", settings, turn, is_decoding=True)
    if cell is None:
        return None
    speeds = figures.speeds(cell)
    theirs_best = max(settings[2:], key=speeds.__getitem__)
    return {
        "set": turn.set,
        "temperature": turn.temperature,
        "prompts": len(next(iter(cell.runs.values()))),
        "ours": best[turn.set],
        "best": theirs_best,
        "over_best": figures.over(cell, best[turn.set], theirs_best),
        "alone_over_alone": figures.over(cell, ALONE, "llama.cpp"),
        "tokens_per_second": speeds,
    }


def _over(cell: Cell, name: str) -> dict[str, list[float]]:
    """Over the target alone; of another draft than the whole one also over that, under the same rule."""
    draft, _, policy = name.partition(" ")
    same = f"{WHOLE} {policy}"
    found = {"over_target": figures.over(cell, name, ALONE)}
    has_same = policy and draft != WHOLE and Setting(engine="cells", name=same) in cell.runs
    return found | ({"over_whole": figures.over(cell, name, same)} if has_same else {})


if __name__ == "__main__":
    main()
