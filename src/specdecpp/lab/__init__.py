"""Systems of the paper's neighbours and trials of our own: kept in Python, on the specification, to be measured against.

| rule | stops when | looks at | file |
|---|---|---|---|
| `Heuristic` | k draft tokens, k + 2 after a step accepted whole, else k - 1 | outcomes | history.py |
| `AcceptanceEMA` | one draft token more than was accepted lately | outcomes | history.py |
| `ArgmaxLength` | the length that is fastest at the acceptance so far, or lately | outcomes, costs | history.py |
| `UCBSpecStop` | the length that may be the fastest, by an upper bound | outcomes, costs | history.py |
| `Cascade` | the length that was fastest in a test, none where that did not pay | outcomes, costs | history.py |
| `FrontierLength` | the length that is fastest at the acceptance of each place, and probes | outcomes, costs | controllers.py |
| `SkippingEMA` | as many as were accepted lately, none below a mean, but for probes | outcomes | controllers.py |
| `DraftVerify` | q(x) < threshold, which follows outcomes | q, outcomes | adaptive.py |
| `AdaptiveEntropy` | 1 - sqrt(gamma H(q)) < threshold, which follows outcomes | q, outcomes | adaptive.py |
| `OnlineLogistic` | another would not raise the step's tokens a second | q, outcomes, costs | logistic.py |
| `Disco` | a classifier of the last draft token < threshold | q | logistic.py |
| `Bandit` | the rule that has been fastest so far says so | outcomes, costs | meta.py |
| `AutoOff` | another rule says so; at once where drafting does not pay | outcomes, costs | meta.py |
| `CostAwareTree`, `Widths` and others | trees of draft tokens | q, outcomes, costs | trees |

`mdp` solves the exact stopping problem, `oracles` know what no decoder can,
and `lossy` has verifications that keep another distribution than the target's.

No module outside this package imports it. `--policy` and `bench` find its rules by the entry point `specdecpp.policies`.
"""

from specdecpp.lab.adaptive import AdaptiveEntropy as AdaptiveEntropy
from specdecpp.lab.adaptive import DraftVerify as DraftVerify
from specdecpp.lab.controllers import FrontierLength as FrontierLength
from specdecpp.lab.controllers import SkippingEMA as SkippingEMA
from specdecpp.lab.history import AcceptanceEMA as AcceptanceEMA
from specdecpp.lab.history import ArgmaxLength as ArgmaxLength
from specdecpp.lab.history import Cascade as Cascade
from specdecpp.lab.history import Heuristic as Heuristic
from specdecpp.lab.history import UCBSpecStop as UCBSpecStop
from specdecpp.lab.logistic import Disco as Disco
from specdecpp.lab.logistic import OnlineLogistic as OnlineLogistic
from specdecpp.lab.meta import AutoOff as AutoOff
from specdecpp.lab.meta import Bandit as Bandit
from specdecpp.lab.trees import TreePolicy as TreePolicy
from specdecpp.policies import Policy

RULES = tuple(kind for kind in globals().copy().values() if isinstance(kind, type) and issubclass(kind, Policy) and kind.short)
"""All of them, for the entry point."""
