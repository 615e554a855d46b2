"""Costs of a step, which policies weigh against its gain: the curve, measuring it (`measuring` with `practice`), following it
by the clock. A plain step has no draft tokens."""

from specdecpp.costs.clock import LONG_WARM_UP, QUICK_S, CostClock
from specdecpp.costs.curve import Costs, chain_tokens

__all__ = ["LONG_WARM_UP", "QUICK_S", "CostClock", "Costs", "chain_tokens"]
