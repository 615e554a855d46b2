"""`specdecpp train`: a recipe, from prompts to calibrated heads and the table that compares them."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdecpp.cli.common import BATCHED, DType, Json, Yes, clock, interruptible, load, print_json, told, write

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from specdecpp.head import AcceptanceHead
    from specdecpp.training.checkpoints import Epoch
    from specdecpp.training.collect import Estimate, Progress
    from specdecpp.training.evaluate import Evaluation
    from specdecpp.training.plan import HeadPlan
    from specdecpp.training.recipe import Recipe

EXAMPLES = ("specdecpp train recipe.yaml", "specdecpp train recipe.yaml --only calibrate --temperature 0.7")
COLUMNS = {
    "AUROC\n/token": "auroc_token",
    "AUROC\n/step": "auroc_product",
    "over\ncumul. q": "gain_product",
    "ECE\n/token": "ece_token",
    "ECE\n/step": "ece_product",
    "KL\n/token": "kl",
}
STAGES = {
    f"{label}\n/{of}": f"{key}_{of.replace('step', 'product')}"
    for of in ("token", "step")
    for label, key in (("ECE", "ece"), ("Brier", "brier"), ("AUROC", "auroc"))
}
LIVE_ROWS, LIVE_TOKENS = 64, 128
"""Prompts that are decoded to calibrate on steps, and the most tokens of an answer."""


class RecipeStage(StrEnum):
    """A part of a recipe."""

    collect = "collect"
    train = "train"
    calibrate = "calibrate"
    evaluate = "evaluate"


def train(
    path: Annotated[Path, typer.Argument(metavar="RECIPE", help="The YAML file that says it all.")],
    only: Annotated[
        RecipeStage | None, typer.Option(metavar="STAGE", help="Only this: collect, train, calibrate or evaluate.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Instead of the recipe's out.")] = None,
    names: Annotated[
        list[str] | None, typer.Option("--head", metavar="NAME", help="Only this head of the recipe; repeatable.")
    ] = None,
    is_grid: Annotated[
        bool, typer.Option("--grid", help="The paper's grid of 20 around each: w_rej 1, 3, 6, 12 x 0 to 4 blocks.")
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="X", help="Calibrate on steps of the pair at this temperature; 0 beside the one that samples."),
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No estimate and no progress.")] = False,
) -> None:
    """Train acceptance heads: collect labels, train, calibrate, evaluate.

    Each stage keeps what is finished: killed at any moment and started again, it goes on where it stopped, and a collection is
    the same to the byte. Only collecting runs both models; a calibration at a --temperature of its own decodes with them.
    """
    with told():
        from specdecpp.report import render
        from specdecpp.training import pipeline
        from specdecpp.training.recipe import Recipe

        recipe = Recipe.read(path)
        recipe = recipe if out is None else replace(recipe, out=out)
        if temperature is not None and only is not RecipeStage.calibrate:
            raise ValueError("--temperature is for --only calibrate. A recipe says at which temperature labels are made.")
        if only is None:
            pipeline.check(recipe)
        if only in (None, RecipeStage.collect):
            end = collected(recipe, yes=yes, quiet=quiet, is_whole=only is None)
            if only and as_json:
                print_json({"labels": str(recipe.labels), **asdict(end), "tokens_per_second": end.tokens_per_second})
            elif not as_json:
                write(closing_line(recipe, end) + "\n")
        if only is RecipeStage.collect:
            return
        plans = chosen(recipe, names, is_grid=is_grid)
        if only in (None, RecipeStage.train):
            with progress(sum(plan.epochs for plan in plans.values()), quiet=quiet) as tell:
                heads = pipeline.train_heads(recipe, plans, tell=tell)
        else:
            heads = pipeline.trained_heads(recipe, plans)
        if only is RecipeStage.train:
            tell_trained(recipe, plans, heads, as_json=as_json)
            return
        with render.waiting("calibrating", quiet=quiet or as_json):
            if temperature is not None:
                heads = calibrated_on_rounds(recipe, heads, temperature, quiet=quiet or as_json)
            elif only in (None, RecipeStage.calibrate):
                heads = pipeline.calibrate_heads(recipe, heads, again=only is RecipeStage.calibrate)
        if only is RecipeStage.calibrate:
            tell_calibrated(recipe, heads, is_greedy=temperature == 0, as_json=as_json)
            return
        with render.waiting("evaluating", quiet=quiet or as_json):
            found = pipeline.evaluate_heads(recipe, heads)
        tell_evaluated(recipe, heads, found, as_json=as_json)


def collected(recipe: "Recipe", *, yes: bool, quiet: bool, is_whole: bool) -> "Progress":
    """Collect what is missing, with the pair that the recipe names; of a whole run only if later stages can use it."""
    import torch

    from specdecpp.training import folders, pipeline, shards
    from specdecpp.training.collect import collect

    folders.writable(recipe.labels)
    if threads := shards.about(recipe.labels).get("threads"):
        torch.set_num_threads(threads)  # the number of threads changes the last digits
    plan = recipe.pair
    pair = load(plan.target, plan.draft, None, dtype=DType(plan.dtype), device=plan.device, quiet=quiet, backend=BATCHED)
    check = partial(pipeline.check_splits, recipe) if is_whole else lambda splits: None
    try:
        with interruptible(), _progress(quiet=quiet) as tell:
            return collect(recipe, pair, progress=tell, assume_yes=yes, check=check)
    except KeyboardInterrupt:
        num, of = len(shards.done(recipe.labels)), shards.about(recipe.labels).get("num_shards", "the")
        print(
            f"interrupted: {num} of {of} shards are finished and safe in {recipe.labels}. Run the same command again: it goes "
            "on where it stopped.",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None


def closing_line(recipe: "Recipe", end: "Progress") -> str:
    made = end.prompts_done - end.prompts_before
    pace = (
        f"{end.tokens:,} tokens in {clock(end.elapsed_s)}, {end.tokens_per_second:,.0f} tokens/s" if made else "all was there"
    )
    return f"{recipe.labels}: {end.prompts_done:,} answers in {end.num_shards} shards ({pace})"


@contextmanager
def _progress(*, quiet: bool) -> "Iterator[Callable[[Progress], None]]":
    """The estimate, then a bar over the prompts with tokens/s and the time left, on stderr where that is a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.text import Text

    from specdecpp.report import render

    err = render.console(stderr=True)
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(24, complete_style=render.ACCENT, finished_style=render.ACCENT),
        TextColumn("{task.fields[figures]}", style="dim"),
    )
    with Progress(*columns, console=err, transient=True, auto_refresh=False, disable=quiet or not err.is_terminal) as bars:
        task = bars.add_task("collecting", total=None, figures="")

        def tell(now: "Progress") -> None:
            if now.estimate.num_prompts and not now.tokens and not quiet:
                err.print(Text(f"  at most {_bound(now.estimate)}", "dim"))
            done, left = now.prompts_done, "" if now.left_s is None else f"  {clock(now.left_s)} left"
            figures = f"{done:,}/{now.num_prompts:,} prompts  {now.tokens_per_second:,.0f} tokens/s{left}"
            bars.update(task, total=now.num_prompts, completed=done, figures=figures, refresh=True)

        yield tell


