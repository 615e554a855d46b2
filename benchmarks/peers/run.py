"""Cycles over all settings of a stage, one at work at a time. Each cycle takes other prompts, and its order is another."""

import json
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.plan import Plan, Setting, Stage, settings, workers
from peers.protocol import Load, Request, Worker, WorkerError

LOAD_LIMIT_S, RUN_LIMIT_S = 240.0, 120.0
IDLE_S, MOST_IDLE = 0.5, 0.05
"""How long waiting workers are watched, and what share of a processor one may use then."""
Say = Callable[[str], None]


@dataclass(kw_only=True)
class Runs:
    """What one setting did in one stage at one temperature: a list per cycle, or why there is nothing."""

    pair: str
    setting: Setting
    stage: Stage
    temperature: float
    cycles: list[list[dict[str, Any]]] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    note: str | None = None


def measure(pair: str, folder: Path, plan: Plan, missing: Mapping[str, str], say: Say) -> tuple[list[Runs], dict[str, str]]:
    """All stages of one pair, and the versions of the engines. `missing` are engines that are not there, and why."""
    about = json.loads((folder / "pair.json").read_text())
    stages = [(stage, settings(pair, stage)) for stage in plan.stages[pair]]
    pool = workers({setting.worker for _, some in stages for setting in some})
    broken = {s.worker: missing[s.engine] for _, some in stages for s in some if s.engine in missing}
    for name in pool.keys() - broken.keys():  # all at once: they import for seconds
        _try(broken, pool[name], pool[name].start)
    runs: list[Runs] = []
    try:
        for stage, some in stages:
            say(f"{pair}, {stage.dtype}, {stage.threads} thread{'s' * (stage.threads > 1)}: {len(some)} settings")
            needed = {setting.worker for setting in some}
            load = Load(folder=str(folder), dtype=stage.dtype, threads=stage.threads)
            unready = dict(broken)
            for name in sorted(needed - broken.keys()):
                _try(unready, pool[name], lambda name=name, load=load: pool[name].load(load, limit_s=LOAD_LIMIT_S))
            runs += _stage(pair, about["prompts"], plan, stage, some, pool, unready)
            say(f"  {sum(len(r.cycles) > 0 for r in runs)} measured, not: {sorted(unready) or 'none'}")
        versions = {name: v for worker in pool.values() for name, v in worker.versions.items()}
    finally:
        for worker in pool.values():
            worker.stop()
    return runs, versions


def _try(broken: dict[str, str], worker: Worker, do: Callable[[], None]) -> None:
    try:
        do()
    except WorkerError as error:
        broken[worker.name] = str(error)


def _stage(
    pair: str,
    prompts: list[list[int]],
    plan: Plan,
    stage: Stage,
    some: list[Setting],
    pool: dict[str, Worker],
    unready: dict[str, str],
) -> list[Runs]:
    runs = [
        Runs(pair=pair, setting=s, stage=stage, temperature=t, note=unready.get(s.worker))
        for t in stage.temperatures
        for s in some
    ]
    for run in runs:  # warm-up: what is compiled, started or measured at first use
        _once(run, pool, prompts[-1], 12, seed=0, keep=False)
    _refuse_busy({run.setting.worker for run in runs if run.note is None}, pool)
    num = plan.prompts[pair]
    for cycle in range(plan.cycles):
        order = list(runs)
        random.Random(cycle).shuffle(order)
        chosen = [prompts[(cycle * num + i) % len(prompts)] for i in range(num)]
        for run in order:
            answers = [_once(run, pool, prompt, plan.tokens, seed=cycle) for prompt in chosen]
            run.first_token_s += [a["seconds"] for a in [_once(run, pool, chosen[0], 1, seed=cycle)] if a]
            run.cycles += [[a | {"prompt": prompts.index(p)} for a, p in zip(answers, chosen, strict=True) if a]]
    return runs


def _once(
    run: Runs, pool: dict[str, Worker], prompt: list[int], tokens: int, *, seed: int, keep: bool = True
) -> dict[str, Any] | None:
    """One answer, None where the setting has failed; a failure stays as the note."""
    if run.note is not None:
        return None
    request = Request(prompt=prompt, max_tokens=tokens, temperature=run.temperature, seed=seed + 1, options=run.setting.options)
    try:
        answer = pool[run.setting.worker].run(request, limit_s=RUN_LIMIT_S)
    except WorkerError as error:
        run.note = str(error)
        return None
    if keep and len(answer["tokens"]) != tokens:
        run.note = f"it ended after {len(answer['tokens'])} of {tokens} tokens"
        return None
    return answer


def _refuse_busy(names: Iterable[str], pool: dict[str, Worker]) -> None:
    """Raise where a waiting worker uses a processor: it would slow the one at work."""
    names, shares = sorted(names), {}
    for _ in range(3):
        before = {name: pool[name].busy_s() for name in names}
        time.sleep(IDLE_S)
        shares = {name: (pool[name].busy_s() - before[name]) / IDLE_S for name in names}
        if max(shares.values(), default=0.0) <= MOST_IDLE:
            return
    busy = {name: f"{share:.0%}" for name, share in shares.items() if share > MOST_IDLE}
    raise RuntimeError(f"workers are busy while they wait: {busy}. Figures would mean nothing.")
