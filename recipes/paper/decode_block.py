"""Steps under block verification, which no replay can give: decode the test prompts for real, on made-up hardware.

    python decode_block.py --labels ../../runs/traces/labels --c 0.05 0.1 0.22 0.3 --seeds 3 --out ../../runs/traces/block.jsonl

Every test prompt of the recordings is answered for each c = t_draft / t_target, as `CostAware` decides at those costs, under
the sampling of the recordings.
What counts are the steps, so the clock does not matter and other work may run. One JSON line for each answer; a run that
was stopped goes on where it was.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

import specdecpp as sd
from specdecpp.bench.results import Machine
from specdecpp.policies import Costs
from specdecpp.training import shards
from specdecpp.verify import BlockVerification


def line(decoder: sd.Decoder, prompt: list[int], *, sampling: sd.Sampling, max_tokens: int, seed: int) -> dict:
    """What the steps of one answer were: how many drafted and accepted how much."""
    answer = decoder.generate(prompt, sampling=sampling, max_tokens=max_tokens, seed=seed)
    counts = Counter((r.num_drafted, r.num_accepted) for r in answer.steps)
    return {"num_tokens": len(answer.tokens), "rounds": [[*pair, n] for pair, n in sorted(counts.items())]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--labels", type=Path, required=True)
    parser.add_argument("--pair", default="reference", help="reference or smollm2")
    parser.add_argument("--head", help="instead of the pair's own")
    parser.add_argument("--c", type=float, nargs="*", default=[])
    parser.add_argument("--costs", type=Path, help="measured costs too: a file with draft_s and passes")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    machines = {f"{c:.2f}": Costs.relative(c) for c in args.c}
    if args.costs:
        machines["measured"] = Machine.read(args.costs).costs
    pair = sd.load_pair(args.pair, head=args.head)
    assert pair.head is not None, "both pairs have a head"
    about = shards.about(args.labels)
    sampling = sd.Sampling(**about["sampling"])
    prompts = [(r.source, r.prompt.tolist()) for r in shards.read(args.labels, split="test")]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    known = args.out.read_text(encoding="utf-8").splitlines() if args.out.exists() else []
    done = {(row["costs"], row["prompt"], row["seed"]) for row in map(json.loads, known)}
    with args.out.open("a", encoding="utf-8") as file:
        for name, costs in machines.items():
            decoder = sd.Decoder(pair, policy=sd.CostAware(head=pair.head), verification=BlockVerification(), costs=costs)
            for seed in range(args.seeds):
                for i, (source, prompt) in enumerate(prompts):
                    if (name, i, seed) in done:
                        continue
                    longest = about["collect"]["max_tokens"]
                    found = line(decoder, prompt, sampling=sampling, max_tokens=longest, seed=1000 * seed + i)
                    file.write(json.dumps({"costs": name, "source": source, "prompt": i, "seed": seed} | found) + "\n")
                    file.flush()


if __name__ == "__main__":
    main()
