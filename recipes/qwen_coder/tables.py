"""The paper's grid and its Table 1 on a pair of yours, and what is beyond the paper, from recordings.

    python tables.py --labels ../../runs/qwen_coder_head/labels --heads ../../runs/qwen_coder_head/heads \\
        --costs measured.json --out ../../benchmarks/results/paper_qwen_coder_0.7.json

No model is run: token verification is replayed, which is exact in distribution. One setting of each rule is chosen on the split
dev for all three sets; `specdecpp_best_h_on_test` is the best threshold for each set on that set itself, and the grid, where
`--heads` has one, is picked for each set too, as the paper does: both are optimistic, and named so. `gain_over_free` is what a
head brings: tokens/s of `cost_aware` over those of `cumulative`, the rule that needs none, and `gain_over_by_q` over those of
`cost_aware` without a head. `over_same_threshold` has, for each h, the gain of SpecDec++ over the same rule on the product of
q: at every h, not at the chosen ones. Costs are t_draft / t_target = c with flat verification, the paper's being 0.22, and
those measured here.
"""

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import specdecpp as sd
from specdecpp import lab
from specdecpp.bench.contestants import Contender
from specdecpp.bench.replays import Recording, Stage, recorded
from specdecpp.bench.results import Machine, Row, provenance_of
from specdecpp.loading.pair import short_name
from specdecpp.policies import CostAware, CumulativeConfidence, Entropy, Fixed, MaxConfidence, SpecDecPP
from specdecpp.training import shards

C = (0.05, 0.10, 0.22, 0.30, 0.60)
CUMULATIVE = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
THRESHOLDS = tuple(i / 20 for i in range(2, 20))
PAPER_THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
PAPER_LENGTHS = (2, 4, 6, 8, 10, 12, 14)
PAPER = {  # arXiv 2405.19715, Table 1: tokens/s of the target alone, the best fixed K, SpecDec++
    "alpaca": (9.26, 17.58, 18.84),
    "humaneval": (9.26, 18.5, 20.6),
    "gsm8k": (9.26, 19.1, 20.9),
}


@dataclass(frozen=True)
class Named:
    """A rule of the field by the name it has in the results."""

    name: str
    rule: Contender


def field(head: sd.AcceptanceHead, lagged: sd.AcceptanceHead) -> list[Named]:
    """The rules of the ladder. All share one bound, the length of the recorded branches."""

    def tuned(of: sd.AcceptanceHead) -> Contender:
        return Contender(
            role="specdecpp",
            settings=tuple(SpecDecPP(head=of, threshold=h, calibrated=True, min_tokens=1) for h in THRESHOLDS),
        )

    def one(role: Any, policy: sd.Policy) -> Contender:
        return Contender(role=role, settings=(policy,))

    return [
        Named("fixed_best", Contender(role="fixed", settings=tuple(Fixed(k=k) for k in range(1, 21)))),
        Named("cumulative", Contender(role="free", settings=tuple(CumulativeConfidence(threshold=t) for t in CUMULATIVE))),
        Named("max_confidence", one("free", MaxConfidence())),
        Named("entropy", one("free", Entropy())),
        Named("heuristic", one("free", lab.Heuristic())),
        Named("specdecpp_lagged", tuned(lagged)),
        Named("specdecpp", tuned(head)),
        Named("cost_aware_by_q", one("free", CostAware())),
        Named("cost_aware_lagged", one("cost_aware", CostAware(head=lagged))),
        Named("cost_aware", one("cost_aware", CostAware(head=head))),
    ]


def figures(row: Row) -> dict[str, Any]:
    """What the results say of one policy on one set."""
    kept = ("verification", "policy", "tokens_per_second", "speedup", "gain_over_best_fixed")
    rates = ("mean_acceptance_length", "discard_rate", "verification_rate", "share_of_headroom")
    found = {name: getattr(row, name) for name in (*kept, *rates)}
    return found | {"interval": list(row.gain_interval or (0.0, 0.0))}


