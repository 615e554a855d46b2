"""From a collection to heads that are trained, calibrated and compared: the stages of the verb `train`, in order.

Everything lies in the recipe's folder: labels/, heads/NAME/, evaluation.json. Each stage keeps what is finished, so that a
run which was killed is started again with the same command.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from specdecpp import cache_dir
from specdecpp.errors import DataError
from specdecpp.head import AcceptanceHead
from specdecpp.training import shards
from specdecpp.training.calibrate import calibrate_head
from specdecpp.training.collect import versions
from specdecpp.training.evaluate import RIVAL, Evaluation, evaluate
from specdecpp.training.folders import writable, writing
from specdecpp.training.prompts import Split, gather
from specdecpp.training.recipe import HeadPlan, Recipe, grid
from specdecpp.training.train import Epoch, train

EVALUATION = "evaluation.json"


def check(recipe: Recipe) -> None:
    """Raise `DataError` for what a whole run would find out at its end: no heads, heads that go by the name of a score or read
    what is not collected, splits that no prompt is on. Reads the prompts; no model is loaded."""
    _check_named(recipe, recipe.train)
    first, *others = recipe.train
    if taken := [name for name in others if name in ("head", RIVAL)]:
        raise DataError(
            f"{recipe.name} calls a head {taken[0]}, which is the name of a score in its evaluation (head is the first one, "
            f"{first}). Give it another name."
        )
    for name, plan in recipe.train.items():
        if not plan.is_ahead and plan.text not in recipe.collect.features:
            raise DataError(
                f"train.{name} reads the {plan.text} text, and collect.features has "
                f"{', '.join(recipe.collect.features) or 'none'}. Add {plan.text} to it, or train a look-ahead head."
            )
    found = gather(recipe.collect.sources, seed=recipe.collect.seed, splits=recipe.collect.splits)
    check_splits(recipe, [prompt.split for prompt in found])


def check_splits(recipe: Recipe, found: Sequence[Split]) -> None:
    """Raise `DataError` unless there are prompts on every split that a whole run reads; `found` are the splits of all."""
    uses: dict[str, str] = {"train": "train on", "dev": "calibrate on"}
    if lacking := [split for split in uses if split not in found]:
        counts = ", ".join(f"{side} has {num}" for side, num in Counter(found).items()) or "there are no prompts at all"
        raise DataError(
            f"{recipe.name} has no prompts to {uses[lacking[0]]}: its split {lacking[0]} is empty ({counts}). A prompt's split "
            f"is decided by its hash: give more prompts, a larger dev_share, or a source with split: {lacking[0]}."
        )


def chosen(recipe: Recipe, names: Sequence[str] | None, *, is_grid: bool = False) -> dict[str, HeadPlan]:
    """The plans that were asked for. Raises ValueError for a name that the recipe does not have."""
    if unknown := [name for name in names or () if name not in recipe.train]:
        raise ValueError(f"{recipe.name} has no head {unknown[0]!r}. Its heads: {', '.join(recipe.train) or 'none'}.")
    plans = {name: plan for name, plan in recipe.train.items() if not names or name in names}
    if not is_grid:
        return plans
    return {f"{name},{point}": cell for name, plan in plans.items() for point, cell in grid(plan).items()}


def train_heads(
    recipe: Recipe, plans: Mapping[str, HeadPlan], *, tell: Callable[[str, Epoch], None] = lambda name, epoch: None
) -> dict[str, AcceptanceHead]:
    """Train each plan on the split `train` of the recipe's labels, and save it in `recipe.heads / name`.

    The labels are read once. Raises `DataError` when there is nothing to train, or nothing to train on.
    """
    _check_named(recipe, plans)
    writable(recipe.heads)
    about = shards.about(recipe.labels)
    records, dev = (list(shards.read(recipe.labels, split=split)) for split in ("train", "dev"))
    return {
        name: train(plan, records, dev, about, recipe.heads / name, tell=partial(tell, name)) for name, plan in plans.items()
    }


def trained_heads(recipe: Recipe, plans: Mapping[str, HeadPlan]) -> dict[str, AcceptanceHead]:
    """The heads of these plans as they were trained and saved. Raises `DataError` for one that was not."""
    _check_named(recipe, plans)
    if lacking := [name for name in plans if not (recipe.heads / name / "head.json").exists()]:
        raise DataError(f"{recipe.heads} has no head {lacking[0]}. Train it first: specdecpp train {recipe.name} --only train.")
    return {name: AcceptanceHead.from_pretrained(recipe.heads / name) for name in plans}


def calibrate_heads(recipe: Recipe, heads: Mapping[str, AcceptanceHead], *, again: bool = False) -> dict[str, AcceptanceHead]:
    """Calibrate what is not calibrated yet, or with `again` all, on the split `dev`, and save it."""
    done, about = {}, shards.about(recipe.labels)
    for name, head in heads.items():
        done[name] = head
        if again or not head.card.is_calibrated:
            found = calibrate_head(head, shards.read(recipe.labels, split="dev"))
            done[name] = found.with_card(sampling=about.get("sampling", head.card.sampling))  # of these labels
            done[name].save_pretrained(recipe.heads / name)
    return done


def evaluate_heads(recipe: Recipe, heads: Mapping[str, AcceptanceHead]) -> Evaluation:
    """Compare the heads with cumulative q on the split `test` (`dev` where no source is a test), and write it all to
    `evaluation.json` with its provenance. The first head is the score `head`, the others go by their names."""
    about = shards.about(recipe.labels)
    split = "test" if any(of.get("test") for of in about.get("prompts", {}).values()) else "dev"
    first, *_ = heads
    others = {name: head for name, head in heads.items() if name != first}
    found = evaluate(heads[first], shards.read(recipe.labels, split=split), others=others)
    provenance = {
        "command": f"specdecpp train {recipe.name}",
        "split": split,
        "heads": list(heads),
        "labels": {key: about.get(key) for key in ("git", "digest", "pair", "sampling", "prompts", "threads")},
        "versions": versions("torch", "transformers"),
    }
    with writing(recipe.out, safe="The heads"):
        cache_dir.write(recipe.out / EVALUATION, json.dumps({"provenance": provenance, **found}, indent=1) + "\n")
    return found


def _check_named(recipe: Recipe, plans: Mapping[str, HeadPlan]) -> None:
    if not plans:
        raise DataError(f"{recipe.name} names no head. Add one: train: {{head: {{}}}}")
