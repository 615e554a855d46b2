"""Choose how the head stops best, by replaying rounds on held-out labels, and write it into the head's card.

    python tune_threshold.py --head ../../runs/head/heads/head --labels ../../runs/head/labels \\
        --costs ../../benchmarks/results/costs.json --out ../../benchmarks/results/threshold.json

Decoding cannot tell settings apart: clocks differ by 10 % between runs with equal rounds, and at temperature 1 two settings
give different answers. The labels can (policies.md 9): along an answer X a candidate is X_i with the recorded odds b_i and is
accepted; otherwise it is the rejected one, followed by its recorded branch. So every rule meets the same answers and the same
coins, under token verification, at the costs t_draft and t_target(n) of costs.json; a look-ahead head costs HEAD_MS a token.
The setting is chosen on the split dev; the split test is only shown.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specdecpp import AcceptanceHead
from specdecpp.training import shards
from specdecpp.training.evaluate import log_probabilities
from specdecpp.training.labels import Record
from specdecpp.training.scores import Judged, head_logits, log_q

HEAD_MS = 0.03
REPEATS = 6
LONGEST = 20

Stop = Callable[[int, float], bool]
"""(candidates so far, log of the product of their scores) -> stop."""


@dataclass(frozen=True)
class Trace:
    """One answer as a rule meets it: odds b [N], log scores of its tokens [N], of its branches [N, K] and their lengths."""

    odds: list[float]
    answer: list[float]
    branch: list[list[float]]
    length: list[int]

    @classmethod
    def of(cls, record: Record, judged: Judged) -> "Trace":
        assert judged.answer is not None, "replayed are answers with branches"
        assert judged.branch is not None
        assert record.branches is not None
        branch, length = judged.branch[:, :, 0], record.branches.length.tolist()
        return cls(record.answer_odds.tolist(), judged.answer[:, 0].tolist(), branch.tolist(), length)


@dataclass
class Tally:
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    ms: float = 0.0

    def add(self, *, drafted: int, accepted: int, ms: float) -> None:
        """A round."""
        self.tokens += accepted + 1
        self.drafted += drafted
        self.accepted += accepted
        self.passes += 1
        self.ms += ms


def replay(trace: Trace, coins: Sequence[float], stop: Stop, ms_of: Callable[[int], float], tally: Tally) -> None:
    """Decode one answer: coin i decides whether the candidate at position i is the answer's token."""
    at, num = 0, len(trace.odds)
    while at < num:
        count, accepted, broken, total = 0, 0, -1, 0.0
        while count < min(LONGEST, num - at - 1):
            if broken < 0 and coins[at + count] < trace.odds[at + count]:
                total += trace.answer[at + count]
                accepted += 1
            else:
                broken = at + count if broken < 0 else broken
                if (m := at + count - broken) >= trace.length[broken]:
                    break
                total += trace.branch[broken][m]
            count += 1
            if stop(count, total):
                break
        at += accepted + 1
        tally.tokens, tally.drafted, tally.accepted = (
            tally.tokens + accepted + 1,
            tally.drafted + count,
            tally.accepted + accepted,
        )
        tally.passes, tally.ms = tally.passes + 1, tally.ms + ms_of(count)


def settings() -> dict[str, tuple[str, Stop]]:
    """Rules by name, with the score that they read."""
    found: dict[str, tuple[str, Stop]] = {"target": ("q", lambda n, s: True)}
    found |= {f"fixed:{k}": ("q", lambda n, s, k=k: n >= k) for k in range(1, 11)}
    for t in (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5):
        found[f"cumulative:{t:g}"] = ("q", lambda n, s, t=t: s < math.log(t))
    for h in (0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7):
        for least in (1, 2):
            name = f"specdecpp:threshold={h:g},min_tokens={least}"
            found[name] = ("head", lambda n, s, h=h, least=least: n >= least and s < math.log(1 - h))
    return found


def table(records: Sequence[Record], head: AcceptanceHead, costs: dict[str, float]) -> dict[str, dict[str, float]]:
    """Speed-up over the target alone, and the rates, of every setting."""
    widths = {int(name[7:-1]): ms for name, ms in costs.items() if name.startswith("target(")}
    verify = np.interp(range(LONGEST + 2), list(widths), list(widths.values())).tolist()
    rng = np.random.default_rng(0)
    coins = [[rng.random(len(r.answer)).tolist() for _ in range(REPEATS)] for r in records]
    judged = {
        "q": [Trace.of(r, log_q(r)) for r in records],
        "head": [Trace.of(r, log_probabilities(head_logits(head, r), head.card.calibration)) for r in records],
    }
    alone = verify[1]
    rows = {}
    for name, (score, stop) in settings().items():
        each = costs["draft"] + (HEAD_MS if score == "head" else 0.0)
        tally = Tally()
        for trace, throws in zip(judged[score], coins, strict=True):
            for throw in throws:
                if name == "target":
                    tally.tokens, tally.passes = tally.tokens + len(throw), tally.passes + len(throw)
                    tally.ms += alone * len(throw)
                else:
                    replay(trace, throw, stop, lambda n, each=each: n * each + verify[n + 1], tally)
        rows[name] = {
            "speedup": round(alone * tally.tokens / tally.ms, 4),
            "mean_acceptance_length": round(tally.tokens / tally.passes, 3),
            "discard_rate": round((tally.drafted - tally.accepted) / tally.tokens, 3),
            "verification_rate": round(tally.passes / tally.tokens, 3),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--labels", type=Path, required=True)
    parser.add_argument("--costs", type=Path, required=True, help="as written by benchmarks/costs.py")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    head = AcceptanceHead.from_pretrained(args.head)
    if head.card.form != "look_ahead" or not head.card.is_calibrated:
        parser.error(f"{args.head} is not a calibrated look-ahead head, and no other is replayed here")
    costs = json.loads(args.costs.read_text())["ms"]
    groups: dict[str, list[Record]] = {"dev": list(shards.read(args.labels, split="dev"))}
    for record in shards.read(args.labels, split="test"):
        groups.setdefault(record.source, []).append(record)
    tables = {name: table(records, head, costs) for name, records in groups.items()}
    names = [name for name in settings() if name.startswith("specdecpp")]
    best = max(names, key=lambda name: tables["dev"][name]["speedup"])
    for name in settings():
        print(f"{name:42}", *(f"{t[name]['speedup']:7.3f}" for t in tables.values()), flush=True)
    print(f"{'':42}", *(f"{name[:7]:>7}" for name in tables), f"  chosen on dev: {best}")
    values = dict(part.split("=") for part in best.partition(":")[2].split(","))
    stopping = {"threshold": float(values["threshold"]), "calibrated": True, "min_tokens": int(values["min_tokens"])}
    head.with_card(stopping=stopping).save_pretrained(args.head)
    if args.out:
        found = {"command": " ".join(sys.argv), "costs": costs, "chosen": best, "replayed": tables}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
