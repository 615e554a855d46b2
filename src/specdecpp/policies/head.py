"""SpecDec++: stop when the head thinks that something has probably been rejected (method.md 5)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdecpp.policies.protocol import Policy, check_probability

if TYPE_CHECKING:
    from torch import Tensor

    from specdecpp.drafting import Draft
    from specdecpp.head import AcceptanceHead


@dataclass(frozen=True, kw_only=True)
class SpecDecPP(Policy):
    """Stop once 1 - prod_i head(e_i) > threshold, within [min_tokens, max_tokens] = [2, 20] (Huang et al. 2025).

    e_i is the draft's hidden state at candidate i, so a candidate is judged by the forward pass that also yields its
    successor; that successor is free and is kept. `calibrated=False` reads the head's raw score, which a weighted loss has
    biased downwards on purpose (the paper's setting: 0.7 with w_rej = 6); `calibrated=True` reads probabilities.
    """

    head: "AcceptanceHead"
    threshold: float = 0.7
    calibrated: bool = False
    min_tokens: int = 2
    max_tokens: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("SpecDecPP.threshold", self.threshold)

    def judge(self, hidden: "Tensor") -> float:
        return self.head.accept_probability(hidden, calibrated=self.calibrated)

    def stop(self, draft: "Draft", memory: Any) -> str | None:
        if (rejection := 1 - draft.survival) > self.threshold:
            return f"P(rejection) = {rejection:.2f} > {self.threshold:g}"
        return None
