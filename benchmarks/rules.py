"""Which rule: all of them on the same recordings at many costs.

    python benchmarks/rules.py --replay reference=runs/rules/t1/labels --replay ... --out results/rules.json

`--replay PAIR=LABELS` names recordings (recipes/rules); rules are replayed at draft steps of .05 to .6 of a pass with flat
passes, and at the costs of the pair on this machine: three to six minutes of one core a recording. A rule of other people's
work is shown three times: as it comes, as it is best on development prompts, and as it is best on the prompts that it is judged
on, which nobody can have. docs/figures/rules.py makes the picture and the table of docs/results.md.
It can be given several times; what a file in `--out` has of other recordings stays. `summary` is in per cent, the worst cell
first. The costs of the pair are measured before a recording is replayed: nothing else should run then.
"""

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from peers.provenance import provenance

import specdecpp as sd
from specdecpp.costs.measuring import measured
from specdecpp.lab import (
    AcceptanceEMA,
    AdaptiveEntropy,
    ArgmaxLength,
    AutoOff,
    Bandit,
    Cascade,
    Disco,
    DraftVerify,
    FrontierLength,
    Heuristic,
    OnlineLogistic,
    SkippingEMA,
    UCBSpecStop,
)
from specdecpp.lab.oracles import hindsight, perfect_probability, pre_sampling
from specdecpp.policies import CostAware, Costs, CumulativeConfidence, Entropy, Fixed, MaxConfidence, Policy, SpecDecPP
from specdecpp.policies.learning import Experience
from specdecpp.policies.protocol import NO_PAST, Given
from specdecpp.policies.score import MIN_OTHERS
from specdecpp.replay.replay import Player, replay, thrown
from specdecpp.replay.replayed import Replayed
from specdecpp.sampling import Sampling
from specdecpp.training import shards
from specdecpp.training.traces import Terms, traces

WEIGHTS = ("bias", "by_rest", "by_entropy", "by_gap", "by_depth")
FLAT = (0.05, 0.1, 0.22, 0.3)
NOT_PAYING = 0.6
SETS = ("gsm8k", "humaneval", "alpaca")
SAMPLINGS = {
    "1": Sampling(temperature=1.0),
    "0.7 top_p 0.9": Sampling(temperature=0.7, top_p=0.9),
    "0": Sampling(temperature=0.0),
}
MOST, REPEATS, FIRST = 14, 2, 10
ARMS = (Fixed(k=2), Fixed(k=5), CumulativeConfidence())


class Rival(NamedTuple):
    """A rule with a setting, the setting it comes with, and those that are tried on development prompts."""

    make: "Callable[[float, Recording], Policy]"
    usual: float
    settings: Sequence[float]


