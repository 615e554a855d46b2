"""Costs of a step, which policies weigh against its gain: the curve, measuring it, following it.

| file | holds |
|---|---|
| curve.py | `Costs`: seconds of a draft token, and of a target pass by the number of positions that it reads |
| clock.py | `CostClock`: costs that follow the times of the steps |
| measuring.py | `measure`: the costs of a pair on this machine, with real steps |
| practice.py | prompts of ours that are answered meanwhile, and what they teach a rule |
| known.py | `known` and `measured`: the same as kept from an earlier process, corrected by its requests |
"""

from specdecpp.costs.clock import CostClock
from specdecpp.costs.curve import Costs, chain_tokens

__all__ = ["CostClock", "Costs", "chain_tokens"]