def _bound(estimate: "Estimate") -> str:
    size = f"{estimate.num_bytes / 1e6:,.0f} MB" if estimate.num_bytes < 1e9 else f"{estimate.num_bytes / 1e9:,.1f} GB"
    return f"{estimate.num_prompts:,} answers, {estimate.num_tokens:,} tokens, {size}, {clock(estimate.seconds)}"


def chosen(recipe: "Recipe", names: list[str] | None, *, is_grid: bool = False) -> "dict[str, HeadPlan]":
    """The plans that were asked for. Raises ValueError for a name that the recipe does not have."""
    from specdecpp.training.plan import grid

    if unknown := [name for name in names or () if name not in recipe.train]:
        raise ValueError(f"{recipe.name} has no head {unknown[0]!r}. Its heads: {', '.join(recipe.train) or 'none'}.")
    plans = {name: plan for name, plan in recipe.train.items() if not names or name in names}
    if not is_grid:
        return plans
    return {f"{name},{point}": cell for name, plan in plans.items() for point, cell in grid(plan).items()}


@contextmanager
def progress(num_epochs: int, *, quiet: bool) -> "Iterator[Callable[[str, Epoch], None]]":
    """A bar over all epochs of all heads, on stderr where that is a terminal; a line for each epoch where it is not."""
    from specdecpp.report import render

    err = render.console(stderr=True)
    with render.progress("training", num_epochs, quiet=quiet) as tick:

        def tell(name: str, epoch: "Epoch") -> None:
            line = f"{name}, epoch {epoch.epoch} of {epoch.epochs}: {figures(asdict(epoch))}"
            if not quiet and not err.is_terminal:
                err.print(f"  {line}", highlight=False, soft_wrap=True)
            tick(f"{name}, epoch {epoch.epoch}")

        yield tell


def figures(row: Mapping[str, Any]) -> str:
    """Losses and accuracy of an epoch, in a line."""
    dev = "" if row["dev_auroc"] is None else f", on dev AUROC {row['dev_auroc']:.4f} and KL {row['dev_kl']:.4f} per token"
    return f"loss {row['loss']:.4f}{dev} ({row['num_labels']:,} labels, {row['epochs']} epochs)"


def tell_trained(
    recipe: "Recipe", plans: "Mapping[str, HeadPlan]", heads: "Mapping[str, AcceptanceHead]", *, as_json: bool
) -> None:
    """A line for each head, or all of it as JSON."""
    rows = {
        name: {"folder": str(recipe.heads / name), "plan": asdict(plans[name]), **head.card.notes["epochs"][-1]}
        for name, head in heads.items()
    }
    if as_json:
        print_json({"heads": rows})
    else:
        write("".join(f"{recipe.heads / name}: {figures(row)}\n" for name, row in rows.items()))


