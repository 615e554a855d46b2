"""The end of a distillation: the draft's head, the verdict on the pair, and sentences about both.

out/draft + target -> recipe of a head (`training.pipeline`) -> out/head;   pair with head -> check -> card
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdecpp import cache_dir
from specdecpp.bench import check
from specdecpp.bench.questions import Questions
from specdecpp.distillation.run import CARD, DistilPlan, Tell
from specdecpp.head import CARD as HEAD_CARD
from specdecpp.loading.pair import load_pair
from specdecpp.report import advice
from specdecpp.training import collect, pipeline
from specdecpp.training.prompts import gather
from specdecpp.training.recipe import CollectPlan, HeadPlan, PairPlan, Recipe

HEAD = "head"
ROWS, CHECKED = 160, 8
"""Prompts that a head is trained on, and prompts of each part of the check."""


def finish(plan: DistilPlan, card: Mapping[str, Any], *, tell: Tell = lambda line: None) -> dict[str, Any]:
    """The card with a head and a verdict; a head that an earlier run finished stays. Raises as `collect`, `train` and `check`
    do."""
    draft = str(plan.out / card["draft"]["files"][0])
    if not (plan.out / HEAD / HEAD_CARD).exists():
        recipe = _recipe(plan, draft)
        tell("collecting labels for the head")
        pipeline.check(recipe)
        collect.collect(recipe, recipe.pair.load(), assume_yes=True)
        tell("training the head")
        heads = pipeline.calibrate_heads(recipe, pipeline.train_heads(recipe, recipe.train))
        pipeline.evaluate_heads(recipe, heads)
        shutil.rmtree(plan.out / HEAD, ignore_errors=True)
        heads[HEAD].save_pretrained(plan.out / HEAD)
    tell("checking the pair")
    pair = load_pair(plan.target, draft=draft, head=plan.out / HEAD, device=plan.device)
    prompts = [tuple(q.prompt) for q in collect.questions(pair, gather(plan.sources, seed=plan.seed + 1))]
    items = prompts[: 2 * CHECKED]
    asked = Questions(dataset=plan.sources[0].label, dev=tuple(items[:CHECKED]), test=tuple(items[CHECKED:]))
    of, most = plan.sampling, max(8, min(96, plan.max_tokens))
    trial = check.Trial(temperature=of.temperature, top_p=of.top_p, seed=plan.seed, max_tokens=most)
    found = check.check(pair, [asked], trial, tell=lambda now: tell(f"checking the pair: {now.elapsed_s:.0f} s"))
    done = {**card, "head": HEAD, "check": advice.to_dict(found)}
    done |= {"reference": check.keep_figures(pair, prompts, trial, tell=tell)}
    cache_dir.write(plan.out / CARD, json.dumps(done, indent=1) + "\n")
    return done


def sentences(plan: DistilPlan, card: Mapping[str, Any]) -> list[str]:
    """The result, and how to use it."""
    shape, files = card["draft"]["shape"], card["draft"]["files"]
    tokens = "all tokens" if shape["tokens"] is None else f"{shape['tokens']:,} tokens"
    lines = [f"{plan.out / files[0]}: {shape['kept']} layers of the target and {shape['own']} of its own, {tokens}."]
    for source, by in card["acceptance"].items():
        lines.append(f"Accepted of {source}: " + ", ".join(f"{value:.2f} ({name})" for name, value in by.items()) + ".")
    if "check" in card:
        lines += card["check"]["sentences"]
        lines.append(f'load_pair("{plan.target}", draft="{plan.out / files[0]}", head="{plan.out / HEAD}")')
    return lines


def _recipe(plan: DistilPlan, draft: str) -> Recipe:
    rows = max(8, round(ROWS / len(plan.sources)))
    of = tuple(replace(source, rows=rows, dev_share=0.2) for source in plan.sources)
    return Recipe(
        collect=CollectPlan(sources=of, max_tokens=min(128, plan.max_tokens), branches=None, shard_size=32, batch=32),
        pair=PairPlan(target=plan.target, draft=draft, dtype="float32", device=plan.device),
        sampling=plan.sampling,
        train={HEAD: HeadPlan(width=64, num_layers=1, epochs=12)},
        out=plan.out,
        name="the head",
    )
