"""The bench: every rule on the clock, on the same prompts and seeds, in one process.

    field -> settings tried on development prompts -> the best of each rule on test prompts -> rows

Fair means: the same code for all, the target alone included; settings chosen on other prompts than those
that are measured, once for all data sets, apart by verification and temperature; everything of one temperature interleaved
prompt by prompt in an order that rotates, after an untimed step, so that a slow moment of the machine falls on all; rates
are ratios of sums, and intervals resample prompts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from specdecpp.bench.contestants import TARGET, Contender
from specdecpp.bench.interleaving import interleaved
from specdecpp.bench.machines import Machine, head_of
from specdecpp.bench.questions import Questions
from specdecpp.bench.results import Results, Row, provenance_of
from specdecpp.bench.rows import MIN_PROMPTS, Entry, Tally, rows_of
from specdecpp.decoder import Decoder
from specdecpp.loading.pair import Pair
from specdecpp.metrics import Metrics
from specdecpp.policies import Policy, SpecDecPP
from specdecpp.policy_spec import VERIFICATION_NAMES, label_of, spec_of
from specdecpp.sampling import Sampling
from specdecpp.verify import at, check_lossless, is_lossless, verifications

WARM_UP_TOKENS = 4
Tick = Callable[[str], None]


def _silent(label: str) -> None:
    """Progress that is not shown."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How long a bench is: prompts of each data set that choose settings and that are measured, cycles, tokens."""

    num_dev: int = 8
    num_test: int = 16
    num_cycles: int = 2
    max_tokens: int = 128

    def changed(self, **sizes: int | None) -> "Size":
        """With other sizes where they are given."""
        return replace(self, **{name: size for name, size in sizes.items() if size is not None})


