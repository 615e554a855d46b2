"""What a pass over several rows costs, ours and llama.cpp's, on the same file: drafting lives on wide passes that cost little.

    python benchmarks/widths.py FILE.gguf [--out benchmarks/results/widths.json]
    python benchmarks/widths.py CHECKPOINT --backend native

Runs where llama-cpp-python is installed, as in `.engines/peers-torch` after `make bench-peers`; without it native alone. One
process, one pass at a time; the settings (backend, threads, rows) take turns in a new order each cycle. In a turn the first
pass finds the caches as another setting left them and is not counted. Medians over all counted passes, as JSON and, beside it,
markdown. Nothing else should run meanwhile.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peers.provenance import provenance

from specdecpp import __version__
from specdecpp.backends import Cache
from specdecpp.backends.native import NativeModel
from specdecpp.errors import SpecdecError
from specdecpp.loading.gguf import GGUF, is_gguf
from specdecpp.loading.models import Checkpoint

CONTEXT, ROWS, THREADS, TURN = 100, (1, 2, 3, 5, 9, 16), (1, 2), 3
Setting = tuple[str, int, int]
"""Backend, threads, rows."""


def backends(name: str, dtype: str, kinds: list[str], threads: list[int]) -> Iterator[tuple[str, int, Cache]]:
    """Each kind with each number of threads, holding the context; says why one is missing."""
    model = GGUF(name) if is_gguf(name) else Checkpoint(name, dtype=dtype, device=None, device_map=None)
    for kind in kinds:
        if reason := model.refusal(kind):
            print(f"without {kind}: {reason}")
            continue
        for n in threads:
            torch.set_num_threads(n)
            backend = model.backend(kind, vocab_size=model.num_rows)
            cache = (backend.with_threads(n) if isinstance(backend, NativeModel) else backend).new_cache()
            cache.extend([7 + i % 500 for i in range(CONTEXT)], rows=1)
            yield kind, n, cache


def measured(made: list[tuple[str, int, Cache]], rows: list[int], cycles: int) -> dict[Setting, list[float]]:
    """Seconds of passes."""
    turns = [(kind, threads, n, cache) for kind, threads, cache in made for n in rows]
    seconds: dict[Setting, list[float]] = {}
    for cycle in range(cycles):
        random.Random(cycle).shuffle(turns)
        for kind, threads, n, cache in turns:
            seconds.setdefault((kind, threads, n), []).extend([once(cache, n) for _ in range(1 + TURN)][1:])
    return seconds


def once(cache: Cache, rows: int) -> float:
    """Seconds of one pass, rolled back afterwards."""
    started = time.perf_counter()
    cache.extend([11 + i for i in range(rows)], rows=rows)
    seconds = time.perf_counter() - started
    cache.rollback(CONTEXT)
    return seconds


def rows_of(seconds: Mapping[Setting, list[float]]) -> list[dict[str, Any]]:
    """A row for each setting; `to_llama_cpp` is its time over llama.cpp's at the same width and threads."""
    typical = {setting: statistics.median(found) for setting, found in seconds.items()}
    found = []
    for kind, threads, n in sorted(typical):
        ms, theirs = typical[kind, threads, n], typical.get(("llama.cpp", threads, n))
        quarters = statistics.quantiles(seconds[kind, threads, n], n=4)
        found.append(
            {
                "runner": kind,
                "threads": threads,
                "rows": n,
                "ms": round(1e3 * ms, 3),
                "ms_quartiles": [round(1e3 * quarters[0], 3), round(1e3 * quarters[2], 3)],
                "to_one_row": _ratio(ms, typical.get((kind, threads, 1))),
                "to_llama_cpp": _ratio(ms, theirs),
            }
        )
    return found


def _ratio(a: float, b: float | None) -> float | None:
    return None if b is None else round(a / b, 3)


def markdown(found: Mapping[str, Any]) -> str:
    """A table for each number of threads."""
    machine = found["machine"]
    place = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']} before it began"
    lines = [
        f"# A pass of several rows: {found['model']}\n",
        f"`{found['command']}`, {found['date']}; {place}; context {found['context']}, medians of {found['passes']} passes, "
        "quartiles in brackets.\n",
    ]
    for threads in sorted({row["threads"] for row in found["rows"]}):
        some = [row for row in found["rows"] if row["threads"] == threads]
        lines += [
            f"## {threads} thread{'s' * (threads > 1)}\n",
            "| backend | rows | ms | over one row | over llama.cpp |\n|---|---:|---:|---:|---:|",
            *(_line(row) for row in some),
            "",
        ]
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    low, high = row["ms_quartiles"]
    ratios = ("" if row[key] is None else f"{row[key]:.2f}" for key in ("to_one_row", "to_llama_cpp"))
    return f"| {row['runner']} | {row['rows']} | {row['ms']:.2f} [{low:.2f}, {high:.2f}] | {' | '.join(ratios)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a GGUF file, or a folder with a checkpoint")
    parser.add_argument("--backend", action="append", help="repeatable (default: native, native-int8, llama.cpp)")
    parser.add_argument("--dtype", default="auto", help="of a checkpoint's weights (default: as stored)")
    parser.add_argument("--threads", type=int, action="append", help="repeatable (default: 1 and 2)")
    parser.add_argument("--rows", type=int, action="append", help="repeatable (default: 1, 2, 3, 5, 9, 16)")
    parser.add_argument("--cycles", type=int, default=20, help=f"each has {TURN} counted passes of every setting")
    parser.add_argument("--quick", action="store_true", help="two cycles")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cycles = 2 if args.quick else args.cycles
    about = provenance("python", "benchmarks/widths.py")
    try:
        made = list(
            backends(
                args.model, args.dtype, args.backend or ["native", "native-int8", "llama.cpp"], args.threads or list(THREADS)
            )
        )
    except SpecdecError as error:
        raise SystemExit(str(error)) from None
    found = {
        **about,
        "model": Path(args.model).name,
        "context": CONTEXT,
        "passes": TURN * cycles,
        "versions": {"specdecpp": __version__} | _llama_cpp(),
        "rows": rows_of(measured(made, args.rows or list(ROWS), cycles)),
    }
    print(markdown(found))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(markdown(found))


def _llama_cpp() -> dict[str, str]:
    if find_spec("llama_cpp") is None:
        return {}
    from importlib.metadata import version

    return {"llama-cpp-python": version("llama-cpp-python")}


if __name__ == "__main__":
    main()
