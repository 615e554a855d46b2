"""`specdecpp replay`: the table of bench from recordings, at any costs, in seconds."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdecpp.cli.bench import Out, Policies, check_out, tell
from specdecpp.cli.common import Device, Draft, DType, DTypeOption, Json, Seed, Split, Target, check_names, load, told

if TYPE_CHECKING:
    from specdecpp.bench.machines import Machine
    from specdecpp.loading.pair import Pair

EXAMPLES = (
    "specdecpp replay out/labels --head out/heads/look_ahead --c 0.22",
    "specdecpp replay out/labels --c 0.05 --c 0.22 --c 0.3 --out replayed.json",
)


def replay(
    labels: Annotated[Path, typer.Argument(metavar="LABELS", help="Labels with branches, as made by collect.")],
    head: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Heads; repeatable.  [default: the pair's own]")
    ] = None,
    c: Annotated[
        list[float] | None, typer.Option("--c", metavar="X", help="t_draft/t_target, verification flat; repeatable.")
    ] = None,
    costs: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON with draft_s and passes, or results.")] = None,
    target: Target = None,
    draft: Draft = None,
    policy: Policies = None,
    split: Annotated[Split, typer.Option(metavar="NAME", help="Answers that are measured.")] = Split.test,
    dev_split: Annotated[Split, typer.Option(metavar="NAME", help="Answers that choose settings.")] = Split.dev,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="How often each answer is replayed.")] = 1,
    out: Out = None,
    seed: Seed = 0,
    as_json: Json = False,
    dtype: DTypeOption = DType.auto,
    device: Device = None,
) -> None:
    """Compare every rule on recordings, at any costs.

    What would I get on hardware where a draft step takes 0.22 of a target pass? Exact in law for token verification, oracles
    included. Without --c and --costs: the costs on this machine of the pair that the labels name, which is the only time that
    models are loaded.
    """
    with told():
        from specdecpp.bench import contestants, replays
        from specdecpp.bench.machines import Machine
        from specdecpp.report import render
        from specdecpp.request import parse_policy

        specs = [parse_policy(spec) for spec in policy or ()]
        machines = [*map(Machine.relative, dict.fromkeys(c or ())), *([Machine.read(costs)] if costs else [])]
        check_names(target, draft, None)
        check_out(out)
        heads = replays.heads_for(labels, head or ())
        rules = contestants.field_for(specs, (), list(heads.values()))
        recording = replays.recorded(labels, heads, split=split.value, dev_split=dev_split.value)
        pair = None
        if not machines:
            pair, machine = _here(labels, target, draft, head[0] if head else None, dtype=dtype, device=device)
            machines = [machine]
        with render.waiting("replaying", quiet=as_json):
            stage = replays.Stage(recording, rules, seed=seed, repeats=repeats)
            found = [replays.results_of(stage, machine, labels=labels, pair=pair) for machine in machines]
        tell(found, out=out, as_json=as_json)


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
