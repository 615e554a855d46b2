"""`specdecpp collect`: answers of the target and labels for a head, as a recipe says."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdecpp.cli.common import BATCHED, DType, Json, Ray, RecipeOut, Yes, clock, interruptible, load, print_json, told, write

if TYPE_CHECKING:
    from specdecpp.training.collect import Estimate, Progress
    from specdecpp.training.prompts import Split
    from specdecpp.training.recipe import Recipe

EXAMPLES = (
    "specdecpp collect recipe.yaml",
    "specdecpp collect recipe.yaml --ray local --json > collected.json",
)


def collect(
    path: Annotated[Path, typer.Argument(metavar="RECIPE", help="The YAML file that says what is collected.")],
    out: RecipeOut = None,
    yes: Yes = False,
    ray: Ray = None,
    branches: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Discarded branches of N tokens on every answer.  [default: by recipe]"),
    ] = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No estimate and no progress.")] = False,
) -> None:
    """Sample answers from the target and label the draft's tokens.

    What is finished is kept: killed at any moment and started again, it goes on, and the result is the same to the byte.
    """
    with told():
        from specdecpp.training.recipe import BranchPlan, Recipe

        recipe = Recipe.read(path)
        recipe = recipe if out is None else replace(recipe, out=out)
        if branches is not None:
            everywhere = replace(
                recipe.collect.branches or BranchPlan(), splits=("train", "dev", "test"), sources=None, length=branches
            )
            recipe = replace(recipe, collect=replace(recipe.collect, branches=everywhere))
        end = collected(recipe, assume_yes=yes, ray=ray, quiet=quiet)
        if as_json:
            print_json({"labels": str(recipe.labels), **asdict(end), "tokens_per_second": end.tokens_per_second})
        else:
            write(closing_line(recipe, end) + "\n")


def collected(
    recipe: "Recipe",
    *,
    assume_yes: bool,
    ray: str | None,
    quiet: bool,
    check: "Callable[[Sequence[Split]], None]" = lambda splits: None,
) -> "Progress":
    """Collect what is missing, with the pair that the recipe names."""
    import torch

    from specdecpp.training import folders, shards
    from specdecpp.training.collect import collect as run

    folders.writable(recipe.labels)
    if threads := shards.about(recipe.labels).get("threads"):
        torch.set_num_threads(threads)  # the number of threads changes the last digits
    plan = recipe.pair
    pair = load(plan.target, plan.draft, None, dtype=DType(plan.dtype), device=plan.device, quiet=quiet, runner=BATCHED)
    try:
        with interruptible(), _progress(quiet=quiet) as tell:
            return run(recipe, pair, progress=tell, assume_yes=assume_yes, ray=ray, check=check)
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
