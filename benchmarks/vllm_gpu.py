"""vLLM on a GPU: without a draft, with its own draft of K tokens, and with the plugin. Each in a process of its own.

    python benchmarks/vllm_gpu.py MODEL DRAFT --contestants none,own:2,own:3,own:5,ours --out benchmarks/results/vllm_gpu.json

A contestant is `none`, `own:K`, or `ours`, where wanted with a policy and how its rounds end: `ours:fixed:3`,
`ours:cumulative:0.2@late`. All start together, and are measured one after the other: as many requests at once as `--at` says
are kept running until all prompts are answered, several times, the first of which is not counted. `summary` compares the last
contestant with no draft and with the best of vLLM's own lengths, by the worst kind of sampling.
"""

import argparse
import fcntl
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

SAMPLINGS: dict[str, dict[str, float]] = {"greedy": {"temperature": 0.0}, "top-p": {"temperature": 0.7, "top_p": 0.9}}
CODE = [
    "def fibonacci(n):\n    ", "import numpy as np\n\ndef moving_average(x, w):\n", "class Stack:\n    def __init__(self):\n",
    "# Sort a list of words by their length, then alphabetically.\ndef", "SELECT name, price FROM products WHERE",
    "def is_prime(n: int) -> bool:\n    \"\"\"Return whether n is prime.\"\"\"\n", "#include <stdio.h>\n\nint main(void) {\n",
    "def binary_search(items, key):\n    low, high = 0, len(items) - 1\n",
]  # fmt: skip
PROSE = [
    "Once upon a time there was a little girl named Lily who", "The capital of France is", "To make a cup of tea, first",
    "Dear Sir or Madam,\n", "The history of Rome begins with", "The three primary colours are",
    "Natalia sold clips to 48 of her friends in April.",
    "Give three tips for a healthy life.\n",
]  # fmt: skip
KINDS = {"code": CODE, "prose": PROSE}
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip


def engine_options(contestant: str, args: argparse.Namespace) -> dict[str, Any]:
    """What a contestant asks of vLLM."""
    kind, _, rest = contestant.partition(":")
    options: dict[str, Any] = {
        "model": args.model, "dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": max(args.at), "seed": 0,
        "enable_prefix_caching": False, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": args.cache_mib << 20,
    }  # fmt: skip
    if kind != "none":
        policy, _, ends = rest.partition("@")
        options["speculative_config"] = {
            "method": "draft_model", "model": args.draft, "draft_sample_method": "probabilistic",
            "num_speculative_tokens": int(rest) if kind == "own" else args.most,
        }  # fmt: skip
        options["per_request_spec_decode_metrics"] = "detailed"
        if kind == "ours":
            given = {"policy": policy, "ends": ends}
            options["additional_config"] = {"specdecpp": {name: value for name, value in given.items() if value}}
    return options | json.loads(args.more)


