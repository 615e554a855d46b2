"""Many requests at once beside other engines: tokens a second of all of them together, on the same weights and prompts.

    python -m peers.batch                           (in benchmarks/) the pair smollm2, two threads; about 20 minutes
    python -m peers.batch --tokens 8 --cycles 1 --out /tmp/batch.json

llama.cpp's server with as many parallel slots, vLLM on a CPU and OpenVINO's continuous batching, each with the target alone,
and ours: the target alone and the default rule without a seed, whose lengths follow the load. One is at work at a time, in an
order that rotates. Of SmolLM2 vLLM has the values of the file in bfloat16. Rows and `over_...` go into batch.json beside what
`batch.py` measures. Nothing else should run meanwhile.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peers import environments as env
from peers.pool import SMOLLM2, workers
from peers.protocol import Load, Request, Worker, WorkerError
from peers.provenance import provenance
from specdecpp.bench.contest import in_turn

OUT = env.ROOT / "benchmarks/results/batch.json"
AT_ONCE = (1, 8, 32)
NUM_REQUESTS = {1: 3, 8: 16, 32: 32}
TEMPERATURES = (0.0, 1.0)
ENGINES = {"llama.cpp": "llama.cpp", "vllm": "vllm_cpu", "openvino batching": "openvino"}
"""Workers of the others, and what the summary calls them."""
OURS = {"target": "ours, target alone", "cost-aware": "ours, default rule"}
DTYPE, DTYPES = "q4_1", {"vllm": "bf16"}
LIMIT_S = 600.0


def measured(missing: dict[str, str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each engine and temperature; what is missing, or fails, is a row with a note."""
    folder, pool = env.MODELS / SMOLLM2, workers({"ours native", *ENGINES})
    prompts: list[list[int]] = json.loads((folder / "prompts.json").read_text())
    notes, settings = dict(missing), [(name, {"n_max": None}) for name in ENGINES]
    settings += [("ours native", {"policy": policy}) for policy in OURS]
    dtypes = {name: DTYPES.get(name, DTYPE) for name in pool}
    rates = timed(pool, folder, dtypes, settings, notes, prompts, TEMPERATURES, args)
    return [
        {
            "pair": SMOLLM2,
            "engine": OURS.get(str(options.get("policy")), name),
            "weights": dtypes[name],
            "temperature": temperature,
            "tokens_per_second": {
                str(n): round(statistics.median(found), 1) for n in AT_ONCE if (found := rates[i, temperature, n])
            },
            "note": notes.get(name),
            "versions": pool[name].versions,
        }
        for i, (name, options) in enumerate(settings)
        for temperature in TEMPERATURES
    ]


def timed(
    pool: dict[str, Worker],
    folder: Path,
    dtypes: dict[str, str],
    settings: Sequence[tuple[str, dict[str, Any]]],
    notes: dict[str, str],
    prompts: Sequence[list[int]],
    temperatures: Sequence[float],
    args: argparse.Namespace,
) -> dict[tuple[int, float, int], list[float]]:
    """Tokens a second of each setting, temperature and number at once, a value a cycle. What fails is put among `notes`."""
    rates: dict[tuple[int, float, int], list[float]] = defaultdict(list)
    try:
        for name, worker in pool.items():
            if name not in notes:
                _try(notes, name, worker, Load(folder=str(folder), dtype=dtypes[name], threads=args.threads))
        for n in AT_ONCE:
            for cycle in range(-1, args.cycles):  # the first is a warm-up
                for i in in_turn(list(range(len(settings))), max(0, cycle), num_turns=args.cycles):
                    name, options = settings[i]
                    for temperature in temperatures if cycle >= 0 else temperatures[:1]:
                        asked = [
                            Request(
                                prompt=prompts[(j + cycle) % len(prompts)],
                                max_tokens=args.tokens if cycle >= 0 else 8,
                                temperature=temperature,
                                seed=1 + j,
                                options=options,
                            )
                            for j in range(NUM_REQUESTS[n])
                        ]
                        rate = _rate(notes, name, pool[name], asked, n)
                        if rate is not None and cycle >= 0:
                            rates[i, temperature, n].append(rate)
    finally:
        for worker in pool.values():
            worker.stop()
    return rates


def _try(notes: dict[str, str], name: str, worker: Worker, load: Load) -> None:
    try:
        worker.start()
        worker.load(load, limit_s=LIMIT_S)
    except WorkerError as error:
        notes[name] = str(error)


def _rate(notes: dict[str, str], name: str, worker: Worker, asked: list[Request], at_once: int) -> float | None:
    """Tokens a second; None where the engine has failed."""
    if name in notes:
        return None
    try:
        found = worker.ask({"do": "run_all", "requests": [asdict(one) for one in asked], "at_once": at_once}, limit_s=LIMIT_S)
    except WorkerError as error:
        notes[name] = str(error)
        return None
    if found["num_tokens"] != [one.max_tokens for one in asked]:
        notes[name] = f"answers of {min(found['num_tokens'])} tokens where {asked[0].max_tokens} were asked for"
        return None
    return sum(found["num_tokens"]) / found["seconds"]


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Ours by the default rule over each of the others: the worst over pairs and temperatures that it has a row of."""
    rates = {(row["pair"], row["temperature"], row["engine"]): row["tokens_per_second"] for row in rows}
    found: dict[str, dict[str, float]] = {}
    for engine, called in ENGINES.items():
        of = {(pair, t): theirs for (pair, t, name), theirs in rates.items() if name == engine}
        for n in map(str, AT_ONCE):
            shares = [rates[*key, OURS["cost-aware"]].get(n, 0) / theirs[n] for key, theirs in of.items() if n in theirs]
            if shares:
                found.setdefault(f"over_{called}".replace("llama.cpp", "llama_cpp"), {})[n] = round(min(shares), 3)
    return found


def prepared() -> dict[str, str]:
    """Makes what is not there; the workers that could not be made, and why."""
    missing = env.prepare((SMOLLM2,), engines=("llama.cpp", "openvino", "vllm"))
    if "openvino" in missing:
        missing["openvino batching"] = missing.pop("openvino")
    return missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", action="append", choices=[*ENGINES], help="only this of the others, as it is; repeatable")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    missing = {name: "not asked for" for name in ENGINES if name not in args.only} if args.only else prepared()
    rows = measured(missing, args)
    for row in rows:
        print(json.dumps(row), file=sys.stderr)
    kept = json.loads(args.out.read_text()) if args.out.exists() else {}
    own = {key: value for key, value in kept.get("summary", {}).items() if not key.startswith("over_")}
    kept |= {"peers": {**provenance("python", "-m", "peers.batch"), "rows": rows}, "summary": own | summary(rows)}
    print(json.dumps(kept["summary"], indent=1))
    args.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
