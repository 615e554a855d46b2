"""The demo: what it asks, how it compares policies fairly, and what may be said about the outcome. It prints nothing;
`render` shows it, `cli` runs it.

With `smollm2` it asks a real model as people do, at temperature 0.7 and top_p 0.9, and tries fewer settings, so that it ends
within a minute.

Fair means: the same code (`Decoder`) for every policy, the target alone included (`Fixed(k=0)`); the same prompts and
seeds; policies interleaved prompt by prompt (`bench.interleaving`), so that a slow moment falls on all of them; the rivals,
fixed K and cumulative confidence, in the setting that was fastest on other prompts, on this machine; everything pooled as a
ratio of sums.

Answers end where the model ends them (`ignore_eos` stays off): nobody generates what comes after the end, and it would
be easier to draft. At temperature 1 two policies then give answers of different length to one seed, but both have the
target's distribution, so their lengths agree in the mean and a ratio of sums compares them rightly.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specdecpp.bench.interleaving import interleaved
from specdecpp.decoder import Decoder
from specdecpp.loading.pair import Pair
from specdecpp.metrics import Metrics
from specdecpp.policies import CostAware, CumulativeConfidence, Fixed, Policy, SpecDecPP
from specdecpp.policy_spec import as_prompt, label_of, spec_of
from specdecpp.sampling import Sampling

_THINK = "\nLet's think step by step."
_SCRIPT = "Write a Python script for this problem:\n\n"
_COUNT_RISES = '''def count_rises(prices: list[float]) -> int:
    """Return how often a price is higher than the one before it.

    >>> count_rises([3.0, 4.0, 2.5, 6.0])
    2
    """'''
_SHORTEST = '''def shortest(words: list[str]) -> str:
    """Return the shortest word; the first one if there are several."""'''

# Ours, in the formats that the reference pair was trained on.
PROMPTS = (
    "Mara bakes 24 muffins in the morning and twice as many in the afternoon. She packs them into boxes of 6 and sells "
    f"each box for $9. How many dollars does she earn if she sells every box?{_THINK}",
    _SCRIPT + _COUNT_RISES,
    "Give three tips for keeping houseplants alive during a long holiday.",
    "A ferry takes 36 cars on each trip. It makes 5 trips on Saturday and 3 trips on Sunday. If each car pays $7, how "
    f"much more money does the ferry take on Saturday than on Sunday?{_THINK}",
)
DEV_PROMPTS = (
    "Tom reads 15 pages of a book every weekday and 30 pages on each day of the weekend. The book has 315 pages. How "
    f"many weeks does he need to finish it?{_THINK}",
    _SCRIPT + _SHORTEST,
    "Explain in a few sentences why the sea is salty.",
)
RIVALS: dict[str, tuple[Policy, ...]] = {
    "fixed": tuple(Fixed(k=k) for k in range(1, 9)),
    "cumulative": tuple(CumulativeConfidence(threshold=t) for t in (0.05, 0.1, 0.2, 0.3, 0.4)),
}
FEW = {"fixed": RIVALS["fixed"][:3], "cumulative": RIVALS["cumulative"][1::2]}
"""The settings of the rivals that are tried with a slow pair."""
USUAL: dict[str | None, dict[str, Any]] = {
    "smollm2": {"max_tokens": 80, "num_cycles": 1, "temperature": 0.7, "top_p": 0.9, "is_short": True}
}
"""How the demo runs with a pair that has a name, where nothing else is asked for."""
DEV_TOKENS, DEV_CYCLES = 48, 1
NUM_LIVE = 2
MIN_RUNS = 4  # fewer runs say nothing about their own spread

Tick = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class DemoPlan:
    """How long the demo runs, and from which seed. Raises ValueError for what cannot be run."""

    max_tokens: int = 128
    num_prompts: int = len(PROMPTS)
    num_cycles: int = 3
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    is_short: bool = False
    """Few settings of the rivals are tried, on short answers."""

    @classmethod
    def usual(cls, pair: str | None, **asked: Any) -> "DemoPlan":
        """The plan for a pair of this name, but for values that are not None."""
        return cls(**USUAL.get(pair, {}) | {name: value for name, value in asked.items() if value is not None})

    def __post_init__(self) -> None:
        if not 1 <= self.num_prompts <= len(PROMPTS):
            raise ValueError(f"the demo has 1 to {len(PROMPTS)} prompts, got {self.num_prompts}")
        if self.num_cycles < 1 or self.max_tokens < 2:
            raise ValueError(f"the demo needs at least 1 cycle and 2 tokens, got {self.num_cycles} and {self.max_tokens}")
        Sampling(temperature=self.temperature, top_p=self.top_p)

    @property
    def rivals(self) -> Mapping[str, tuple[Policy, ...]]:
        """The settings that are tried of each."""
        return FEW if self.is_short else RIVALS

    @property
    def num_dev_runs(self) -> int:
        """Answers that choose the settings."""
        return sum(map(len, self.rivals.values())) * len(DEV_PROMPTS) * DEV_CYCLES

    @property
    def num_runs(self) -> int:
        """Timed answers per policy."""
        return self.num_prompts * self.num_cycles


@dataclass(frozen=True, kw_only=True)
class DemoEntry:
    """One policy of the comparison, with what each of its runs cost, in the same order for all."""

    name: str
    label: str
    policy: Policy
    runs: tuple[Metrics, ...]

    @property
    def total(self) -> Metrics:
        """All runs pooled: sums, so that its rates are ratios of sums."""
        return sum(self.runs, Metrics())


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times as many tokens per second one policy makes as another, and the standard error of its logarithm."""

    value: float
    error: float | None

    @property
    def is_clear(self) -> bool:
        """Tell whether the difference is more than 2.5 standard errors: 95 % for a handful of runs (Student's t, 5 to 6)."""
        return self.error is not None and abs(math.log(self.value)) > 2.5 * self.error


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The entries by name: target, fixed, cumulative and, with a head, specdecpp."""

    plan: DemoPlan
    entries: Mapping[str, DemoEntry]

    def ratio(self, name: str, to: str = "target") -> Ratio:
        """Tokens per second of one entry over those of another; the error is a jackknife over the paired runs."""
        a, b = self.entries[name].runs, self.entries[to].runs
        value = _log_ratio(a, b)
        n = len(a)
        if n < MIN_RUNS or name == to:
            return Ratio(value=math.exp(value), error=None)
        left_out = [_log_ratio(a[:i] + a[i + 1 :], b[:i] + b[i + 1 :]) for i in range(n)]
        mean = sum(left_out) / n
        return Ratio(value=math.exp(value), error=math.sqrt((n - 1) / n * sum((x - mean) ** 2 for x in left_out)))


def description(pair: Pair) -> str:
    """The pair and the machine in a line."""
    sizes = []
    for role, backend in (("target", pair.target), ("draft", pair.draft)):
        model = getattr(backend, "model", None)
        size = pair.names[role] if model is None else f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters"
        sizes.append(f"{role} {size}")
    num_threads = torch.get_num_threads()
    threads = f", {num_threads} thread{'s' if num_threads > 1 else ''}" if pair.target.device.type == "cpu" else ""
    return f"{', '.join(sizes)}, on {pair.target.device}{threads}"


def conditions(plan: DemoPlan) -> str:
    """Conditions of the comparison."""
    prompts = f"{plan.num_prompts} prompt{'s' if plan.num_prompts > 1 else ''} x {plan.num_cycles}"
    top_p = f", top_p {plan.top_p:g}" if plan.top_p < 1 else ""
    return (
        f"{prompts}, up to {plan.max_tokens} tokens, temperature {plan.temperature:g}{top_p}\n"
        f"  ± is a standard error; K and the cumulative threshold were the fastest of {len(plan.rivals['fixed'])} and "
        f"{len(plan.rivals['cumulative'])} on other prompts"
    )


def tuned_rivals(pair: Pair, plan: DemoPlan, tick: Tick = lambda _: None) -> dict[str, Policy]:
    """Each rival in its setting with the most tokens per second on the development prompts, after an untimed warm-up."""
    policies = {spec_of(policy): policy for settings in plan.rivals.values() for policy in settings}
    Decoder(pair, policy=Fixed(k=4)).generate(as_prompt(pair, DEV_PROMPTS[0]), max_tokens=16, seed=plan.seed)
    runs = _timed(
        pair,
        policies,
        DEV_PROMPTS,
        num_cycles=DEV_CYCLES,
        plan=plan,
        max_tokens=min(DEV_TOKENS // 2 if plan.is_short else DEV_TOKENS, plan.max_tokens),
        tick=tick,
    )
    speed = {spec: sum(metrics, Metrics()).tokens_per_second for spec, metrics in runs.items()}
    return {name: max(settings, key=lambda policy: speed[spec_of(policy)]) for name, settings in plan.rivals.items()}


def contestants(pair: Pair, rivals: Mapping[str, Policy]) -> dict[str, Policy]:
    """Who takes part: the target alone, the rivals (`tuned_rivals`), with a head SpecDec++, and the default rule."""
    policies: dict[str, Policy] = {"target": Fixed(k=0), **rivals}
    if pair.head is not None:
        policies["specdecpp"] = SpecDecPP.tuned(pair.head)
    policies["cost_aware"] = CostAware(head=pair.head if pair.head is not None and pair.head.card.is_calibrated else None)
    return policies


def compare(pair: Pair, policies: Mapping[str, Policy], plan: DemoPlan, tick: Tick = lambda _: None) -> Comparison:
    """Run every policy on the same prompts and seeds, interleaved, and keep what each run cost."""
    prompts = PROMPTS[: plan.num_prompts]
    runs = _timed(pair, policies, prompts, num_cycles=plan.num_cycles, plan=plan, max_tokens=plan.max_tokens, tick=tick)
    entries = {
        name: DemoEntry(name=name, label=label_of(policy), policy=policy, runs=tuple(runs[name]))
        for name, policy in policies.items()
    }
    return Comparison(plan=plan, entries=entries)


def _timed(
    pair: Pair,
    policies: Mapping[str, Policy],
    prompts: tuple[str, ...],
    *,
    num_cycles: int,
    plan: DemoPlan,
    max_tokens: int,
    tick: Tick,
) -> dict[str, list[Metrics]]:
    """Metrics of each policy's runs, taken in turns."""
    answers = interleaved(
        {name: Decoder(pair, policy=policy, reuses=False) for name, policy in policies.items()},
        [as_prompt(pair, text) for text in prompts],
        num_cycles=num_cycles,
        max_tokens=max_tokens,
        sampling=Sampling(temperature=plan.temperature, top_p=plan.top_p),
        seed=plan.seed,
    )
    runs: dict[str, list[Metrics]] = {name: [] for name in policies}
    for name, _, output in answers:
        runs[name].append(output.metrics)
        tick(label_of(policies[name]))
    return runs