class Paper:
    """A stage for the ladder."""

    def __init__(self, recording: Recording, named: Iterable[Named], *, repeats: int):
        self.named = list(named)
        self.stage = Stage(recording, [n.rule for n in self.named], repeats=repeats)
        self.recording = recording

    def on(self, machine: Machine) -> dict[str, dict[str, Any]]:
        """{dataset: {policy: figures}}."""
        rows = self.stage.rows(machine)
        found: dict[str, dict[str, Any]] = {}
        for dataset in self.recording.datasets:
            own = [row for row in rows if row.dataset == dataset]
            of = {"target": next(figures(r) for r in own if r.role == "target")}
            for named in self.named:
                chosen = self.stage.chosen(named.rule, machine)
                label = self.recording.name_of(chosen) if chosen else ""
                of[named.name] = next(figures(r) for r in own if r.role == named.rule.role and r.label == label)
            settings = {self.recording.name_of(p) for n in self.named if n.name == "specdecpp" for p in n.rule.settings}
            best = max((r for r in own if r.label in settings), key=lambda r: r.tokens_per_second)
            of["specdecpp_best_h_on_test"] = figures(best)
            fixed = max((r for r in own if r.role == "fixed"), key=lambda r: r.tokens_per_second)
            of["fixed_best_on_test"] = figures(fixed)
            of |= {f"{r.policy}{'_probability' * (r.policy == 'perfect')}": figures(r) for r in own if r.role == "oracle"}
            of["specdecpp"]["over_same_threshold"] = self._over_same_threshold(dataset, machine)
            of["cost_aware"] |= self._over(dataset, machine, "cumulative", "gain_over_free")
            of["cost_aware"] |= self._over(dataset, machine, "cost_aware_by_q", "gain_over_by_q")
            found[dataset] = of
        return found

    def _over_same_threshold(self, dataset: str, machine: Machine) -> dict[str, list[float]]:
        """{h: gain and its interval} of a head over q where both stop once the chance of a rejection passes h."""
        (rules,) = (named.rule.settings for named in self.named if named.name == "specdecpp")
        gains = {}
        for h, rule in zip(THRESHOLDS, rules, strict=True):
            by_q = self.stage.played(dataset, CumulativeConfidence(threshold=round(1 - h, 6)), machine)
            gain = self.stage.played(dataset, rule, machine).gain(over=by_q)
            gains[f"{h:g}"] = [round(x - 1, 4) for x in (gain.value, gain.low, gain.high)]
        return gains

    def _over(self, dataset: str, machine: Machine, without: str, name: str) -> dict[str, Any]:
        """What the head brings over a rule without one, on the same luck, with 95 % over prompts; 0 is no gain."""
        rules = {named.name: self.stage.chosen(named.rule, machine) for named in self.named}
        free, own = (rules[rule] for rule in (without, "cost_aware"))
        assert free is not None, "there are thresholds to choose from"
        assert own is not None, "it has one setting"
        gain = self.stage.played(dataset, own, machine).gain(over=self.stage.played(dataset, free, machine))
        return {name: gain.value - 1, f"{name}_interval": [gain.low - 1, gain.high - 1]}


def grid_table(recording: Recording, heads: Mapping[str, sd.AcceptanceHead], machine: Machine) -> dict[str, Any]:
    """The paper's Table 1 in kind: best fixed K and best (w_rej, D, h) for each set, picked on that set as the paper does,
    and the whole grid."""
    lengths = Contender(role="fixed", settings=tuple(Fixed(k=k) for k in PAPER_LENGTHS))
    cells = {
        f"{name},h={h:g}": SpecDecPP(head=head, threshold=h, calibrated=False)
        for name, head in heads.items()
        for h in PAPER_THRESHOLDS
    }
    stage = Stage(recording, [lengths, Contender(role="specdecpp", settings=tuple(cells.values()))])
    table: dict[str, Any] = {}
    for dataset in recording.datasets:
        fixed = {p.k: stage.played(dataset, p, machine) for p in lengths.settings if p.k <= recording.longest}  # pyright: ignore
        grid = {name: stage.played(dataset, p, machine) for name, p in cells.items()}
        k = max(fixed, key=lambda k: fixed[k].speed_up)
        best = max(grid, key=lambda name: grid[name].speed_up)
        gain = grid[best].gain(over=fixed[k])
        table[dataset] = {
            "best_fixed": {"k": k, **rates(fixed[k])},
            "specdecpp": {"setting": best, **rates(grid[best])},
            "gain": gain.value - 1,
            "gain_interval": [gain.low - 1, gain.high - 1],
            "paper": dict(zip(("target", "best_fixed", "specdecpp"), PAPER[dataset], strict=True)),
            "fixed": {str(k): rates(of) for k, of in fixed.items()},
            "grid": {name: rates(of) for name, of in grid.items()},
        }
    return table