def calibrated_on_rounds(
    recipe: "Recipe", heads: "Mapping[str, AcceptanceHead]", temperature: float, *, quiet: bool
) -> "dict[str, AcceptanceHead]":
    """The heads calibrated on steps of the recipe's pair, on the prompts of the labels, and saved."""
    from specdecpp.training import shards
    from specdecpp.training.calibrate import calibrate_live

    plan = recipe.pair
    prompts = [record.prompt.tolist() for record in shards.read(recipe.labels, split=recipe.calibrate.split)]
    prompts = prompts[:: max(1, len(prompts) // LIVE_ROWS)][:LIVE_ROWS]
    pair = load(plan.target, plan.draft, None, dtype=DType(plan.dtype), device=plan.device, quiet=quiet)
    sampling, done = replace(recipe.sampling, temperature=temperature), {}
    for name, head in heads.items():
        done[name] = calibrate_live(head, pair, prompts, sampling=sampling, max_tokens=LIVE_TOKENS)
        done[name].save_pretrained(recipe.heads / name)
    return done


def tell_calibrated(recipe: "Recipe", heads: "Mapping[str, AcceptanceHead]", *, is_greedy: bool, as_json: bool) -> None:
    """The figures before and after, by stage, for each head."""
    from specdecpp.report import render

    told_of, out = {}, render.console()
    for name, head in heads.items():
        stages = head.card.notes["calibration_greedy" if is_greedy else "calibration"]
        fitted = head.card.calibration_at(is_greedy=is_greedy)
        told_of[name] = {"folder": str(recipe.heads / name), "calibration": vars(fitted), "figures": stages}
        if not as_json:
            out.print(_stages(name, stages, vars(fitted)))
    if as_json:
        print_json({"heads": told_of})


def _stages(name: str, stages: Mapping[str, Mapping[str, Any]], fitted: Mapping[str, float]) -> "RenderableType":
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    from specdecpp.report import render

    columns = STAGES | {"KL\n/token": "kl"}
    table = render.plain_table("stage", *columns, gap=2)
    for stage, found in stages.items():
        cells = ("-" if found[key] is None else f"{found[key]:.3f}" for key in columns.values())
        table.add_row(stage, *cells, style=render.ACCENT if stage == "calibrated" else "")
    after = stages["calibrated"]
    counts = f"{after['num_labels']:,} labels of {after['num_answers']:,} answers ({after['evidence']})"
    fit = (
        f"rejection weight {fitted['rejection_weight']:g}, temperature {fitted['temperature']:.3f}, bias {fitted['bias']:+.3f}"
    )
    return Group(render.heading(name, counts), Padding(Group(table, "", Text(fit)), (0, 1)))


def tell_evaluated(recipe: "Recipe", heads: "Mapping[str, AcceptanceHead]", found: "Evaluation", *, as_json: bool) -> None:
    """A table and a diagram for each source, then the verdicts."""
    from specdecpp.training.evaluate import PRODUCT_FIGURES, verdicts

    names = {("head" if i == 0 else name): str(recipe.heads / name) for i, name in enumerate(heads)}
    if as_json:
        print_json({"out": str(recipe.out), "heads": names, "evaluation": found, "verdicts": verdicts(found)})
    else:
        _show(found, verdicts(found), names)
    if bare := [s for s, scores in found.items() if all(scores["head"][k] is None for k in PRODUCT_FIGURES)]:
        print(
            f"note: the labels of {', '.join(bare)} have no branches, so there are no figures for steps. Let collect.branches "
            "in the recipe include this split, and collect into another folder.",
            file=sys.stderr,
        )


def _show(evaluation: Mapping[str, Any], said: list[str], paths: Mapping[str, str]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from specdecpp.report import render

    out = render.console()
    for source, scores in evaluation.items():
        head = scores["head"]
        counts = f"{head['num_labels']:,} labels of {head['num_answers']:,} answers"
        out.print(render.heading(source, counts), Padding(_table(scores, paths), (0, 1)), "", sep="\n")
    for sentence in said:
        out.print(Padding(Text(sentence), (0, 1)))


def _table(scores: Mapping[str, Mapping[str, Any]], paths: Mapping[str, str]) -> "Table":
    """One row per score; heads in the accent colour, the best of the steps in bold."""
    from specdecpp.report import render

    table = render.plain_table("score", *COLUMNS, gap=2)
    best = max(scores, key=lambda name: scores[name]["auroc_product"] or 0)
    for name, found in scores.items():
        cells = [_cell(found, key) for key in COLUMNS.values()]
        style = " ".join(["bold"] * (name == best) + [render.ACCENT] * (name in paths))
        table.add_row(name.replace("_", " ") if name not in paths else name, *cells, style=style)
    return table


def _cell(found: Mapping[str, Any], key: str) -> str:
    value, error = found[key], found.get(f"{key}_error")
    if value is None:
        return "-"
    sign = "+" if key == "gain_product" else ""
    return f"{value:{sign}.3f}" + ("" if error is None else f" ±{f'{error:.3f}'.removeprefix('0')}")
