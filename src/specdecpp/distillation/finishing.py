"""After the draft: its head, the verdict on the pair, and what is said of both.

out/draft + target -> recipe of a head (`training.pipeline`) -> out/head;   pair with head -> check -> card
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from specdecpp import cache_dir
from specdecpp.bench import check
from specdecpp.bench.questions import Questions
from specdecpp.distillation.plan import DistilPlan
from specdecpp.distillation.run import CARD
from specdecpp.head import CARD as HEAD_CARD
from specdecpp.loading.pair import load_pair
from specdecpp.report import advice
from specdecpp.training import collect, jobs, pipeline, shards
from specdecpp.training.plan import HeadPlan
from specdecpp.training.prompts import gather
from specdecpp.training.recipe import CollectPlan, PairPlan, Recipe

HEAD = "head"
ROWS, CHECKED = 160, 8
"""Prompts that a head is trained on, and that the pair is checked on."""
Say = Callable[[str], None]


def finish(plan: DistilPlan, card: Mapping[str, Any], *, tell: Say = lambda doing: None) -> dict[str, Any]:
    """The card with a head and a verdict; what an earlier run finished for this draft is kept. Raises as `collect`, `train`
    and `check` do."""
    draft = str(plan.out / card["draft"]["files"][0])
    recipe = _recipe(plan, draft)
    batched = recipe.pair.load()
    _drop_of_another(recipe, batched.draft_fingerprint)
    if not (plan.out / HEAD / HEAD_CARD).exists():
        tell("collecting labels for the head")
        pipeline.check(recipe)
        collect.collect(recipe, batched, assume_yes=True)
        tell("training the head")
        heads = pipeline.calibrate_heads(recipe, pipeline.train_heads(recipe, recipe.train))
        pipeline.evaluate_heads(recipe, heads)
        shutil.rmtree(plan.out / HEAD, ignore_errors=True)
        heads[HEAD].save_pretrained(plan.out / HEAD)
    tell("checking the pair")
    pair = load_pair(plan.target, draft=draft, head=plan.out / HEAD, device=plan.device)
    items = [list(q.ids) for q in jobs.questions(pair, gather(plan.sources, seed=plan.seed + 1))][: 2 * CHECKED]
    asked = Questions(
        dataset=plan.sources[0].label, dev=tuple(map(tuple, items[:CHECKED])), test=tuple(map(tuple, items[CHECKED:]))
    )
    of = plan.sampling
    trial = check.Trial(temperature=of.temperature, top_p=of.top_p, seed=plan.seed, max_tokens=max(8, min(96, plan.max_tokens)))
    found = check.check(pair, [asked], trial, tell=lambda spent: tell(f"checking the pair: {spent}"))
    done = {**card, "head": HEAD, "check": advice.to_dict(found)}
    cache_dir.write(plan.out / CARD, json.dumps(done, indent=1) + "\n")
    return done


def _drop_of_another(recipe: Recipe, draft: str | None) -> None:
    """Remove labels and heads of the draft that was here before it was trained on: they are of no use to this one."""
    if shards.about(recipe.labels).get("pair", {}).get("draft") in (None, draft):
        return
    (recipe.out / pipeline.EVALUATION).unlink(missing_ok=True)
    for folder in (recipe.out / HEAD, recipe.heads):
        shutil.rmtree(folder, ignore_errors=True)
    for path in recipe.labels.iterdir():
        if path.name != shards.COLLECTION:  # which tells whose all of it was, and goes last
            path.unlink()
    shutil.rmtree(recipe.labels)


def sentences(plan: DistilPlan, card: Mapping[str, Any]) -> list[str]:
    """The result, and how to use it."""
    shape, files = card["draft"]["shape"], card["draft"]["files"]
    tokens = "all tokens" if shape["tokens"] is None else f"{shape['tokens']:,} tokens"
    said = [f"{plan.out / files[0]}: {shape['kept']} layers of the target and {shape['own']} of its own, {tokens}."]
    for source, by in card["acceptance"].items():
        said.append(f"Accepted of {source}: " + ", ".join(f"{value:.2f} ({name})" for name, value in by.items()) + ".")
    if "check" in card:
        said += card["check"]["sentences"]
        said.append(f'load_pair("{plan.target}", draft="{plan.out / files[0]}", head="{plan.out / HEAD}")')
    return said


def _recipe(plan: DistilPlan, draft: str) -> Recipe:
    share = 1 / len(plan.sources)
    of = tuple(replace(source, rows=max(8, round(ROWS * share)), dev_share=0.2) for source in plan.sources)
    return Recipe(
        collect=CollectPlan(sources=of, max_tokens=min(128, plan.max_tokens), branches=None, shard_size=32, batch=32),
        pair=PairPlan(target=plan.target, draft=draft, dtype="float32", device=plan.device),
        sampling=plan.sampling,
        train={HEAD: HeadPlan(width=64, num_layers=1, epochs=12)},
        out=plan.out,
        name="the head",
    )
