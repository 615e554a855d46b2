"""`specdecpp bench`: every rule by the clock on the same prompts in one process, or from recordings."""

import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdecpp.cli import common
from specdecpp.cli.common import Json, PairNames
from specdecpp.cli.report import show

if TYPE_CHECKING:
    from specdecpp.bench.contest import Contest
    from specdecpp.bench.results import Machine, Results

EXAMPLES = (
    "specdecpp bench --quick",
    "specdecpp bench --prompts gsm8k_test.jsonl --prompt gsm8k --out results.json",
)


@common.with_pair()
def bench(
    names: PairNames,
    prompts: common.Prompts = None,
    prompt: common.PromptKind = None,
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
    top_p: Annotated[
        float | None, typer.Option(metavar="X", help="Keep the most probable tokens of this mass.  [default: 1; smollm2: 0.9]")
    ] = None,
    verification: Annotated[
        list[str] | None, typer.Option(metavar="KIND", help="token, block, compare; repeatable.  [default: token and block]")
    ] = None,
    policy: common.PolicySpecs = None,
    verify_lossless: Annotated[
        bool, typer.Option("--verify-lossless", help="Test every answer against the target's distribution.")
    ] = False,
    quick: common.Quick = False,
    labels: Annotated[
        Path | None, typer.Option("--replay", metavar="LABELS", help="From recordings with branches instead of the clock.")
    ] = None,
    costs: Annotated[
        str | None, typer.Option(metavar="C", help="Replay at t_draft/t_target = C, passes flat, or at the costs in a file.")
    ] = None,
    out: common.Out = None,
    seed: common.Seed = 0,
    as_json: Json = False,
) -> None:
    """Compare every rule by the clock.

    The target alone, the best fixed K, free rules, SpecDec++ and the rule without a threshold, on the same prompts and
    seeds, interleaved. Settings are chosen on other prompts than those that are measured. Run nothing else.

    With --replay and --costs: the same table from labels with branches, exact in distribution, oracles included.
    """
    from specdecpp.bench import contestants, questions, replays
    from specdecpp.bench.contest import QUICK, BenchPlan, Contest
    from specdecpp.bench.results import writable
    from specdecpp.policy_spec import parse_policy

    specs = [parse_policy(spec) for spec in policy or ()]
    if labels is not None:
        clocked = {"--temperature": temperature, "--top-p": top_p, "--verification": verification, "--num": num}
        clocked |= {"--max-tokens": max_tokens, "--cycles": cycles, "--quick": quick, "--prompts": prompts, "--prompt": prompt}
        clocked |= {"--verify-lossless": verify_lossless, "--backend": names.backend, "--target": names.target}
        clocked |= {"--draft": names.draft, "--device": names.device, "--dtype": None if names.dtype == "auto" else names.dtype}
        if given := [name for name, value in clocked.items() if value is not None and value is not False]:
            raise ValueError(
                f"{given[0]} is for the clock: --replay takes the pair, prompts, sampling and lengths from its recordings. "
                "Leave one of the two out."
            )
        machine = machine_of(costs)
        if out:
            writable(out)
        heads = replays.heads_for(labels, names.head)
        rules = contestants.field_for(specs, list(heads.values()))
        stage = replays.Stage(replays.recorded(labels, heads), rules, seed=seed)
        tell(replays.results_of(stage, machine, labels=labels), out=out, as_json=as_json)
        return
    if costs is not None:
        raise ValueError("--costs is for --replay LABELS: by the clock a machine has its own costs.")
    sizes = {"num_test": num, "max_tokens": max_tokens, "num_cycles": cycles}
    options: dict[str, Any] = sampled(names.usual, temperature, top_p) | (QUICK if quick else {})
    options |= {key: size for key, size in sizes.items() if size is not None}
    if verification:
        options["verifications"] = tuple(dict.fromkeys(verification))
    plan = BenchPlan(**options, seed=seed)
    names.check(*(policy or ()))
    texts = questions.read(prompts or (), prompt or ())
    if out:
        writable(out)
    pair = names.load()
    rules = contestants.field_for(specs, [pair.head] if pair.head else [], quick=quick)
    sets = [questions.encoded(pair, of, num_dev=plan.num_dev, num_test=plan.num_test) for of in texts]
    race(Contest(pair=pair, rules=rules, sets=sets, plan=plan), verify_lossless, out, as_json=as_json)


def machine_of(costs: str | None) -> "Machine":
    """The machine of `--costs`: c, or the costs in a file."""
    from specdecpp.bench.results import Machine

    if costs is None:
        raise ValueError(
            "--replay needs --costs: a number, which is the time of a draft token over that of a target pass, or a file of "
            "bench --out or of check --json, which hold the costs of a machine."
        )
    try:
        c = float(costs)
    except ValueError:
        return Machine.read(costs)
    return Machine.relative(c)


def sampled(pair: str | None, temperatures: Sequence[float] | None = None, top_p: float | None = None) -> dict[str, Any]:
    """Temperatures and top_p: as asked, else greedy and the usual sampling of the pair of this name."""
    usual = usual_sampling(pair)
    asked = tuple(dict.fromkeys(temperatures or (0.0, usual["temperature"])))
    return {"temperatures": asked, "top_p": usual["top_p"] if top_p is None else top_p}


def usual_sampling(pair: str | None) -> dict[str, float]:
    """Temperature and top_p of a pair of this name, 1 unless it has its own."""
    from specdecpp.loading.shipped import SAMPLING

    return {"temperature": 1.0, "top_p": 1.0} | SAMPLING.get(pair or "", {})


def race(contest: "Contest", verify: bool = False, out: Path | None = None, *, as_json: bool) -> None:
    """Run a contest and report it, as far as it came where it is interrupted. Exits with 1 where the distribution of the
    target was not kept, with 130 after an interrupt."""
    from specdecpp.bench import lossless
    from specdecpp.bench.contest import results_of
    from specdecpp.report import render

    began, num, num_done = perf_counter(), contest.num_answers, 0
    most = f"at most {num:,} answers, {common.clock(contest.most_s)} if all are long and drafting gains nothing"
    try:
        with common.interruptible(), render.live("timing", every_s=60.0) as say:
            print(most, file=sys.stderr)  # who reads it may interrupt at once

            def tick(label: str) -> None:
                nonlocal began, num_done
                num_done += 1
                if num_done == 1:  # until now all were warmed up too
                    began = perf_counter()
                    return
                left_s = (perf_counter() - began) * (num - num_done) / (num_done - 1)
                say(f"{num_done}/{num}, {common.clock(left_s)} left: {label}")

            heats = contest.run(tick)
    except KeyboardInterrupt:
        print("interrupted before all rules had answered one test prompt: there is nothing to show.", file=sys.stderr)
        raise typer.Exit(130) from None
    findings = lossless.verify(contest, heats) if verify else []
    done = results_of(contest, heats, notes=lossless.sentences(findings))
    tell(done, out=out, as_json=as_json)
    if not lossless.is_kept(findings):
        print("error: the distribution of the target was not kept; the notes say where.", file=sys.stderr)
        raise typer.Exit(1)
    if done.is_partial:
        raise typer.Exit(130)


def tell(results: "Results", *, out: Path | None, as_json: bool) -> None:
    """Write the file, and show the tables or the JSON."""
    if out is not None:
        results.write(out)
        print(f"wrote {out}", file=sys.stderr)
    if as_json:
        common.print_json(results.to_dict())
    else:
        from specdecpp.report.tables import boards

        show(boards([results]))
