"""Is a pair worth it? Measured in a minute: what steps cost here, how often the target would accept, and what follows.

    costs.measuring -> costs;  answers of the target -> labels -> traces -> replay at these costs -> verdict and advice

Two answers of the target are sampled to every prompt. One chooses the settings of the rules, the other says what they bring.
Replay counts forward passes and the head; a short real run beside it shows what is lost outside of them. Advice comes from
replaying the same answers on another machine: with a cheaper draft, with verification that is flat, without a head's time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import torch

from specdecpp.bench.contestants import TARGET, default_field
from specdecpp.bench.machines import Machine
from specdecpp.bench.questions import Questions
from specdecpp.bench.replays import Recording, Stage
from specdecpp.bench.results import Interval, Row
from specdecpp.bench.rows import Tally, ratio_interval
from specdecpp.bench.run import ALONE, Bench, Contestant, Plan
from specdecpp.costs import chain_tokens
from specdecpp.costs.measuring import measure
from specdecpp.decoder import Decoder
from specdecpp.loading.pair import Pair
from specdecpp.policies import Costs, Policy
from specdecpp.runners import EagerRunner
from specdecpp.sampling import Sampling
from specdecpp.training.branches import check_tree_mask
from specdecpp.training.jobs import context_of, runners_of
from specdecpp.training.labels import Answer, Labelling, label
from specdecpp.training.responses import sample_responses
from specdecpp.training.traces import Terms, traces

LEAST_GAIN = 1.01
"""Over the target alone: a draft that brings less is not worth its memory."""
CHEAP = 0.05
"""Time of a draft step over that of a target pass, with a cheap draft."""
GOOD = 0.8
"""The acceptance of a draft that is good."""
BRANCH, REPEATS = 20, 4
WIDE = 5
"""Positions of the wider target pass that the report compares with a pass of one."""
STEPS = ("what steps cost", "answers of the target", "labels", "every rule in replay", "the best rule for real")
Tick = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How much a check runs. Raises ValueError for what cannot be run."""

    max_tokens: int = 96
    num_timed: int = 4
    """Prompts of the short real run, each answered twice by both."""
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 8 or self.num_timed < 1:
            raise ValueError(
                f"a check needs answers of at least 8 tokens and 1 timed prompt, got {self.max_tokens} and {self.num_timed}"
            )
        assert self.sampling

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_p=self.top_p)


@dataclass(frozen=True, kw_only=True)
class Check:
    """What was found. Speed-ups are over the target alone.

    `what_if` has the best speed-up on other machines: `draft` with a cheap one, `verification` with one that is flat, `head`
    with one that takes no time, `acceptance` with a good one (fixed K, by the chain formula).
    """

    machine: Machine
    acceptance: float
    """1 - TV(p, q), averaged over positions: the chance that a drafted token is accepted."""
    rows: tuple[Row, ...]
    what_if: Mapping[str, float]
    measured: float
    """The speed-up of the rule that replay liked best, decoded for real."""
    measured_interval: Interval | None
    time_shares: Mapping[str, float]
    runners: str = ""
    """How forward passes are run, and why so."""

    @property
    def costs(self) -> Costs:
        return self.machine.costs

    @property
    def c(self) -> float:
        return self.costs.draft_s / self.costs.verify_s(1)

    @property
    def width(self) -> float:
        """A pass over a few positions, over that of one."""
        return self.costs.verify_s(WIDE) / self.costs.verify_s(1)

    @property
    def best(self) -> Row:
        """The rule that is predicted to be fastest."""
        return max((row for row in self.rows if row.chosen and row.role != "target"), key=lambda row: row.speedup)

    @property
    def limit(self) -> float:
        """With hindsight, or without drafting: no rule can do better at these costs."""
        return max(1.0, next(row.speedup for row in self.rows if row.policy == "hindsight"))

    @property
    def is_worth(self) -> bool | None:
        """Whether the best rule is predicted ahead of the target alone with its whole interval, and not seen behind it with
        its whole interval when decoded; False: predicted behind, or ahead by less than `LEAST_GAIN`, as a rule is that hardly
        drafts. None: too close to call."""
        low, high = self.best.speedup_interval or (self.best.speedup, self.best.speedup)
        is_seen_behind = self.measured_interval is not None and self.measured_interval[1] < 1
        return False if high < LEAST_GAIN else True if low > 1 and not is_seen_behind else None


