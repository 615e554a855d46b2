"""`specdecpp bench`: every rule by the clock on the same prompts in one process, or from recordings."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdecpp.cli.common import (
    Json,
    Out,
    PairNames,
    PolicySpecs,
    PromptKind,
    Prompts,
    Quick,
    Seed,
    check_names,
    clock,
    interruptible,
    kind_of,
    print_json,
    with_pair,
)
from specdecpp.cli.report import show

if TYPE_CHECKING:
    from specdecpp.bench.contest import Contest
    from specdecpp.bench.results import Machine, Results
    from specdecpp.loading.pair import Pair
    from specdecpp.policy_spec import PolicySpec

EXAMPLES = (
    "specdecpp bench --quick",
    "specdecpp bench --prompts gsm8k_test.jsonl --prompt gsm8k --out results.json",
)


@with_pair()
def bench(
    names: PairNames,
    prompts: Prompts = None,
    prompt: PromptKind = None,
    num: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Of each file, measured.  [default: 16; quick: 6]")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="The most tokens of an answer.  [default: 128; quick: 64]")
    ] = None,
    cycles: Annotated[int | None, typer.Option(metavar="N", help="How often all are timed.  [default: 2; quick: 1]")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(metavar="X", help="0 is greedy; repeatable.  [default: 0, 1; smollm2: 0, 0.7]")
    ] = None,
    top_p: Annotated[float | None, typer.Option(metavar="X", help="Keep this mass of p.  [default: 1; smollm2: 0.9]")] = None,
    verification: Annotated[
        list[str] | None, typer.Option(metavar="KIND", parser=kind_of, help="token, block; repeatable.  [default: both]")
    ] = None,
    policy: PolicySpecs = None,
    verify_lossless: Annotated[
        bool, typer.Option("--verify-lossless", help="Test every answer against the target's distribution.")
    ] = False,
    quick: Quick = False,
    labels: Annotated[
        Path | None, typer.Option("--replay", metavar="LABELS", help="From recordings with branches instead of the clock.")
    ] = None,
    costs: Annotated[
        str | None,
        typer.Option(
            metavar="C", help="Replay at t_draft/t_target = C, passes flat, or at a file's.  [default: this machine's]"
        ),
    ] = None,
    out: Out = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Compare every rule by the clock.

    The target alone, the best fixed K, free rules, SpecDec++ and the rule without a threshold, on the same prompts and
    seeds, interleaved. Settings are chosen on other prompts than those that are measured. Nothing else should run
    meanwhile.

    With --replay: the same table from labels with branches, exact in distribution, at any costs, oracles included.
    """
    from specdecpp.bench import contestants, questions
    from specdecpp.bench.contest import QUICK, BenchPlan, Contest
    from specdecpp.costs.measuring import measure
    from specdecpp.policy_spec import parse_policy

    sizes = {"num_test": num, "max_tokens": max_tokens, "num_cycles": cycles}
    specs = [parse_policy(spec) for spec in policy or ()]
    if labels is not None:
        sampling = {"--temperature": temperature, "--top-p": top_p, "--verification": verification}
        others = {"--num": num, "--max-tokens": max_tokens, "--cycles": cycles, "--quick": quick, "--prompts": prompts}
        others |= {"--prompt": prompt, "--verify-lossless": verify_lossless, "--backend": names.backend}
        refuse_in_replay(sampling | others)
        check_names(names.target, names.draft, None)
        check_out(out)
        tell(_replayed(labels, specs, machine_of(costs), names, seed, quiet=as_json), out=out, as_json=as_json)
        return
    if costs is not None:
        raise ValueError("--costs is for --replay LABELS: by the clock a machine has its own costs.")
    options: dict[str, Any] = sampled(names.usual, temperature, top_p) | (QUICK if quick else {})
    options |= {key: size for key, size in sizes.items() if size is not None}
    if verification:
        options["verifications"] = tuple(dict.fromkeys(verification))
    plan = BenchPlan(**options, seed=seed)
    names.check(*specs)
    texts = questions.read(prompts or (), prompt or ())
    check_out(out)
    pair = names.load()
    rules = contestants.field_for(specs, [pair.head] if pair.head else [], quick=quick)
    sets = [questions.encoded(pair, of, num_dev=plan.num_dev, num_test=plan.num_test) for of in texts]
    contest = Contest(pair=pair, rules=rules, sets=sets, plan=plan, costs=measure(pair))
    if code := race(contest, verify=verify_lossless, out=out, as_json=as_json):
        raise typer.Exit(code)


