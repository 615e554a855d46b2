"""Choose the head's stopping threshold by decoding held-out prompts, and write it into the head's card.

    python tune_threshold.py --pair runs/reference --samples runs/reference/head_samples.jsonl \\
        --out benchmarks/results/threshold.json

Thresholds and fixed lengths are interleaved over the same prompts and seeds; tokens/s is a ratio of sums. The prompts are
the validation prompts of the training files (nothing here is a test prompt). Nothing else may run meanwhile.
"""

import argparse
import json
from pathlib import Path

from corpus import read_jsonl

from specdecpp import CumulativeConfidence, Decoder, Fixed, Metrics, Policy, SpecDecPP, load_pair

THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pair", type=Path, required=True, help="folder with target/, draft/ and head/")
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pair = load_pair(args.pair / "target", draft=args.pair / "draft", head=args.pair / "head", dtype="float32")
    head = pair.head
    assert head is not None
    rows = [r for r in read_jsonl(args.samples) if r["validation"]]
    prompts = [r["prompt"] for r in rows[:: max(1, len(rows) // args.prompts)]][: args.prompts]
    policies: dict[str, Policy] = {"target": Fixed(k=0)}
    policies |= {f"fixed:{k}": Fixed(k=k) for k in range(1, 9)}
    policies |= {f"cumulative:{t:g}": CumulativeConfidence(threshold=t) for t in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)}
    policies |= {f"specdecpp:{t:g}": SpecDecPP(head=head, threshold=t) for t in THRESHOLDS}
    policies |= {f"specdecpp:{t:g},min_tokens=1": SpecDecPP(head=head, threshold=t, min_tokens=1) for t in THRESHOLDS}
    totals = {name: Metrics() for name in policies}
    names = list(policies)
    Decoder(pair).generate(prompts[0], max_tokens=32, seed=0)
    for i, prompt in enumerate(prompts):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            run = Decoder(pair, policy=policies[name]).generate(prompt, max_tokens=args.max_tokens, seed=i)
            totals[name] += run.metrics
    base = totals["target"].tokens_per_second
    table = {
        name: {
            "tokens_per_second": round(m.tokens_per_second, 1),
            "speedup": round(m.tokens_per_second / base, 3),
            "mean_acceptance_length": round(m.mean_acceptance_length, 3),
            "discard_rate": round(m.discard_rate, 3),
            "verification_rate": round(m.verification_rate, 3),
            "head_share": round(m.head_s / m.elapsed_s, 3),
        }
        for name, m in totals.items()
    }
    for name, row in table.items():
        print(f"{name:28}", *(f"{v:9.3f}" for v in row.values()), flush=True)
    best = max(THRESHOLDS, key=lambda t: totals[f"specdecpp:{t:g}"].tokens_per_second)
    head.with_card(threshold=best).save_pretrained(args.pair / "head")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"command": "tune_threshold.py", "chosen": best, "policies": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
