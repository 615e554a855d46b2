"""`specdecpp bench`: every rule on the clock, on the same prompts, in one process."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdecpp.cli.common import (
    BackendOption,
    Device,
    Draft,
    DType,
    DTypeOption,
    Head,
    Json,
    Lossy,
    Seed,
    Target,
    check_names,
    clock,
    interruptible,
    kind_of,
    load,
    print_json,
    told,
    usual,
)
from specdecpp.cli.report import show

if TYPE_CHECKING:
    from specdecpp.bench.contestants import Contender
    from specdecpp.bench.machines import Machine
    from specdecpp.bench.questions import Questions
    from specdecpp.bench.results import Results
    from specdecpp.bench.run import BenchPlan
    from specdecpp.loading.pair import Pair
    from specdecpp.policy_spec import PolicySpec

EXAMPLES = (
    "specdecpp bench --quick",
    "specdecpp bench --prompts gsm8k_test.jsonl --prompt gsm8k --out results.json",
)


Data = Annotated[
    list[str] | None, typer.Option("--prompts", metavar="FILE", help="As in recipes; repeatable.  [default: a few]")
]
Builder = Annotated[
    list[str] | None,
    typer.Option("--prompt", metavar="KIND", help="How a row becomes a prompt: gsm8k, alpaca, humaneval, field:NAME."),
]
Policies = Annotated[list[str] | None, typer.Option("--policy", metavar="SPEC", help="These instead of all; repeatable.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the results, for report.")]


def bench(
    target: Target = None,
    draft: Draft = None,
    head: Head = None,
    data: Data = None,
    prompt: Builder = None,
    num_dev: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Of each file, to choose settings.  [default: 8; quick: 3]")
    ] = None,
    num: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Of each file, measured.  [default: 16; quick: 6]")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="The most tokens per answer.  [default: 128; quick: 64]")
    ] = None,
    cycles: Annotated[int | None, typer.Option(metavar="N", help="How often all are measured.  [default: 2; quick: 1]")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(metavar="X", help="0 is greedy; repeatable.  [default: 0, 1; smollm2: 0, 0.7]")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="X", help="Keep the likeliest, of mass X.  [default: 1; smollm2: 0.9]")
    ] = None,
    verification: Annotated[
        list[str] | None, typer.Option(metavar="KIND", parser=kind_of, help="token, block; repeatable.  [default: both]")
    ] = None,
    policy: Policies = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="SWEEP", help="Show more settings: specdecpp.threshold=0.3,0.5; repeatable."),
    ] = None,
    verify_lossless: Annotated[
        bool, typer.Option("--verify-lossless", help="Test every answer against the target's distribution.")
    ] = False,
    lossy: Lossy = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts and settings.")] = False,
    labels: Annotated[
        Path | None, typer.Option("--replay", metavar="LABELS", help="From recordings with branches instead of the clock.")
    ] = None,
    c: Annotated[
        list[float] | None, typer.Option("--c", metavar="X", help="Replay at t_draft/t_target, passes flat; repeatable.")
    ] = None,
    costs: Annotated[Path | None, typer.Option(metavar="FILE", help="Replay at costs from JSON or results.")] = None,
    out: Out = None,
    seed: Seed = 0,
    as_json: Json = False,
    dtype: DTypeOption = DType.auto,
    device: Device = None,
    backend: BackendOption = None,
) -> None:
    """Compare every rule by the clock.

    The target alone, the best fixed K, free rules, SpecDec++ and the rule without a threshold, on the same prompts and
    seeds, interleaved. Settings are chosen on other prompts than those that are measured. Nothing else should run
    meanwhile.

    With --replay: the same table from labels with branches, exact in distribution, at any costs (by default those of the pair
    that the labels name, on this machine), oracles included.
    """
    with told():
        from specdecpp.bench import contestants, questions
        from specdecpp.bench.machines import Machine
        from specdecpp.bench.run import QUICK, USUAL, BenchPlan
        from specdecpp.policy_spec import parse_policy
        from specdecpp.verify import is_lossless, verifications

        if labels is not None:
            sampling = {"--temperature": temperature, "--top-p": top_p, "--verification": verification, "--lossy": lossy}
            sizes = {"--num-dev": num_dev, "--num": num, "--max-tokens": max_tokens, "--cycles": cycles, "--quick": quick}
            others = {"--prompts": data, "--prompt": prompt, "--sweep": sweep, "--verify-lossless": verify_lossless}
            refuse_in_replay(sampling | sizes | others | {"--backend": backend})
            heads, specs = [head] if head else [], [parse_policy(spec) for spec in policy or ()]
            machines = [*map(Machine.relative, dict.fromkeys(c or ())), *([Machine.read(costs)] if costs else [])]
            check_names(target, draft, None)
            check_out(out)
            tell(
                _replayed(labels, heads, specs, machines, target, draft, seed, dtype, device, as_json), out=out, as_json=as_json
            )
            return
        if c or costs:
            raise ValueError("--c and --costs are for --replay LABELS: by the clock a machine has its own costs.")
        if lossy and verify_lossless:
            raise ValueError(
                "--lossy permits other distributions than the target's, and --verify-lossless tests for it. Give one."
            )
        with_lossy = ("token", *(name for name, kind in verifications().items() if not is_lossless(kind)))
        size = QUICK if quick else USUAL
        size = size.changed(num_dev=num_dev, num_test=num, num_cycles=cycles, max_tokens=max_tokens)
        name = usual(target, draft, head)
        temperatures, mass = sampled(name, temperature, top_p)
        plan = BenchPlan(
            temperatures=temperatures,
            top_p=mass,
            verifications=tuple(dict.fromkeys(verification or (with_lossy if lossy else BenchPlan.verifications))),
            lossless=not lossy,
            max_tokens=size.max_tokens,
            num_cycles=size.num_cycles,
            seed=seed,
        )
        specs = [parse_policy(spec) for spec in policy or ()]
        swept = [spec for text in sweep or () for spec in contestants.swept(text)]
        for spec in (None, *specs, *swept):
            check_names(target, draft, head, spec)
        texts = questions.read(data or (), prompt or ())
        check_out(out)
        pair = load(name, draft, head, dtype=dtype, device=device, backend=backend)
        rules = contestants.field_for(specs, swept, [pair.head] if pair.head else [], quick=quick)
        sets = [questions.encoded(pair, of, num_dev=size.num_dev, num_test=size.num_test) for of in texts]
        code = _race(pair, rules, sets, plan, verify=verify_lossless, out=out, as_json=as_json, is_whole=bool(sweep))
        if code:
            raise typer.Exit(code)


def refuse_in_replay(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of the clock: recordings bring their own prompts, sampling and lengths."""
    if given := [name for name, value in options.items() if value is not None and value is not False]:
        raise ValueError(
            f"{given[0]} is for the clock: --replay takes prompts, sampling and lengths from its recordings. "
            "Leave one of the two out."
        )


