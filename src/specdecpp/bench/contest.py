"""The contest: every rule by the clock, on the same prompts and seeds, in one process.

    field -> settings tried on development prompts -> the best of each rule on test prompts -> rows

Fair means: the same code for all, the target alone included; settings chosen on other prompts than those that are measured,
once for all data sets, apart by verification and temperature; everything of one temperature interleaved prompt by prompt in
an order that rotates, after an untimed step, so that a slow moment of the machine falls on all; rates are ratios of sums,
and intervals resample prompts.
"""

import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

from specdecpp.bench.contestants import ALONE, TARGET, Contender
from specdecpp.bench.questions import Questions
from specdecpp.bench.results import Machine, Results, provenance_of
from specdecpp.bench.rows import MIN_PROMPTS, Entry, rows_of
from specdecpp.costs.measuring import measured
from specdecpp.decoder import Decoder, Output
from specdecpp.loading.pair import Pair
from specdecpp.metrics import Metrics
from specdecpp.policies import Costs, Policy
from specdecpp.policies.head import heads
from specdecpp.policy_spec import label_of, spec_of
from specdecpp.sampling import Sampling
from specdecpp.verify import check_rule, is_lossless, verifications

WARM_UP_TOKENS = 4
Key = TypeVar("Key", bound=Hashable)
Turn = TypeVar("Turn")
Answer = TypeVar("Answer")
Tick = Callable[[str], None]


def interleaved(
    runs: Mapping[Key, Callable[[Turn, int], Answer]],
    turns: Sequence[Turn],
    *,
    max_tokens: int,
    warm_up: int = WARM_UP_TOKENS,
    at_random: bool = False,
) -> Iterator[tuple[Key, Turn, Answer]]:
    """Every contestant in every turn, as it comes: (whose, which turn, the answer), after a short untimed answer of each.

    `runs` take a turn and the most tokens of the answer. The order is that of `in_turn`; at random it depends on the turn
    alone, so that a comparison which was stopped goes on as it would have gone.
    """
    for run in runs.values() if turns else ():
        run(turns[0], warm_up)
    for number, turn in enumerate(turns):
        order = in_turn([*runs], number, num_turns=len(turns))
        if at_random:
            order = random.Random(str(turn)).sample([*runs], len(runs))
        for key in order:
            yield key, turn, runs[key](turn, max_tokens)


def in_turn(contestants: Sequence[Any], turn: int, *, num_turns: int) -> Sequence[Any]:
    """The order of one turn: who begins moves on, further where turns are too few to go around, and every other turn goes
    backwards, so that neither a slow start of the turns nor a slow end falls on the same ones."""
    num = len(contestants)
    first = turn * max(1, num // num_turns) % num if num else 0
    if turn % 2:
        return [*contestants[: first + 1][::-1], *contestants[first + 1 :][::-1]]
    return [*contestants[first:], *contestants[:first]]


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """Plan of a contest. Temperature 0 is verified greedily, whatever `verifications` say. Raises ValueError."""

    temperatures: tuple[float, ...] = (0.0, 1.0)
    verifications: tuple[str, ...] = ("token", "block")
    top_p: float = 1.0
    num_dev: int = 8
    """Prompts of each data set that choose settings."""
    num_test: int = 16
    """Prompts of each data set that are measured."""
    num_cycles: int = 2
    max_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperatures and self.verifications and self.max_tokens >= 2 and self.num_cycles >= 1):
            raise ValueError(
                "a bench needs a temperature, a verification, at least 2 tokens and 1 cycle, got "
                f"{self.temperatures}, {self.verifications}, {self.max_tokens} and {self.num_cycles}"
            )
        known = [name for name, kind in verifications().items() if is_lossless(kind) and name != "greedy"]
        if unknown := [name for name in self.verifications if name not in known]:
            raise ValueError(f"a bench compares the verifications {', '.join(known)}, got {unknown[0]!r}.")
        for temperature in self.temperatures:
            Sampling(temperature=temperature, top_p=self.top_p)

    def verifications_at(self, temperature: float) -> tuple[str, ...]:
        return self.verifications if temperature else ("greedy",)


