"""The end of a distillation: the verdict on the pair, and sentences about it.

out/draft + target -> pair -> check -> card
"""

import json
from collections.abc import Mapping
from typing import Any

from specdecpp import cache_dir
from specdecpp.bench import check
from specdecpp.bench.questions import Questions
from specdecpp.distillation.run import CARD, HELD, DistilPlan, Tell
from specdecpp.loading.pair import load_pair
from specdecpp.report import advice
from specdecpp.training.collect import questions
from specdecpp.training.prompts import gather

CHECKED = 8
"""Prompts of each part of the check."""


def finish(plan: DistilPlan, card: Mapping[str, Any], *, tell: Tell = lambda line: None) -> dict[str, Any]:
    """The card with a verdict. Raises as `check` does."""
    tell("checking the pair")
    pair = load_pair(plan.target, draft=plan.out / card["draft"]["files"][0], device=plan.device)
    prompts = [tuple(q.prompt) for q in questions(pair, gather(plan.sources, seed=plan.seed), room=plan.max_tokens)[:HELD]]
    items = prompts[: 2 * CHECKED]
    asked = Questions(dataset=plan.sources[0].label, dev=tuple(items[:CHECKED]), test=tuple(items[CHECKED:]))
    trial = check.Trial(sampling=plan.sampling, seed=plan.seed, max_tokens=max(8, min(96, plan.max_tokens)))
    found = check.check(pair, [asked], trial, tell=lambda now: tell(f"checking the pair: {now.elapsed_s:.0f} s"))
    done = {**card, "check": advice.to_dict(found), "reference": check.keep_figures(pair, prompts, trial, tell=tell)}
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
        lines.append(f'load_pair("{plan.target}", draft="{plan.out / files[0]}")')
    return lines