def _replayed(
    labels: Path,
    heads: Sequence[str],
    specs: "Sequence[PolicySpec]",
    machines: "Sequence[Machine]",
    target: str | None,
    draft: str | None,
    seed: int,
    dtype: DType,
    device: str | None,
    quiet: bool,
) -> "list[Results]":
    """A table for each of the costs, or for those of the pair that the labels are of."""
    from specdecpp.bench import contestants, replays
    from specdecpp.report import render

    found = replays.heads_for(labels, heads)
    rules = contestants.field_for(specs, (), list(found.values()))
    recording, pair = replays.recorded(labels, found, split="test", dev_split="dev"), None
    if not machines:
        pair, here = _here(labels, target, draft, heads[0] if heads else None, dtype=dtype, device=device)
        machines = [here]
    with render.waiting("replaying", quiet=quiet):
        stage = replays.Stage(recording, rules, seed=seed)
        return [replays.results_of(stage, machine, labels=labels, pair=pair) for machine in machines]


def _here(
    labels: Path, target: str | None, draft: str | None, head: str | None, *, dtype: DType, device: str | None
) -> "tuple[Pair, Machine]":
    """The pair that the labels are of, unless another is named, and its costs on this machine."""
    from specdecpp.bench import replays
    from specdecpp.bench.machines import Machine
    from specdecpp.errors import DataError, PairError
    from specdecpp.report import render
    from specdecpp.training import shards

    own = shards.about(labels).get("names", {}) if target is None else {}
    try:
        pair = load(own.get("target", target), own.get("draft", draft), head, dtype=dtype, device=device)
    except PairError as error:
        if not own:
            raise
        raise DataError(
            f"the pair that the labels in {labels} are of cannot be loaded ({error}) Say where it is with --target and "
            "--draft, or say the costs with --c or --costs."
        ) from error
    replays.check_pair(labels, pair)
    with render.waiting("measuring what steps cost"):
        return pair, Machine.here(pair)


