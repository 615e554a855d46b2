"""The bench without a target: the same table from recorded answers, at any costs, in seconds.

    labels with branches -> traces of a development and a test split -> settings chosen on the first, replayed on the second

A replay is exact in distribution under token verification (`replay.replay`), counts forward passes only, and gives all rules
the same coins. The oracles say what could be had: with hindsight, with a perfect score of drawn tokens, and before sampling.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path

from specdecpp.bench.contest import head_notes
from specdecpp.bench.contestants import ALONE, Contender
from specdecpp.bench.results import Machine, Results, Role, Row, head_about, provenance_of
from specdecpp.bench.rows import Entry, rows_of
from specdecpp.errors import DataError
from specdecpp.head import AcceptanceHead
from specdecpp.loading.pair import REFERENCE, short_name
from specdecpp.metrics import Metrics
from specdecpp.policies import Fixed, Policy
from specdecpp.policies.head import costs_for, heads
from specdecpp.policy_spec import label_of, spec_of
from specdecpp.replay.replay import replay
from specdecpp.replay.replayed import Replayed
from specdecpp.replay.trace import Trace
from specdecpp.training import shards
from specdecpp.training.evaluate import labels_for
from specdecpp.training.traces import Terms, trace

Oracle = Callable[..., Replayed]
"""A function that the entry point `specdecpp.oracles` names by its label: those of the lab."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Traces that choose settings and traces that are measured, with the opinions of the heads, by their names."""

    dev: Sequence[Trace]
    test: Sequence[Trace]
    heads: Mapping[str, AcceptanceHead] = field(default_factory=dict)
    temperature: float = 1.0

    @property
    def longest(self) -> int:
        """The most draft tokens of a step that can be replayed."""
        return min(trace.branch_size for trace in (*self.dev, *self.test))

    @property
    def datasets(self) -> list[str]:
        return list(dict.fromkeys(trace.source for trace in self.test))

    def name_of(self, policy: Policy) -> str:
        """A policy as a table shows it, with the name of its head where there are several."""
        asked = heads(policy)[:1] if len(self.heads) > 1 else []
        named = [name for name, head in self.heads.items() if head in asked]
        return " ".join([label_of(policy), *named])


def heads_for(folder: Path | str, name: str | None) -> dict[str, AcceptanceHead]:
    """The head of this name, else the reference pair's for labels of that. Raises `HeadError` for one that cannot be read."""
    if name is not None:
        return {Path(name).name: AcceptanceHead.from_pretrained(name)}
    of = shards.about(folder).get("pair", {})
    head = AcceptanceHead.from_pretrained(REFERENCE / "head")
    is_own = None not in of.values() and (head.card.target, head.card.draft) == (of.get("target"), of.get("draft"))
    return {"head": head} if is_own else {}


def recorded(folder: Path | str, heads: Mapping[str, AcceptanceHead]) -> Recording:
    """The splits dev and test of a collection as traces. Raises `DataError` where one is missing, has no branches, or is of
    another pair than a head.

    >>> recorded("out/labels", {}).datasets                                                      # doctest: +SKIP
    ['gsm8k', 'alpaca']
    """
    about = shards.about(folder)
    sides: dict[str, list[Trace]] = {}
    for record in labels_for(heads.values(), folder):
        side = sides.setdefault(record.split, [])
        if record.split in ("dev", "test"):
            side.append(trace(record, Terms.of(about), heads=heads.values()))
    for name in ("test", "dev"):
        if not sides.get(name):
            raise DataError(
                f"the labels in {folder} have no split {name}, only {', '.join(sorted(sides))}: settings are chosen on dev and "
                "measured on test. Collect both."
            )
    temperature = float(about.get("sampling", {}).get("temperature", 1.0))
    return Recording(dev=sides["dev"], test=sides["test"], heads=heads, temperature=temperature)


