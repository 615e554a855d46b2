"""Costs of a pair on this machine: measured once, kept for later processes, corrected by the steps of requests.

The figures are kept for the pair and the machine (`cache_dir.remember`), so that a later process weighs the same costs and a
seed gives the same answer there; those of a machine that was busy meanwhile only for ten minutes. Beside them stands what the
steps of requests have made of them since (`CostClock`): requests without a seed begin there. Where the two are at odds, the
measurement was wrong, and a later process takes the other for both.
"""

from dataclasses import dataclass, replace
from typing import Any

from specdecpp import cache_dir
from specdecpp.costs.clock import are_wrong
from specdecpp.costs.curve import Costs
from specdecpp.costs.measuring import BUDGET_S, CANDIDATES, costs_of, timed
from specdecpp.costs.practice import Practice
from specdecpp.loading.checks import code
from specdecpp.loading.pair import Pair

METHOD = 18
"""Counts up when the figures of an earlier way of measuring should no longer be believed."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """Costs and practice of a pair on this machine. Requests with a seed see `costs`, the others begin with `now`."""

    costs: Costs
    now: Costs
    practice: Practice = Practice()  # noqa: RUF009 (frozen)
    is_new: bool = True
    """Tell whether it was measured just now."""
    is_steady: bool = True
    spread: float = 1.0
    """Of equal steps, how far the median lies above the fastest, at most."""


def measured(pair: Pair) -> Costs:
    """The costs of a pair on this machine: those of an earlier measurement, else measured now and kept."""
    return known(pair).costs


def known(pair: Pair) -> Known:
    """Costs that an earlier process has kept of a pair, else measured now and kept."""
    found = cache_dir.recall("costs", _about(pair)) if pair.is_identified else None
    try:
        if found:
            costs, now = Costs.parse(found), Costs.parse(found["now"])
            told = Known(costs=costs, now=now, practice=Practice.parse(found["practice"]), is_new=False)
            told = replace(told, is_steady=found.get("is_steady") is not False, spread=float(found.get("spread", 1.0)))
            if are_wrong(costs, now):
                told = replace(told, costs=now)
                keep(pair, told)
            return told
    except (ValueError, KeyError, TypeError):
        pass  # of another version, or damaged: measured again
    cycles, practice = timed(pair, BUDGET_S)
    costs = costs_of(pair, cycles)
    times = [[r.verify_s for cycle in cycles for r in cycle.turns.get(k, ())] for k in CANDIDATES]
    told = Known(
        costs=costs, now=costs, practice=practice, is_steady=cache_dir.is_steady(times), spread=cache_dir.spread(times)
    )
    if pair.is_identified:
        keep(pair, told)
    return told


def keep(pair: Pair, known: Known) -> None:
    """Keep it for later processes."""
    told = _figures(known.costs) | {"now": _figures(known.now), "practice": known.practice.told(), "spread": known.spread}
    cache_dir.remember("costs", _about(pair), told, is_steady=known.is_steady)


def _figures(costs: Costs) -> dict[str, Any]:
    names = "draft_s", "head_s", "start_s", "switch_s", "other_s", "read_along"
    return {name: getattr(costs, name) for name in names} | {"passes": {str(n): s for n, s in costs.passes.items()}}


def _about(pair: Pair) -> dict[str, Any]:
    """Facts that the figures depend on."""
    card = pair.head.card if pair.head else None
    backends = pair.target, pair.draft
    return {
        "method": METHOD,
        "head": card and [card.form, card.hidden_size, card.width, card.num_layers, card.scalars],
        "target": pair.target_fingerprint,
        "draft": pair.draft_fingerprint,
        "models": pair.identities,
        "code": code(),
        "runners": [[type(r).__name__, getattr(r, "num_threads", None), getattr(r, "activations", None)] for r in backends],
        "devices": [str(r.device) for r in backends],
        "dtypes": [str(getattr(getattr(r, "model", r), "dtype", None)) for r in backends],
        **cache_dir.about(),
    }