def rates(of: Any) -> dict[str, float]:
    found = {"speedup": of.speed_up, "discard_rate": of.discard_rate, "verification_rate": of.verification_rate}
    return {name: round(value, 4) for name, value in found.items()}


def show(found: Mapping[str, Any], table: Mapping[str, Any]) -> None:
    """Both tables, for people."""
    for name, datasets in found.items():
        print(f"\ncosts: {name}   speed-up over the target alone, and gain over the best fixed K (95 % over prompts)")
        for policy in dict.fromkeys(p for of in datasets.values() for p in of):
            cells = []
            for of in datasets.values():
                if (own := of.get(policy)) is None:
                    cells.append(f"{'-':>28}")
                    continue
                low, high = (100 * x for x in own["interval"])
                gain = 100 * (own["gain_over_best_fixed"] or 0)
                cells.append(f"{own['speedup']:6.3f} {gain:+6.1f} % [{low:+5.1f}, {high:+5.1f}]")
            print(f"{policy:26}", *cells)
        for name, over in (("gain_over_free", "the head over cumulative q"), ("gain_over_by_q", "the head over cost-aware q")):
            print(f"{over:26}", end="")
            for of in datasets.values():
                low, high = (100 * x for x in of["cost_aware"][f"{name}_interval"])
                print(f" {100 * of['cost_aware'][name]:+13.1f} % [{low:+5.1f}, {high:+5.1f}]", end="")
            print()
        print(f"{'':26}", *(f"{d:>28}" for d in datasets))
    print("\nTable 1 in kind (picked for each set on that set), replayed at c = 0.22; the paper's figures beside it")
    for dataset, row in table.items():
        target, fixed, own = row["paper"].values()
        low, high = (100 * x for x in row["gain_interval"])
        print(
            f"{dataset:10} K = {row['best_fixed']['k']} {row['best_fixed']['speedup']:.2f}x   SpecDec++ "
            f"{row['specdecpp']['speedup']:.2f}x ({row['specdecpp']['setting']})   gain {100 * row['gain']:+.1f} % "
            f"[{low:+.1f}, {high:+.1f}]   paper {fixed / target:.2f}x, {own / target:.2f}x, {100 * (own / fixed - 1):+.1f} %"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--labels", type=Path, required=True)
    parser.add_argument("--heads", type=Path, required=True, help="folder with head, head_lagged and the grid around it")
    parser.add_argument("--costs", type=Path, help="measured costs: a results file, or draft_s and passes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    read = sd.AcceptanceHead.from_pretrained
    head, lagged = read(args.heads / "head"), read(args.heads / "head_lagged")
    machines = [*map(Machine.relative, C), *([Machine.read(args.costs)] if args.costs else [])]
    recording = recorded(args.labels, {"head": head, "lagged": lagged})
    paper = Paper(recording, field(head, lagged), repeats=args.repeats)
    names = [f"{float(m.name.removeprefix('c = ')):.2f}" if m.name.startswith("c = ") else "measured" for m in machines]
    found = {name: paper.on(machine) for name, machine in zip(names, machines, strict=True)}
    grid = {path.name.partition(",")[2]: read(path) for path in sorted(args.heads.glob("head_lagged,*"))}
    table: dict[str, Any] = {}
    if grid:
        recording = recorded(args.labels, grid)
        table = grid_table(recording, grid, Machine.relative(0.22))
    show(found, table)
    if args.out:
        counts = {"repeats": args.repeats, "num_dev": len(recording.dev), "num_test": len(recording.test)}
        of = shards.about(args.labels)
        labels = {"names": {r: short_name(name) for r, name in of["names"].items()}, "sampling": of["sampling"]}
        about = provenance_of(None, seed=0, data=counts, labels=labels)
        result = {
            "provenance": about,
            "costs": found,
            "machines": {n: m.to_dict() for n, m in zip(names, machines, strict=True)},
        }
        args.out.write_text(json.dumps(result | {"paper_table": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