QUICK = {"num_dev": 3, "num_test": 6, "num_cycles": 1, "max_tokens": 64}
"""Sizes of a quick bench."""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One rule in one setting under one verification."""

    rule: Contender
    policy: Policy
    verification: str


@dataclass(frozen=True, kw_only=True)
class Heat:
    """Everything that was run on some prompts at one temperature: whole turns, in each of which every contestant answered."""

    temperature: float
    contestants: Sequence[Contestant]
    prompts: Sequence[Sequence[int]]
    turns: list[tuple[int, Mapping[Contestant, Output]]] = field(default_factory=list)
    """Places of prompts, and the answers to them."""

    @property
    def answers(self) -> dict[Contestant, list[list[Output]]]:
        """Timed answers of each contestant: by prompt, then by cycle."""
        places = range(len(self.prompts))
        return {c: [[of[c] for place, of in self.turns if place == i] for i in places] for c in self.contestants}


@dataclass(frozen=True, kw_only=True)
class Contest:
    """A field, prompts and a plan, ready to be run with a pair. Raises `UnsoundError` for a rule that a verification cannot
    bear, ValueError where settings are to be chosen and there are no development prompts."""

    pair: Pair
    rules: Sequence[Contender]
    sets: Sequence[Questions]
    plan: BenchPlan

    def __post_init__(self) -> None:
        num = max((len(rule.settings) for rule in self.rules), default=0)
        if num > 1 and not self.dev:
            raise ValueError(
                f"a rule has {num} settings to choose among and there are no development prompts, on which that is done. Give "
                "a file with more prompts, or name each rule in one setting, a fixed K too."
            )
        for temperature in self.plan.temperatures:
            for verification in self.plan.verifications_at(temperature):
                for one in self._contestants(verification):
                    check_rule(one.policy, verifications()[verification], lossless=True)
                    for head in heads(one.policy):
                        self.pair.check_head(head)

    @property
    def costs(self) -> Costs:
        """Those of this machine, which decoders find by themselves, with what practice has shown."""
        return measured(self.pair)

    @property
    def dev(self) -> list[Sequence[int]]:
        return [ids for questions in self.sets for ids in questions.dev]

    @property
    def test(self) -> list[Sequence[int]]:
        return [ids for questions in self.sets for ids in questions.test]

    @property
    def num_answers(self) -> int:
        """Answers that will be timed."""
        num_tried = sum(len(rule.settings) for rule in self.rules if len(rule.settings) > 1)
        num_arenas = [len(self.plan.verifications_at(temperature)) for temperature in self.plan.temperatures]
        num_tests = len(self.test) * self.plan.num_cycles
        return sum(num * num_tried * len(self.dev) + (1 + num * len(self.rules)) * num_tests for num in num_arenas)

    @property
    def most_s(self) -> float:
        """About how long all of it takes if every answer is as long as it may be, at the target's own pace."""
        return self.num_answers * self.plan.max_tokens * self.costs.verify_s(1)

    def run(self, tick: Tick = lambda label: None) -> list[Heat]:
        """Choose settings and time them, temperature by temperature. `tick` is called after every answer.

        Interrupted (KeyboardInterrupt) it gives the whole turns until then; where there is none, the interrupt is raised.
        """
        heats: list[Heat] = []
        try:
            for temperature in self.plan.temperatures:
                names = self.plan.verifications_at(temperature)
                contestants = [Contestant(rule=ALONE, policy=TARGET, verification=names[0])]
                for name in names:
                    contestants += self.chosen(name, temperature, tick)
                heats.append(Heat(temperature=temperature, contestants=contestants, prompts=self.test))
                self._time(heats[-1], num_cycles=self.plan.num_cycles, tick=tick)
        except KeyboardInterrupt:
            if not any(heat.turns for heat in heats):
                raise
        return [heat for heat in heats if heat.turns]

    def chosen(self, verification: str, temperature: float, tick: Tick = lambda label: None) -> list[Contestant]:
        """Each rule in the setting with the most tokens per second over all development prompts."""
        settings = self._contestants(verification)
        tried = [contestant for contestant in settings if len(contestant.rule.settings) > 1]
        heat = Heat(temperature=temperature, contestants=tried, prompts=self.dev)
        self._time(heat, num_cycles=1, tick=tick)
        speed = {contestant: sum(pooled(of), Metrics()).tokens_per_second for contestant, of in heat.answers.items()}
        of_rules = [[contestant for contestant in settings if contestant.rule is rule] for rule in self.rules]
        return [max(of, key=lambda contestant: speed.get(contestant, 0.0)) for of in of_rules]

    def _contestants(self, verification: str) -> list[Contestant]:
        return [Contestant(rule=r, policy=policy, verification=verification) for r in self.rules for policy in r.settings]

    def _time(self, heat: Heat, *, num_cycles: int, tick: Tick) -> None:
        """Fill in the turns of a heat. A prompt has the same seed for all, and another one in every cycle."""
        sampling, num = Sampling(temperature=heat.temperature, top_p=self.plan.top_p), len(heat.prompts)

        def run(decoder: Decoder, turn: int, max_tokens: int) -> Output:
            prompt, seed = heat.prompts[turn % num], self.plan.seed + turn
            return decoder.generate(prompt, max_tokens=max_tokens, sampling=sampling, seed=seed)

        runs = {contestant: partial(run, self._decoder(contestant)) for contestant in heat.contestants}
        answers: dict[Contestant, Output] = {}
        for contestant, turn, output in interleaved(runs, range(num_cycles * num), max_tokens=self.plan.max_tokens):
            answers[contestant] = output
            tick(label_of(contestant.policy))
            if len(answers) == len(runs):  # a turn that not all have finished counts for none
                heat.turns.append((turn % num, answers))
                answers = {}

    def _decoder(self, contestant: Contestant) -> Decoder:
        return Decoder(
            self.pair,
            policy=contestant.policy,
            verification=verifications()[contestant.verification],
            reuses=False,  # every contestant reads the prompt
        )


