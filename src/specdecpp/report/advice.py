"""The result of a check in words: whether it is worth it, how sure that is, why, and what to do if not."""

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType

from specdecpp.bench.check import CHEAP, GOOD, WIDE, Check, Option
from specdecpp.bench.results import Machine
from specdecpp.bench.rows import MIN_PROMPTS
from specdecpp.bench.turns import LENGTHS
from specdecpp.report import render
from specdecpp.report.sentences import times

NOTABLE = 1.05
"""How much faster decoding would have to become for a fault to be worth a sentence."""
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
    """In a word or two."""
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
    said = [
        f"{verdict(check).capitalize()}: with {name} answers of {check.trial.max_tokens} tokens come "
        f"{times(best.speedup, best.interval)} as fast as from the target alone, the reading of prompts included; decoding "
        f"alone is {times(best.decoding, best.decoding_interval)} as fast.",
        sureness(check),
        f"A draft token takes {check.c:.2f} of a target pass (c), one over {WIDE} positions {check.width:.2f} times as long as "
        f"one over a single one, and the target accepts {100 * check.acceptance:.0f} % of what is drafted"
        f"{f' (by depth: {depths} %)' if depths else ''}.",
        *([f"The default rule, {own.label}, makes it {_both(own)}."] if own and own is not best else []),
        *([f"Passes are run by {check.backends.rstrip('.')}."] if check.backends else []),
    ]
    advice = [sentence for _, sentence in sorted(_advice(check), reverse=True)]
    if check.is_worth is not True:
        advice.insert(0, f"First of all, {fault(check)}.")
        advice.append("Until then use the target alone, or the default rule, which drafts nothing where that does not pay.")
    return said + advice


def sureness(check: Check) -> str:
    """How sure the verdict is, and what it rests on."""
    seen = f"{_prompts(check)}, {check.elapsed_s:.0f} s{', interrupted' if check.is_interrupted else ''}"
    if check.best.interval is None:
        why = f"an interval takes {MIN_PROMPTS} prompts"
        return f"This is unsure: {why} ({seen})."
    if check.is_worth is None:
        return f"This is unsure: the 95 % interval does not rule out the target alone ({seen}). More time or prompts narrow it."
    return f"This is sure to 95 %, as far as other prompts are like these ({seen})."


def _prompts(check: Check) -> str:
    num = check.num_seen
    return f"{num} prompt{'s' * (num != 1)}" if num == check.num_prompts else f"{num} of {check.num_prompts} prompts"


def _both(option: Option) -> str:
    decoding = times(option.decoding, option.decoding_interval)
    return f"{times(option.speedup, option.interval)} as fast, decoding {decoding}"


def _advice(check: Check) -> Iterator[tuple[float, str]]:
    """(The speed-up in decoding that would be had, what to do for it), for every fault that matters."""
    for name, speedup in check.what_if.items():
        if speedup > NOTABLE * max(1.0, check.best.decoding):
            _, cure, do = FAULTS[name]
            yield speedup, f"With {cure} decoding would be {speedup:.2f} times as fast. {do}"


def fault(check: Check) -> str:
    """The first obstacle: the one whose cure would bring most."""
    return FAULTS[max(check.what_if, key=lambda name: check.what_if[name])][0]


def options(check: Check) -> list[Option]:
    """The lengths that were timed, the best one, and the default rule."""
    shown = [o for o in check.lengths if o is check.best or o.policy.max_tokens in LENGTHS]
    return [*shown, *([check.own] if check.own else [])]


def table(check: Check) -> RenderableType:
    """Every rule beside the target alone; the best in bold."""
    rows = render.plain_table("policy", "tokens/s\ndecoding", "tokens\n/pass", "decoding\ntimes", "answers\ntimes", gap=3)
    rows.add_row("target alone", f"{1 / check.costs.verify_s(1):.1f}", "1.00", "1.00", "1.00")
    for option in options(check):
        passes = "" if option.tokens_per_pass is None else f"{option.tokens_per_pass:.2f}"
        speeds = (
            _figure(option.decoding, option.decoding_interval),
            _figure(option.speedup, option.interval),
        )
        style = "bold" if option is check.best else ""
        rows.add_row(option.label, f"{option.tokens_per_second:.1f}", passes, *speeds, style=style)
    return rows


def _figure(value: float, interval: tuple[float, float] | None) -> str:
    return f"{value:.2f}" + ("" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]")


def to_dict(check: Check) -> dict[str, Any]:
    """Everything as JSON."""
    best = check.best
    return {
        "verdict": verdict(check),
        "sentences": sentences(check),
        "is_sure": check.is_worth is not None,
        "is_interrupted": check.is_interrupted,
        "seconds": check.elapsed_s,
        "num_prompts": check.num_seen,
        "policy": best.spec,
        "speedup": best.speedup,
        "speedup_interval": best.interval,
        "decoding": best.decoding,
        "decoding_interval": best.decoding_interval,
        "c": check.c,
        "costs": Machine(name="measured", costs=check.costs).to_dict(),
        "acceptance": check.acceptance,
        "acceptance_by_depth": check.by_depth,
        "what_if": check.what_if,
        "options": [
            {
                "policy": option.spec,
                "label": option.label,
                "tokens_per_second": option.tokens_per_second,
                "tokens_per_pass": option.tokens_per_pass,
                "speedup": option.speedup,
                "speedup_interval": option.interval,
                "decoding": option.decoding,
                "decoding_interval": option.decoding_interval,
            }
            for option in options(check)
        ],
    }
