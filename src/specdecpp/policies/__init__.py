"""How many tokens to draft: one small frozen dataclass per rule, grouped by what the rule looks at.

| rule | stops when | looks at | file |
|---|---|---|---|
| `Fixed` | k draft tokens; none in `NoDraft()`, the target alone | nothing | fixed.py |
| `MaxConfidence` | q(x) < threshold | q | confidence.py |
| `CumulativeConfidence` | prod q(x_i) < threshold: the free baseline to beat | q | confidence.py |
| `Entropy` | sqrt(c H(q)) > threshold | q | confidence.py |
| `SpecDecPP` | 1 - prod head(x_i) > threshold | a trained head | head.py |
| `CostAware` | another draft token costs more than it brings: the default | q or a head, outcomes, costs | cost_aware.py |

`protocol.py` defines a rule and what it sees, `learning.py` holds what steps teach the default and later requests, `score.py`
turns estimates into probabilities; costs of a step are in the package `costs`.

Every rule here but `MaxConfidence(drop=True)` decides *after* a sampled token and keeps that token, which is lossless with
token and block verification (see the head of `protocol.py`).

A new rule is a file and a line below; its short form on the command line is that of its class (`Policy.short`). Rules from
elsewhere, those of `specdecpp.lab` too, are found by the entry point `specdecpp.policies`, which names a sequence of them.
"""

from functools import cache
from importlib.metadata import entry_points

from specdecpp.costs import CostClock as CostClock
from specdecpp.costs import Costs as Costs
from specdecpp.policies.confidence import CumulativeConfidence as CumulativeConfidence
from specdecpp.policies.confidence import Entropy as Entropy
from specdecpp.policies.confidence import MaxConfidence as MaxConfidence
from specdecpp.policies.cost_aware import CostAware as CostAware
from specdecpp.policies.fixed import Fixed as Fixed
from specdecpp.policies.fixed import NoDraft as NoDraft
from specdecpp.policies.head import SpecDecPP as SpecDecPP
from specdecpp.policies.protocol import DraftSoFar as DraftSoFar
from specdecpp.policies.protocol import Outcome as Outcome
from specdecpp.policies.protocol import Policy as Policy
from specdecpp.policies.protocol import Rule as Rule
from specdecpp.policies.protocol import Stop as Stop


@cache
def named() -> tuple[type[Policy], ...]:
    """Every rule with a short form, by its name: those of this package, and those that entry points name."""
    rules = [kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, Policy) and kind.short]
    rules += [kind for point in entry_points(group="specdecpp.policies") for kind in point.load()]
    return tuple(sorted(rules, key=lambda kind: kind.short))
