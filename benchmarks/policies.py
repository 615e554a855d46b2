"""Stopping rules and verifications side by side on the reference pair, over prompts of a file, decoded for real.

    python benchmarks/policies.py --gsm8k gsm8k_test.jsonl [--prompts 24] [--out benchmarks/results/policies.json]

Every configuration answers the same prompts from the same seeds, interleaved in an order that rotates; a speed-up is a ratio
of sums over the target alone, run by the same code; its error is a jackknife over prompts. Temperature 1. The best fixed K
and the best threshold are read off the same prompts, so they are optimistic; the head's threshold was tuned on others.
Nothing else should run meanwhile.
"""

import argparse
import json
import platform
from pathlib import Path

import torch
import transformers

import specdecpp as sd
from specdecpp.decoder import default_policy
from specdecpp.demo import Comparison, Entry, Plan


def configurations(pair: sd.Pair) -> dict[str, sd.Decoder]:
    policies: dict[str, sd.Policy] = {f"fixed {k}": sd.Fixed(k=k) for k in (1, 2, 3, 4, 5, 6, 8)}
    policies |= {f"cumulative {t:g}": sd.CumulativeConfidence(threshold=t) for t in (0.1, 0.2, 0.3, 0.4)}
    policies |= {"max confidence 0.4": sd.MaxConfidence(), "entropy 0.3": sd.Entropy(), "SpecDec++": default_policy(pair)}
    made = {"target": sd.Decoder(pair, policy=sd.Fixed(k=0))}
    made |= {f"{name}, token": sd.Decoder(pair, policy=policy) for name, policy in policies.items()}
    block = ("fixed 4", "cumulative 0.2", "SpecDec++")
    return made | {
        f"{name}, block": sd.Decoder(pair, policy=policies[name], verification=sd.BlockVerification()) for name in block
    }


def row(comparison: Comparison, name: str) -> dict[str, float | None]:
    total, ratio = comparison.entries[name].total, comparison.ratio(name)
    return {
        "speedup": round(ratio.value, 3),
        "speedup_error": None if ratio.error is None else round(ratio.value * ratio.error, 3),
        "tokens_per_second": round(total.tokens_per_second, 1),
        "mean_acceptance_length": round(total.mean_acceptance_length, 3),
        "discard_rate": round(total.discard_rate, 3),
        "verification_rate": round(total.verification_rate, 3),
        "head_share": round(total.head_s / total.elapsed_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, required=True, help="JSONL with a question a line")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pair = sd.load_pair()
    lines = args.gsm8k.read_text(encoding="utf-8").splitlines()[: args.prompts]
    prompts = [f"{json.loads(line)['question'].strip()}\nLet's think step by step." for line in lines]
    decoders = configurations(pair)
    names, runs = list(decoders), {name: [] for name in decoders}
    decoders["target"].generate([{"role": "user", "content": prompts[0]}], max_tokens=32, seed=0)
    for seed, text in enumerate(prompts):
        for name in names[seed % len(names) :] + names[: seed % len(names)]:
            answer = decoders[name].generate([{"role": "user", "content": text}], max_tokens=args.max_tokens, seed=seed)
            runs[name].append(answer.metrics)
    entries = {n: Entry(name=n, label=n, policy=decoders[n].policy, runs=tuple(of)) for n, of in runs.items()}
    comparison = Comparison(plan=Plan(max_tokens=args.max_tokens), entries=entries)
    table = {name: row(comparison, name) for name in names}
    print(f"{'':26}{'speed-up':>15}{'tokens/s':>10}{'length':>8}{'R_d':>8}{'R_v':>8}{'head':>8}")
    for name, r in table.items():
        print(
            f"{name:26}{r['speedup']:8.2f} ±{r['speedup_error'] or 0:5.2f}{r['tokens_per_second']:10.1f}"
            f"{r['mean_acceptance_length']:8.2f}{r['discard_rate']:8.2f}{r['verification_rate']:8.2f}{r['head_share']:8.3f}"
        )
    if args.out:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
        command = (
            f"python benchmarks/policies.py --gsm8k gsm8k_test.jsonl --prompts {args.prompts} --max-tokens {args.max_tokens}"
        )
        result = {"command": command, "threads": torch.get_num_threads(), "versions": versions, "policies": table}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