def measure(contestant: str, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of one contestant by sampling, kind of prompt and load, in this process."""
    began = time.perf_counter()
    import torch
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    is_gpu = torch.cuda.is_available()
    llm = LLM(**engine_options(contestant, args))
    engine: Any = llm.llm_engine
    if args.ids:
        kinds = {"ids": json.loads(Path(args.ids).read_text())}
    else:
        tokenizer = llm.get_tokenizer()
        kinds = {name: [tokenizer.encode(text) for text in texts] for name, texts in KINDS.items()}
    config = engine.vllm_config
    found: dict[str, Any] = {
        "contestant": contestant, "ready_s": round(time.perf_counter() - began, 1), "vllm": vllm.__version__,
        "torch": torch.__version__, "gpu": torch.cuda.get_device_name(0) if is_gpu else "none",
        "v2": config.use_v2_model_runner, "async": bool(config.scheduler_config.async_scheduling), "rows": [], "answers": {},
    }  # fmt: skip
    core = getattr(engine.engine_core, "engine_core", None)
    worker = getattr(getattr(core, "model_executor", None), "driver_worker", None)
    runner = getattr(getattr(worker, "worker", worker), "model_runner", None)
    speculator = getattr(runner, "speculator", None)
    found["speculator"] = type(speculator).__name__

    def run(prompts: list[list[int]], at_once: int, sampling: dict[str, float]) -> tuple[float, list[Any], int]:
        num = max(at_once, len(prompts))
        waiting, running, done, steps = list(range(num))[::-1], 0, {}, 0
        start = time.perf_counter()
        while waiting or running:
            while waiting and running < at_once:
                i = waiting.pop()
                how = SamplingParams(**sampling, max_tokens=args.tokens, ignore_eos=True, detokenize=False, seed=i)
                engine.add_request(str(i), {"prompt_token_ids": prompts[i % len(prompts)]}, how)
                running += 1
            steps += 1
            for output in engine.step():
                if output.finished:
                    running -= 1
                    done[int(output.request_id.partition("-")[0])] = output.outputs[0]
        return time.perf_counter() - start, [done[i] for i in range(num)], steps

    await_others(contestant, args)
    with open(args.lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in args.samplings.split(","):
            for kind, prompts in kinds.items():
                for at_once in args.at:
                    run(prompts, at_once, SAMPLINGS[name])
                    runs = [run(prompts, at_once, SAMPLINGS[name]) for _ in range(args.repeats)]
                    outputs = runs[-1][1]
                    num_tokens = sum(len(o.token_ids) for o in outputs)
                    row = {"sampling": name, "kind": kind, "at": at_once}
                    row["tokens_per_s"] = round(statistics.median(num_tokens / seconds for seconds, *_ in runs), 1)
                    row["ms_per_step"] = round(1e3 * statistics.median(seconds / steps for seconds, _, steps in runs), 3)
                    blocks = [b for o in outputs if (b := getattr(o, "spec_decode_metrics", None)) is not None]
                    if blocks:
                        rounds = sum(sum(b.histogram) for b in blocks)
                        accepted = sum(j * c for b in blocks for j, c in enumerate(b.histogram))
                        drafted = sum(b.num_draft_tokens for b in blocks)
                        row["drafted"] = round(drafted / max(1, rounds), 2)
                        row["length"] = round(1 + accepted / max(1, rounds), 2)
                        row["drafting_share"] = round((rounds + accepted) / num_tokens, 2)
                    found["rows"].append(row)
                    if name == "greedy":
                        found["answers"][f"{kind} {at_once}"] = [list(o.token_ids) for o in outputs]
                    print(contestant, row, flush=True)
        if args.profile:
            try:
                parts = {"propose": speculator, "execute_model": runner, "sample_tokens": runner}
                parts |= dict.fromkeys(("schedule", "update_from_output"), getattr(core, "scheduler", None))
                found["profile"] = profile(lambda: run(next(iter(kinds.values()))[:2], 1, SAMPLINGS["greedy"]), parts)
            except Exception as error:  # no tracer on this machine: the other figures stand
                found["profile"] = {"error": str(error)[:200]}
    return found


def await_others(contestant: str, args: argparse.Namespace) -> None:
    """Wait until all are ready, or have failed: who still starts would be measured by the others."""
    file_of(contestant, args).with_suffix(".ready").touch()
    end = time.monotonic() + args.wait
    while time.monotonic() < end:
        stems = {file.stem for kind in ("ready", "json") for file in Path(args.logs).glob(f"vllm.*.{kind}")}
        if len(stems) >= (args.num or len(args.contestants.split(","))):
            return
        time.sleep(0.5)


def file_of(contestant: str, args: argparse.Namespace) -> Path:
    return Path(args.logs) / f"vllm.{args.tag}{contestant.replace(':', '_').replace('@', '_').replace('.', '')}.x"


def profile(run: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds per step: of the host in some methods, then of the device, and of the kernels that take most."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as traced

    spent = dict.fromkeys(parts, 0.0)

    def timed(name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - start

        return call

    had = {name: getattr(of, name) for name, of in parts.items() if hasattr(of, name)}
    for name, method in had.items():
        setattr(parts[name], name, timed(name, method))
    seconds, _, steps = run()
    for name in had:
        delattr(parts[name], name)
    found: dict[str, Any] = {"steps": steps, "ms_per_step": round(1e3 * seconds / steps, 3)}
    found["host_ms"] = {name: round(1e3 * spent[name] / steps, 3) for name in had}
    try:
        with traced(activities=[ProfilerActivity.CUDA]) as trace:
            _, _, steps = run()
    except Exception as error:  # no tracer on this machine
        return found | {"error": str(error)[:200]}
    rows = sorted(trace.key_averages(), key=lambda r: -r.self_device_time_total)
    found["device_ms_per_step"] = round(sum(r.self_device_time_total for r in rows) / 1e3 / steps, 3)
    return found | {"top": [(r.key[:48], r.count, round(r.self_device_time_total / 1e3 / steps, 4)) for r in rows[:8]]}


def summary(found: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The last contestant over no draft and over vLLM's own best length, by load; the worst of sampling and kind of prompt."""
    rates = {
        name: {(r["sampling"], r["kind"], r["at"]): r["tokens_per_s"] for r in one["rows"]}
        for name, one in found.items()
        if "rows" in one
    }
    ours, own = list(found)[-1], [name for name in rates if name.startswith("own")]
    if ours not in rates:
        return {}
    over: dict[str, Any] = {"over_no_draft": {}, "over_own_best_k": {}}
    for at in args.at:
        cases = [case for case in rates[ours] if case[2] == at]
        if "none" in rates:
            over["over_no_draft"][str(at)] = round(min(rates[ours][c] / rates["none"][c] for c in cases), 3)
        if own:
            over["over_own_best_k"][str(at)] = round(min(rates[ours][c] / max(rates[o][c] for o in own) for c in cases), 3)
    return over


def table(found: dict[str, Any]) -> None:
    """Every contestant's rows, and how many of its greedy answers are those of no draft."""
    base = found.get("none", {})
    for name, one in found.items():
        if "error" in one:
            print(f"{name}: {one['error'][-700:]}")
            continue
        about = {k: one[k] for k in ("ready_s", "v2", "async", "speculator") if k in one}
        print(f"{name} {about}" + (f" {one['profile']}"[:420] if "profile" in one else ""))
        rows: dict[tuple[str, str], list[str]] = {}
        for r in one["rows"]:
            same = [(r["sampling"], r["kind"], r["at"]) == (b["sampling"], b["kind"], b["at"]) for b in base.get("rows", [])]
            ratio = f" {r['tokens_per_s'] / base['rows'][same.index(True)]['tokens_per_s']:.2f}x" if any(same) else ""
            length = f" len {r['length']}/{r['drafted']}/{r['drafting_share']}" if "length" in r else ""
            rows.setdefault((r["sampling"], r["kind"]), []).append(
                f"{r['at']}: {r['tokens_per_s']:.0f}{ratio} {r['ms_per_step']}ms{length}"
            )
        for case, cells in rows.items():
            print("  ", *case, "|", " | ".join(cells))
        if base.get("answers") and name != "none":
            equal = {at: sum(a == b for a, b in zip(x, base["answers"][at], strict=True)) for at, x in one["answers"].items()}
            print("   equal to none:", equal)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("model")
    p.add_argument("draft")
    p.add_argument("--contestants", default="none,own:2,own:3,own:5,ours")
    p.add_argument("--at", default="1,8,32", type=lambda s: [int(x) for x in s.split(",")])
    p.add_argument("--samplings", default="greedy,top-p")
    p.add_argument("--tokens", type=int, default=96)
    p.add_argument("--most", type=int, default=8, help="num_speculative_tokens of ours")
    p.add_argument("--repeats", type=int, default=2)
    p.add_argument("--ids", help="a JSON file of prompts as token ids, in place of the texts here")
    p.add_argument("--more", default="{}", help="further options of vllm.LLM, as JSON")
    p.add_argument("--cache-mib", type=int, default=3072)
    p.add_argument("--limit", type=int, default=330, help="seconds for all of it")
    p.add_argument("--logs", default=tempfile.gettempdir())
    p.add_argument("--profile", action="store_true")
    p.add_argument("--wait", type=int, default=150, help="seconds to wait for others to be ready")
    p.add_argument("--num", type=int, help="how many processes start, where other runs share the logs and the lock")
    p.add_argument("--tag", default="", help="goes before the names of files")
    p.add_argument("--out")
    p.add_argument("--one", help=argparse.SUPPRESS)
    p.add_argument("--lock", default=os.path.join(tempfile.gettempdir(), "vllm_gpu.lock"))
    args = p.parse_args()
    names = args.contestants.split(",")
    files = {name: file_of(name, args) for name in names}
    if args.one:
        try:
            result = measure(args.one, args)
        except BaseException:
            result = {"error": traceback.format_exc()[-6000:]}
            traceback.print_exc()
        files[args.one].with_suffix(".json").write_text(json.dumps(result))
        sys.stdout.flush()
        os._exit(1 if "error" in result else 0)  # vLLM's threads have nothing to say to us
    end, children = time.monotonic() + args.limit, {}
    for name, file in files.items():
        for kind in (".json", ".ready"):
            file.with_suffix(kind).unlink(missing_ok=True)
        command = [sys.executable, __file__, *sys.argv[1:], "--one", name]
        with file.with_suffix(".log").open("w") as log:
            children[name] = subprocess.Popen(
                command, env=ENVIRONMENT | os.environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
    found: dict[str, Any] = {}
    for name, child in children.items():
        try:
            child.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
        text = files[name].with_suffix(".log").read_text()
        written = files[name].with_suffix(".json")
        found[name] = json.loads(written.read_text()) if written.is_file() else {"error": "ran past its limit\n" + text[-1500:]}
        print(f"== {name}", *[line[:200] for line in text.splitlines() if "specdecpp" in line][:6], sep="\n   ", flush=True)
    over = summary(found, args)
    if args.out:
        kept = {name: {k: v for k, v in one.items() if k != "answers"} for name, one in found.items()}
        Path(args.out).write_text(json.dumps({"summary": over, "contestants": kept}, indent=1) + "\n")
    table(found)
    print("summary", json.dumps(over))


if __name__ == "__main__":
    main()
