"""Costs of a step, which policies weigh against its gain: the curve, measuring it, following it. A plain step has no draft
tokens.

| file | holds |
|---|---|
| curve.py | `Costs`: seconds of a draft token, and of a target pass by the number of positions that it reads |
| clock.py | `CostClock`: costs that follow the times of the steps |
| measuring.py | `known`: the costs of a pair on this machine, of an earlier process or measured now with real steps |
| practice.py | the prompts that these steps answer, and their lessons for a rule |
"""

from specdecpp.costs.clock import CostClock
from specdecpp.costs.curve import Costs, chain_tokens

__all__ = ["CostClock", "Costs", "chain_tokens"]
