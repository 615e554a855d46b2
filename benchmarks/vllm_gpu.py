"""vLLM on a GPU: without a draft, with its own draft of K tokens, and with the plugin. Each in a process of its own.

    python benchmarks/vllm_gpu.py MODEL DRAFT --data FOLDER --out benchmarks/results/vllm_gpu.json

A contestant is `none`, `own:K`, or `ours`, where wanted with a policy: `ours:fixed:3`, `ours:cumulative:0.2`. All start
together; those that are ready wait on a pipe and take no time of anybody, and then answer the same prompts one after the other,
in an order that is drawn anew for every case: a case is a kind of sampling, a kind of prompt and a number of requests kept
running. What counts are the tokens made while so many run. The first step over all cases is not counted. FOLDER has
HumanEval.jsonl.gz (`code`), gsm8k_test.jsonl and alpaca_1k.jsonl (`others`).

`summary` compares the last of ours with no draft and with the best of vLLM's own lengths, by the worst case; what is not there,
failed or came too late is left out, and the file is written anew after every case.
"""

import argparse
import gzip
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from itertools import product
from pathlib import Path
from typing import Any

SAMPLINGS: dict[str, dict[str, float]] = {"greedy": {"temperature": 0.0}, "top-p": {"temperature": 0.7, "top_p": 0.9}}
REQUESTS = {1: 5, 8: 16}
"""Requests of a case by how many run together; else twice as many."""
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip


def prompts_of(model: str, data: Path, num: int) -> dict[str, list[list[int]]]:
    """Questions of both kinds as the ids of a chat."""
    from transformers import AutoTokenizer

    def lines(name: str) -> list[dict[str, str]]:
        path = data / name
        return [json.loads(line) for line in (gzip.open(path, "rt") if name.endswith("gz") else path.open())]

    tokenizer = AutoTokenizer.from_pretrained(model)
    code = [f"Complete this function:\n\n{one['prompt']}" for one in lines("HumanEval.jsonl.gz")]
    alpaca = [one["instruction"] + (f"\n\n{one['input']}" if one.get("input") else "") for one in lines("alpaca_1k.jsonl")]
    others = [
        text for pair in zip((one["question"] for one in lines("gsm8k_test.jsonl")), alpaca, strict=False) for text in pair
    ]

    def ids(text: str) -> list[int]:
        if tokenizer.chat_template is None:
            text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        else:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
        return list(tokenizer(text, add_special_tokens=False).input_ids)[-400:]

    return {kind: [ids(text) for text in texts[:num]] for kind, texts in (("code", code), ("others", others))}


def engine_options(contestant: str, args: argparse.Namespace) -> dict[str, Any]:
    """What a contestant asks of vLLM."""
    kind, _, rest = contestant.partition(":")
    options: dict[str, Any] = {
        "model": args.model, "dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": max(args.at), "seed": 0,
        "enable_prefix_caching": False, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": args.cache_mib << 20,
        "skip_tokenizer_init": True,
    }  # fmt: skip
    if kind != "none":
        options["speculative_config"] = {
            "method": "draft_model", "model": args.draft, "draft_sample_method": "probabilistic",
            "num_speculative_tokens": int(rest) if kind == "own" else args.most,
        }  # fmt: skip
        options["per_request_spec_decode_metrics"] = "detailed"
        if kind == "ours":
            options["additional_config"] = {"specdecpp": {"policy": rest} if rest else {}}
    return options | json.loads(args.more)