def check(
    pair: Pair,
    sets: Sequence[Questions],
    trial: Trial,
    *,
    recorder: Pair | None = None,
    tick: Tick = lambda step: None,
    tell: Tick = lambda doing: None,
) -> Check:
    """Measure a pair on all prompts, of both sides, and predict every rule. `tick` is told of each of `STEPS` that is done, and
    `tell`, again and again, which one is being done and how far it is.

    `recorder` is the same pair under runners that read whole batches, where those of `pair` do not.

    Raises `RunnerError` for models that cannot be run in batches or under a tree attention mask.
    """
    prompts = [ids for questions in sets for ids in (*questions.test, *questions.dev)]
    dataset = " and ".join(questions.dataset for questions in sets)
    tell(f"{STEPS[0]}: rounds of several lengths")
    machine = Machine.here(pair, measure(pair))
    tick(STEPS[0])
    recording = record(recorder or pair, dataset, prompts, trial, tick=tick, tell=tell)
    tell(f"{STEPS[3]}: settings are chosen")
    stage = Stage(recording, default_field([pair.head] if pair.head else []), seed=trial.seed, repeats=REPEATS)
    rows = stage.rows(machine)
    best, _ = fastest(stage, machine)
    what_if = {name: fastest(stage, other)[1] for name, other in others(machine).items()}
    acceptance = float(np.concatenate([t.overlap for t in recording.test]).mean())
    if acceptance < GOOD:
        what_if["acceptance"] = chain_speedup(machine.costs, GOOD)
    tick(STEPS[3])
    alone, own = decoded(pair, prompts[: trial.num_timed], best, machine, trial, tell=tell)
    teach(pair, prompts[: trial.num_timed], trial)
    tick(STEPS[4])
    return Check(
        machine=machine,
        acceptance=acceptance,
        rows=rows,
        what_if=what_if,
        measured=own.tokens_per_second / alone.tokens_per_second,
        measured_interval=ratio_interval(own, alone, seed=trial.seed),
        time_shares=own.time_shares or {},
        runners=pair.runners,
    )


def is_batched(pair: Pair) -> bool:
    """Whether both models read whole batches, in which answers are sampled and labelled."""
    return isinstance(pair.target, EagerRunner) and isinstance(pair.draft, EagerRunner)


def record(
    pair: Pair, dataset: str, prompts: Sequence[Sequence[int]], trial: Trial, *, tick: Tick, tell: Tick = lambda doing: None
) -> Recording:
    """Two answers to every prompt: the first choose settings, the others are measured."""
    target, draft = runners_of(pair)
    context = context_of(pair)
    longest = max(map(len, prompts)) + trial.max_tokens + BRANCH
    check_tree_mask(draft, longest=longest if context is None else min(longest, context))
    sampling = trial.sampling
    twice = [*prompts, *prompts]
    counted = Counter(most=len(twice) * trial.max_tokens, tell=tell)
    sampled = sample_responses(
        target,
        twice,
        sampling=sampling,
        max_tokens=trial.max_tokens,
        ends=pair.ends,
        generator=torch.Generator(device=target.device).manual_seed(trial.seed),
        max_length=context,
        tick=counted,
    )
    tick(STEPS[1])
    how = Labelling(sampling=sampling, ends=pair.ends, draws=1, features=(), branch_length=BRANCH, max_length=context)
    answers = [Answer(prompt=p, answer=a, source=dataset) for p, a in zip(twice, sampled, strict=True)]
    generator = torch.Generator(device=draft.device).manual_seed(trial.seed + 1)
    terms = Terms(ends=pair.ends, max_tokens=trial.max_tokens, max_length=context)
    heads = {} if pair.head is None else {"head": pair.head}
    tell(f"{STEPS[2]}: of {len(answers)} answers")
    labelled = label(
        target, draft, answers, how, generator, tick=lambda num: tell(f"{STEPS[2]}: {num} of {len(answers)} answers")
    )
    made = traces(labelled, terms, heads=heads.values())
    tick(STEPS[2])
    num = len(prompts)
    return Recording(dev=made[:num], test=made[num:], heads=heads, temperature=trial.temperature)


