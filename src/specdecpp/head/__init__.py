"""The acceptance head: a small residual network on the draft's hidden state, which estimates P(draft token accepted).

There are two forms. They differ in when a draft token Y_t can be judged:

lagged       from e_t, the draft's state *at* Y_t: D_h residual blocks x + SiLU(W x + b), then a linear output, the logit of
             acceptance (Huang et al. 2025, section 3.2). The forward pass on Y_t has then been paid for.
look-ahead   from e_{t-1}, the state that gave q_t, from Y_t's row of a small table, and from scalars such as log q(Y_t):
             as soon as Y_t is drawn. The table is the head's own, so every backend can feed it.

`AcceptanceHead` is the module in torch, for any rows at once, `RowEstimator` the same in numpy for one row, `HeadCard` what is
known of both. Compiled code (`backends/native/cpp/step.h`) has its own forward; all answer what `tests/golden_head.json` says.
"""

from specdecpp.head.features import SCALARS as SCALARS
from specdecpp.head.model import CARD as CARD
from specdecpp.head.model import AcceptanceHead as AcceptanceHead
from specdecpp.head.model import Calibration as Calibration
from specdecpp.head.model import Estimator as Estimator
from specdecpp.head.model import HeadCard as HeadCard
from specdecpp.head.model import RowEstimator as RowEstimator