class Contestant:
    """An engine in this process, which serves cases when it is told to."""

    def __init__(self, name: str, args: argparse.Namespace):
        import torch
        from vllm import LLM  # pyright: ignore[reportMissingImports]

        began = time.perf_counter()
        self.args, self.num = args, 0
        self.engine: Any = LLM(**engine_options(name, args)).llm_engine
        core = getattr(self.engine.engine_core, "engine_core", None)
        self.scheduler: Any = getattr(core, "scheduler", None)
        worker: Any = getattr(getattr(core, "model_executor", None), "driver_worker", None)
        self.runner: Any = getattr(getattr(worker, "worker", worker), "model_runner", None)
        config = self.engine.vllm_config
        self.about = {
            "ready_s": round(time.perf_counter() - began, 1),
            "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
            "v2": config.use_v2_model_runner,
            "async": bool(config.scheduler_config.async_scheduling),
            "speculator": type(getattr(self.runner, "speculator", None)).__name__,
        }
        while not Path(args.ids).exists():
            time.sleep(0.2)
        self.prompts = json.loads(Path(args.ids).read_text())

    def serve(self, sampling: str, kind: str, at: int, num: int = 0, tokens: int = 0) -> dict[str, Any]:
        """Answer `num` prompts, `at` of them at once; tokens per second while so many run."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        num, limit, prompts = num or REQUESTS.get(at, 2 * at), tokens or self.args.tokens, self.prompts[kind]
        names: dict[str, int] = {}
        answers: dict[int, list[int]] = {}
        steps, made, window, blocks = 0, 0, None, []
        spent = self._timed() if self.args.profile else {}
        start = time.perf_counter()
        running, given = 0, 0
        times: dict[bool, list[float]] = {True: [], False: []}  # of steps behind an arrival, and of others
        last, since = start, 0
        while given < num or running:
            since += 1
            while given < num and running < at:
                how = SamplingParams(
                    **SAMPLINGS[sampling], max_tokens=limit, ignore_eos=True, detokenize=False, seed=given,
                    output_kind=RequestOutputKind.DELTA,
                )  # fmt: skip
                name = f"r{self.num}"
                self.num += 1
                names[name], answers[given] = given, []
                self.engine.add_request(name, {"prompt_token_ids": prompts[given % len(prompts)]}, how)
                given, running, since = given + 1, running + 1, 0
            steps += window is None
            for output in self.engine.step():
                one = output.outputs[0]
                answers[names[output.request_id.partition("-")[0]]] += one.token_ids
                made += len(one.token_ids)
                if output.finished:
                    running -= 1
                    if (block := getattr(one, "spec_decode_metrics", None)) is not None:
                        blocks.append(block)
            now = time.perf_counter() - start
            times[since <= 1].append(start + now - last)  # an output comes a step after its pass was begun
            last = start + now
            if window is None and ((given == num and running < at) or now > self.args.visit_s):
                window = made, now
                if now > self.args.visit_s:
                    given = num
                    self.engine.abort_request(list(names))
                    break
        assert window is not None
        row: dict[str, Any] = {
            "tokens_per_s": round(window[0] / window[1], 1),
            "ms_per_step": round(1e3 * window[1] / steps, 3),
            "ms_with_prompts": round(1e3 * statistics.median(times[True]), 3),
            "ms_decoding": round(1e3 * statistics.median(times[False]), 3) if times[False] else None,
        }
        if spent:
            row["host_ms"] = {name: round(1e3 * seconds / steps, 3) for name, seconds in spent.items()}
            for of, name in self._parts():
                delattr(of, name)
        if blocks:
            rounds = sum(sum(b.histogram) for b in blocks)
            row["length"] = round(1 + sum(j * c for b in blocks for j, c in enumerate(b.histogram)) / max(1, rounds), 2)
            row["drafted"] = round(sum(b.num_draft_tokens for b in blocks) / max(1, rounds), 2)
            row["drafting_share"] = round(rounds * row["length"] / max(1, made), 2)
        if sampling == "greedy":
            row["answers"] = [answers[i] for i in sorted(answers)]
        return row

    def warm(self) -> None:
        """Whatever is compiled when it is first used; what ours has learned beside others that do the same is forgotten."""
        for sampling, at in product(self.args.samplings, self.args.at):
            self.serve(sampling, "code", at, num=at, tokens=24)
        if (lengths := getattr(self.scheduler, "lengths", None)) is not None:
            lengths.forget()

    def _parts(self) -> list[tuple[Any, str]]:
        of = [(getattr(self.runner, "speculator", None), "propose"), (self.runner, "execute_model")]
        of += [(self.runner, "sample_tokens"), (self.scheduler, "schedule"), (self.scheduler, "update_from_output")]
        return [(one, name) for one, name in of if hasattr(one, name)]

    def _timed(self) -> dict[str, float]:
        """Seconds of the host in some methods from now on."""
        spent = {name: 0.0 for _, name in self._parts()}

        def timed(name: str, method: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                start = time.perf_counter()
                try:
                    return method(*args, **kwargs)
                finally:
                    spent[name] += time.perf_counter() - start

            return call

        for of, name in self._parts():
            setattr(of, name, timed(name, getattr(of, name)))
        return spent


def serve_cases(name: str, args: argparse.Namespace) -> None:
    """A contestant's process: say what it is, then one line for every line that comes."""
    with os.fdopen(args.reply, "w", buffering=1) as reply:
        try:
            contestant = Contestant(name, args)
            contestant.warm()
            reply.write(json.dumps(contestant.about) + "\n")
            for line in sys.stdin:
                args.profile = (case := json.loads(line)).pop("profile")
                reply.write(json.dumps(contestant.serve(**case)) + "\n")
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
    os._exit(1)  # vLLM's threads have nothing to say to us


