"""Choose how the head stops best under a threshold, by replay on held-out labels, and write it into the head's card.

    python tune_threshold.py --head ../../runs/head/heads/head --labels ../../runs/head/labels --costs measured.json

Decoding cannot tell settings apart: clocks differ by 10 % between runs with equal steps, and at temperature 1 two settings
give different answers. A replay can (`specdecpp.replay.replay`): every rule meets the same answers and the same coins. The
setting is chosen on the split dev; the split test is only shown.
"""

import argparse
from pathlib import Path

import specdecpp as sd
from specdecpp.bench.contestants import Contender
from specdecpp.bench.replays import Stage, recorded
from specdecpp.bench.results import Machine

THRESHOLDS = tuple(i / 20 for i in range(4, 15))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--labels", type=Path, required=True)
    parser.add_argument("--costs", type=Path, required=True, help="JSON with draft_s, passes and head_s, or results of bench")
    args = parser.parse_args()
    head, machine = sd.AcceptanceHead.from_pretrained(args.head), Machine.read(args.costs)
    settings = tuple(
        sd.SpecDecPP(head=head, threshold=h, calibrated=True, min_tokens=least) for h in THRESHOLDS for least in (1, 2)
    )
    stage = Stage(recorded(args.labels, {"head": head}), [Contender(role="other", settings=settings)])
    datasets = [None, *stage.recording.datasets]
    for policy in settings:
        speeds = (stage.played(dataset, policy, machine).speed_up for dataset in datasets)
        print(f"{policy.threshold:.2f}, at least {policy.min_tokens}", *(f"{speed:7.3f}" for speed in speeds), flush=True)
    best = max(settings, key=lambda policy: stage.played(None, policy, machine).tokens_per_second)
    print(f"{'':16}", *(f"{name or 'dev':>7.7}" for name in datasets), f"  chosen on dev: {best.threshold}, {best.min_tokens}")
    stopping = {"threshold": best.threshold, "calibrated": True, "min_tokens": best.min_tokens}
    head.with_card(stopping=stopping, by_default=False).save_pretrained(args.head)  # by the clock q alone is as quick


if __name__ == "__main__":
    main()
