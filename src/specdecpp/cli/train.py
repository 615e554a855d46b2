"""`specdecpp train`: a recipe, from prompts to calibrated heads and the table that compares them."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specdecpp.cli.common import BATCHED, Json, PairNames, Quiet, clock, interruptible, print_json, write

if TYPE_CHECKING:
    from rich.table import Table

    from specdecpp.head import AcceptanceHead
    from specdecpp.training.collect import Progress
    from specdecpp.training.evaluate import Evaluation
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
LIVE_ROWS, LIVE_TOKENS = 64, 128
"""Prompts that are decoded to calibrate on steps, and the most tokens of an answer."""


def train(
    path: Annotated[Path, typer.Argument(metavar="RECIPE", help="The YAML file that says it all.")],
    only: Annotated[
        Literal["collect", "train", "calibrate", "evaluate"] | None,
        typer.Option(metavar="STAGE", help="Only this: collect, train, calibrate or evaluate."),
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
    yes: Annotated[bool, typer.Option("--yes", help="Go on past 20 GB, or past what the disk holds.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train acceptance heads, from a recipe.

    It collects labels, trains, calibrates and evaluates. Each stage keeps what is finished: killed at any moment and started
    again, it goes on where it stopped, and a collection is the same to the byte. Only collecting runs both models; a
    calibration at a --temperature of its own decodes with them.
    """
    from specdecpp.report import render
    from specdecpp.training import pipeline
    from specdecpp.training.recipe import Recipe

    recipe = Recipe.read(path)
    recipe = recipe if out is None else replace(recipe, out=out)
    if temperature is not None and only != "calibrate":
        raise ValueError("--temperature is for --only calibrate. A recipe says at which temperature labels are made.")
    plans = pipeline.chosen(recipe, names, is_grid=is_grid)
    if only is None:
        pipeline.check(recipe)
    if only in (None, "collect"):
        end = collected(recipe, yes=yes, quiet=quiet, is_whole=only is None)
        if only and as_json:
            print_json({"labels": str(recipe.labels), **asdict(end)})
        elif not as_json:
            write(f"{recipe.labels}: {end.prompts_done:,} answers in {end.num_shards} shards ({_pace(end)})\n")
    if only == "collect":
        return
    if only in (None, "train"):
        with render.live("training", quiet=quiet) as say:
            heads = pipeline.train_heads(recipe, plans, tell=lambda name, epoch: say(f"{name}: {_figures(asdict(epoch))}"))
    else:
        heads = pipeline.trained_heads(recipe, plans)
    if only == "train":
        trained = {name: {"plan": asdict(plans[name]), **head.card.notes["epochs"][-1]} for name, head in heads.items()}
        tell_heads(recipe, trained, _figures, as_json=as_json)
        return
    with render.live("calibrating", every_s=None, quiet=quiet or as_json):
        if temperature is not None:
            heads = calibrated_on_steps(recipe, heads, temperature, quiet=quiet or as_json)
        elif only in (None, "calibrate"):
            heads = pipeline.calibrate_heads(recipe, heads, again=only == "calibrate")
    if only == "calibrate":
        is_greedy, fits = temperature == 0, {}
        for name, head in heads.items():
            stages = head.card.notes["calibration_greedy" if is_greedy else "calibration"]
            fits[name] = {"calibration": vars(head.card.calibration_at(is_greedy=is_greedy)), "figures": stages}
        tell_heads(recipe, fits, _fit, as_json=as_json)
        return
    with render.live("evaluating", every_s=None, quiet=quiet or as_json):
        found = pipeline.evaluate_heads(recipe, heads)
    tell_evaluated(recipe, heads, found, as_json=as_json)


