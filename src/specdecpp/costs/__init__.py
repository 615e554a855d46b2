"""What a step costs, which policies weigh against what it brings: the curve, measuring it, following it.

| file | holds |
|---|---|
| curve.py | `Costs`: seconds of a draft token, and of a target pass by the number of positions that it reads |
| clock.py | `CostClock`: costs that follow the times of the rounds |
| measuring.py | `measure` and `measured`: the costs of a pair on this machine, with real rounds |
"""

from specdecpp.costs.clock import CostClock
from specdecpp.costs.curve import Costs, chain_tokens

__all__ = ["CostClock", "Costs", "chain_tokens"]
