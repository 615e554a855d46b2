"""vLLM on a CPU with our plugin beside vLLM's own fixed lengths, at one request, 8 and 32 at once: tokens a second of all.

    python -m peers.vllm_door                       (in benchmarks/) the pair smollm2, two threads; a quarter of an hour

SmolLM2's values in bfloat16, greedy: on a CPU vLLM verifies sampled candidates by parameters from memory that nobody has
written (its issue 55005), and its own adaptive verification belongs to the runner for CUDA. One engine is at work at a time, in
an order that rotates. Nothing else should run meanwhile.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from peers import environments as env
from peers.batch import AT_ONCE, prepared, timed
from peers.plan import SMOLLM2
from peers.protocol import Worker
from peers.provenance import provenance

OUT = env.ROOT / "benchmarks/results/vllm.json"
SETTINGS: dict[str, tuple[str, ...]] = {
    "no draft": (),
    "its own K = 1": ("1",),
    "its own K = 2": ("2",),
    "its own K = 3": ("3",),
    "its own K = 4": ("4",),
    "its own schedule": ("2", "[[1, 4, 2], [5, 32, 0]]"),
    "plugin, default rule": ("8", "cost-aware"),
}
"""The schedule, of candidates by how many requests there are, says what this table once found best."""
OWN, PLUGIN = [name for name in SETTINGS if "own" in name], "plugin, default rule"


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The plugin over what vLLM does by itself, by how many requests there are at once."""
    rates = {row["setting"]: row["tokens_per_second"] for row in rows}
    over: dict[str, dict[str, float]] = {"plugin_over_best_own_k": {}, "plugin_over_no_draft": {}}
    for n in map(str, AT_ONCE):
        ours, own = rates[PLUGIN].get(n), [rates[name][n] for name in OWN if n in rates[name]]
        if ours and own:
            over["plugin_over_best_own_k"][n] = round(ours / max(own), 3)
        if ours and n in rates["no draft"]:
            over["plugin_over_no_draft"][n] = round(ours / rates["no draft"][n], 3)
    return over


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if why := prepared([SMOLLM2]).get("vllm"):
        sys.exit(why)
    pool = {
        name: Worker(
            name=name,
            python=env.python(env.VLLM),
            module="peers.engines.vllm_cpu",
            arguments=arguments,
            environment=env.environment(),
            log=env.LOGS / f"vllm-{i}.log",
        )
        for i, (name, arguments) in enumerate(SETTINGS.items())
    }
    folder = env.MODELS / SMOLLM2
    prompts = json.loads((folder / "pair.json").read_text())["prompts"]
    notes: dict[str, str] = {}
    settings = [(name, dict[str, Any]()) for name in pool]
    rates = timed(pool, folder, dict.fromkeys(pool, "bf16"), settings, notes, prompts, (0.0,), args)
    rows = [
        {
            "setting": name,
            "tokens_per_second": {str(n): round(statistics.median(found), 1) for n in AT_ONCE if (found := rates[i, 0.0, n])},
            "note": notes.get(name),
            "versions": pool[name].versions,
        }
        for i, name in enumerate(pool)
    ]
    for row in rows:
        print(json.dumps(row), file=sys.stderr)
    found = {**provenance("python", "-m", "peers.vllm_door"), "rows": rows, "summary": summary(rows)}
    print(json.dumps(found["summary"], indent=1))
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
