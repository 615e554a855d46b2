"""The paper's Table 1 on a real pair, by the clock: Qwen2.5-Coder 1.5B with the .5B draft as it is, on the paper's three sets.

    python benchmarks/table1.py --target FILE --draft FILE --data FOLDER --head FOLDER
    python benchmarks/table1.py --target FILE --draft FILE --data FOLDER --head FOLDER --replay FILE

The target alone, fixed K, rules by q and SpecDec++ with its head answer each prompt in a random order; all read every prompt.
The *mixed stream* is all sets together, where one K has to serve code, mathematics and questions. `--head` is what
`specdecpp train recipes/qwen_coder/head.yaml` made, `--replay` what `tables.py` there made of its recordings: speeds at the
paper's costs. What is measured is kept in `--work` at once, and the same command goes on where a killed one was.
`summary` has whole answers: the worse sampling of the stream, the worst cell, and the best cell of SpecDec++ over the same
threshold on q. Rows with `is_decoding` leave the reading of prompts out. Nothing else may run meanwhile.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from peers import environments as env
from peers.cells import Cell, rounded
from peers.provenance import provenance
from realpair import figures
from realpair.files import DRAFT, TARGET, WrongFileError
from realpair.log import Log, Turn
from realpair.prompts import BENCHMARKS, Messages, prompts

import specdecpp as sd
from specdecpp import cache_dir
from specdecpp.decoder import encode
from specdecpp.errors import SpecdecError
from specdecpp.policies import SpecDecPP

OUT, WORK = env.ROOT / "benchmarks/results/table1.json", env.ROOT / "runs/table1"
PAIR, PART, ALONE, DEFAULT, MIXED = "qwen", "cells", "none", "cost-aware by q", "mixed"
FIXED = tuple(f"fixed:{k}" for k in (1, 2, 3, 4, 6))
BY_Q, BY_HEAD, WITH_HEAD = "cumulative:0.3", "SpecDec++", "cost-aware, head"
"""The threshold 1 - S > .7 on q, and on the head's S as the paper has it; and the default rule with the head."""
SAMPLINGS = ((0.0, 1.0), (0.7, 0.9))


def main() -> None:
    args = _arguments()
    log = Log(args.work / "log.jsonl")
    try:
        texts = prompts(args.data, args.prompts, BENCHMARKS)
        log.agree(tokens=args.tokens)
        pair = sd.load_pair(str(TARGET.checked(args.target)), draft=DRAFT.checked(args.draft), head=args.head)
        _measure(log, pair, texts, args)
    except (WrongFileError, ValueError, SpecdecError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(f"\nStopped. What was measured is in {log.path}; the same command goes on from there.")
    settings = _settings(has_head=args.head is not None)
    print(json.dumps(written(log, settings, args)["summary"], indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, metavar="FILE", help=f"{TARGET.model} as Q4_K_M")
    parser.add_argument("--draft", type=Path, metavar="FILE", help=f"{DRAFT.model} as Q4_K_M")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="the data files with the prompts")
    parser.add_argument("--head", type=Path, metavar="FOLDER", help="a head of the pair; without it no rule with a head")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="tables of recipes/qwen_coder/tables.py for this pair")
    parser.add_argument("--prompts", type=int, default=8, help="of each set (default: 8)")
    parser.add_argument("--tokens", type=int, default=128, help="of every answer (default: 128)")
    parser.add_argument("--work", type=Path, default=WORK, help="keeps what was measured (default: runs/table1)")
    parser.add_argument("--out", type=Path, default=OUT, help="(default: benchmarks/results/table1.json)")
    return parser.parse_args()


def _settings(*, has_head: bool) -> list[str]:
    return [ALONE, *FIXED, BY_Q, DEFAULT, *((BY_HEAD, WITH_HEAD) if has_head else ())]


def _policy(name: str, pair: sd.Pair) -> sd.Policy | str:
    if pair.head is not None and name == BY_HEAD:
        return SpecDecPP(head=pair.head, threshold=0.7, calibrated=True, min_tokens=1)
    return {DEFAULT: sd.CostAware(), WITH_HEAD: sd.CostAware(head=pair.head)}.get(name, name)


def _turns(num: int) -> list[Turn]:
    """Cells alternate, so that a slow hour falls on all of them."""
    return [Turn(set=name, temperature=t, top_p=p, prompt=i) for i in range(num) for name in BENCHMARKS for t, p in SAMPLINGS]


