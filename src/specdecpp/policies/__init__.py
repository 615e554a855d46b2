"""How many tokens to draft: one small frozen dataclass per rule, grouped by what the rule looks at.

| file | looks at |
|---|---|
| fixed.py | nothing, or the outcomes of earlier rounds |
| confidence.py | the draft's own probabilities |
| head.py | a trained acceptance head |

Every rule here decides *after* a sampled token and keeps that token, which is lossless with token and block verification
(see `protocol.Policy`).
"""

from specdecpp.policies.confidence import CumulativeConfidence, Entropy, MaxConfidence
from specdecpp.policies.fixed import Fixed, Heuristic
from specdecpp.policies.head import SpecDecPP
from specdecpp.policies.protocol import Policy

__all__ = ["CumulativeConfidence", "Entropy", "Fixed", "Heuristic", "MaxConfidence", "Policy", "SpecDecPP"]
