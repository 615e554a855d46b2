"""What another distribution than the target's buys: quality against speed for every lossy verification, beside the lossless
ones.

    python benchmarks/lossy.py --gsm8k gsm8k_test.jsonl [--pair smollm2] [--count 16] [--tokens 160]
                               [--out benchmarks/results/lossy.json]

Questions of GSM8K, each answered under every verification in turns, at temperature 0 and at .7 (top-p .9), with one stopping
rule. A row: tokens/s, accepted draft tokens, exact match (the last number after the last `####` or `=` of the text against
that of the solution), the share of tokens before the answer leaves the target's own greedy one (at temperature 0), and the mean
total variation a token. Nothing else should run.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from peers.provenance import provenance

import specdecpp as sd
from specdecpp.bench.contest import interleaved
from specdecpp.lab.lossy import Chow, Fuzzy, OptimalDeferral, TokenCascade, TVBudget, Typical
from specdecpp.metrics import Metrics
from specdecpp.policy_spec import as_prompt, label_of, parse_policy
from specdecpp.sampling import Sampling
from specdecpp.training.prompts import gsm8k
from specdecpp.verify import BlockVerification, TokenVerification, is_lossless, verification_for

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


SETTINGS: dict[str, Any] = {
    "target alone": TokenVerification(),
    "token": TokenVerification(),
    "block": BlockVerification(),
    **{f"fuzzy js {x:g}": Fuzzy(x) for x in (0.05, 0.1, 0.3)},
    **{f"chow {x:g}": Chow(x) for x in (0.1, 0.5)},
    **{f"opt {x:g}": OptimalDeferral(x) for x in (0.1, 0.5)},
    **{f"token-cascade {x:g}": TokenCascade(x) for x in (0.3, 0.7)},
    **{f"typical {x:g}": Typical(x) for x in (0.09, 0.3)},
    **{f"tv {x:g}": TVBudget(x) for x in (0.02, 0.1, 0.3)},
}


@dataclass(frozen=True)
class Question:
    """A question as a prompt, and its number."""

    prompt: Any
    number: float


def questions(pair: sd.Pair, path: Path, count: int) -> list[Question]:
    """The first questions of a file."""
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]
    return [Question(as_prompt(pair, gsm8k(row)), float(number(row["answer"].rpartition("####")[2]) or 0)) for row in rows]


def number(text: str) -> float | None:
    """The last number after the last `####` or `=`, or of the text where there is none after it."""
    for part in (re.split(r"####|=", text)[-1], text):
        if found := NUMBER.findall(part):
            return float(found[-1].replace(",", ""))
    return None


def agreement(tokens: Sequence[int], own: Sequence[int]) -> float:
    """The share of the target's own answer that comes before the first other token."""
    same = next((i for i, (a, b) in enumerate(zip(tokens, own, strict=False)) if a != b), min(len(tokens), len(own)))
    return same / max(1, len(own))


def measured(pair: sd.Pair, asked: Sequence[Question], sampling: Sampling, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one temperature."""
    policy = parse_policy(args.policy).build(pair.head)
    kinds = {name: v for name, v in SETTINGS.items() if args.only is None or any(name.startswith(o) for o in args.only)}
    kinds = {"target alone": TokenVerification()} | kinds
    if sampling.is_greedy:  # where several kinds are one
        once = {str(verification_for(sampling, v)): name for name, v in reversed(kinds.items()) if name != "target alone"}
        kinds = {name: v for name, v in kinds.items() if name == "target alone" or name in once.values()}
    decoders = {
        name: sd.Decoder(
            pair, policy=sd.Fixed(k=0) if name == "target alone" else policy, verification=v, lossless=False, reuses=False
        )
        for name, v in kinds.items()
    }

    def run(decoder: sd.Decoder, i: int, max_tokens: int) -> sd.Output:
        return decoder.generate(asked[i].prompt, max_tokens=max_tokens, sampling=sampling, seed=args.seed + i)

    outputs: dict[str, list[sd.Output]] = {name: [] for name in decoders}
    runs = {name: partial(run, decoder) for name, decoder in decoders.items()}
    for name, _, output in interleaved(runs, range(len(asked)), max_tokens=args.tokens):
        outputs[name].append(output)
    return [row(name, kinds[name], found, outputs["target alone"], asked, sampling) for name, found in outputs.items()]


def row(
    name: str,
    kind: Any,
    outputs: Sequence[sd.Output],
    own: Sequence[sd.Output],
    asked: Sequence[Question],
    sampling: Sampling,
) -> dict[str, Any]:
    """One verification at one temperature."""
    metrics = sum((output.metrics for output in outputs), Metrics())
    target = sum((output.metrics for output in own), Metrics())
    right = [number(output.text) == question.number for output, question in zip(outputs, asked, strict=True)]
    same = [agreement(output.tokens, alone.tokens) for output, alone in zip(outputs, own, strict=True)]
    return {
        "temperature": sampling.temperature,
        "verification": name,
        "lossless": is_lossless(verification_for(sampling, kind)),
        "tokens_per_second": round(metrics.tokens_per_second, 2),
        "speedup": round(metrics.tokens_per_second / target.tokens_per_second, 3),
        "draft_acceptance_rate": round(metrics.draft_acceptance_rate, 4),
        "exact_match": sum(right) / len(right),
        "agreement": round(sum(same) / len(same), 4) if sampling.is_greedy else None,
        "mean_tv": round(metrics.mean_tv, 5),
        "num_tokens": metrics.num_tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, required=True, metavar="FILE", help="questions of GSM8K, JSON lines")
    parser.add_argument("--pair", default="smollm2")
    parser.add_argument("--policy", default="fixed:4", help="the stopping rule (default: fixed:4)")
    parser.add_argument("--only", action="append", metavar="NAME", help="settings that begin so; repeatable")
    parser.add_argument("--count", type=int, default=16, help="questions (default: 16)")
    parser.add_argument("--tokens", type=int, default=160, help="the most tokens of an answer (default: 160)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/lossy.json")
    args = parser.parse_args()
    pair = sd.load_pair(args.pair)
    asked = questions(pair, args.gsm8k, args.count)
    samplings = Sampling(temperature=0.0), Sampling(temperature=0.7, top_p=0.9)
    rows = [row for sampling in samplings for row in measured(pair, asked, sampling, args)]
    about = {"pair": args.pair, "policy": label_of(parse_policy(args.policy).policy), "top_p": 0.9}
    about |= {"questions": len(asked), "max_tokens": args.tokens, "seed": args.seed}
    found = provenance("python", "benchmarks/lossy.py") | about | {"rows": rows}
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for of in rows:
        print(
            *(f"{of[key]!s:>20}" for key in ("temperature", "verification", "speedup", "exact_match", "agreement", "mean_tv"))
        )


if __name__ == "__main__":
    main()
