"""The result of a check in words: whether drafting pays, how sure that is, why, and what to do if not."""

from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from specdecpp.bench.check import CHEAP, GOOD, WIDE, Check, Option
from specdecpp.bench.results import Machine
from specdecpp.bench.rows import MIN_PROMPTS
from specdecpp.bench.turns import LENGTHS
from specdecpp.policy_spec import spec_of
from specdecpp.report import render
from specdecpp.report.tables import times

NOTABLE = 1.05
"""Factor by which decoding would have to become faster for a fault to be worth a sentence."""
FAULTS = {
    "draft": (
        "the draft is too slow",
        f"a draft that takes {CHEAP:g} of a target pass",
        "Take a smaller one, or run it faster.",
    ),
    "acceptance": (
        "too little of the draft is accepted",
        f"{100 * GOOD:.0f} % acceptance",
        "Distil the draft on answers of the target, take one of the target's family, or sample at a lower temperature.",
    ),
    "verification": (
        "verification is not flat",
        "wide passes as quick as narrow ones",
        "A GPU reads several tokens in the time of one, and a larger target hides more; here short steps pay.",
    ),
    "head": (
        "the head takes too long",
        "a head that takes no time",
        "Train a smaller one, or use a free rule such as cumulative.",
    ),
}
"""Faults of a pair: the fault, what the pair would have without it, and how that is had."""
VERDICTS = {True: "worth it", False: "not worth it", None: "too close to call"}


def verdict(check: Check) -> str:
    """The result in a word or two."""
    return VERDICTS[check.is_worth]


def now(check: Check) -> str:
    """The state of a check that goes on, in a line."""
    best = check.best
    sure = "unsure" if check.is_worth is None else VERDICTS[check.is_worth]
    spent = f"{check.elapsed_s:.0f} of {check.trial.seconds:.0f} s"
    return f"{spent}: {sure} so far, {best.label} {times(best.speedup, best.interval)}"


def sentences(check: Check) -> list[str]:
    """The verdict, how sure it is, the facts it rests on, and what to do."""
    best, own = check.best, check.own
    name = f"{best.label}, the default rule," if best is own else best.label
    depths = ", ".join(f"{100 * a:.0f}" for a in check.by_depth)
    lines = [
        f"{verdict(check).capitalize()}: with {name} answers of {check.trial.max_tokens} tokens come "
        f"{times(best.speedup, best.interval)} as fast as from the target alone, the reading of prompts included; decoding "
        f"alone is {times(best.decoding, best.decoding_interval)} as fast.",
        _sureness(check),
        f"A draft token takes {check.c:.2f} of a target pass (c), one over {WIDE} positions {check.width:.2f} times as long as "
        f"one over a single one, and the target accepts {100 * check.acceptance:.0f} % of what is drafted"
        f"{f' (by depth: {depths} %)' if depths else ''}.",
    ]
    if check.backends:
        lines.append(f"Passes are run by {check.backends.rstrip('.')}.")
    cures = sorted(check.what_if.items(), key=lambda cure: -cure[1])
    if check.is_worth is not True:
        lines.append(f"First of all, {FAULTS[cures[0][0]][0]}.")
    for fault, speedup in cures:
        if speedup > NOTABLE * max(1.0, best.decoding):
            _, cure, do = FAULTS[fault]
            lines.append(f"With {cure} decoding would be {speedup:.2f} times as fast. {do}")
    if check.is_worth is not True:
        lines.append("Until then use the target alone, or the default rule, which drafts nothing where that does not pay.")
    return lines


def _sureness(check: Check) -> str:
    """The certainty of the verdict, and what it rests on."""
    num, whole = check.num_seen, check.num_prompts
    prompts = f"{num} prompt{'s' * (num != 1)}" if num == whole else f"{num} of {whole} prompts"
    seen = f"{prompts}, {check.elapsed_s:.0f} s{', interrupted' if check.is_interrupted else ''}"
    if check.best.interval is None:
        return f"This is unsure: an interval takes {MIN_PROMPTS} prompts ({seen})."
    if check.is_worth is None:
        return f"This is unsure: the 95 % interval does not rule out the target alone ({seen}). More time or prompts narrow it."
    return f"This is sure to 95 %, as far as other prompts are like these ({seen})."


def _options(check: Check) -> list[Option]:
    """The lengths that were timed, the best one, and the default rule."""
    shown = [o for o in check.lengths if o is check.best or o.policy.max_tokens in LENGTHS]
    return [*shown, *([check.own] if check.own else [])]


def terminal(check: Check) -> RenderableType:
    """The sentences, then every rule beside the target alone, the best in bold."""
    rows = render.plain_table("policy", "tokens/s\ndecoding", "tokens\n/pass", "decoding\ntimes", "answers\ntimes", gap=3)
    rows.add_row("target alone", f"{1 / check.costs.verify_s(1):.1f}", "1.00", "1.00", "1.00")
    for option in _options(check):
        rows.add_row(
            option.label,
            f"{option.tokens_per_second:.1f}",
            "" if option.tokens_per_pass is None else f"{option.tokens_per_pass:.2f}",
            times(option.decoding, option.decoding_interval, ""),
            times(option.speedup, option.interval, ""),
            style="bold" if option is check.best else "",
        )
    return Group(
        render.heading("The pair", verdict(check)),
        *(Padding(Text(sentence), (0, 1)) for sentence in sentences(check)),
        render.heading("Rules", "over the target alone; answers with the reading of their prompts"),
        Padding(rows, (0, 1)),
    )


def to_dict(check: Check) -> dict[str, Any]:
    """Everything as JSON; the figures of the best policy stand beside the verdict."""
    return {
        "verdict": verdict(check),
        "sentences": sentences(check),
        "is_sure": check.is_worth is not None,
        "is_interrupted": check.is_interrupted,
        "seconds": check.elapsed_s,
        "num_prompts": check.num_seen,
        **_option(check.best),
        "c": check.c,
        "costs": Machine(name="measured", costs=check.costs).to_dict(),
        "acceptance": check.acceptance,
        "acceptance_by_depth": check.by_depth,
        "what_if": check.what_if,
        "options": [_option(option) for option in _options(check)],
    }


def _option(option: Option) -> dict[str, Any]:
    figures = {name: value for name, value in vars(option).items() if name != "policy"}
    return {"policy": spec_of(option.policy), "label": option.label, **figures}