USUAL, QUICK = Size(), Size(num_dev=3, num_test=6, num_cycles=1, max_tokens=64)


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """How much is run. Temperature 0 is verified greedily, whatever lossless `verifications` there are. Raises
    ValueError for what cannot be run."""

    temperatures: tuple[float, ...] = (0.0, 1.0)
    verifications: tuple[str, ...] = ("token", "block")
    top_p: float = 1.0
    max_tokens: int = USUAL.max_tokens
    num_cycles: int = USUAL.num_cycles
    seed: int = 0
    lossless: bool = True
    """Refuse verifications that change the distribution (`lab.lossy`)."""

    def __post_init__(self) -> None:
        if not (self.temperatures and self.verifications and self.max_tokens >= 2 and self.num_cycles >= 1):
            raise ValueError(
                "a bench needs a temperature, a verification, at least 2 tokens and 1 cycle, got "
                f"{self.temperatures}, {self.verifications}, {self.max_tokens} and {self.num_cycles}"
            )
        if unknown := [v for v in self.verifications if v not in VERIFICATION_NAMES]:
            raise ValueError(f"there is no verification {unknown[0]!r} to choose. There are {', '.join(VERIFICATION_NAMES)}.")
        for name in self.verifications:
            check_lossless(verifications()[name], lossless=self.lossless)
        for temperature in self.temperatures:
            Sampling(temperature=temperature, top_p=self.top_p)

    def verifications_at(self, temperature: float) -> tuple[str, ...]:
        if temperature:
            return self.verifications
        other = [v for v in self.verifications if not is_lossless(at(Sampling(temperature=0.0), verifications()[v]))]
        return ("greedy", *other)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One rule in one setting under one verification; `is_chosen` as in the rows."""

    rule: Contender
    policy: Policy
    verification: str
    is_chosen: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """One timed answer."""

    metrics: Metrics
    tokens: tuple[int, ...]


Runs = list[list[Run]]
"""Of one contestant: by prompt, then by cycle."""


@dataclass(frozen=True, kw_only=True)
class Heat:
    """Everything that was run on the test prompts at one temperature, which all went in turns."""

    temperature: float
    runs: Mapping[Contestant, Runs]

    @property
    def num_turns(self) -> int:
        """Turns in which every contestant answered a prompt."""
        return min(sum(map(len, of)) for of in self.runs.values())

    def whole_turns(self) -> "Heat":
        """Without the answers of a turn that not all of them finished."""
        num_prompts = len(next(iter(self.runs.values())))
        least = [min(len(of[i]) for of in self.runs.values()) for i in range(num_prompts)]
        runs = {c: [answers[:num] for answers, num in zip(of, least, strict=True)] for c, of in self.runs.items()}
        return Heat(temperature=self.temperature, runs=runs)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A field, prompts and a plan, ready to be run with a pair. Raises `UnsoundError` for a rule that a verification cannot
    bear, ValueError where settings are to be chosen and there are no development prompts."""

    pair: Pair
    rules: Sequence[Contender]
    sets: Sequence[Questions]
    plan: BenchPlan
    machine: Machine

    def __post_init__(self) -> None:
        num = max((len(rule.settings) for rule in self.rules), default=0)
        if num > 1 and not self.dev:
            raise ValueError(
                f"a rule has {num} settings to choose among and there are no development prompts. Ask for some with "
                "--num-dev, or name each rule in one setting, a fixed K too."
            )
        for temperature in self.plan.temperatures:
            for verification in self.plan.verifications_at(temperature):
                for rule in self.rules:
                    for policy in (*rule.settings, *rule.beside):
                        self._decoder(Contestant(rule=rule, policy=policy, verification=verification))

    @property
    def dev(self) -> tuple[tuple[int, ...], ...]:
        return tuple(ids for questions in self.sets for ids in questions.dev)

    @property
    def test(self) -> tuple[tuple[int, ...], ...]:
        return tuple(ids for questions in self.sets for ids in questions.test)

    @property
    def num_answers(self) -> int:
        """The most answers that will be timed."""
        num = 0
        for temperature in self.plan.temperatures:
            num_arenas = len(self.plan.verifications_at(temperature))
            num += num_arenas * sum(rule.most_tried for rule in self.rules) * len(self.dev)
            shown = sum(len(rule.beside) + bool(rule.settings) for rule in self.rules)
            num += (1 + num_arenas * shown) * len(self.test) * self.plan.num_cycles
        return num

    @property
    def most_s(self) -> float:
        """About how long all of it takes if every answer is as long as it may be, at the target's own pace."""
        return self.num_answers * self.plan.max_tokens * self.machine.costs.verify_s(1)

    @property
    def num_turns(self) -> int:
        """Turns of all temperatures, when nothing interrupts it."""
        return len(self.plan.temperatures) * len(self.test) * self.plan.num_cycles

    def run(self, tick: Tick = _silent) -> list[Heat]:
        """Choose settings and time them, temperature by temperature. `tick` is told of every answer.

        Interrupted (KeyboardInterrupt) it gives the whole turns until then; where there is none, the interrupt is raised.
        """
        heats: list[Heat] = []
        try:
            for temperature in self.plan.temperatures:
                self._heat(temperature, heats, tick)
        except KeyboardInterrupt:
            heats = [whole for heat in heats if (whole := heat.whole_turns()).num_turns]
            if not heats:
                raise
        return heats

    def _heat(self, temperature: float, heats: list[Heat], tick: Tick) -> None:
        """Run a heat, which stands in `heats` as soon as its answers come."""
        verifications = self.plan.verifications_at(temperature)
        contestants = [Contestant(rule=ALONE, policy=TARGET, verification=verifications[0], is_chosen=True)]
        for verification in verifications:
            chosen = self.tuned(verification, temperature, tick)
            contestants += [
                Contestant(rule=rule, policy=policy, verification=verification, is_chosen=policy == choice)
                for rule, choice in zip(self.rules, chosen, strict=True)
                for policy in rule.shown(choice)
            ]
        num_cycles = self.plan.num_cycles
        heat = Heat(temperature=temperature, runs={contestant: [[] for _ in self.test] for contestant in contestants})
        heats.append(heat)
        self.interleaved(heat.runs, self.test, temperature=temperature, num_cycles=num_cycles, tick=tick)

    def tuned(self, verification: str, temperature: float, tick: Tick = _silent) -> list[Policy | None]:
        """The setting of each rule with the most tokens per second over all development prompts; None for a rule without.

        A rule that was only scanned is tried again around the best of its scan, that one included, and this decides.
        """

        def fastest(tried: Mapping[int, Sequence[Policy]]) -> dict[int, Policy]:
            of = {
                (i, policy): Contestant(rule=self.rules[i], policy=policy, verification=verification)
                for i, policies in tried.items()
                for policy in policies
            }
            runs: dict[Contestant, Runs] = {contestant: [[] for _ in self.dev] for contestant in of.values()}
            self.interleaved(runs, self.dev, temperature=temperature, num_cycles=1, tick=tick)
            speed = {key: Tally.of(_metrics(runs[contestant])).tokens_per_second for key, contestant in of.items()}
            return {i: max(policies, key=lambda policy: speed[i, policy]) for i, policies in tried.items()}

        best: dict[int, Policy] = {i: rule.settings[0] for i, rule in enumerate(self.rules) if rule.settings}
        best |= fastest({i: rule.first for i, rule in enumerate(self.rules) if rule.first})
        again = {i: rule.around(best[i]) for i, rule in enumerate(self.rules) if rule.first and rule.scan}
        best |= fastest({i: policies for i, policies in again.items() if len(policies) > 1})
        return [best.get(i) for i in range(len(self.rules))]

    def interleaved(
        self,
        runs: Mapping[Contestant, Runs],
        prompts: Sequence[Sequence[int]],
        *,
        temperature: float,
        num_cycles: int,
        tick: Tick = _silent,
    ) -> None:
        """Every contestant on every prompt in every cycle, in turns (`interleaving`), after a few untimed tokens.

        `runs`, a list for each prompt, take the answers as they come.
        """
        decoders = {contestant: self._decoder(contestant) for contestant in runs}
        sampling = Sampling(temperature=temperature, top_p=self.plan.top_p)
        for decoder in decoders.values():
            decoder.generate(prompts[0], max_tokens=WARM_UP_TOKENS, sampling=sampling, seed=self.plan.seed)
        answers = interleaved(
            decoders,
            prompts,
            num_cycles=num_cycles,
            max_tokens=self.plan.max_tokens,
            sampling=sampling,
            seed=self.plan.seed,
        )
        for contestant, place, output in answers:
            runs[contestant][place].append(Run(metrics=output.metrics, tokens=output.tokens))
            tick(label_of(contestant.policy))

    def _decoder(self, contestant: Contestant) -> Decoder:
        verification = verifications()[contestant.verification]
        return Decoder(
            self.pair,
            policy=contestant.policy,
            verification=verification,
            costs=self.machine.costs_of(contestant.policy),
            lossless=self.plan.lossless,
            reuses=False,  # every contestant reads the prompt
        )