def pooled(answers: Sequence[Sequence[Output]]) -> list[Metrics]:
    """Metrics of each prompt, all its answers together."""
    return [sum((answer.metrics for answer in of), Metrics()) for of in answers]


def results_of(contest: Contest, heats: Sequence[Heat], *, notes: Sequence[str] = ()) -> Results:
    """The rows with where they come from; `notes` stand after those about the conditions."""
    plan = contest.plan
    num_turns = len(plan.temperatures) * len(contest.test) * plan.num_cycles
    data = {q.dataset: {"num_dev": len(q.dev), "num_test": len(q.test)} for q in contest.sets}
    return Results(
        kind="bench",
        provenance=provenance_of(contest.pair, seed=plan.seed, data=data, plan=asdict(plan)),
        costs=Machine(name="measured", costs=contest.costs).to_dict(),
        rows=rows_of(list(_entries(contest, heats)), seed=plan.seed),
        notes=(*conditions(contest, heats), *notes),
        is_partial=sum(len(heat.turns) for heat in heats) < num_turns,
    )


def _entries(contest: Contest, heats: Sequence[Heat]) -> Iterator[Entry]:
    """One of every contestant on every data set of which it answered a prompt."""
    for heat in heats:
        start = 0
        for questions in contest.sets:
            end = start + len(questions.test)
            for contestant, answers in heat.answers.items():
                if own := [of for of in answers[start:end] if of]:
                    yield Entry(
                        dataset=questions.dataset,
                        temperature=heat.temperature,
                        verification=contestant.verification,
                        role=contestant.rule.role,
                        policy=spec_of(contestant.policy),
                        label=label_of(contestant.policy),
                        chosen=True,
                        prompts=pooled(own),
                    )
            start = end


def conditions(contest: Contest, heats: Sequence[Heat]) -> list[str]:
    """Notes for a reader of the table; the first says how far an interrupted contest came."""
    plan, notes = contest.plan, []
    num = len(contest.test) * plan.num_cycles
    done = {heat.temperature: len(heat.turns) for heat in heats}
    if sum(done.values()) < num * len(plan.temperatures):
        whole = ", ".join(f"{done.get(t, 0)} of {num} at temperature {t:g}" for t in plan.temperatures)
        turns = f"the turns of all rules ({len(contest.test)} prompts x {plan.num_cycles})"
        notes.append(f"Interrupted: of {turns} these are whole: {whole}.")
    notes.append(
        f"{len(contest.test)} prompts x {plan.num_cycles}, up to {plan.max_tokens} tokens"
        f"{f', top_p {plan.top_p:g}' if plan.top_p < 1 else ''}; settings were chosen on {len(contest.dev)} "
        "other prompts, once for all data sets; gains are over the best fixed K under token verification."
    )
    if len(contest.test) < MIN_PROMPTS:
        notes.append(f"There are no intervals: fewer than {MIN_PROMPTS} prompts say nothing about their spread.")
    return notes + head_notes(contest.rules, temperatures=plan.temperatures)


def head_notes(rules: Iterable[Contender], *, temperatures: Sequence[float]) -> list[str]:
    """Heads that were asked at temperatures which they were not made for."""
    asked = {head for rule in rules for policy in rule.settings for head in heads(policy)}
    made_for: set[Any] = {(head.card.sampling or {}).get("temperature") for head in asked} - {None}
    return [
        f"The head was made for temperature {t:g}, and was asked at {', '.join(other)}."
        for t in sorted(made_for)
        if (other := [f"{other:g}" for other in temperatures if other != t])
    ]
