"""Whether greedy answers stay the same, token for token, under every rule and every format of weights; and whether sampled ones
have the target's distribution. SmolLM2 (or another GGUF file) with the compiled backend.

    python benchmarks/identity.py FILE.gguf [--prompts gsm8k_test.jsonl] [--minutes 20] --out benchmarks/results/identity.json

The file is taken as it is, and its values are written anew in the other formats. For every other prompt the draft is the
target's first layers, which agree seldom, and for the rest the whole target in a neighbouring format, which agrees mostly:
short and long runs of accepted draft tokens are both there. Every rule of the command line takes part; those that need a head
get an untrained one, since who decides when to stop must not matter. The file's own format sees every rule on every
prompt, the others as many rules a prompt as --rotate says, in turn.

Then chi-square at temperature 1: `specdecpp.bench.lossless` with p and q computed by torch from the file's values, all rules
together failing by chance in one run of a thousand.

A run does what --minutes leave it time for and goes on where it stopped: the file that it writes is its state.
"""

import argparse
import ctypes
import hashlib
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peers.provenance import provenance

import specdecpp as sd
from specdecpp import cache_dir
from specdecpp.backends import Model
from specdecpp.bench.lossless import FALSE_ALARM, chi_square_p, parts
from specdecpp.decoder import encode
from specdecpp.head import Calibration, HeadCard
from specdecpp.loading import gguf_writing
from specdecpp.loading.gguf import GGUF
from specdecpp.loading.gguf_writing import cut
from specdecpp.policies import Costs
from specdecpp.policy_spec import KINDS, WRAPPERS, parse_policy
from specdecpp.sampling import Sampling
from specdecpp.testing import practice_prompts
from specdecpp.verify import GreedyVerification, TokenVerification

