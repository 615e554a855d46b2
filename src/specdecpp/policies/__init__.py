"""How many tokens to draft: one small frozen dataclass per rule, grouped by what the rule looks at.

| rule | stops when | looks at | file |
|---|---|---|---|
| `Fixed` | k candidates; none in `NoDraft()`, the target alone | nothing | fixed.py |
| `Heuristic` | k candidates, k + 2 after a round accepted whole, else k - 1 | outcomes | fixed.py |
| `AcceptanceEMA` | one candidate more than was accepted lately | outcomes | history.py |
| `ArgmaxLength` | the length that is fastest at the acceptance so far, or lately | outcomes, costs | history.py |
| `UCBSpecStop` | the length that may be the fastest, by an upper bound | outcomes, costs | history.py |
| `Cascade` | the length that was fastest in a test, none where that did not pay | outcomes, costs | cascade.py |
| `MaxConfidence` | q(x) < threshold | q | confidence.py |
| `CumulativeConfidence` | prod q(x_i) < threshold: the free baseline to beat | q | confidence.py |
| `Entropy` | sqrt(c H(q)) > threshold | q | confidence.py |
| `DraftVerify` | q(x) < threshold, which follows outcomes | q, outcomes | adaptive.py |
| `AdaptiveEntropy` | 1 - sqrt(gamma H(q)) < threshold, which follows outcomes | q, outcomes | adaptive.py |
| `OnlineLogistic` | another would not raise the round's tokens a second | q, outcomes, costs | logistic.py |
| `Disco` | a classifier of the last candidate < threshold | q | logistic.py |
| `SpecDecPP` | 1 - prod head(x_i) > threshold | a trained head | head.py |
| `CostAware` | another candidate costs more than it brings: the default | q or a head, outcomes, costs | cost_aware.py |
| `Bandit` | the rule that has been fastest so far says so | outcomes, costs | meta.py |
| `WithCopies` | another rule says so; takes copies of the text where these promise more | outcomes, costs | copies.py |
| `AutoOff` | another rule says so; at once where drafting does not pay | outcomes, costs | meta.py |

`protocol.py` says what a rule is and what it sees, `account.py` what the rounds of a request teach the default, `score.py` what
they say of its estimates, `gains.py` whether drafting pays, `experience.py` what requests teach those to come; what a step
costs is in the package `costs`.

Every rule here decides *after* a sampled token and keeps that token, which is lossless with token and block verification
(see `protocol.Policy`).

A new rule is a file and a line below; its short form on the command line is that of its class (`Policy.short`).
"""

from specdecpp.costs import CostClock as CostClock
from specdecpp.costs import Costs as Costs
from specdecpp.policies.adaptive import AdaptiveEntropy as AdaptiveEntropy
from specdecpp.policies.adaptive import DraftVerify as DraftVerify
from specdecpp.policies.cascade import Cascade as Cascade
from specdecpp.policies.confidence import CumulativeConfidence as CumulativeConfidence
from specdecpp.policies.confidence import Entropy as Entropy
from specdecpp.policies.confidence import MaxConfidence as MaxConfidence
from specdecpp.policies.copies import WithCopies as WithCopies
from specdecpp.policies.cost_aware import CostAware as CostAware
from specdecpp.policies.fixed import Fixed as Fixed
from specdecpp.policies.fixed import Heuristic as Heuristic
from specdecpp.policies.fixed import NoDraft as NoDraft
from specdecpp.policies.head import SpecDecPP as SpecDecPP
from specdecpp.policies.history import AcceptanceEMA as AcceptanceEMA
from specdecpp.policies.history import ArgmaxLength as ArgmaxLength
from specdecpp.policies.history import UCBSpecStop as UCBSpecStop
from specdecpp.policies.logistic import Disco as Disco
from specdecpp.policies.logistic import OnlineLogistic as OnlineLogistic
from specdecpp.policies.meta import AutoOff as AutoOff
from specdecpp.policies.meta import Bandit as Bandit
from specdecpp.policies.protocol import Candidates as Candidates
from specdecpp.policies.protocol import Outcome as Outcome
from specdecpp.policies.protocol import Policy as Policy
from specdecpp.policies.protocol import Rule as Rule
from specdecpp.policies.protocol import Stop as Stop


def named() -> tuple[type[Policy], ...]:
    """Every rule with a short form, by its name."""
    rules = (kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, Policy) and kind.short)
    return tuple(sorted(rules, key=lambda kind: kind.short))