def sampled(pair: str | None, temperatures: Sequence[float] | None, top_p: float | None) -> tuple[tuple[float, ...], float]:
    """Temperatures and top_p: those that are asked for, else greedy and as a pair of this name is sampled in the demo."""
    from specdecpp.demo import DemoPlan

    usual = DemoPlan.usual(pair)
    asked = tuple(dict.fromkeys(temperatures or (0.0, usual.temperature)))
    return asked, usual.top_p if top_p is None else top_p


def _race(
    pair: "Pair",
    rules: "Sequence[Contender]",
    sets: "Sequence[Questions]",
    plan: "BenchPlan",
    *,
    verify: bool,
    out: Path | None,
    as_json: bool,
    is_whole: bool,
) -> int:
    """Run the bench and report it, as far as it came where it is interrupted: the exit code, 1 where the distribution of the
    target was not kept, 130 for an interrupt."""
    from specdecpp.bench import lossless
    from specdecpp.bench.machines import Machine
    from specdecpp.bench.run import Bench, results_of
    from specdecpp.costs.measuring import measure
    from specdecpp.report import render

    race = Bench(pair=pair, rules=rules, sets=sets, plan=plan, machine=Machine.here(pair, measure(pair)))
    most = f"at most {race.num_answers:,} answers, {clock(race.most_s)} if all are long and drafting gains nothing"
    try:
        with interruptible(), render.progress("timing", race.num_answers) as tick:
            print(most, file=sys.stderr)  # who reads it may interrupt at once
            heats = race.run(tick)
    except KeyboardInterrupt:
        print("interrupted before all rules had answered one test prompt: there is nothing to show.", file=sys.stderr)
        return 130
    found = lossless.verify(race, heats) if verify else None
    done = results_of(race, heats, notes=found.sentences if found else ())
    tell([done], out=out, as_json=as_json, is_whole=is_whole)
    if not as_json:
        _show_times(done)
    if found and not found.is_kept:
        print("error: the distribution of the target was not kept; the notes say where.", file=sys.stderr)
        return 1
    return 130 if done.is_partial else 0


def _show_times(results: "Results") -> None:
    """Where the time goes."""
    from specdecpp.report import render, tables

    out = render.console()
    out.print(tables.times(results.rows), width=render.width_of(out))


def check_out(out: Path | None) -> None:
    """Refuse, before anything is run, a file that cannot be written in the end."""
    if out is not None:
        from specdecpp.bench.results import writable

        writable(out)


def tell(found: "Sequence[Results]", *, out: Path | None, as_json: bool, is_whole: bool = False) -> None:
    """Write the files, one for each costs, and show the tables or the JSON; whole: with every setting."""
    if out is not None:
        from specdecpp.bench.results import write_all

        for path in write_all(found, out):
            print(f"wrote {path}", file=sys.stderr)
    if as_json:
        print_json(found[0].to_dict() if len(found) == 1 else {"results": [results.to_dict() for results in found]})
    else:
        from specdecpp.report.boards import boards

        show(boards(found), is_whole=is_whole)