OWN = "as it is"
LAYERS = 4
"""Of the target, which draft: a draft that is often wrong tries more of a step than one that agrees."""
WRITTEN = ("q8_0", "q4_0", "q4_1", "f16", "bf16", "f32")
K_QUANTS = {"q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}
"""What llama.cpp's quantiser calls them. Rows that are no whole blocks of 256 get its nearest smaller blocks."""
MORE = {"fixed": ("fixed:1", "fixed:4", "fixed:9"), "max-confidence": ("max-confidence", "max-confidence:drop=true")}
"""Settings of a rule where its defaults are not all that matters."""
WRAPPED = {"auto-off": "auto-off:cumulative", "bandit": "bandit:fixed:2|cumulative|entropy"}
TREES = ("tree:4x2", "tree:costs")
COSTS = Costs(draft_s=0.3, passes={1: 1.0, 9: 1.5})
"""Made up, so that stops do not depend on how busy the machine is."""
BLOCK = 10
"""Prompts after which the state is written."""


class Formats:
    """The files of each format, made when they are first asked for."""

    def __init__(self, file: Path, folder: Path, backend: Any):
        self._file, self._folder, self._backend = file, folder, backend
        self._pairs: dict[str, list[sd.Pair]] = {}

    def path(self, name: str) -> Path:
        """The target in a format. Raises ImportError where llama.cpp would have to write it and is not there."""
        if name == OWN:
            return self._file
        path = self._folder / f"target-{name}.gguf"
        if not path.exists():
            self._quantise(path, K_QUANTS[name]) if name in K_QUANTS else self._write(path, name)
        return path

    def pairs(self, name: str) -> list[sd.Pair]:
        """With the first layers as the draft, and with the whole in another format."""
        if name not in self._pairs:
            target, short = self.path(name), self._folder / f"draft-{name.replace(' ', '-')}.gguf"
            if not short.exists():
                cut(target, short, LAYERS)
            near = self.path("q4_0" if name == OWN else OWN)
            self._pairs[name] = [sd.load_pair(target, draft=draft, backend=self._backend) for draft in (short, near)]
        return self._pairs[name]

    def keep(self, name: str) -> None:
        """Let the pairs of other formats go."""
        self._pairs = {name: self.pairs(name)}

    def _write(self, path: Path, name: str) -> None:
        file = GGUF(self._file)
        gguf_writing.write(file.model, file.tokenizer(), path, precision=gguf_writing.Precision(name), name=name)

    def _quantise(self, path: Path, kind: int) -> None:
        import llama_cpp  # pyright: ignore[reportMissingImports]

        quiet = llama_cpp.llama_log_callback(lambda *_: None)  # it says a line for each tensor
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype = kind
        with cache_dir.whole(path) as part:
            if llama_cpp.llama_model_quantize(bytes(self.path("f32")), bytes(part), options):
                raise RuntimeError(f"llama.cpp cannot write {path.name}")


def rules() -> list[str]:
    """Every rule of the command line."""
    names = [spec for name in KINDS for spec in MORE.get(name, (name,))]
    return [*names, *(WRAPPED[name] for name in WRAPPERS), *TREES]


@cache
def policy_of(spec: str, width: int) -> sd.Policy:
    """A rule, with an untrained head where it needs one."""
    card = HeadCard(hidden_size=width, calibration=Calibration(num_labels=1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return parse_policy(spec).build(sd.AcceptanceHead(card))


def answers(pair: sd.Pair, spec: str, ids: list[int], **options: Any) -> sd.Output:
    """One answer under a rule, or of the target alone."""
    policy = policy_of(spec, pair.draft.hidden_size)
    verification = TokenVerification() if options["temperature"] else GreedyVerification()
    return sd.Decoder(pair, policy=policy, verification=verification, costs=COSTS).generate(ids, **options)


# Greedy


def tested(name: str, index: int, rotate: int) -> list[str]:
    """The rules that a prompt is decoded under."""
    every = rules()
    if name == OWN:
        return every
    return [every[(rotate * index + i) % len(every)] for i in range(rotate)]


def compare(formats: Formats, name: str, index: int, prompt: str, args: argparse.Namespace) -> dict[str, Any]:
    """One prompt in one format: counts by rule, and where an answer leaves the target's own."""
    pair = formats.pairs(name)[index % 2]
    ids = encode(pair, [{"role": "user", "content": prompt}])
    options = {"max_tokens": args.tokens, "temperature": 0.0}
    own = answers(pair, "none", ids, **options).tokens
    found: dict[str, Any] = {}
    for spec in tested(name, index, args.rotate):
        out = answers(pair, spec, ids, **options)
        at = next((i for i, (a, b) in enumerate(zip(own, out.tokens, strict=False)) if a != b), min(len(own), len(out.tokens)))
        found[spec] = {
            "prompts": 1,
            "tokens": len(out.tokens),
            "rounds": out.metrics.num_spec_steps,
            "drafted": out.metrics.num_draft_tokens,
            "accepted": out.metrics.num_accepted_draft_tokens,
            "differ": [] if out.tokens == own else [{"prompt": index, "token": at}],
        }
    return found


def add(total: dict[str, Any], found: dict[str, Any]) -> None:
    """Counts of one prompt onto those of the others."""
    for spec, counts in found.items():
        known = total.setdefault(spec, dict.fromkeys(counts, 0) | {"differ": []})
        for key, value in counts.items():
            known[key] = known[key] + value


# Sampling


def sampled(formats: Formats, prompts: list[str], spec: str, args: argparse.Namespace) -> dict[str, Any]:
    """Chi-square of answers at temperature 1 under one rule, in the file's own format."""
    pairs = formats.pairs(OWN)
    exact = [replace(pair, target=_exact(pair.target_name), draft=_exact(pair.draft_name)) for pair in pairs]
    counts, distributions = [], []
    for i, prompt in enumerate(prompts):
        ids = encode(pairs[i % 2], [{"role": "user", "content": prompt}])
        out = answers(pairs[i % 2], spec, ids, max_tokens=args.tokens, temperature=1.0, seed=i)
        side = parts(exact[i % 2], ids, out.tokens, Sampling())
        counts.append(side[0])
        distributions.append(side[1])
    p_value = chi_square_p(torch.cat(counts), torch.cat(distributions))
    return {"answers": len(prompts), "tokens": sum(map(len, counts)), "p_value": p_value, "least": FALSE_ALARM / len(rules())}


_EXACT: dict[str, Model] = {}


def _exact(name: str) -> Model:
    """A file's values in float32, computed by torch."""
    if name not in _EXACT:
        model = GGUF(name)
        _EXACT[name] = model.backend("eager", vocab_size=model.num_rows)
    return _EXACT[name]


# The run


def read_prompts(path: Path | None, num: int) -> list[str]:
    """From a file of JSON lines (`question`, `prompt` or `instruction`), evenly spread; without one, this library's own."""
    if path is None:
        found = practice_prompts()
    else:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        found = [next(row[key] for key in ("question", "prompt", "instruction") if key in row) for row in rows]
    return [found[i * len(found) // num] for i in range(min(num, len(found)))]


def work(state: dict[str, Any], formats: Formats, prompts: list[str], args: argparse.Namespace) -> Iterator[str]:
    """Everything that is left to do, a word after each part."""
    for start in range(0, len(prompts), BLOCK):
        for name in args.format:
            block = state["greedy"].setdefault(name, {"prompts": 0, "rules": {}})
            for index in range(max(start, block["prompts"]), min(start + BLOCK, len(prompts))):
                try:
                    found = compare(formats, name, index, prompts[index], args)
                except ImportError:
                    block["note"] = "not tried: llama.cpp, which writes this format, is not installed"
                    break
                add(block["rules"], found)
                block["prompts"] = index + 1
                differ = sum(len(counts["differ"]) for counts in block["rules"].values())
                yield f"{name}: {index + 1} of {len(prompts)} prompts, {differ} answers differ"
    formats.keep(OWN)
    for spec in rules():
        if spec not in state["sampled"] and spec != "max-confidence:drop=true":  # which is sound for greedy answers only
            state["sampled"][spec] = sampled(formats, prompts[: args.sampled], spec, args)
            yield f"{spec}: p-value {state['sampled'][spec]['p_value']:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path, help="the target, a GGUF file")
    parser.add_argument("--prompts", type=Path, help="JSON lines with question, prompt or instruction (default: our own)")
    parser.add_argument("--num", type=int, default=200, help="prompts (default: 200)")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer (default: 48)")
    parser.add_argument("--sampled", type=int, default=60, help="answers a rule for the chi-square (default: 60)")
    parser.add_argument("--format", action="append", choices=[OWN, *WRITTEN, *K_QUANTS], help="only this; repeatable")
    parser.add_argument("--backend", choices=["native", "native-int8"], default="native")
    parser.add_argument("--rotate", type=int, default=2, help="rules a prompt in the formats written anew (default: 2)")
    parser.add_argument("--minutes", type=float, help="stop in time and go on another day")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/identity"), help="for the files written (default: build/identity)"
    )
    parser.add_argument("--quick", action="store_true", help="2 prompts, 8 tokens")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.quick:
        args.num, args.tokens, args.sampled = 2, 8, 2
    args.format = args.format or [OWN, *WRITTEN, *K_QUANTS]
    prompts = read_prompts(args.prompts, args.num)
    state = opened(args, prompts)
    args.folder /= state["settings"]["file"]  # what was written of another file stays apart
    args.folder.mkdir(parents=True, exist_ok=True)
    began = saved = time.monotonic()
    for word in work(state, Formats(args.file, args.folder, args.backend), prompts, args):
        print(word, flush=True)
        is_over = args.minutes is not None and time.monotonic() - began > 60 * args.minutes
        if is_over or time.monotonic() - saved > 20:
            cache_dir.write(args.out, json.dumps(state, indent=1) + "\n")
            saved = time.monotonic()
        if is_over:
            print("Time is up; the same command goes on.")
            return
    state["complete"] = True
    cache_dir.write(args.out, json.dumps(state, indent=1) + "\n")
    print(summary(state))


def opened(args: argparse.Namespace, prompts: list[str]) -> dict[str, Any]:
    """The state so far. Exits where it is that of another run."""
    settings = {
        "file": hashlib.sha256(args.file.read_bytes()).hexdigest()[:16],
        "prompts": hashlib.sha256("\0".join(prompts).encode()).hexdigest()[:16],
        **{key: getattr(args, key) for key in ("num", "tokens", "sampled", "rotate", "backend")},
    }
    if not args.out.exists():
        about = provenance("python", "benchmarks/identity.py")
        return {**about, "settings": settings, "complete": False, "greedy": {}, "sampled": {}}
    state = json.loads(args.out.read_text(encoding="utf-8"))
    if state["settings"] != settings:
        raise SystemExit(f"{args.out} is of a run with other settings: {state['settings']}, not {settings}. Name another file.")
    return state | {"complete": False}


def summary(state: dict[str, Any]) -> str:
    """What came out, in lines."""
    lines = []
    for name, block in state["greedy"].items():
        of = block["rules"].values()
        differ, num = sum(len(r["differ"]) for r in of), sum(r["prompts"] for r in of)
        accepted = sum(r["accepted"] for r in of) / max(1, sum(r["drafted"] for r in of))
        told = block.get("note") or f"{differ} of {num} answers to {block['prompts']} prompts differ, {accepted:.0%} accepted"
        lines.append(f"{name}: {told}")
    failed = [spec for spec, found in state["sampled"].items() if found["p_value"] < found["least"]]
    least = min((found["p_value"] for found in state["sampled"].values()), default=1.0)
    lines.append(f"T = 1: {len(failed)} of {len(state['sampled'])} rules fail {failed or ''}, least p-value {least:.2g}")
    return "\n".join(lines)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # an untrained head says that it is one
    main()
