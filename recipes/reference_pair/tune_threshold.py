"""Choose how the head stops best by decoding held-out prompts, and write it into the head's card.

    python tune_threshold.py --head ../../runs/head/heads/head --labels ../../runs/head/labels \\
        --costs ../../benchmarks/results/costs.json --out ../../benchmarks/results/threshold.json

Every rule decodes the same prompts from the same seeds. What decides is the time *modelled* from the rounds, t_draft and
t_target(n) of costs.json and the head's own time: clocks differ by 10 % between runs of one policy with equal rounds. The
prompts are those of the split dev of the head's labels (nothing here is a test prompt).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specdecpp import CumulativeConfidence, Decoder, Fixed, Metrics, Policy, Round, SpecDecPP, load_pair
from specdecpp.request import spec_of
from specdecpp.training import shards

THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
MIN_TOKENS = (0, 1, 2)


def modelled_s(rounds: Sequence[Round], costs: dict[str, float]) -> float:
    """Seconds of some rounds at the costs of `costs.py` (milliseconds), the target's between its points by interpolation."""
    widths = {int(name[7:-1]): ms for name, ms in costs.items() if name.startswith("target(")}
    verify = np.interp([r.num_drafted + 1 for r in rounds], list(widths), list(widths.values()))
    return float(verify.sum() + costs["draft"] * sum(r.num_drafted for r in rounds)) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", type=Path, help="default: the reference pair that ships")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--labels", type=Path, required=True)
    parser.add_argument("--costs", type=Path, required=True, help="as written by benchmarks/costs.py")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pair = load_pair(args.target, draft=args.draft, head=args.head, dtype="float32")
    head = pair.head
    assert head is not None
    prompts = [r.prompt.tolist() for r in shards.read(args.labels, split="dev")]
    prompts = prompts[:: max(1, len(prompts) // args.prompts)][: args.prompts]
    policies: dict[str, Policy] = {"target": Fixed(k=0)}
    policies |= {f"fixed:{k}": Fixed(k=k) for k in range(1, 9)}
    policies |= {f"cumulative:{t:g}": CumulativeConfidence(threshold=t) for t in (0.05, 0.1, 0.2, 0.3, 0.4)}
    ours = [
        SpecDecPP(head=head, threshold=t, min_tokens=m, calibrated=head.card.is_calibrated)
        for t in THRESHOLDS
        for m in MIN_TOKENS
    ]
    policies |= {spec_of(policy): policy for policy in ours}
    costs = json.loads(args.costs.read_text())["ms"]
    totals, modelled = {name: Metrics() for name in policies}, dict.fromkeys(policies, 0.0)
    names = list(policies)
    Decoder(pair).generate(prompts[0], max_tokens=32, seed=0)
    for i, prompt in enumerate(prompts):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            run = Decoder(pair, policy=policies[name]).generate(prompt, max_tokens=args.max_tokens, seed=i)
            totals[name] += run.metrics
            modelled[name] += modelled_s(run.rounds, costs) + run.metrics.head_s
    speed = {name: m.num_tokens / modelled[name] for name, m in totals.items()}
    table = {
        name: {
            "modelled_speedup": round(speed[name] / speed["target"], 3),
            "measured_speedup": round(m.tokens_per_second / totals["target"].tokens_per_second, 3),
            "mean_acceptance_length": round(m.mean_acceptance_length, 3),
            "discard_rate": round(m.discard_rate, 3),
            "verification_rate": round(m.verification_rate, 3),
            "head_share": round(m.head_s / m.elapsed_s, 3),
        }
        for name, m in totals.items()
    }
    for name, row in table.items():
        print(f"{name:28}", *(f"{v:9.3f}" for v in row.values()), flush=True)
    best = max(ours, key=lambda policy: speed[spec_of(policy)])
    stopping = {name: getattr(best, name) for name in ("threshold", "calibrated", "min_tokens")}
    head.with_card(stopping=stopping).save_pretrained(args.head)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(
            json.dumps({"command": " ".join(sys.argv), "chosen": spec_of(best), "policies": table}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
