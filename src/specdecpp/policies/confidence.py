"""Rules that read the draft's own probabilities, which cost nothing.

q(x) is the probability under the distribution the draft token was drawn from. With greedy drafting that distribution is
one-hot and says nothing; the unwarped softmax (temperature 1) is read instead.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from specdecpp.policies.protocol import Evidence, Policy, Rule, check_probability

if TYPE_CHECKING:
    from specdecpp.costs import Costs


@dataclass(frozen=True, kw_only=True)
class MaxConfidence(Policy):
    """Stop once the last draft token has q(x) < threshold: the dynamic rule of transformers (default 0.4, at most 20).

    `drop=True` also removes that draft token, as `p-min` does in llama.cpp (0.75 and at most 16, of the argmax among its ten
    likeliest). There draft tokens are the draft's argmax and are compared with the target's own draw, at any temperature. With
    draft tokens that are drawn it is sound under `CompareVerification` and for greedy decoding only, and the Decoder refuses it
    elsewhere. Without `drop` the last draft token stays, and costs a row of the pass. `min_tokens` counts one that is dropped.
    """

    short: ClassVar[str] = "max-confidence:threshold"
    threshold: float = 0.4
    drop: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("MaxConfidence.threshold", self.threshold)

    @property
    def drops_last(self) -> bool:
        return self.drop

    def rule(self, memory: Any, costs: "Costs | None") -> Rule:
        return Rule(Evidence.LAST_Q, (0.0, self.threshold))


@dataclass(frozen=True, kw_only=True)
class CumulativeConfidence(Policy):
    """Stop once the product of q over the step falls below the threshold (default 0.2).

    The free baseline that any trained head has to beat: it estimates the survival of the whole step, at no cost.
    """

    short: ClassVar[str] = "cumulative:threshold"
    threshold: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("CumulativeConfidence.threshold", self.threshold)

    def rule(self, memory: Any, costs: "Costs | None") -> Rule:
        return Rule(Evidence.PRODUCT_OF_Q, (0.0, self.threshold))


@dataclass(frozen=True, kw_only=True)
class Entropy(Policy):
    """Stop once sqrt(c * H(q)) > threshold, H in nats: SVIP (Zhang et al. 2024; c = 0.15, threshold 0.3, at most 40).

    1 - sqrt(c * H) bounds the acceptance probability from below, up to the constant.
    """

    short: ClassVar[str] = "entropy:threshold"
    threshold: float = 0.3
    c: float = 0.15
    max_tokens: int = 40

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.c > 0 and self.threshold >= 0):
            raise ValueError(f"Entropy needs c > 0 and threshold >= 0, got c={self.c} and threshold={self.threshold}")

    def rule(self, memory: Any, costs: "Costs | None") -> Rule:
        return Rule(Evidence.NEGATIVE_ENTROPY, (-math.inf, -self.threshold * self.threshold / self.c))
