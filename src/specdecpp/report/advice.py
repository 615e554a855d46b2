"""What a check of a pair says in words: whether it is worth it, why, and what to do if not."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from specdecpp.bench.check import CHEAP, GOOD, WIDE, Check
from specdecpp.bench.results import Results
from specdecpp.report.sentences import times

NOTABLE = 1.05
"""How much faster the best rule would have to become for a fault to be worth a sentence."""
LOST = 0.9
"""Measured over predicted, below which something is lost outside the passes."""


def verdict(check: Check) -> str:
    """In a word or two."""
    return {True: "worth it", False: "not worth it", None: "too close to call"}[check.is_worth]


def sentences(check: Check) -> list[str]:
    """The verdict, the facts it rests on, and what to do."""
    best = check.best
    speed = times(best.speedup, best.speedup_interval)
    said = [
        f"{verdict(check).capitalize()}: {best.label} is predicted at {speed} the speed of the target alone; no rule can do "
        f"better than {check.limit:.2f} times here.",
        f"A candidate takes {check.c:.2f} of a target pass (c), one over {WIDE} positions {check.width:.2f} times as long as "
        f"one over a single one, and the target accepts {100 * check.acceptance:.0f} % of what is drafted (1 - TV).",
        _measured(check),
        *([f"Passes are run by {check.runners.rstrip('.')}."] if check.runners else []),
    ]
    advice = [sentence for _, sentence in sorted(_advice(check), reverse=True)]
    if check.is_worth is not True:
        advice.insert(0, f"First of all, {fault(check)}.")
        advice.append("Until then use the target alone, or the default rule, which drafts nothing where that does not pay.")
    return said + advice


def _measured(check: Check) -> str:
    """The short real run beside the prediction."""
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in check.time_shares.items())
    said = f"Decoded for real, it was {times(check.measured, check.measured_interval)} as fast ({shares})."
    high = check.measured if check.measured_interval is None else check.measured_interval[1]
    if check.measured < LOST * check.best.speedup and high < check.best.speedup:
        said += (
            " That is less than its passes alone allow: what is lost goes into reading the prompt and into overhead between "
            "the passes, which weigh on small models and short answers, or into a machine that was busy."
        )
    return said


def _advice(check: Check) -> Iterator[tuple[float, str]]:
    """(The speed-up that would be had, what to do for it), for every fault that matters."""
    about = {
        "draft": (
            f"a draft that takes {CHEAP:g} of a target pass",
            "Take a smaller one, or run it faster.",
        ),
        "acceptance": (
            f"{100 * GOOD:.0f} % acceptance and a fixed K",
            "Distil the draft on answers of the target, take one of the target's family, or sample at a lower temperature.",
        ),
        "verification": (
            "wide passes as quick as narrow ones",
            "A GPU reads several tokens in the time of one, and a larger target hides more; here short rounds pay.",
        ),
        "head": (
            f"a head that takes no time (it takes {1000 * check.machine.head_s:.2f} ms a candidate)",
            "Train a smaller one, or use a free rule such as cumulative.",
        ),
    }
    for name, speedup in check.what_if.items():
        if speedup > NOTABLE * check.best.speedup:
            what, do = about[name]
            yield speedup, f"With {what} it would be {speedup:.2f} times. {do}"


def fault(check: Check) -> str:
    """What stands in the way first: the one whose cure would bring most."""
    names = {
        "draft": "the draft is too slow",
        "acceptance": "too little of the draft is accepted",
        "verification": "verification is not flat",
        "head": "the head takes too long",
    }
    return names[max(check.what_if, key=lambda name: check.what_if[name])]


def table(check: Check) -> Results:
    """The chosen setting of every rule, and how far one could get, as results to show."""
    rows = tuple(row for row in check.rows if row.chosen or row.role == "oracle")
    return Results(kind="replay", provenance={}, costs=check.machine.to_dict(), rows=rows)


def to_dict(check: Check) -> dict[str, Any]:
    """Everything as JSON."""
    return {
        "verdict": verdict(check),
        "sentences": sentences(check),
        "c": check.c,
        "costs": check.machine.to_dict(),
        "acceptance": check.acceptance,
        "policy": check.best.policy,
        "speedup": check.best.speedup,
        "speedup_interval": check.best.speedup_interval,
        "limit": check.limit,
        "what_if": dict(check.what_if),
        "measured": {
            "speedup": check.measured,
            "interval": check.measured_interval,
            "time_shares": dict(check.time_shares),
        },
        "rows": [asdict(row) for row in check.rows],
    }