RIVALS = {
    "fixed K": Rival(lambda k, _: Fixed(k=int(k)), 4, range(13)),
    "cumulative q": Rival(
        lambda h, _: CumulativeConfidence(threshold=h), 0.2, (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    ),
    "max confidence": Rival(lambda h, _: MaxConfidence(threshold=h), 0.4, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)),
    # llama.cpp drafts the argmax and drops what falls below p-min, which is sound at temperature 0; elsewhere it is kept
    "p-min": Rival(
        lambda h, r: MaxConfidence(threshold=h, max_tokens=16, drop=r.is_greedy), 0.75, (0.2, 0.4, 0.5, 0.6, 0.75, 0.9)
    ),
    "SVIP": Rival(lambda h, _: Entropy(threshold=h), 0.3, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)),
    "AdaEDL": Rival(lambda h, _: AdaptiveEntropy(threshold=h), 0.4, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)),
    "Draft & Verify": Rival(lambda h, _: DraftVerify(threshold=h), 0.5, (0.2, 0.4, 0.5, 0.6, 0.8)),
    "DISCO": Rival(lambda h, r: Disco(threshold=h, **r.classifier), 0.7, (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9)),
    "GammaTune": Rival(lambda k, _: AcceptanceEMA(start_tokens=int(k)), 4, (2, 4, 6)),
    "transformers' schedule": Rival(lambda k, _: Heuristic(start_tokens=int(k)), 5, (2, 3, 5)),
    "best length so far": Rival(lambda a, _: ArgmaxLength(prior=a, min_tokens=0), 0.7, (0.5, 0.7, 0.9)),
    "best length lately": Rival(lambda f, _: ArgmaxLength(fading=f, min_tokens=0), 0.1, (0.05, 0.1, 0.2, 0.4)),
    "Cascade": Rival(lambda k, _: Cascade(start_tokens=int(k)), 3, (1, 2, 3, 5)),
    "UCB-SpecStop": Rival(lambda b, _: taught(UCBSpecStop(exploration=b)), 1, (0.3, 1, 3, 10)),
    "Ollama's controller": Rival(lambda n, _: taught(FrontierLength(probe_every=int(n))), 4, (2, 4, 16)),
    "ExLlamaV3's EMA": Rival(lambda k, _: SkippingEMA(max_tokens=int(k)), 4, (2, 4, 7, 10, 14)),
    "vLLM's estimator": Rival(lambda k, _: taught(OnlineLogistic(max_tokens=int(k))), 7, (3, 5, 7, 10, 14)),
    "auto-off": Rival(lambda h, _: AutoOff(policy=CumulativeConfidence(threshold=h)), 0.2, (0.1, 0.2, 0.4, 0.6)),
    "bandit": Rival(lambda e, _: Bandit(arms=ARMS, exploration=e), 0.3, (0.1, 0.3, 1)),
}


@dataclass
class Recording:
    """Traces of one pair under one sampling."""

    name: str
    pair: Any
    sampling: str = ""
    splits: dict[str, list[Any]] = field(default_factory=dict)
    known: dict[Any, Replayed] = field(default_factory=dict)
    """What rules that do not look at the costs did, whatever those are."""

    @classmethod
    def of(cls, name: str, folder: Path) -> "Recording":
        pair = sd.load_pair(name)
        about = shards.about(folder)
        terms = Terms.of(about)
        heads = [pair.head] if pair.head is not None else []
        splits = {name: traces(shards.read(folder, split=name), terms, heads=heads) for name in ("dev", "test")}
        found = [known for known, sampling in SAMPLINGS.items() if sampling == Sampling(**about["sampling"])]
        return cls(name, pair, found[0] if found else json.dumps(about["sampling"]), splits)

    @property
    def is_greedy(self) -> bool:
        return self.sampling == "0"

    @cached_property
    def classifier(self) -> dict[str, float]:
        """The weights of `Disco`: logistic regression on the draft tokens that long steps test on development prompts."""
        rows, labels = map(np.array, zip(*tested(self.splits["dev"]), strict=True))
        weights = np.zeros(rows.shape[1])
        for _ in range(20):  # Newton's method
            chance = 1 / (1 + np.exp(-rows @ weights))
            curve = rows.T @ (rows * (chance * (1 - chance))[:, None]) + 1e-3 * np.eye(len(weights))
            weights += np.linalg.solve(curve, rows.T @ (labels - chance) - 1e-3 * weights)
        return {name: round(float(w), 4) for name, w in zip(WEIGHTS, weights, strict=True)}

    def play(self, split: str, rival: str, setting: float, costs: Costs) -> Replayed:
        """A rival's steps; replayed again only where it looks at the costs."""
        key = split, rival, setting
        if key not in self.known:
            policy = RIVALS[rival].make(setting, self)
            done = replay(self.splits[split], policy, costs, repeats=REPEATS, max_tokens=MOST)
            if done.is_priced:
                return done
            self.known[key] = done
        return self.known[key].at(costs)