def collected(recipe: "Recipe", *, yes: bool, quiet: bool, is_whole: bool) -> "Progress":
    """Collect what is missing, with the pair that the recipe names; of a whole run only if later stages can use it."""
    import torch

    from specdecpp.report import render
    from specdecpp.training import folders, pipeline, shards
    from specdecpp.training.collect import collect

    folders.writable(recipe.labels)
    if threads := shards.about(recipe.labels).get("threads"):
        torch.set_num_threads(threads)  # the number of threads changes the last digits
    pair = _named(recipe, backend=BATCHED).load(quiet=quiet)
    check = partial(pipeline.check_splits, recipe) if is_whole else lambda splits: None
    try:
        with interruptible(), render.live("collecting", quiet=quiet) as say:
            return collect(recipe, pair, progress=lambda now: say(_standing(now)), assume_yes=yes, check=check)
    except KeyboardInterrupt:
        num, of = len(shards.done(recipe.labels)), shards.about(recipe.labels).get("num_shards", "the")
        print(
            f"interrupted: {num} of {of} shards are finished and safe in {recipe.labels}. Run the same command again: it goes "
            "on where it stopped.",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None


def _named(recipe: "Recipe", **backend: Any) -> PairNames:
    """The pair of a recipe, without a head."""
    return PairNames(**vars(recipe.pair) | {"target": recipe.pair.target or "reference", "head": None}, **backend)


def _standing(now: "Progress") -> str:
    """Progress of a collection in words, and the time left at the pace of the prompts done in this run."""
    made = now.prompts_done - now.prompts_before
    left = f", {clock(now.elapsed_s * (now.num_prompts - now.prompts_done) / made)} left" if made else ""
    return f"{now.prompts_done:,} of {now.num_prompts:,} prompts, {_pace(now)}{left}"


def _pace(now: "Progress") -> str:
    if not now.tokens:
        return "nothing new"
    return f"{now.tokens:,} tokens in {clock(now.elapsed_s)}, {now.tokens / now.elapsed_s:,.0f} tokens/s"


def _figures(row: Mapping[str, Any]) -> str:
    """Losses and accuracy of an epoch, in a line."""
    dev = "" if row["dev_auroc"] is None else f", on dev AUROC {row['dev_auroc']:.4f} and KL {row['dev_kl']:.4f} per token"
    return f"loss {row['loss']:.4f}{dev} ({row['num_labels']:,} labels, epoch {row['epoch']} of {row['epochs']})"


def tell_heads(recipe: "Recipe", rows: Mapping[str, Mapping[str, Any]], line: Callable[[Any], str], *, as_json: bool) -> None:
    """A line for each head, or all of it as JSON."""
    if as_json:
        print_json({"heads": {name: {"folder": str(recipe.heads / name), **row} for name, row in rows.items()}})
    else:
        write("".join(f"{recipe.heads / name}: {line(row)}\n" for name, row in rows.items()))


def _fit(row: Mapping[str, Any]) -> str:
    """A calibration in a line, with its KL before and after."""
    fitted, stages = row["calibration"], row["figures"]
    fit = f"temperature {fitted['temperature']:.3f}, bias {fitted['bias']:+.3f}"
    gain = f"KL per token {stages['raw']['kl']:.3f} before and {stages['calibrated']['kl']:.3f} after"
    return f"{fit}; {gain} ({fitted['num_labels']:,} labels)"


def calibrated_on_steps(
    recipe: "Recipe", heads: "Mapping[str, AcceptanceHead]", temperature: float, *, quiet: bool
) -> "dict[str, AcceptanceHead]":
    """The heads calibrated on steps of the recipe's pair, on the prompts of the labels, and saved."""
    from specdecpp.training import shards
    from specdecpp.training.calibrate import calibrate_live

    prompts = [record.prompt.tolist() for record in shards.read(recipe.labels, split="dev")]
    prompts = prompts[:: max(1, len(prompts) // LIVE_ROWS)][:LIVE_ROWS]
    pair = _named(recipe).load(quiet=quiet)
    sampling, done = replace(recipe.sampling, temperature=temperature), {}
    for name, head in heads.items():
        done[name] = calibrate_live(head, pair, prompts, sampling=sampling, max_tokens=LIVE_TOKENS)
        done[name].save_pretrained(recipe.heads / name)
    return done


def tell_evaluated(recipe: "Recipe", heads: "Mapping[str, AcceptanceHead]", found: "Evaluation", *, as_json: bool) -> None:
    """A table for each source, then the verdicts."""
    from rich.padding import Padding

    from specdecpp.report import render
    from specdecpp.training.evaluate import PRODUCT_FIGURES, verdicts

    names = {("head" if i == 0 else name): str(recipe.heads / name) for i, name in enumerate(heads)}
    if as_json:
        print_json({"out": str(recipe.out), "heads": names, "evaluation": found, "verdicts": verdicts(found)})
    else:
        out = render.console()
        for source, scores in found.items():
            counts = f"{scores['head']['num_labels']:,} labels of {scores['head']['num_answers']:,} answers"
            out.print(render.heading(source, counts), Padding(_table(scores, names), (0, 1)), "", sep="\n")
        for sentence in verdicts(found):
            out.print(Padding(sentence, (0, 1)))
    if bare := [s for s, scores in found.items() if all(scores["head"][k] is None for k in PRODUCT_FIGURES)]:
        print(
            f"note: the labels of {', '.join(bare)} have no branches, so there are no figures for steps. Let collect.branches "
            "in the recipe include this split, and collect into another folder.",
            file=sys.stderr,
        )


def _table(scores: Mapping[str, Mapping[str, Any]], heads: Mapping[str, str]) -> "Table":
    """One row per score; heads in the accent colour, the best of the steps in bold."""
    from specdecpp.report import render

    table = render.plain_table("score", *COLUMNS, gap=2)
    best = max(scores, key=lambda name: scores[name]["auroc_product"] or 0)
    for name, found in scores.items():
        cells = [_cell(found, key) for key in COLUMNS.values()]
        style = " ".join(["bold"] * (name == best) + [render.ACCENT] * (name in heads))
        table.add_row(name if name in heads else name.replace("_", " "), *cells, style=style)
    return table


def _cell(found: Mapping[str, Any], key: str) -> str:
    value, error = found[key], found.get(f"{key}_error")
    if value is None:
        return "-"
    sign = "+" if key == "gain_product" else ""
    return f"{value:{sign}.3f}" + ("" if error is None else f" ±{f'{error:.3f}'.removeprefix('0')}")