@dataclass
class Counter:
    """Reports how many tokens have been sampled so far."""

    most: int
    tell: Tick
    num: int = 0

    def __post_init__(self) -> None:
        self(0)

    def __call__(self, num_tokens: int) -> None:
        self.num += num_tokens
        self.tell(f"{STEPS[1]}: {self.num:,} tokens, of at most {self.most:,}")


def fastest(stage: Stage, machine: Machine) -> tuple[Policy, float]:
    """The best of the chosen settings on a machine, and its speed-up there."""
    dataset = stage.recording.datasets[0]
    policies = [policy for rule in stage.rules if (policy := stage.chosen(rule, machine)) is not None]
    speed = {policy: stage.played(dataset, policy, machine).tokens_per_second for policy in policies}
    best = max(policies, key=lambda policy: speed[policy])
    return best, speed[best] * machine.costs.verify_s(1)


def others(machine: Machine) -> dict[str, Machine]:
    """The machine with one thing improved each: flat verification, a cheap draft, a head that takes no time."""
    costs, single = machine.costs, machine.costs.verify_s(1)
    found = {"verification": replace(machine, costs=replace(costs, passes={1: single}))}
    if costs.draft_s > CHEAP * single:
        found["draft"] = replace(machine, costs=replace(costs, draft_s=CHEAP * single, start_s=0.0))
    if machine.head_s:
        found["head"] = replace(machine, costs=replace(costs, head_s=0.0))
    return found


def chain_speedup(costs: Costs, acceptance: float) -> float:
    """The speed-up of the best fixed K of up to 20 where every candidate is accepted with one probability."""
    k = costs.best_length(acceptance, range(21))
    return chain_tokens(acceptance, k) / costs.round_s(k) * costs.verify_s(1)


def teach(pair: Pair, prompts: Sequence[Sequence[int]], trial: Trial) -> None:
    """Have the default rule answer some prompts without a seed: later requests under the same sampling, in other processes too,
    begin with what it learns of them (`policies.experience`)."""
    if pair.target_fingerprint is None or pair.draft_fingerprint is None:
        return  # without fingerprints nothing is kept for later processes
    decoder = Decoder(pair)
    for prompt in prompts:
        decoder.generate(prompt, max_tokens=trial.max_tokens, sampling=trial.sampling)


def decoded(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    policy: Policy,
    machine: Machine,
    trial: Trial,
    *,
    tell: Tick = lambda doing: None,
) -> tuple[Tally, Tally]:
    """(The target alone, the policy) on the clock, in turns."""
    verification = "token" if trial.temperature else "greedy"
    plan = Plan(
        temperatures=(trial.temperature,), top_p=trial.top_p, max_tokens=trial.max_tokens, num_cycles=2, seed=trial.seed
    )
    bench = Bench(pair=pair, rules=(), sets=(), plan=plan, machine=machine)
    pairing = [Contestant(rule=ALONE, policy=p, verification=verification) for p in (TARGET, policy)]
    tell(f"{STEPS[4]}: in turns with the target alone")
    numbers = count(1)
    most = len(pairing) * len(prompts) * plan.num_cycles

    def tick(label: str) -> None:
        tell(f"{STEPS[4]}: {next(numbers)} of {most} answers")

    runs = bench.interleaved(pairing, prompts, temperature=trial.temperature, num_cycles=plan.num_cycles, tick=tick)
    first, second = (Tally.of([[run.metrics for run in of] for of in runs[c]]) for c in pairing)
    return first, second
