"""The parts of the measurement. Each adds to the log what is missing there; what is there is left alone."""

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

from peers import environments as env
from peers.pool import workers
from peers.protocol import Load, Request, Worker

import specdecpp as sd
from realpair.files import REFERENCE, SMOLLM2, Names
from realpair.log import Log, Run, Turn, turns
from realpair.prompts import Messages
from specdecpp import cache_dir
from specdecpp.decoder import encode
from specdecpp.loading import shipped

ALONE, DEFAULT, FIXED = "none", "default", {f"fixed:{k}": k for k in (1, 2, 3, 5)}
CONTESTANTS = (ALONE, *FIXED, DEFAULT)
LLAMA = {"llama.cpp": None} | {f"llama.cpp, n-max {n}": n for n in (2, 4, 8, 16)}
"""Draft tokens a step, at most; None without the draft. Its p-min is the one it comes with."""
LATER, THREADS = 3, 2
VERDICT = re.compile(r"worth it|too close to call", re.IGNORECASE)
CHECK_LIMIT_S, QUICK_LIMIT_S, RUN_LIMIT_S = 1200.0, 120.0, 600.0
COMPILED = "specdecpp/native-*.so"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured: prompts of a set (for llama.cpp, for first requests), and tokens an answer."""

    prompts: int
    llama_prompts: int
    first: int
    tokens: int
    is_quick: bool = False

    @property
    def first_turns(self) -> list[Turn]:
        return turns(self.first)[: 2 if self.is_quick else None]

    @property
    def loads(self) -> list[str]:
        later = [f"later {i}" for i in range(1 if self.is_quick else LATER)]
        return ["compiling", *later, "imports", "first"]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What the parts work with. What ours measures and compiles is kept in a cache folder within `work`."""

    pair: str
    names: Names
    prompts: Mapping[str, Sequence[Messages]]
    plan: Plan
    work: Path
    log: Log
    _loaded: list[sd.Pair] = field(default_factory=list)

    @property
    def cache(self) -> Path:
        return self.work / "cache"

    def load(self) -> sd.Pair:
        """The pair within this process, loaded once."""
        if not self._loaded:
            self._loaded.append(sd.load_pair(self.names.target, draft=self.names.draft, device=self.names.device))
        return self._loaded[0]

    def close(self) -> None:
        self._loaded.clear()
        gc.collect()

    def add(self, part: str, setting: str, turn: Turn | None = None, **found: Any) -> None:
        place = {"set": turn.set, "temperature": turn.temperature, "prompt": turn.prompt} if turn else {}
        self.log.add(pair=self.pair, part=part, **place, setting=setting, **found)


# Processes of their own


