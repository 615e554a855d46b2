"""Trees against chains, and against the shapes of other papers: all of them on the same recordings, at many costs.

    python benchmarks/trees.py --replay reference=runs/rules/t1/labels --replay ... --out results/trees.json
    python benchmarks/trees.py --clock reference --data gsm8k_test.jsonl --prompt gsm8k --data ... --out results/trees.json

`--replay PAIR=LABELS` names recordings (recipes/rules). Every rule is replayed exactly in distribution (`lab.trees.replay`),
under token verification; at temperature 0 the others take the likeliest tokens and EAGLE-2 picks among them, as published.
Rivals have the setting that is best on development prompts at the very costs of a cell, over all its sets; fixed chains the
best of hindsight on the very set. Chains and cost-aware trees are at most 14 deep. Passes are flat to 32 rows, grow evenly, or
take steps. `summary` is in per cent, at c = 0.22, flat and temperature 1 where it names no worst cell.

`--clock PAIR` decodes the prompts of files with trees, the cost-aware chain and the target alone, in turns in one process,
greedily and at temperature 1; reading the prompt is left aside. Intervals are over prompts. Greedy answers are compared with
the target's own.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from batch import loaded
from peers.provenance import provenance

import specdecpp as sd
from specdecpp.bench import questions
from specdecpp.bench.contest import in_turn
from specdecpp.decoder import run
from specdecpp.lab.trees import C2T, CostAwareTree, DynamicDepth, Eagle2, OptTree, Tree, TreePolicy, Widths
from specdecpp.lab.trees.recorded import recorded
from specdecpp.lab.trees.replay import TreesReplayed, played, replay_trees
from specdecpp.policies import CostAware, Costs, Fixed
from specdecpp.replay.intervals import ratio_of_ratios
from specdecpp.replay.replay import replay
from specdecpp.sampling import Sampling, streams
from specdecpp.training import shards
from specdecpp.training.traces import Terms, traces

SETS = ("gsm8k", "humaneval", "alpaca")
MOST, DEV, REPEATS = 14, 25, 5


def flat(c: float) -> Costs:
    return Costs(draft_s=c, passes={1: 1.0, 32: 1.0, 64: 2.0})


COSTS = {
    **{f"c = {c:g}, flat to 32": flat(c) for c in (0.05, 0.1, 0.22, 0.3, 0.6)},
    "c = 0.22, a row 2 %": Costs(draft_s=0.22, passes={1: 1.0, 32: 1.62}),
    "c = 0.22, a row 5 %": Costs(draft_s=0.22, passes={1: 1.0, 32: 2.55}),
    "c = 0.22, a row 10 %": Costs(draft_s=0.22, passes={1: 1.0, 32: 4.1}),
    "c = 0.1, a row 25 %": Costs(draft_s=0.1, passes={1: 1.0, 32: 8.75}),
    "c = 0.15, steps": Costs(draft_s=0.15, passes={1: 1, 2: 1.3, 8: 1.3, 9: 1.7, 16: 1.7, 17: 2.4, 32: 2.4}),
}
MAIN = "c = 0.22, flat to 32"
BEAMS = ((4, 4), (4, 2), (3, 4), (2, 3), (4, 6), (2, 1))


def rivals(weights: tuple[float, float, float, float], **how: Any) -> dict[str, list[TreePolicy]]:
    """Every rival with its settings."""
    widths = ((4,), (4, 2), (4, 4), (6, 3), (8, 3), (4, 2, 1), (4, 3, 2), (3, 2, 2), (4, 2, 1, 1), (2, 2, 1, 1, 1), (1, 1))
    depths = ((2, 4, 4), (2, 4, 6), (3, 4, 3), (3, 3, 4), (4, 4, 2), (4, 3, 3), (5, 3, 2), (6, 4, 4), (2, 1, 1), (2, 2, 2))
    return {
        "static": [Widths(widths=w, **how) for w in widths],
        "EAGLE-2": [Eagle2(max_tokens=d, width=w, branch=b, **how) for d, w, b in depths],
        "DDD": [DynamicDepth(width=w, branch=b, threshold=t, **how) for w, b in BEAMS for t in (-0.3, -0.7, -1.2)],
        "OPT-Tree": [OptTree(width=w, branch=b, gain=g, **how) for w, b in BEAMS for g in (0.3, 0.5, 0.7)],
        "C2T": [C2T(branch=b, threshold=t, weights=weights, **how) for b in (1, 2, 4, 6) for t in (0.05, 0.15, 0.3, 0.5)],
    }


PUBLISHED = ("EAGLE-2", "DDD", "C2T", "OPT-Tree")


def classifier(answers: Sequence[Any]) -> tuple[float, float, float, float]:
    """C2T's weights: whether a node of a static tree is accepted, by logistic regression on the answers' steps."""
    seen: list[Tree] = []

    class Noting(Widths):
        def wants_child(self, tree: Tree, node: int, memory: Any) -> bool:
            if not seen or seen[-1] is not tree:
                seen.append(tree)
            return super().wants_child(tree, node, memory)

    rows, accepted = [], []
    for i, distributions in enumerate(answers):
        seen.clear()
        steps = list(played(distributions, Noting(widths=(4, 2, 1, 1)), flat(0.22), streams(i, draw=distributions.draw)[0]))
        drawn = [r.extra for r in steps if r.extra is not None and r.extra.tokens]
        for tree, grown in zip(seen, drawn, strict=True):
            for node, parent in enumerate(grown.parents):
                rows.append((1.0, np.log(max(tree.product(node), 1e-30)), tree.entropy(parent), tree.depths[node]))
                accepted.append(node in grown.path)
    x, y, w = np.array(rows), np.array(accepted, float), np.zeros(4)
    for _ in range(30):  # Newton
        p = 1 / (1 + np.exp(-np.clip(x @ w, -50, 50)))
        w += np.linalg.solve((x * (p * (1 - p))[:, None]).T @ x + 1e-3 * np.eye(4), x.T @ (y - p) - 1e-3 * w)
    a, b, c, d = w.tolist()
    return a, b, c, d


def cells(name: str, folder: Path, limit: int | None) -> Iterator[dict[str, Any]]:
    """A cell for each set and costs."""
    pair, about = sd.load_pair(name), shards.about(folder)
    terms, sampling = Terms.of(about), Sampling(**about["sampling"])
    records = {split: list(shards.read(folder, split=split)) for split in ("dev", "test")}
    records = {"dev": _first(records["dev"], min(DEV, limit or DEV)), "test": _first(records["test"], limit)}
    dev, test = (recorded(records[split], pair, terms, sampling) for split in ("dev", "test"))
    chains = traces(records["test"], terms)
    how: dict[str, Any] = {"children": "likeliest"} if sampling.is_greedy else {}
    weights = classifier(dev)
    tuned = {rival: [(p, replay_trees(dev, p, flat(0.22))) for p in kinds] for rival, kinds in rivals(weights, **how).items()}
    on_test: dict[TreePolicy, TreesReplayed] = {}
    most = 1 if sampling.is_greedy else REPEATS  # nothing is random there
    fixed = [replay(chains, Fixed(k=k), flat(0.22), repeats=most) for k in range(MOST - 1)]
    for kind, costs in COSTS.items():
        repeats = 1 if "flat" in kind else most  # else trees are small, and so are differences
        found: dict[str, Any] = {
            "cost-aware tree": replay_trees(test, CostAwareTree(max_tokens=MOST), costs, repeats=repeats),
            "cost-aware chain": replay(chains, CostAware(), costs, repeats=most, max_tokens=MOST),
        }
        picked = {}
        for rival, kinds in tuned.items():
            best = max(kinds, key=lambda pair, costs=costs: pair[1].at(costs).tokens_per_second)[0]
            if best not in on_test:
                on_test[best] = replay_trees(test, best, flat(0.22), repeats=min(2, most))
            found[rival], picked[rival] = on_test[best].at(costs), str(best)
        for part in SETS:
            own = found["cost-aware tree"].only(part)
            best_fixed = max((r.at(costs).only(part) for r in fixed), key=lambda r: r.tokens_per_second)
            others = {rule: r.only(part) for rule, r in found.items() if rule != "cost-aware tree"} | {"fixed K": best_fixed}
            yield {
                "pair": name,
                "sampling": "0" if sampling.is_greedy else f"{sampling.temperature:g}, top_p {sampling.top_p:g}",
                "costs": kind,
                "set": part,
                "prompts": len(own.sources),
                "nodes": round(own.num_verified / float(own.passes.sum()), 2),
                "draft_passes": round(own.num_draft_passes / float(own.passes.sum()), 2),
                "speed_up": {rule: round(r.speed_up, 4) for rule, r in {"cost-aware tree": own, **others}.items()},
                "percent_over": {rule: _percent(own.gain(over=r)) for rule, r in others.items()},
                "settings": picked,
            }


CHAIN, ALONE = "cost-aware chain", "target alone"
BY_CLOCK: dict[str, sd.Policy] = {
    ALONE: Fixed(k=0),
    CHAIN: CostAware(),
    "cost-aware tree": CostAwareTree(),
    "tree 2x1": Widths(widths=(2, 1)),
    "tree 4x2": Widths(widths=(4, 2)),
}


def timed(decoder: sd.Decoder, prompt: Any, **options: Any) -> tuple[int, float, int, tuple[int, ...]]:
    """Tokens of an answer, its seconds but for the prompt's, steps with a tree, and the answer."""
    session = decoder.start(prompt, **options)
    session.prefill()
    started = perf_counter()
    steps = list(run(session))
    seconds = perf_counter() - started
    answer = tuple(session.tokens[session.num_prompt_tokens :])
    return len(answer), seconds, sum(r.extra is not None for r in steps), answer