ALONE = Contender(role="target", settings=(TARGET,))


def rows(bench: Bench, heats: Sequence[Heat]) -> tuple[Row, ...]:
    """A row for every contestant on every data set."""
    entries = []
    for heat in heats:
        start = 0
        for questions in bench.sets:
            end = start + len(questions.test)
            of_set = {c: [answers for answers in of[start:end] if answers] for c, of in heat.runs.items()}
            entries += [_entry(c, of, heat.temperature, questions.dataset) for c, of in of_set.items() if of]
            start = end
    return rows_of(entries, seed=bench.plan.seed)


def results_of(bench: Bench, heats: Sequence[Heat], *, notes: Sequence[str] = ()) -> Results:
    """The rows with where they come from; `notes` stand after those about the conditions."""
    plan = {name: getattr(bench.plan, name) for name in BenchPlan.__dataclass_fields__ if name != "seed"}
    num_done = sum(heat.num_turns for heat in heats)
    is_partial = num_done < bench.num_turns
    data = {q.dataset: {"num_dev": len(q.dev), "num_test": len(q.test)} for q in bench.sets}
    return Results(
        kind="bench",
        provenance=provenance_of(bench.pair, seed=bench.plan.seed, data=data, plan=plan),
        costs=bench.machine.to_dict(),
        rows=rows(bench, heats),
        notes=(*([interrupted(bench, heats)] if is_partial else []), *conditions(bench), *notes),
        is_partial=is_partial,
    )


def interrupted(bench: Bench, heats: Sequence[Heat]) -> str:
    """How far a bench came."""
    of = len(bench.test) * bench.plan.num_cycles
    done = {heat.temperature: heat.num_turns for heat in heats}
    told = ", ".join(f"{done.get(t, 0)} of {of} at temperature {t:g}" for t in bench.plan.temperatures)
    return (
        f"Interrupted: of the turns of all rules ({len(bench.test)} prompts x {bench.plan.num_cycles}) these are whole: {told}."
    )


def conditions(bench: Bench) -> list[str]:
    """Notes for a reader of the table."""
    plan, num_dev = bench.plan, len(bench.dev)
    said = [
        f"{len(bench.test)} prompts x {plan.num_cycles}, up to {plan.max_tokens} tokens"
        f"{f', top_p {plan.top_p:g}' if plan.top_p < 1 else ''}; settings were chosen on {num_dev} "
        "other prompts, once for all data sets; gains are over the best fixed K under token verification."
    ]
    if any(rule.scan for rule in bench.rules):
        said.append("Fixed K was scanned coarsely on the development prompts, then around the best of the scan.")
    if len(bench.test) < MIN_PROMPTS:
        said.append(f"There are no intervals: fewer than {MIN_PROMPTS} prompts say nothing about their spread.")
    policies = {p for rule in bench.rules for p in (*rule.settings, *rule.beside)}
    return said + head_notes(policies, temperatures=plan.temperatures)


def head_notes(policies: Iterable[Policy], *, temperatures: Sequence[float]) -> list[str]:
    """Where heads are asked something that they were not made for."""
    said: dict[str, None] = {}
    for policy in policies:
        if (head := head_of(policy)) is None:
            continue
        made_for = (head.card.sampling or {}).get("temperature")
        other = [f"{t:g}" for t in temperatures if made_for is not None and t != made_for]
        if other:
            said[f"The head was made for temperature {made_for:g}, and was also asked at {', '.join(other)}."] = None
        weight = head.card.calibration.rejection_weight
        if isinstance(policy, SpecDecPP) and not policy.calibrated and weight != 6:
            said[
                f"SpecDec++ raw is the paper's setting for a head trained with w_rej = 6; this head's weight is {weight:g}."
            ] = None
    return sorted(said)


def _entry(contestant: Contestant, runs: Runs, temperature: float, dataset: str) -> Entry:
    return Entry(
        dataset=dataset,
        temperature=temperature,
        verification=contestant.verification,
        role=contestant.rule.role,
        policy=spec_of(contestant.policy),
        label=label_of(contestant.policy),
        is_chosen=contestant.is_chosen,
        tally=Tally.of(_metrics(runs)),
    )


def _metrics(runs: Runs) -> list[list[Metrics]]:
    return [[run.metrics for run in of] for of in runs]