def _measure(log: Log, pair: sd.Pair, texts: dict[str, list[Messages]], args: argparse.Namespace) -> None:
    """Everybody's answers to the prompts that are missing."""
    settings = _settings(has_head=pair.head is not None)
    waiting = [turn for turn in _turns(args.prompts) if not log.has(PAIR, PART, turn, settings)]
    runs = {name: partial(_answer, sd.Decoder(pair, policy=_policy(name, pair), reuses=False)) for name in settings}
    log.measure(PAIR, PART, runs, waiting, lambda turn: encode(pair, texts[turn.set][turn.prompt]), tokens=args.tokens)


def _answer(decoder: sd.Decoder, prompt: list[int], turn: Turn, tokens: int) -> dict[str, Any]:
    started = time.perf_counter()
    out = decoder.generate(prompt, max_tokens=tokens, temperature=turn.temperature, top_p=turn.top_p, top_k=0, ignore_eos=True)
    told = {"tokens": len(out.tokens), "seconds": time.perf_counter() - started, "reading_s": out.metrics.prefill_s}
    return told | {
        name: getattr(out.metrics, name) for name in ("num_draft_tokens", "num_accepted_draft_tokens", "num_spec_steps")
    }


def written(log: Log, settings: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """The file: a row for each set and sampling, one for the mixed stream under each sampling, and the summary."""
    rows = []
    for temperature, top_p in SAMPLINGS:
        place = Turn(set=MIXED, temperature=temperature, top_p=top_p, prompt=0)
        for is_decoding in (False, True):
            found = [
                figures.cell(log, PAIR, PART, settings, replace(place, set=name), is_decoding=is_decoding)
                for name in BENCHMARKS
            ]
            cells = [*filter(None, found)]
            rows += [_row(cell, settings, is_decoding=is_decoding) for cell in (*cells, _together(cells, place)) if cell.runs]
    whole = [row for row in rows if not row["is_decoding"]]
    mixed = [row["over_best_k"][DEFAULT] for row in whole if row["set"] == MIXED]
    alone = [row["over_best_k"][DEFAULT] for row in whole if row["set"] != MIXED]
    found = {
        **provenance("python", "benchmarks/table1.py"),
        **log.origin,
        "files": {part.role: {"model": part.model, "sha256": part.sha256} for part in (TARGET, DRAFT)},
        "rows": rows,
        "summary": {
            "mixed_stream_over_best_k": min(mixed, default=None),
            "worst_set_over_best_k": min(alone, default=None),
            "paper_costs_over_best_k": _replayed(args.replay, "fixed_best"),
            "paper_costs_over_best_k_of_set": _replayed(args.replay, "fixed_best_on_test"),
            "head_over_q": max((row["head_over_q"] for row in whole if "head_over_q" in row), default=None),
        },
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with cache_dir.whole(args.out) as part:
        part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _together(cells: Sequence[Cell], place: Turn) -> Cell:
    """All sets as one stream."""
    runs = {setting: [run for cell in cells for run in cell.runs[setting]] for setting in (cells[0].runs if cells else ())}
    return Cell(dataset=MIXED, temperature=place.temperature, top_p=place.top_p, runs=runs)


def _row(cell: Cell, settings: list[str], *, is_decoding: bool) -> dict[str, Any]:
    """Tokens/s of all, over the target alone and over the K that is best on these very prompts."""
    speeds = figures.speeds(cell)
    best = max(FIXED, key=speeds.__getitem__)
    row = {
        "set": cell.dataset,
        "temperature": cell.temperature,
        "top_p": cell.top_p,
        "is_decoding": is_decoding,
        "prompts": len(next(iter(cell.runs.values()))),
        "best_k": best,
        "tokens_per_second": speeds,
        "over_target": {name: figures.over(cell, name, ALONE) for name in settings[1:]},
        "over_best_k": {name: figures.over(cell, name, best) for name in settings if name not in (ALONE, *FIXED)},
    }
    return row | ({"head_over_q": figures.over(cell, BY_HEAD, BY_Q)} if BY_HEAD in settings else {})


def _replayed(file: Path | None, rival: str) -> dict[str, Any] | None:
    """Speed of the default over a fixed K at the paper's costs, by set: the K that is best on other prompts of all sets, with
    an interval, or the best on this set itself."""
    if file is None:
        return None
    found = {}
    for name, of in json.loads(file.read_text(encoding="utf-8"))["costs"]["0.22"].items():
        own = of["cost_aware_by_q"]
        bounds = [1 + x for x in own["interval"]] if rival == "fixed_best" else []
        found[name] = [rounded(x) for x in (own["speedup"] / of[rival]["speedup"], *bounds)]
    return found


if __name__ == "__main__":
    main()