class Child:
    """A contestant's process, as its parent sees it."""

    def __init__(self, name: str, args: argparse.Namespace):
        self.name = name
        self.log = Path(args.logs) / f"vllm.{name.replace(':', '_').replace('@', '_').replace('.', '')}.log"
        self.replies, write = os.pipe()
        self._rest = b""
        self.error = ""
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--one", name, "--reply", str(write), "--ids", args.ids],
                env=ENVIRONMENT | os.environ, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True, pass_fds=[write], text=True,
            )  # fmt: skip
        os.close(write)

    def heard(self, seconds: float) -> dict[str, Any] | None:
        """The next line, or None: then it has failed, or is late, and is over."""
        end = time.monotonic() + seconds
        while b"\n" not in self._rest:
            if not select.select([self.replies], [], [], max(0.0, end - time.monotonic()))[0]:
                return self.stop(f"nothing came in {seconds:.0f} s")
            if not (more := os.read(self.replies, 1 << 20)):
                return self.stop("it ended")
            self._rest += more
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def asked(self, case: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        try:
            print(json.dumps(case), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return self.stop("it ended")
        return self.heard(seconds)

    def stop(self, why: str = "") -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if why and not self.error:
            text = [line for line in self.log.read_text().splitlines() if "base.py:380" not in line]
            self.error = f"{why}: " + " / ".join(line[-160:] for line in text[-4:])


def summary(cells: dict[str, dict[tuple[str, str, int], float]], at: list[int]) -> dict[str, Any]:
    """The last of ours over no draft and over vLLM's own best length, by load; the worst of sampling and kind of prompt."""
    over: dict[str, Any] = {"over_no_draft": {}, "over_own_best_k": {}}
    ours = cells.get("ours", {})
    for load in at:
        cases = [case for case in ours if case[2] == load]
        for name, others in (("over_no_draft", ["none"]), ("over_own_best_k", [n for n in cells if n.startswith("own")])):
            rates = {case: [cells[o][case] for o in others if case in cells.get(o, {})] for case in cases}
            if found := [ours[case] / max(of) for case, of in rates.items() if of]:
                over[name][str(load)] = round(min(found), 3)
    plain = cells.get("none", {})
    code = [ours[case] / plain[case] for case in ours if case[1:] == ("code", 1) and case in plain]
    return over | ({"code_at_1_over_no_draft": round(min(code), 3)} if code else {})


def compare(args: argparse.Namespace, children: list[Child]) -> None:
    """Ask all case by case, and print the table."""
    end = time.monotonic() + args.limit
    names = [child.name for child in children]
    num = max(REQUESTS.get(int(at), 2 * int(at)) for at in args.at)
    Path(args.ids + ".part").write_text(json.dumps(prompts_of(args.model, Path(args.data), num)))
    os.rename(args.ids + ".part", args.ids)
    about, ready = {}, time.monotonic() + args.wait
    for child in children:
        if (said := child.heard(max(1.0, min(ready, end) - time.monotonic()))) is not None:
            about[child.name] = said
    print(f"{len(about)} of {len(names)} ready, {end - time.monotonic():.0f} s left", flush=True)
    rows: dict[str, dict[tuple[str, str, int], list[dict[str, Any]]]] = {name: {} for name in names}
    every: list[tuple[str, str, int]] = list(product(args.samplings, ["code", "others"], args.at))
    drawn = random.Random(0)
    for repeat in range(args.repeats + 1):
        drawn.shuffle(every)
        for case in every:
            if end - time.monotonic() < 3 or (not repeat and case[1] == "code"):
                continue
            drawn.shuffle(children)
            for child in children:
                given = named(case) | {"profile": args.profile and not repeat}
                left = min(args.visit_s + 15, end - time.monotonic())
                if child.error or left < 1 or (row := child.asked(given, left)) is None:
                    continue
                rows[child.name].setdefault(case, []).append(row | {"repeat": repeat})
                print(child.name, repeat, *case, {k: v for k, v in row.items() if k != "answers"}, flush=True)
            write(rows, about, children, names, args)
    show(rows, about, {child.name: child.error for child in children}, args)
    print("summary", json.dumps(write(rows, about, children, names, args)))


def counted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["repeat"]]


def named(case: tuple[str, str, int]) -> dict[str, Any]:
    return dict(zip(("sampling", "kind", "at"), case, strict=True))


def rate(rows: list[dict[str, Any]]) -> float:
    return statistics.median(row["tokens_per_s"] for row in rows) if rows else 0.0


def write(rows: Any, about: Any, children: list[Child], names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """What is known by now."""
    over = summary(
        {name: {case: rate(of) for case, had in rows[name].items() if (of := counted(had))} for name in names}, args.at
    )
    found = {name: dict(about.get(name, {})) for name in names}
    for child in children:
        found[child.name] |= {"error": child.error} if child.error else {}
        had = [(case, row) for case, of in rows[child.name].items() for row in of]
        found[child.name]["rows"] = [named(case) | {k: v for k, v in row.items() if k != "answers"} for case, row in had]
    if args.out:
        written = {"summary": over, "more": json.loads(args.more), "contestants": found}
        Path(args.out).write_text(json.dumps(written, indent=1) + "\n")
    return over


def show(rows: Any, about: Any, errors: dict[str, str], args: argparse.Namespace) -> None:
    """Tokens per second of every case, and how many greedy answers are those of no draft."""
    columns = [(kind, at) for at in args.at for kind in ("code", "others")]
    print("tokens/s, over no draft, length/drafted:", *(f"{kind}@{at}" for kind, at in columns), sep=" | ")
    for name in rows:
        said = about.get(name, {})
        kind = "" if not said else ("" if said["v2"] and said["async"] else "FIRST BACKEND ") + f"{said['ready_s']:.0f}s"
        for sampling in args.samplings:
            cells = []
            for column in columns:
                of, base = (counted(rows.get(n, {}).get((sampling, *column), [])) for n in (name, "none"))
                mine, plain = rate(of), rate(base)
                last = of[-1] if of else {}
                cells.append(
                    f"{mine:.0f}" + (f" {mine / plain:.2f}x" if plain and name != "none" else "")
                    + (f" {last['length']}/{last['drafted']}" if "length" in last else "")
                )  # fmt: skip
            print(name, sampling, kind, "|", " | ".join(cells))
        equal = []
        for column in columns:
            mine, base = (rows.get(n, {}).get(("greedy", *column), []) for n in (name, "none"))
            if mine and base and name != "none":
                pairs = list(zip(mine[-1]["answers"], base[-1]["answers"], strict=False))
                equal.append(f"{sum(all(x == y for x, y in zip(a, b, strict=False)) for a, b in pairs)}/{len(pairs)}")
        first = rows[name].get(("greedy", "others", 1), [])
        hosts = [row["host_ms"] | {"step": row["ms_per_step"]} for row in first if "host_ms" in row]
        if equal or hosts:
            print("  equal", *equal, "| host ms a step at 1:", *(f"{k[:7]} {v}" for k, v in (hosts or [{}])[-1].items()))
        if errors.get(name):
            print("  FAILED", errors[name][-330:])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("model")
    p.add_argument("draft")
    p.add_argument("--data", default=".", help="the folder of the questions")
    p.add_argument("--contestants", default="none,ours,own:3,own:2,ours:fixed:3,own:4", type=lambda s: s.split(","))
    p.add_argument("--at", default="1,8,32", type=lambda s: [int(x) for x in s.split(",")])
    p.add_argument("--samplings", default="greedy,top-p", type=lambda s: s.split(","))
    p.add_argument("--tokens", type=int, default=96)
    p.add_argument("--most", type=int, default=8, help="num_speculative_tokens of ours")
    p.add_argument("--repeats", type=int, default=2)
    p.add_argument("--more", default="{}", help="further options of vllm.LLM, as JSON")
    p.add_argument("--cache-mib", type=int, default=3072)
    p.add_argument("--limit", type=float, default=270, help="seconds for all of it")
    p.add_argument("--wait", type=float, default=150, help="seconds to wait for all to be ready")
    p.add_argument("--visit-s", type=float, default=6, help="seconds that one case of one contestant may take")
    p.add_argument("--profile", action="store_true", help="time the host's part in the step that is not counted")
    p.add_argument("--logs", default=tempfile.gettempdir())
    p.add_argument("--out")
    for name, kind in (("--one", str), ("--reply", int), ("--ids", str)):
        p.add_argument(name, type=kind, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.one:
        serve_cases(args.one, args)
    args.ids = os.path.join(tempfile.mkdtemp(), "ids.json")
    children = [Child(name, args) for name in args.contestants]
    try:
        compare(args, children)
    finally:
        for child in children:
            child.stop()


if __name__ == "__main__":
    main()
