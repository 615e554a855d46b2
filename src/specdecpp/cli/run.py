"""`specdecpp run`: a whole recipe, from prompts to calibrated heads and the table that compares them."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from specdecpp.cli import collect as collecting
from specdecpp.cli import evaluate as evaluating
from specdecpp.cli import train as training
from specdecpp.cli.common import Json, Ray, RecipeOut, Yes, print_json, told, write

EXAMPLES = (
    "specdecpp run recipe.yaml",
    "specdecpp run recipe.yaml --out runs/second --json > figures.json",
)


def run(
    path: Annotated[Path, typer.Argument(metavar="RECIPE", help="The YAML file that says it all.")],
    out: RecipeOut = None,
    yes: Yes = False,
    ray: Ray = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Run a recipe: collect, train, calibrate, evaluate.

    Each step keeps what is finished: killed at any moment and started again, it goes on where it stopped.
    """
    with told():
        from specdecpp.report import render
        from specdecpp.training import pipeline
        from specdecpp.training.evaluate import verdicts
        from specdecpp.training.recipe import Recipe

        recipe = Recipe.read(path)
        recipe = recipe if out is None else replace(recipe, out=out)
        pipeline.check(recipe)
        check = partial(pipeline.check_splits, recipe)
        collected = collecting.collected(recipe, assume_yes=yes, ray=ray, quiet=quiet, check=check)
        if not as_json:
            write(collecting.closing_line(recipe, collected) + "\n")
        plans = training.chosen(recipe, None)
        with training.progress(sum(p.epochs for p in plans.values()), quiet=quiet) as tell:
            heads = pipeline.train_heads(recipe, plans, tell=tell)
        with render.waiting("calibrating and evaluating", quiet=quiet or as_json):
            heads = pipeline.calibrate_heads(recipe, heads)
            found = pipeline.evaluate_heads(recipe, heads)
        names = {("head" if i == 0 else name): str(recipe.heads / name) for i, name in enumerate(heads)}
        if as_json:
            print_json({"out": str(recipe.out), "heads": names, "evaluation": found, "verdicts": verdicts(found)})
        else:
            evaluating.show(found, verdicts(found), names)