def refuse_in_replay(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of the clock: recordings bring their own prompts, sampling and lengths."""
    if given := [name for name, value in options.items() if value is not None and value is not False]:
        raise ValueError(
            f"{given[0]} is for the clock: --replay takes prompts, sampling and lengths from its recordings. "
            "Leave one of the two out."
        )


def machine_of(costs: str | None) -> "Machine | None":
    """The machine of `--costs`: c, or the costs in a file."""
    from specdecpp.bench.results import Machine

    if costs is None:
        return None
    try:
        c = float(costs)
    except ValueError:
        return Machine.read(costs)
    return Machine.relative(c)


def _replayed(
    labels: Path,
    specs: "Sequence[PolicySpec]",
    machine: "Machine | None",
    names: PairNames,
    seed: int,
    *,
    quiet: bool,
) -> "Results":
    """The table at the costs of a machine, or at those of the pair that the labels are of."""
    from specdecpp.bench import contestants, replays
    from specdecpp.report import render

    heads = replays.heads_for(labels, names.head)
    rules = contestants.field_for(specs, list(heads.values()))
    recording, pair = replays.recorded(labels, heads), None
    if machine is None:
        pair, machine = _here(labels, names)
    with render.waiting("replaying", quiet=quiet):
        return replays.results_of(replays.Stage(recording, rules, seed=seed), machine, labels=labels, pair=pair)


def _here(labels: Path, names: PairNames) -> "tuple[Pair, Machine]":
    """The pair that the labels are of, unless another is named, and its costs on this machine."""
    from specdecpp.bench import replays
    from specdecpp.bench.results import Machine
    from specdecpp.costs.measuring import measured
    from specdecpp.errors import DataError, PairError
    from specdecpp.report import render
    from specdecpp.training import shards

    own = shards.about(labels).get("names", {}) if names.target is None else {}
    try:
        pair = replace(names, target=own.get("target", names.target), draft=own.get("draft", names.draft)).load()
    except PairError as error:
        if not own:
            raise
        raise DataError(
            f"the pair that the labels in {labels} are of cannot be loaded ({error}) Say where it is with --target and "
            "--draft, or say the costs with --costs."
        ) from error
    replays.check_pair(labels, pair)
    with render.waiting("measuring what steps cost"):
        return pair, Machine(name="measured", costs=measured(pair))


def sampled(pair: str | None, temperatures: Sequence[float] | None, top_p: float | None) -> dict[str, Any]:
    """Temperatures and top_p: those that are asked for, else greedy and as a pair of this name is sampled by its users."""
    from specdecpp.bench.contest import usual_sampling

    usual = usual_sampling(pair)
    asked = tuple(dict.fromkeys(temperatures or (0.0, usual["temperature"])))
    return {"temperatures": asked, "top_p": usual["top_p"] if top_p is None else top_p}


def race(contest: "Contest", *, verify: bool = False, out: Path | None = None, as_json: bool) -> int:
    """Run a contest and report it, as far as it came where it is interrupted: the exit code, 1 where the distribution of the
    target was not kept, 130 for an interrupt."""
    from specdecpp.bench import lossless
    from specdecpp.bench.contest import results_of
    from specdecpp.report import render, tables

    most = f"at most {contest.num_answers:,} answers, {clock(contest.most_s)} if all are long and drafting gains nothing"
    try:
        with interruptible(), render.progress("timing", contest.num_answers) as tick:
            print(most, file=sys.stderr)  # who reads it may interrupt at once
            heats = contest.run(tick)
    except KeyboardInterrupt:
        print("interrupted before all rules had answered one test prompt: there is nothing to show.", file=sys.stderr)
        return 130
    findings = lossless.verify(contest, heats) if verify else []
    done = results_of(contest, heats, notes=lossless.sentences(findings))
    tell(done, out=out, as_json=as_json)
    if not as_json:
        console = render.console()
        console.print(tables.times(done.rows), width=render.width_of(console))
    if not lossless.is_kept(findings):
        print("error: the distribution of the target was not kept; the notes say where.", file=sys.stderr)
        return 1
    return 130 if done.is_partial else 0


def check_out(out: Path | None) -> None:
    """Refuse, before anything is run, a file that cannot be written in the end."""
    if out is not None:
        from specdecpp.bench.results import writable

        writable(out)


def tell(results: "Results", *, out: Path | None, as_json: bool) -> None:
    """Write the file, and show the tables or the JSON."""
    if out is not None:
        results.write(out)
        print(f"wrote {out}", file=sys.stderr)
    if as_json:
        print_json(results.to_dict())
    else:
        from specdecpp.report.boards import boards

        show(boards([results]))
