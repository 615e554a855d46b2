"""SpecDec++: stop when the head thinks that something has probably been rejected (method.md 5)."""

import math
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdecpp.policies.protocol import Policy, check_probability

if TYPE_CHECKING:
    from torch import Tensor

    from specdecpp.drafting import Draft
    from specdecpp.head import AcceptanceHead, Estimator


@dataclass(frozen=True, kw_only=True)
class SpecDecPP(Policy):
    """Stop once 1 - prod_i head(Y_i) > threshold, within [min_tokens, max_tokens] = [2, 20] (Huang et al. 2025).

    A lagged head judges a candidate by the forward pass that also yields its successor; that successor is free and is
    kept. A look-ahead head judges it as soon as it is drawn, so no pass is spent on a candidate that is judged hopeless.

    `calibrated=False` reads the head's raw score, which a weighted loss has biased downwards on purpose (the paper's
    setting: 0.7 with w_rej = 6); `calibrated=True` reads probabilities, and warns where nobody has checked them.

    >>> policy = SpecDecPP.tuned(pair.head)                     # as its card says            # doctest: +SKIP
    """

    head: "AcceptanceHead"
    threshold: float = 0.7
    calibrated: bool = False
    min_tokens: int = 2
    max_tokens: int = 20
    _estimate: "Estimator" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("SpecDecPP.threshold", self.threshold)
        if self.calibrated and self.head is not None and not self.head.card.is_calibrated:
            warnings.warn(
                "the head's probabilities have not been calibrated on held-out labels, so a threshold on them means little. "
                "Calibrate it (specdecpp calibrate), or use its raw score (calibrated=False).",
                stacklevel=3,
            )
        if self.head is not None:
            object.__setattr__(self, "_estimate", self.head.estimator(calibrated=self.calibrated))

    @classmethod
    def tuned(cls, head: "AcceptanceHead", **changes: Any) -> "SpecDecPP":
        """The rule in the setting that the head's card recommends, the defaults where it says nothing."""
        return cls(head=head, **(head.card.stopping | changes))

    @property
    def looks_ahead(self) -> bool:
        return self.head.card.form == "look_ahead"

    def judge(self, draft: "Draft", hidden: "Tensor") -> float:
        scalars = tuple(_SCALARS[name](draft) for name in self.head.card.scalars)
        return self._estimate(hidden, draft.tokens[-1], scalars)

    def stop(self, draft: "Draft", memory: Any) -> str | None:
        if (rejection := 1 - draft.survival) > self.threshold:
            return f"P(rejection) = {rejection:.2f} > {self.threshold:g}"
        return None


_SCALARS = {
    "log_q": lambda draft: math.log(max(draft.confidence(-1), 1e-30)),
    "entropy": lambda draft: draft.entropy(-1),
    "gap": lambda draft: draft.gap(-1),
    "depth": lambda draft: float(draft.num_tokens),
}