def verdicts(comparison: Comparison) -> list[str]:
    """The numbers in plain sentences; losing is said as plainly as winning."""
    entries = comparison.entries
    ours = "specdecpp" if "specdecpp" in entries else "cumulative"
    subject = f"On this machine {'SpecDec++' if ours == 'specdecpp' else 'cumulative confidence'}"
    rivals = {"target": "the target alone", "fixed": "the best fixed K", "cumulative": "cumulative confidence"}
    said = []
    for key, rival in rivals.items():
        if key != ours:
            said.append(_sentence(subject, rival, comparison.ratio(ours, to=key)))
            subject = "It"
    if "cost_aware" in entries:
        said.append(_sentence("The rule without a threshold", rivals["target"], comparison.ratio("cost_aware")))
    for key in ("fixed", "cumulative"):
        if key != ours and (ratio := comparison.ratio(key)).value < 1:
            said.append(_sentence(rivals[key][0].upper() + rivals[key][1:], rivals["target"], ratio))
    if all(comparison.ratio(key).value < 1 for key in entries if key != "target"):
        said.append(
            "Drafting does not pay here: no rule is ahead of the target alone. specdecpp check says what is in the way."
        )
    if ours == "cumulative":
        said.append("The pair has no head, so SpecDec++ did not take part; name one with --head.")
    return said


