"""Costs of a pair on this machine: measured once, kept for later processes, corrected by the steps of requests.

A later process takes the same measured costs (`cache_dir.remember`), so that a seed gives the same answer there, and requests
without a seed begin with the costs that the clock has made of them (`CostClock`). Where the two differ by more than `WRONG` the
measurement was wrong: a later process takes the clock's for both, and a seed may then give another answer.
"""

from dataclasses import dataclass, replace
from typing import Any

from specdecpp import cache_dir
from specdecpp.costs.clock import differ, shares
from specdecpp.costs.curve import Costs
from specdecpp.costs.measuring import BUDGET_S, LENGTHS, costs_of, timed
from specdecpp.costs.practice import Practice
from specdecpp.loading.checks import code
from specdecpp.loading.pair import Pair

METHOD = 19
"""Counts up when the figures of an earlier way of measuring should no longer be believed."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """Costs and practice of a pair on this machine. Requests with a seed see `costs`, the others begin with `now`."""

    costs: Costs
    now: Costs
    practice: Practice = Practice()  # noqa: RUF009 (frozen)
    is_new: bool = True
    """True where it was measured just now."""
    is_steady: bool = True


def measured(pair: Pair) -> Costs:
    """The costs of a pair on this machine: those of an earlier measurement, else measured now and kept."""
    return known(pair).costs


def known(pair: Pair) -> Known:
    """Costs that an earlier process has kept of a pair, else measured now and kept."""
    kept = cache_dir.recall("costs", _about(pair)) if pair.is_identified else None
    try:
        if kept:
            found = Known(
                costs=Costs.parse(kept),
                now=Costs.parse(kept["now"]),
                practice=Practice.parse(kept["practice"]),
                is_new=False,
                is_steady=kept.get("is_steady") is not False,
            )
            if differ(shares(found.costs), shares(found.now)):
                found = replace(found, costs=found.now)
                keep(pair, found)
            return found
    except (ValueError, KeyError, TypeError):
        pass  # of another version, or damaged: measured again
    cycles, practice = timed(pair, BUDGET_S)
    costs = costs_of(pair, cycles)
    times = [[r.verify_s for cycle in cycles for r in cycle.turns.get(k, ())] for k in LENGTHS]
    found = Known(costs=costs, now=costs, practice=practice, is_steady=cache_dir.is_steady(times))
    if pair.is_identified:
        keep(pair, found)
    return found


def keep(pair: Pair, known: Known) -> None:
    """Keep it for later processes."""
    figures = known.costs.to_json() | {"now": known.now.to_json(), "practice": known.practice.to_json()}
    cache_dir.remember("costs", _about(pair), figures, is_steady=known.is_steady)


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
        "backends": [[type(r).__name__, getattr(r, "num_threads", None), getattr(r, "activations", None)] for r in backends],
        "devices": [str(r.device) for r in backends],
        "dtypes": [str(getattr(getattr(r, "model", r), "dtype", None)) for r in backends],
        **cache_dir.about(),
    }