def tested(recorded: Sequence[Any]) -> Iterator[tuple[tuple[float, ...], int]]:
    """(What `Disco` reads of a draft token, whether it was accepted), of all that steps of `MOST` draft tokens test."""
    for trace, runs in zip(recorded, thrown(recorded, seed=0, repeats=REPEATS), strict=True):
        for run in runs.tolist():
            at = 0
            for r in Player(trace, Fixed(k=MOST), Costs.relative(0.1)).steps(run):
                for k in range(min(r.num_accepted + 1, r.num_drafted)):
                    is_accepted = k < r.num_accepted
                    place = at + k, int(not is_accepted)
                    rest = math.log(max(1 - math.exp(trace.log_q[place]), MIN_OTHERS))
                    yield (1.0, rest, float(trace.entropy[place]), float(trace.gap[place]), k + 1.0), int(is_accepted)
                at += r.num_tokens


class Lessons:
    """Requests one after the other without a seed: what one has learned, the next begins with."""

    def __init__(self, policy: Policy):
        self.experience, self.last = Experience(policy), None

    def policy(self) -> Any:
        """The rule; its requests must be replayed in order."""
        lessons, given = self, self.experience._policy

        class Taught(type(given)):
            def start(self, given: Given = NO_PAST) -> Any:
                if lessons.last is not None:
                    lessons.experience.add(lessons.last)
                lessons.last = lessons.experience.begin(given)
                return lessons.last

            def learn(self, memory: Any, outcome: Any) -> Any:
                lessons.last = super().learn(memory, outcome)
                return lessons.last

        pupil: Any = object.__new__(Taught)
        pupil.__dict__.update(given.__dict__)
        return pupil


def taught(policy: Policy) -> Policy:
    """A rule whose requests, replayed in order, teach each other."""
    return Lessons(policy).policy()


def replayed(recording: Recording, costs: Costs) -> tuple[dict[str, Replayed], dict[str, dict[str, Replayed]]]:
    """(Rules as anybody can have them, for each set the rival settings that are best on it) on the test prompts."""
    play = partial(replay, costs=costs, repeats=REPEATS, max_tokens=MOST)
    test = recording.splits["test"]
    found = {"cost-aware by q": play(test, CostAware()), "cost-aware by q, taught": play(test, taught(CostAware()))}
    if recording.pair.head is not None:
        head = recording.pair.head
        found["cost-aware"] = play(test, CostAware(head=head))
        found["SpecDec++"] = play(test, SpecDecPP.tuned(head))
    picked: dict[str, dict[str, Replayed]] = defaultdict(dict)
    for name, (_, usual, settings) in RIVALS.items():
        on_test = {s: recording.play("test", name, s, costs) for s in settings}
        best = max(settings, key=lambda s, name=name: recording.play("dev", name, s, costs).tokens_per_second)
        found |= {f"{name} {usual:g}": on_test[usual], f"{name}, tuned": on_test[best]}
        for part in SETS:
            picked[part][name] = max((r.only(part) for r in on_test.values()), key=lambda r: r.tokens_per_second)
    return found, picked


LADDER = {"perfect score before sampling": pre_sampling, "perfect probability": perfect_probability, "hindsight": hindsight}
"""What limits the rules: how far a score of each kind could go (`replay.oracles`)."""


def cells(recording: Recording, name: str, costs: Costs) -> Iterator[dict[str, Any]]:
    """A cell for each set: speed-ups over the target alone, and per cent over the best of hindsight."""
    found, picked = replayed(recording, costs)
    limits = {rung: of(recording.splits["test"], costs, repeats=REPEATS, max_tokens=MOST) for rung, of in LADDER.items()}
    for part in SETS:
        own = {rule: r.only(part) for rule, r in found.items()}
        hindsight = {rival: picked[part][rival] for rival in ("fixed K", "cumulative q")}
        over = {
            rule: {rival: _percent(own[rule].gain(over=best)) for rival, best in hindsight.items()}
            for rule in own
            if rule.startswith("cost-aware")
        }
        yield {
            "pair": recording.name,
            "sampling": recording.sampling,
            "costs": name,
            "set": part,
            "prompts": len(own["cost-aware by q"].sources),
            **({"seconds": asdict(costs)} if name == "measured" else {}),
            "speed_up": {rule: round(r.speed_up, 4) for rule, r in own.items()},
            "limits": {rung: round(r.only(part).speed_up, 4) for rung, r in limits.items()},
            "picked_on_these_prompts": {rival: round(r.speed_up, 4) for rival, r in picked[part].items()},
            "percent_over": over,
            "head_over_free": _percent(own["cost-aware"].gain(over=own["cost-aware by q"])) if "cost-aware" in own else None,
        }


