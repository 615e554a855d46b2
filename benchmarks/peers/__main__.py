"""Ours beside other engines on the same weights. Nothing else should run meanwhile.

    make bench-peers                                          everything: about 20 minutes, and an hour before the first time
    python -m peers --quick                                   (in benchmarks/) every engine once
    python -m peers --pair 30m-2m --out /tmp/peers.json

Writes JSON, and beside it markdown and SVG.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from peers import environments as env
from peers.plan import Plan
from peers.report import markdown, picture
from peers.rows import Row, rows_of
from peers.run import measure

OUT = env.ROOT / "benchmarks/results/peers.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: the reference pair, one cycle, few tokens")
    parser.add_argument("--pair", action="append", help="only this pair; repeatable")
    parser.add_argument("--threads", type=int, action="append", help="only stages with so many threads; repeatable")
    parser.add_argument("--dtype", action="append", help="only weights of this type: f32, bf16, int8; repeatable")
    parser.add_argument("--cycles", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--prepare", action="store_true", help="make environments and models, measure nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    plan = _plan(args)
    missing = prepare(tuple(plan.prompts))
    if args.prepare:
        print(json.dumps(missing, indent=1))
        return
    threads = sorted({stage.threads for stage in plan.stages})
    bandwidth = _bandwidth(threads)
    rows: list[Row] = []
    versions: dict[str, str] = {}
    for name in plan.prompts:
        runs, found = measure(name, env.MODELS / name, plan, missing, _say)
        about = json.loads((env.MODELS / name / "pair.json").read_text())
        rows += rows_of(runs, about, bandwidth)
        versions |= found
        _write(args.out, rows, _provenance(plan, versions, bandwidth, missing))


def _plan(args: argparse.Namespace) -> Plan:
    plan = Plan.quick() if args.quick else Plan.full()
    names = args.pair or list(plan.prompts)
    stages = [s for s in plan.stages if not args.threads or s.threads in args.threads]
    return replace(
        plan,
        prompts={name: plan.prompts.get(name, 1) for name in names},
        stages=tuple(s for s in stages if not args.dtype or s.dtype in args.dtype),
        cycles=args.cycles or plan.cycles,
        tokens=args.tokens or plan.tokens,
    )


def prepare(names: Sequence[str]) -> dict[str, str]:
    """Make what is not there; what could not be made, and why. Ours and the pairs must be."""
    missing: dict[str, str] = {}
    env.make_torch()
    env.make_pairs(names)
    steps: dict[str, tuple[Callable[[], None], ...]] = {
        "llama.cpp": (env.make_llama,),
        "openvino": (env.make_openvino, lambda: env.export_pairs(names)),
    }
    for engine, makes in steps.items():
        try:
            for make in makes:
                make()
        except env.CannotMakeError as error:
            missing[engine] = str(error)
            _say(f"without {engine}: {error}")
    return missing


def _bandwidth(threads: Sequence[int]) -> dict[int, float]:
    command = [str(env.python(env.TORCH)), "-m", "peers.floor", *map(str, threads)]
    done = subprocess.run(command, env=env.environment(), capture_output=True, text=True, check=True)
    return {int(n): gb for n, gb in json.loads(done.stdout).items()}


def _provenance(
    plan: Plan, versions: dict[str, str], bandwidth: dict[int, float], missing: dict[str, str]
) -> dict[str, object]:
    sha = subprocess.run(["git", "rev-parse", "HEAD"], cwd=env.ROOT, capture_output=True, text=True, check=False)
    return {
        "command": shlex.join(["python", "-m", "peers", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "git": sha.stdout.strip() or None,
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "bandwidth_gb_per_s": {str(n): gb for n, gb in bandwidth.items()},
        },
        "versions": {"python": platform.python_version(), **versions},
        "missing": missing,
        "plan": asdict(plan),
        "pairs": {
            name: {key: about[key] for key in ("num_parameters", "acceptance")}
            for name in plan.prompts
            for about in [json.loads((env.MODELS / name / "pair.json").read_text())]
        },
    }


def _cpu() -> str:
    """The processor's name, and what it can do with vectors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    sets = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if name in facts.get("flags", "")]
    name = f"{facts.get('model name', 'unknown')} (family {facts.get('cpu family')}, model {facts.get('model')})"
    return f"{name} with {', '.join(sets)}" if sets else name


def _write(out: Path, rows: Sequence[Row], provenance: dict[str, object]) -> None:
    """The three files; after each pair, so that a killed run leaves what it has."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**provenance, "rows": [row.to_dict() for row in rows]}, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(rows, provenance))
    out.with_suffix(".svg").write_text(picture(rows).svg())


def _say(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
