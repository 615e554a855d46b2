"""From a collection to heads that are trained, calibrated and compared: what the verbs `train` and `run` do, in order.

Everything lies in the recipe's folder: labels/, heads/NAME/, evaluation.json. Each step keeps what is finished, so that a
run which was killed is started again with the same command.
"""

import json
import platform
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers

import specdecpp
from specdecpp.errors import DataError
from specdecpp.head import AcceptanceHead
from specdecpp.training import shards
from specdecpp.training.calibrate import calibrate_head
from specdecpp.training.evaluate import Evaluation, evaluate
from specdecpp.training.plan import HeadPlan
from specdecpp.training.progress import Epoch
from specdecpp.training.recipe import Recipe
from specdecpp.training.train import train

EVALUATION = "evaluation.json"


def train_heads(
    recipe: Recipe, plans: Mapping[str, HeadPlan], *, tell: Callable[[str, Epoch], None] = lambda name, epoch: None
) -> dict[str, AcceptanceHead]:
    """Train each plan on the split `train` of the recipe's labels, and save it in `recipe.heads / name`.

    The labels are read once. Raises `DataError` when there is nothing to train, or nothing to train on.
    """
    if not plans:
        raise DataError(f"{recipe.name} names no head. Add one: train: {{head: {{}}}}")
    about = shards.about(recipe.labels)
    records, dev = (list(shards.read(recipe.labels, split=split)) for split in ("train", "dev"))
    return {
        name: train(plan, records, dev, about, recipe.heads / name, tell=partial(tell, name)) for name, plan in plans.items()
    }


def calibrate_heads(recipe: Recipe, heads: Mapping[str, AcceptanceHead]) -> dict[str, AcceptanceHead]:
    """Calibrate what is not calibrated yet, on the split that the recipe names, and save it."""
    done = {}
    for name, head in heads.items():
        done[name] = head
        if not head.card.is_calibrated:
            done[name] = calibrate_head(head, shards.read(recipe.labels, split=recipe.calibrate.split))
            done[name].save_pretrained(recipe.heads / name)
    return done


def evaluate_heads(recipe: Recipe, heads: Mapping[str, AcceptanceHead]) -> Evaluation:
    """Compare the heads with the free rules on the split `test` (`dev` where no source is a test), and write it all to
    `evaluation.json` with its provenance. The first head is the score `head`, the others go by their names."""
    counts = shards.about(recipe.labels).get("prompts", {})
    split = "test" if any(of.get("test") for of in counts.values()) else "dev"
    first, *_ = heads
    others = {name: head for name, head in heads.items() if name != first}
    found = evaluate(heads[first], shards.read(recipe.labels, split=split), others=others)
    shards.replace(recipe.out / EVALUATION, (json.dumps(provenance(recipe, split) | found, indent=1) + "\n").encode())
    return found


def provenance(recipe: Recipe, split: str) -> dict[str, Any]:
    """Where the figures come from: the command, the labels, the versions."""
    about = shards.about(recipe.labels)
    kept = ("git", "digest", "pair", "sampling", "prompts", "threads")
    return {
        "provenance": {
            "command": f"specdecpp run {recipe.name}",
            "split": split,
            "labels": {name: about.get(name) for name in kept},
            "versions": {
                "specdecpp": specdecpp.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
        }
    }