def first_requests(recording: Recording, costs: Costs) -> float:
    """Tokens per second of the first ten requests of a pair that nobody has used, over those of the same requests later."""
    test = recording.splits["test"]
    order = np.random.default_rng(0).permutation(len(test))
    ratios = []
    for start in range(0, len(test) - FIRST, FIRST):
        some = [test[i] for i in order[start : start + FIRST]]
        others = [test[i] for i in order if i not in set(order[start : start + FIRST])]
        lessons = Lessons(CostAware())
        new = replay(some, Lessons(CostAware()).policy(), costs, max_tokens=MOST)
        replay(others, policy := lessons.policy(), costs, max_tokens=MOST)
        ratios.append(new.tokens_per_second / replay(some, policy, costs, max_tokens=MOST).tokens_per_second)
    return statistics.fmean(ratios)


def _percent(interval: Any) -> dict[str, float]:
    return {key: round(100 * (getattr(interval, key) - 1), 2) for key in ("value", "low", "high")}


def summary(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Per cent: the worst cell and the mean over cells. Without a head but for `head_vs_free`."""
    played = found.get("replay", [])
    paying = [cell for cell in played if not cell["costs"].endswith(f"{NOT_PAYING:g}")]
    free = "cost-aware by q"
    columns = {
        "replay_vs_best_cumulative": [c["percent_over"][free]["cumulative q"]["value"] for c in paying],
        "replay_vs_best_fixed": [c["percent_over"][free]["fixed K"]["value"] for c in paying],
        "head_vs_free": [c["head_over_free"]["value"] for c in paying if c["head_over_free"]],
        "c06_vs_target": [100 * (c["speed_up"][free] - 1) for c in played if c not in paying],
        "first_ten_requests": [100 * (share - 1) for share in found.get("first_requests", {}).values()],
    }
    return {
        name: {"worst": round(min(values), 2), "mean": round(statistics.fmean(values), 2), "cells": len(values)}
        for name, values in columns.items()
        if values
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--replay", action="append", default=[], metavar="PAIR=LABELS", help="recordings, 3 to 6 minutes each; repeatable"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    found |= provenance("python", "benchmarks/rules.py")
    found["commands"] = sorted({*found.get("commands", ()), found["command"]})  # all that the file is made of

    def add(section: str, cell: dict[str, Any]) -> None:
        keys = [key for key in ("pair", "sampling", "costs", "set") if key in cell]
        found.setdefault(section, [])
        found[section] = [c for c in found[section] if any(c[key] != cell[key] for key in keys)] + [cell]
        print(*(cell[key] for key in keys), json.dumps(cell["percent_over"]), flush=True)
        found["summary"] = summary(found)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(found, indent=1) + "\n")

    for name, _, folder in (named.partition("=") for named in args.replay):
        recording = Recording.of(name, Path(folder))
        kinds = {f"c = {c:g}": Costs.relative(c) for c in (*FLAT, NOT_PAYING)}
        kinds["measured"] = measured(recording.pair)
        for kind, costs in kinds.items():
            for cell in cells(recording, kind, costs):
                add("replay", cell)
            if kind == "c = 0.22":
                taught = found.setdefault("first_requests", {})
                taught[f"{name}, {recording.sampling}"] = round(first_requests(recording, costs), 4)
    print(json.dumps(found.get("summary", {}), indent=1))


if __name__ == "__main__":
    main()