def _environment(cache: Path, **more: str) -> dict[str, str]:
    """For children: modules of this folder and of the source beside it, and a cache folder."""
    paths = [str(env.ROOT / "benchmarks"), str(env.ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(cache), **more}


@contextmanager
def _empty(compiled: Path | None) -> Iterator[Path]:
    """A cache folder for a while, with nothing in it but compiled code, None: not even that."""
    with tempfile.TemporaryDirectory(prefix="real-pair-") as folder:
        if compiled:
            copy_compiled(compiled, Path(folder))
        yield Path(folder)


def copy_compiled(cache: Path, to: Path) -> None:
    """Compiled code from one cache folder to another. What is there stays: a process that runs it must not lose it."""
    (to / "specdecpp").mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in cache.glob(COMPILED):
        if not (copy := to / "specdecpp" / path.name).exists():
            with cache_dir.whole(copy) as part:
                shutil.copy2(path, part)


def _fresh(bench: Bench, cache: Path, request: dict[str, Any] | None = None, **more: str) -> tuple[dict[str, Any], str]:
    """What `realpair.fresh` says, and what went to its standard error."""
    asked = {**vars(bench.names), "request": request, "started": time.time()}
    command = [sys.executable, "-m", "realpair.fresh", json.dumps(asked)]
    done = subprocess.run(command, env=_environment(cache, **more), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"a process that loads {bench.names.target} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def load(bench: Bench) -> None:
    """Seconds from the start of a process to the pair: with an empty cache folder, later, and with compiled code alone."""
    if bench.log.has(bench.pair, "load", None, bench.plan.loads):
        return
    with _empty(None) as cache:
        for setting in bench.plan.loads[:-2]:
            bench.add("load", setting, seconds=_fresh(bench, cache)[0]["loaded_s"])
        _, said = _fresh(bench, cache, PYTHONPROFILEIMPORTTIME="1")
        bench.add("load", "imports", seconds=imports_s(said))
        with _empty(cache) as other:
            bench.add("load", "first", seconds=_fresh(bench, other)[0]["loaded_s"])


def imports_s(said: str) -> float:
    """The sum over modules of Python's own account of imports."""
    return sum(int(own) for own in re.findall(r"^import time:\s+(\d+) \|", said, re.MULTILINE)) / 1e6


def check(bench: Bench) -> None:
    """Seconds from the start of `specdecpp check` to the line with its verdict, None if it takes too long, and to its end."""
    if bench.log.has(bench.pair, "check", None, ["check"]):
        return
    command = [sys.executable, "-m", "specdecpp", "check", "--target", *bench.names.arguments]
    started, verdict, limit_s = time.perf_counter(), None, QUICK_LIMIT_S if bench.plan.is_quick else CHECK_LIMIT_S
    own = _environment(bench.cache, PYTHONUNBUFFERED="1", NO_COLOR="1")
    with subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        timer = Timer(limit_s, process.kill)
        timer.start()
        lines = []
        for line in process.stdout or ():
            lines.append(line.rstrip())
            if verdict is None and VERDICT.search(line):
                verdict = time.perf_counter() - started, line.strip()
        code = process.wait()
        timer.cancel()
    whole_s = time.perf_counter() - started
    if code and verdict is None and whole_s < limit_s:
        raise RuntimeError(f"specdecpp check ended with {code}: {' '.join(lines[-3:])}")
    seconds, words = verdict or (None, None)
    bench.add("check", "check", seconds=seconds and round(seconds, 2), verdict=words, whole_s=round(whole_s, 2))


def rows(bench: Bench) -> None:
    """Passes of 1 to 16 rows of the target, ours and llama.cpp's, by `widths.py`; none for a pair that is no GGUF file."""
    if bench.pair == REFERENCE or bench.log.has(bench.pair, "rows", None, ["rows"]):
        return
    parts = shipped.names(bench.names.target)
    file = parts.target if parts else bench.names.target
    out = bench.work / f"widths-{bench.pair}.json"
    command = [env.python(env.TORCH), env.ROOT / "benchmarks/widths.py", file, "--threads", THREADS, "--out", out]
    command += ["--backend", "native", "--backend", "llama.cpp", *(["--quick"] if bench.plan.is_quick else [])]
    subprocess.run(list(map(str, command)), env=_environment(bench.cache), stdout=subprocess.DEVNULL, check=True)
    bench.add("rows", "rows", rows=json.loads(out.read_text(encoding="utf-8"))["rows"])


def first(bench: Bench) -> None:
    """First requests under the default rule, each with a cache folder that holds compiled code alone."""
    waiting = [turn for turn in bench.plan.first_turns if not bench.log.has(bench.pair, "first", turn, [DEFAULT])]
    if waiting and not list(bench.cache.glob(COMPILED)):
        _fresh(bench, bench.cache)
    for turn in waiting:
        prompt = bench.prompts[turn.set][turn.prompt]
        request = _options(turn, bench.plan.tokens) | {"prompt": prompt}
        with _empty(bench.cache) as cache:
            bench.add("first", DEFAULT, turn, **_fresh(bench, cache, request)[0])


# In turns


def cells(bench: Bench) -> None:
    """All contestants on all prompts."""
    _in_turns(bench, "cells", CONTESTANTS, bench.plan.prompts, _ours)


def llama(bench: Bench) -> None:
    """llama.cpp's server plain and with the draft, beside the default; none for a pair that is no GGUF file."""
    if bench.pair == REFERENCE:
        return
    worker = workers({"llama.cpp"})["llama.cpp"]

    def runs(bench: Bench, settings: Sequence[str]) -> dict[str, Run]:
        worker.start()
        worker.load(Load(folder=str(_linked(bench)), dtype="q4_k_m", threads=THREADS), limit_s=RUN_LIMIT_S)
        return _ours(bench, [DEFAULT]) | {name: partial(theirs, worker, n) for name, n in LLAMA.items()}

    try:
        _in_turns(bench, "llama", [DEFAULT, *LLAMA], bench.plan.llama_prompts, runs)
    finally:
        worker.stop()


def _in_turns(
    bench: Bench,
    part: str,
    settings: Sequence[str],
    num: int,
    runs_of: Callable[[Bench, Sequence[str]], dict[str, Run]],
) -> None:
    """Every contestant answers a prompt before the next one comes, in a random order."""
    waiting = [turn for turn in turns(num) if not bench.log.has(bench.pair, part, turn, settings)]
    if not waiting:
        return
    pair = bench.load()
    prompts, tokens = bench.prompts, bench.plan.tokens
    prompt_of = lambda turn: encode(pair, prompts[turn.set][turn.prompt])  # noqa: E731
    bench.log.measure(bench.pair, part, runs_of(bench, settings), waiting, prompt_of, tokens=tokens)


def _options(turn: Turn, tokens: int) -> dict[str, Any]:
    """Every answer has so many tokens; no seed."""
    return {"max_tokens": tokens, "temperature": turn.temperature, "top_p": turn.top_p, "top_k": 0, "ignore_eos": True}


def _ours(bench: Bench, settings: Sequence[str]) -> dict[str, Run]:
    policies = {name: sd.Fixed(k=k) for name, k in ({ALONE: 0} | FIXED).items()}
    pair = bench.load()
    return {name: partial(_answer, sd.Decoder(pair, policy=policies.get(name), reuses=False)) for name in settings}


def _answer(decoder: sd.Decoder, prompt: list[int], turn: Turn, tokens: int) -> dict[str, float]:
    started = time.perf_counter()
    out = decoder.generate(prompt, **_options(turn, tokens))
    return {"tokens": len(out.tokens), "seconds": time.perf_counter() - started, "reading_s": out.metrics.prefill_s}


def theirs(worker: Worker, n_max: int | None, prompt: list[int], turn: Turn, tokens: int) -> dict[str, float]:
    request = Request(
        prompt=prompt,
        max_tokens=tokens,
        temperature=turn.temperature,
        top_p=turn.top_p,
        seed=turn.prompt + 1,
        options={"n_max": n_max},
    )
    answer = worker.run(request, limit_s=RUN_LIMIT_S)
    return {"tokens": len(answer["tokens"]), "seconds": answer["seconds"], "reading_s": answer["reading_s"]}


def _linked(bench: Bench) -> Path:
    parts = (shipped.names(SMOLLM2) if bench.pair == SMOLLM2 else None) or bench.names
    return linked(bench.work / f"llama-{bench.pair}", target=parts.target, draft=parts.draft)


def linked(folder: Path, **files: Any) -> Path:
    """A folder with the two files under the names that llama.cpp's worker looks for."""
    folder.mkdir(parents=True, exist_ok=True)
    for role, file in files.items():
        link = folder / f"{role}-q4_k_m.gguf"
        with suppress(FileNotFoundError):
            link.unlink()
        link.symlink_to(Path(file).resolve())
    return folder


PARTS: dict[str, Callable[[Bench], None]] = {
    "load": load,
    "check": check,
    "rows": rows,
    "cells": cells,
    "first": first,
    "llama": llama,
}