def _sentence(subject: str, rival: str, ratio: Ratio) -> str:
    percent = 100 * (ratio.value - 1)
    error = "" if ratio.error is None else f" (± {_number(100 * ratio.value * ratio.error)} %)"
    doubt = "" if ratio.is_clear else ": too close to call"
    if _number(abs(percent)) == "0.0":
        return f"{subject} is as fast as {rival}{error}{doubt}."
    way = "faster" if percent > 0 else "slower"
    return f"{subject} is {_number(abs(percent))} % {way} than {rival}{error}{doubt}."


def _number(percent: float) -> str:
    return f"{percent:.0f}" if percent >= 9.95 else f"{percent:.1f}"


def _log_ratio(a: tuple[Metrics, ...], b: tuple[Metrics, ...]) -> float:
    return math.log(sum(a, Metrics()).tokens_per_second / sum(b, Metrics()).tokens_per_second)


def to_dict(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON: one object per policy, and the plan it was run under."""
    policies = {}
    for name, entry in comparison.entries.items():
        total, ratio = entry.total, comparison.ratio(name)
        own = {"k": entry.policy.k} if name == "fixed" and isinstance(entry.policy, Fixed) else {}
        policies[name] = own | {
            "policy": spec_of(entry.policy),
            "tokens_per_second": total.tokens_per_second,
            "speedup": ratio.value,
            "speedup_error": None if ratio.error is None else ratio.value * ratio.error,
            "mean_acceptance_length": total.mean_acceptance_length,
            "discard_rate": total.discard_rate,
            "verification_rate": total.verification_rate,
            "num_tokens": total.num_tokens,
            "elapsed_s": total.elapsed_s,
            "time_shares": total.time_shares,
        }
    plan = {name: getattr(comparison.plan, name) for name in comparison.plan.__dataclass_fields__}
    return {"policies": policies, "plan": plan, "verdicts": verdicts(comparison)}