def clocked(name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A cell for each set and temperature."""
    pair = loaded(name)
    costs = sd.Decoder(pair, policy=CostAwareTree()).costs
    decoders = {rule: sd.Decoder(pair, policy=policy, costs=costs, reuses=False) for rule, policy in BY_CLOCK.items()}
    texts = questions.read(args.data, args.prompt)
    sets = [questions.encoded(pair, one, num_dev=1, num_test=args.prompts) for one in texts]
    for temperature in (0.0, 1.0):
        for rule in BY_CLOCK:  # caches and compiled code
            timed(decoders[rule], sets[0].dev[0], max_tokens=16, temperature=temperature, seed=0)
        for part in sets:
            sums = {rule: np.zeros((2, len(part.test))) for rule in BY_CLOCK}
            trees, differ = dict.fromkeys(BY_CLOCK, 0), dict.fromkeys(BY_CLOCK, 0)
            for turn in range(args.cycles * len(part.test)):
                i, answers = turn % len(part.test), {}
                for rule in in_turn(list(BY_CLOCK), turn, num_turns=args.cycles * len(part.test)):
                    how = {"max_tokens": args.tokens, "temperature": temperature, "seed": turn}
                    num, seconds, num_trees, answers[rule] = timed(decoders[rule], part.test[i], **how)
                    sums[rule][:, i] += num, seconds
                    trees[rule] += num_trees
                for rule in BY_CLOCK:
                    differ[rule] += temperature == 0 and answers[rule] != answers[ALONE]
            yield {
                "pair": Path(name).name,
                "sampling": f"{temperature:g}",
                "set": part.dataset,
                "prompts": len(part.test),
                "tokens_per_second": {rule: round(float(a.sum() / b.sum()), 1) for rule, (a, b) in sums.items()},
                "percent_over": {
                    f"{rule} over {other}": _percent(ratio_of_ratios(*sums[rule], *sums[other]))
                    for other in (CHAIN, ALONE)
                    for rule in BY_CLOCK
                    if rule not in (other, ALONE)
                },
                "rounds_with_trees": {rule: num for rule, num in trees.items() if num},
                "differ": sum(differ.values()),
                "costs": None if costs is None else asdict(costs),
            }


def _first(records: list[Any], limit: int | None) -> list[Any]:
    """The first of every source."""
    if limit is None:
        return records
    return [r for i, r in enumerate(records) if sum(o.source == r.source for o in records[:i]) < limit]


def _percent(interval: Any) -> dict[str, float]:
    return {key: round(100 * (getattr(interval, key) - 1), 2) for key in ("value", "low", "high")}


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per cent; the worst cells with their names."""

    def named(cell: dict[str, Any], value: float) -> dict[str, Any]:
        return {"percent": value, **{key: cell[key] for key in ("sampling", "costs", "set")}}

    def worst(*rules: str) -> dict[str, Any]:
        values = [(min(cell["percent_over"][rule]["value"] for rule in rules), i) for i, cell in enumerate(found)]
        value, i = min(values)
        return named(found[i], value)

    main = [cell for cell in found if cell["costs"] == MAIN and cell["sampling"].startswith("1,")]
    return {
        "over_best_fixed_chain": {cell["set"]: cell["percent_over"]["fixed K"]["value"] for cell in main},
        "over_cost_aware_chain": {cell["set"]: cell["percent_over"]["cost-aware chain"]["value"] for cell in main},
        "worst_vs_chain": worst("cost-aware chain"),
        "worst_vs_other_trees": worst(*PUBLISHED),
        "worst_vs_static": worst("static"),
    }


def clock_worst(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The cell of the clock where the cost-aware tree is furthest behind the chain, in per cent with its interval."""

    def over(cell: dict[str, Any]) -> dict[str, float]:
        return cell["percent_over"][f"cost-aware tree over {CHAIN}"]

    cell = min(cells, key=lambda cell: over(cell)["value"])
    return over(cell) | {key: cell[key] for key in ("pair", "sampling", "set")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replay", action="append", default=[], metavar="PAIR=LABELS", help="recordings; repeatable")
    parser.add_argument("--limit", type=int, help="answers of each source, for a quick look")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--clock", metavar="PAIR", help="by the clock on a pair that ships, or a folder with target and draft")
    parser.add_argument("--data", action="append", default=[], metavar="FILE", help="prompts for the clock; repeatable")
    parser.add_argument("--prompt", action="append", default=[], metavar="KIND", help="what its rows are, for each file")
    parser.add_argument("--prompts", type=int, default=24, help="of each file")
    parser.add_argument("--cycles", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}

    def keep(key: str, cell: dict[str, Any], *names: str) -> None:
        """A cell takes the place of an earlier one of its name."""
        kept = [c for c in found.get(key, []) if any(c[name] != cell[name] for name in names)]
        found[key] = [*kept, cell]
        found["summary"] = (summary(found["replay"]) if "replay" in found else {}) | {
            "clock_worst_vs_chain": clock_worst(found["clock"]) if "clock" in found else None
        }
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(found, indent=1) + "\n")

    about = provenance("python", "benchmarks/trees.py")
    for name, _, folder in (named.partition("=") for named in args.replay):
        for cell in cells(name, Path(folder), args.limit):
            found |= about
            keep("replay", cell, "pair", "sampling", "costs", "set")
            percent = {rule: interval["value"] for rule, interval in cell["percent_over"].items()}
            print(*(cell[key] for key in ("pair", "sampling", "costs", "set")), json.dumps(percent), flush=True)
    for cell in clocked(args.clock, args) if args.clock else ():
        found["clock_about"] = about
        keep("clock", cell, "pair", "sampling", "set")
        print(json.dumps({key: value for key, value in cell.items() if key != "costs"}), flush=True)
    print(json.dumps(found.get("summary", {}), indent=1))


if __name__ == "__main__":
    main()
