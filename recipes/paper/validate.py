"""Does the replay foretell the clock? The policies of a bench, replayed at the costs it was run at, beside what it found.

    python validate.py --labels ../../runs/traces/labels --bench ../../benchmarks/results/bench.json

The answers are not the same: the bench decodes prompts of its own, which costs luck, and its time includes reading the prompt.
"""

import argparse
from pathlib import Path

import specdecpp as sd
from specdecpp.bench.replays import recorded
from specdecpp.bench.results import Machine, Results
from specdecpp.loading.pair import REFERENCE
from specdecpp.policies.head import costs_for
from specdecpp.policy_spec import parse_policy
from specdecpp.replay.replay import replay

NAMES = {"gsm8k_test": "gsm8k", "HumanEval": "humaneval", "alpaca_1k": "alpaca"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--labels", type=Path, required=True)
    parser.add_argument("--bench", type=Path, required=True)
    args = parser.parse_args()
    head = sd.AcceptanceHead.from_pretrained(REFERENCE / "head")
    recording = recorded(args.labels, {"head": head})
    machine = Machine.read(args.bench)
    print(f"{'':26}{'R_d clock':>10}{'replay':>8}{'R_v clock':>11}{'replay':>8}{'times clock':>22}{'replay':>8}")
    for row in Results.read(args.bench).rows:
        if row.verification != "token" or row.role == "target":
            continue
        policy = parse_policy(row.policy).build(head)
        traces = [t for t in recording.test if t.source == NAMES[row.dataset]]
        found = replay(traces, policy, costs_for(policy, machine.costs), repeats=2, max_tokens=recording.longest)
        low, high = row.speedup_interval or (0.0, 0.0)
        print(
            f"{row.dataset:11}{row.label:15}{row.discard_rate:10.3f}{found.discard_rate:8.3f}{row.verification_rate:11.3f}"
            f"{found.verification_rate:8.3f}{row.speedup:8.2f} [{low:5.2f}, {high:4.2f}]{found.speed_up:8.2f}"
        )


if __name__ == "__main__":
    main()