class Stage:
    """A recording and a field, on which machines are tried; what a rule does that never looks at costs is replayed once."""

    def __init__(self, recording: Recording, rules: Sequence[Contender], *, seed: int = 0, repeats: int = 1):
        self.recording, self.asked, self.seed, self.repeats = recording, rules, seed, repeats
        self.rules = []
        for rule in rules:  # without fixed lengths beyond what is recorded; other rules are cut short there
            settings = tuple(p for p in rule.settings if not (isinstance(p, Fixed) and p.k > recording.longest))
            self.rules += [replace(rule, settings=settings)] if settings else []
        self._sides: dict[str | None, list[Trace]] = {None: [*recording.dev]}
        self._sides |= {dataset: [t for t in recording.test if t.source == dataset] for dataset in recording.datasets}
        self._played: dict[tuple[str | None, Policy], Replayed] = {}

    def rows(self, machine: Machine) -> tuple[Row, ...]:
        """A row for the target, every setting of every rule, and the oracles, on every data set."""
        chosen = {rule: self.chosen(rule, machine) for rule in (ALONE, *self.rules)}
        entries = []
        for dataset in self.recording.datasets:
            for rule, choice in chosen.items():
                entries += [self.entry(dataset, rule.role, policy, policy == choice, machine) for policy in rule.settings]
            entries += self.oracles(dataset, machine)
        return rows_of(entries, seed=self.seed)

    def chosen(self, rule: Contender, machine: Machine) -> Policy:
        """The setting with the most tokens per second over the whole development split."""
        if len(rule.settings) == 1:
            return rule.settings[0]
        return max(rule.settings, key=lambda policy: self.played(None, policy, machine).tokens_per_second)

    def played(self, dataset: str | None, policy: Policy, machine: Machine) -> Replayed:
        """A policy on the test answers of a data set, or for None on all that choose settings."""
        costs, found = costs_for(policy, machine.costs), self._played.get((dataset, policy))
        if found is not None and (not found.is_priced or found.costs == costs):
            return found if found.is_priced else found.at(costs)
        found = replay(self._sides[dataset], policy, costs, **self._options)
        self._played[dataset, policy] = found
        return found

    @property
    def notes(self) -> list[str]:
        """Notes for a reader of the table."""
        longest = self.recording.longest
        notes = [
            f"Replayed on {len(self.recording.test)} recorded answers; settings were chosen on {len(self.recording.dev)} "
            "others, once for all data sets. Only forward passes are counted, and a head's time where it was measured."
        ]
        if any(policy.max_tokens > longest for rule in self.asked for policy in rule.settings):
            notes.append(f"The recorded branches have {longest} tokens, and so no step has more draft tokens than that.")
        return notes + head_notes(self.rules, temperatures=[self.recording.temperature])

    @property
    def _options(self) -> dict[str, int]:
        return {"seed": self.seed, "repeats": self.repeats, "max_tokens": self.recording.longest}

    def entry(self, dataset: str, role: Role, policy: Policy, chosen: bool, machine: Machine) -> Entry:
        """A policy on the test answers of a data set, ready for `rows.rows_of`."""
        head_s = machine.costs.head_s if heads(policy) else 0.0
        found = metrics_by_answer(self.played(dataset, policy, machine), head_s=head_s)
        return self._entry(dataset, role, spec_of(policy), self.recording.name_of(policy), chosen, found)

    def oracles(self, dataset: str, machine: Machine) -> list[Entry]:
        """Those that the recording knows enough for; without the target's view of the branches it is hindsight alone."""
        traces, known = self._sides[dataset], dict[str, tuple[str, Oracle]]()
        for point in entry_points(group="specdecpp.oracles"):
            known |= point.load()
        if any(t.truth is None for t in traces):
            known = {key: of for key, of in known.items() if key == "hindsight"}
        found = {key: metrics_by_answer(oracle(traces, machine.costs, **self._options)) for key, (_, oracle) in known.items()}
        return [self._entry(dataset, "oracle", key, known[key][0], False, prompts) for key, prompts in found.items()]

    def _entry(self, dataset: str, role: Role, policy: str, label: str, chosen: bool, prompts: list[Metrics]) -> Entry:
        temperature = self.recording.temperature
        return Entry(
            dataset=dataset,
            temperature=temperature,
            verification="token" if temperature else "greedy",
            role=role,
            policy=policy,
            label=label,
            chosen=chosen,
            prompts=prompts,
            repeats=self.repeats,
        )


def metrics_by_answer(played: Replayed, *, head_s: float = 0.0) -> list[Metrics]:
    """Metrics of each answer, all its runs together; of what drafting costs, `head_s` a draft token is the head's."""
    num = played.drafted + played.dropped
    head, draft = num * head_s, num * (played.costs.draft_s - head_s)
    columns = {
        "num_tokens": played.tokens,
        "num_spec_steps": played.passes,
        "num_draft_tokens": played.drafted,
        "num_accepted_draft_tokens": played.accepted,
        "draft_s": draft,
        "head_s": head,
        "verify_s": played.seconds - draft - head,
    }
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [Metrics(**dict(zip(columns, row, strict=True))) for row in rows]


def results_of(stage: Stage, machine: Machine, *, labels: Path | str) -> Results:
    """The table on one machine, with where it comes from."""
    recording, about = stage.recording, shards.about(labels)
    names = {role: short_name(name) for role, name in about.get("names", {}).items()}
    source = {key: about.get(key) for key in ("digest", "sampling", "command")} | {"names": names}
    counts = {"num_dev": len(recording.dev), "num_test": len(recording.test), "repeats": stage.repeats}
    heads = {name: head_about(head) for name, head in recording.heads.items()}
    return Results(
        kind="replay",
        provenance=provenance_of(seed=stage.seed, labels=source, data=counts, heads=heads),
        costs=machine.to_dict(),
        rows=stage.rows(machine),
        notes=tuple(stage.notes),
    )
