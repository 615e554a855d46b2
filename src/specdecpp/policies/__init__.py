"""How many tokens to draft: one small frozen dataclass per rule, grouped by what the rule looks at.

| rule | stops when | looks at | file |
|---|---|---|---|
| `Fixed` | k candidates; 0 is the target alone | nothing | fixed.py |
| `Heuristic` | k candidates, k + 2 after a round accepted whole, else k - 1 | outcomes | fixed.py |
| `AcceptanceEMA` | one candidate more than was accepted lately | outcomes | history.py |
| `ArgmaxLength` | the length that is fastest at the acceptance so far | outcomes, costs | history.py |
| `MaxConfidence` | q(x) < threshold | q | confidence.py |
| `CumulativeConfidence` | prod q(x_i) < threshold: the free baseline to beat | q | confidence.py |
| `Entropy` | sqrt(c H(q)) > threshold | q | confidence.py |
| `DraftVerify` | q(x) < threshold, which follows outcomes | q, outcomes | adaptive.py |
| `AdaptiveEntropy` | 1 - sqrt(gamma H(q)) < threshold, which follows outcomes | q, outcomes | adaptive.py |
| `SpecDecPP` | 1 - prod head(x_i) > threshold | a trained head | head.py |
| `CostAware` | another candidate costs more than it brings: the default | q or a head, outcomes, costs | cost_aware.py |
| `Bandit` | the rule that has been fastest so far says so | outcomes, costs | meta.py |
| `AutoOff` | another rule says so; at once where drafting does not pay | outcomes, costs | meta.py |

`protocol.py` says what a rule is and what it sees, `score.py` what outcomes say of its estimates, `experience.py` what requests
teach those to come; what a step costs is in the room `costs`.

Every rule here decides *after* a sampled token and keeps that token, which is lossless with token and block verification
(see `protocol.Policy`).
"""

from specdecpp.costs import CostClock, Costs
from specdecpp.policies.adaptive import AdaptiveEntropy, DraftVerify
from specdecpp.policies.confidence import CumulativeConfidence, Entropy, MaxConfidence
from specdecpp.policies.cost_aware import CostAware
from specdecpp.policies.fixed import Fixed, Heuristic
from specdecpp.policies.head import SpecDecPP
from specdecpp.policies.history import AcceptanceEMA, ArgmaxLength
from specdecpp.policies.meta import AutoOff, Bandit
from specdecpp.policies.protocol import Candidates, Outcome, Policy, Rule, Stop

__all__ = [
    "AcceptanceEMA",
    "AdaptiveEntropy",
    "ArgmaxLength",
    "AutoOff",
    "Bandit",
    "Candidates",
    "CostAware",
    "CostClock",
    "Costs",
    "CumulativeConfidence",
    "DraftVerify",
    "Entropy",
    "Fixed",
    "Heuristic",
    "MaxConfidence",
    "Outcome",
    "Policy",
    "Rule",
    "SpecDecPP",
    "Stop",
]
