"""From the log to the figures: ratios of sums over prompts, intervals by the paired bootstrap over them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any

import numpy as np
from peers.cells import Cell, Setting, interval, rounded, summed

from realpair.log import SAMPLINGS, Log, Record, Turn, turns
from realpair.parts import ALONE, CONTESTANTS, DEFAULT, FIXED, LLAMA
from specdecpp.replay.intervals import ratio_of_ratios

Figures = dict[str, Any]


def cell(log: Log, pair: str, part: str, settings: Sequence[str], turn: Turn, *, is_decoding: bool = False) -> Cell | None:
    """The runs of a set under a sampling on all prompts that every setting answered; None without one. `is_decoding` leaves
    the reading of prompts out."""
    runs: dict[Setting, list[Any]] = {Setting(engine=part, name=name): [] for name in settings}
    for number in sorted({record["prompt"] for record in log.of(pair, part)}):
        place = replace(turn, prompt=number)
        found = {name: log.get(pair, part, place, name) for name in settings}
        if not all(found.values()):
            continue
        for setting, answers in runs.items():
            run: Record = found[setting.name] or {}
            answers.append((run["tokens"], run["seconds"] - is_decoding * run.get("reading_s", 0.0), 0))
    return Cell(dataset=turn.set, temperature=turn.temperature, top_p=turn.top_p, runs=runs) if any(runs.values()) else None


def over(cell: Cell, one: str, other: str) -> list[float]:
    """How many times as fast, with bounds where there are prompts enough."""
    top, bottom = (next(setting for setting in cell.runs if setting.name == name) for name in (one, other))
    num = len(cell.runs[top])
    if num < 2:
        return [rounded(cell.speed(top, num) / cell.speed(bottom, num))]
    return interval(ratio_of_ratios(*cell.columns(top, num), *cell.columns(bottom, num)))


def speeds(cell: Cell) -> dict[str, float]:
    """Tokens per second by setting."""
    return {setting.name: rounded(cell.speed(setting, len(runs))) for setting, runs in cell.runs.items()}


def cells(log: Log, pair: str) -> list[Figures] | None:
    """A row for each set and sampling, the worst first."""
    rows = []
    for turn in turns(1):
        whole = cell(log, pair, "cells", CONTESTANTS, turn)
        decoding = cell(log, pair, "cells", CONTESTANTS, turn, is_decoding=True)
        if whole is None or decoding is None:
            continue
        num = len(next(iter(whole.runs.values())))
        told = {"set": turn.set, "temperature": turn.temperature, "top_p": turn.top_p, "prompts": num}
        rows.append(told | compared(whole) | {"decoding_alone": compared(decoding)})
    return sorted(rows, key=lambda row: row["default_over_best_fixed"][0]) or None


def compared(cell: Cell) -> Figures:
    """The default, the best fixed length on these very prompts, and no draft."""
    found = speeds(cell)
    best = max(FIXED, key=lambda name: found[name])
    return {
        "best_fixed": best,
        "default_over_best_fixed": over(cell, DEFAULT, best),
        "default_over_no_draft": over(cell, DEFAULT, ALONE),
        "best_fixed_over_no_draft": over(cell, best, ALONE),
        "tokens_per_second": found,
    }


def first(log: Log, pair: str, rows: Sequence[Figures] | None) -> Figures | None:
    """First requests over the same prompts in the warm process: the best fixed length of the cell, and no draft."""
    best = {(row["set"], row["temperature"]): row["best_fixed"] for row in rows or ()}
    top_p, requests = dict(SAMPLINGS), []
    for record in log.of(pair, "first"):
        turn = Turn(
            set=record["set"], temperature=record["temperature"], top_p=top_p[record["temperature"]], prompt=record["prompt"]
        )
        others = [log.get(pair, "cells", turn, name) for name in (best.get((turn.set, turn.temperature), ""), ALONE)]
        if all(others):
            requests.append((record, *others))
    if not requests:
        return None
    columns = [np.array([[run["tokens"], run["seconds"]] for run in of]).T for of in zip(*requests, strict=True)]
    told = [
        {name: record.get(name) for name in ("set", "temperature", "prompt", "seconds", "loaded_s", "decoder_s")}
        | {"over_best_fixed": rounded(_speed(record) / _speed(best)), "over_no_draft": rounded(_speed(record) / _speed(alone))}
        for record, best, alone in requests
    ]
    return {
        "over_best_fixed": _over(columns[0], columns[1]),
        "over_no_draft": _over(columns[0], columns[2]),
        "requests": sorted(told, key=lambda request: request["over_best_fixed"]),
    }


def _speed(run: Record) -> float:
    return run["tokens"] / run["seconds"]


def _over(one: Any, other: Any) -> list[float]:
    if one.shape[1] < 2:
        return [rounded(float(one[0, 0] / one[1, 0] / (other[0, 0] / other[1, 0])))]
    return interval(ratio_of_ratios(*one, *other))


def llama(log: Log, pair: str) -> Figures | None:
    """The default over llama.cpp plain and at its best with the draft, by cell."""
    rows = []
    for turn in turns(1):
        if (found := cell(log, pair, "llama", [DEFAULT, *LLAMA], turn)) is None:
            continue
        rates, num = speeds(found), len(next(iter(found.runs.values())))
        plain, *drafting = LLAMA
        best = max(drafting, key=lambda name: rates[name])
        told = {"set": turn.set, "temperature": turn.temperature, "top_p": turn.top_p, "prompts": num}
        told |= {
            "best": best,
            "default_over_plain": over(found, DEFAULT, plain),
            "default_over_best": over(found, DEFAULT, best),
        }
        rows.append(told | {"tokens_per_second": rates})
    if not rows:
        return None
    means = {name: summed([row[name][0] for row in rows]) for name in ("default_over_plain", "default_over_best")}
    return means | {"cells": sorted(rows, key=lambda row: row["default_over_best"][0])}


def load(log: Log, pair: str) -> Figures | None:
    """Seconds; `first` is without compiling, which took `compiling` more."""
    found = {record["setting"]: record["seconds"] for record in log.of(pair, "load")}
    if "first" not in found:
        return None
    later = median(seconds for name, seconds in found.items() if name.startswith("later"))
    told = {"first": found["first"], "later": later, "imports": found["imports"]}
    return {name: rounded(s) for name, s in (told | {"compiling": found["compiling"] - found["first"]}).items()}


def pair_figures(log: Log, pair: str, earlier: Mapping[str, Any]) -> Figures:
    """All of a pair; parts that the log does not have are those of an earlier file."""
    rows = cells(log, pair)
    check, widths = (next(log.of(pair, part), None) for part in ("check", "rows"))
    told = check and {name: check[name] for name in ("seconds", "verdict", "whole_s")}
    found = {"load": load(log, pair), "check": told, "rows": widths and widths["rows"], "cells": rows}
    found |= {"first": first(log, pair, rows), "llama": llama(log, pair)}
    sittings = {record["setting"]: record["about"] for record in log.of(pair, "sitting")}
    parts = {name: earlier.get(name) if of is None else of for name, of in found.items()}
    return {"summary": summary(parts), "sittings": earlier.get("sittings", {}) | sittings, **parts}


def summary(parts: Mapping[str, Any]) -> Figures:
    """The figures that the bars are about; None where a part was not measured."""
    rows, load, check, first = parts["cells"] or (), parts["load"], parts["check"], parts["first"]
    one_row = [row["to_llama_cpp"] for row in parts["rows"] or () if row["runner"] == "native" and row["rows"] == 1]
    ratios: dict[str, dict[str, Any]] = {
        name: dict(summed([row[name][0] for row in rows]) or {"worst": None, "mean": None})
        for name in ("default_over_best_fixed", "default_over_no_draft")
    }
    ratios["default_over_best_fixed"] |= {"first_request": first and first["over_best_fixed"][0]}
    return {
        "load_s": {name: load and load[name] for name in ("first", "later")},
        "check_s": check and check["seconds"],
        "one_row_over_llama_cpp": rounded(1 / one_row[0]) if one_row else None,
        **ratios,
        "best_fixed_over_no_draft": {
            "mean": rounded(mean(row["best_fixed_over_no_draft"][0] for row in rows)) if rows else None
        },
    }


def table(name: str, found: Mapping[str, Any]) -> str:
    """The cells of a pair, worst first."""
    lines = [f"{name}: {'set':<13}{'sampling':<16}{'default/best K':>22}{'default/none':>22}{'best K':>9}{'/none':>8}"]
    for row in found["cells"] or ():
        sampling = "greedy" if row["temperature"] == 0 else f"{row['temperature']:g}, top-p {row['top_p']:g}"
        ratios = [_bounds(row[key]) for key in ("default_over_best_fixed", "default_over_no_draft")]
        best = row["best_fixed"].partition(":")[2]
        end = f"{best:>9}{row['best_fixed_over_no_draft'][0]:>8.3f}"
        lines.append(f"{'':{len(name) + 2}}{row['set']:<13}{sampling:<16}{ratios[0]:>22}{ratios[1]:>22}{end}")
    return "\n".join(lines)


def _bounds(found: Sequence[float]) -> str:
    value, *bounds = found
    return f"{value:.3f}" + (f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else "")
