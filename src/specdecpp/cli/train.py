"""`specdecpp train`: the heads of a recipe, on labels that have been collected."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdecpp.cli.common import Json, RecipeOut, print_json, told, write

if TYPE_CHECKING:
    from specdecpp.training.checkpoints import Epoch
    from specdecpp.training.plan import HeadPlan
    from specdecpp.training.recipe import Recipe

EXAMPLES = (
    "specdecpp train recipe.yaml",
    "specdecpp train recipe.yaml --head lagged --grid",
)
Tell = Callable[[str, "Epoch"], None]


def train(
    path: Annotated[Path, typer.Argument(metavar="RECIPE", help="The YAML file that names the heads.")],
    heads: Annotated[
        list[str] | None, typer.Option("--head", metavar="NAME", help="Only this head of the recipe; repeatable.")
    ] = None,
    is_grid: Annotated[
        bool, typer.Option("--grid", help="The paper's grid of 20 around each: w_rej 1, 3, 6, 12 x 0 to 4 blocks.")
    ] = False,
    out: RecipeOut = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Train acceptance heads on collected labels.

    No model is run: the draft's states are among the labels. A run that was killed goes on after its last finished epoch.
    """
    with told():
        from specdecpp.training.pipeline import train_heads
        from specdecpp.training.recipe import Recipe

        recipe = Recipe.read(path)
        recipe = recipe if out is None else replace(recipe, out=out)
        plans = chosen(recipe, heads, is_grid=is_grid)
        with progress(sum(p.epochs for p in plans.values()), quiet=quiet) as tell:
            trained = train_heads(recipe, plans, tell=tell)
        rows = {
            name: {"folder": str(recipe.heads / name), "plan": asdict(plans[name]), **head.card.notes["epochs"][-1]}
            for name, head in trained.items()
        }
        if as_json:
            print_json({"heads": rows})
        else:
            for name, row in rows.items():
                write(f"{recipe.heads / name}: {figures(row)}\n")


def chosen(recipe: "Recipe", names: list[str] | None, *, is_grid: bool = False) -> "dict[str, HeadPlan]":
    """The plans that were asked for. Raises ValueError for a name that the recipe does not have."""
    from specdecpp.training.plan import grid

    if unknown := [name for name in names or () if name not in recipe.train]:
        raise ValueError(f"{recipe.name} has no head {unknown[0]!r}. Its heads: {', '.join(recipe.train) or 'none'}.")
    plans = {name: plan for name, plan in recipe.train.items() if not names or name in names}
    if not is_grid:
        return plans
    return {f"{name},{point}": cell for name, plan in plans.items() for point, cell in grid(plan).items()}


def figures(row: dict[str, Any]) -> str:
    """What an epoch has reached, in a line."""
    dev = "" if row["dev_auroc"] is None else f", on dev AUROC {row['dev_auroc']:.4f} and KL {row['dev_kl']:.4f} per token"
    return f"loss {row['loss']:.4f}{dev} ({row['num_labels']:,} labels, {row['epochs']} epochs)"


@contextmanager
def progress(num_epochs: int, *, quiet: bool) -> Iterator[Tell]:
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
