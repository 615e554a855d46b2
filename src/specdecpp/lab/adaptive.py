"""Rules on the draft's own probabilities whose threshold follows how many draft tokens are accepted.

After every step, with m a running mean of the accepted share (Zhang et al. 2023, "Draft & Verify", arXiv 2309.08168):

    m  <- 0.5 m + 0.5 accepted/drafted
    t' <- t + 0.01 where m < 0.9, else t - 0.01, or t if the step was as long as it may be: it was not t that stopped it
    t  <- 0.9 t + 0.1 t'

So the threshold moves by 0.001 a step: it drifts over thousands of tokens, and hardly within one short answer.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specdecpp.policies.protocol import NO_PAST, Evidence, Given, Policy, Rule, check_probability

if TYPE_CHECKING:
    from specdecpp.costs import Costs
    from specdecpp.policies.protocol import Outcome

MEMORY, INERTIA = 0.5, 0.9


@dataclass(frozen=True, kw_only=True)
class Drift:
    """The threshold as it stands, and the running mean of the accepted share."""

    threshold: float
    mean: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AdaptivePolicy(Policy):
    """Base of the rules with such a threshold: where it starts, the share it aims at, and its step."""

    threshold: float = 0.5
    aim: float = 0.9
    step: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability(f"{type(self).__name__}.threshold", self.threshold)
        check_probability(f"{type(self).__name__}.aim", self.aim)
        if not self.step >= 0:
            raise ValueError(f"{type(self).__name__} needs a step of at least 0, got {self.step}")

    def start(self, given: Given = NO_PAST) -> Drift:
        return Drift(threshold=self.threshold)

    def learn(self, memory: Drift, outcome: "Outcome") -> Drift:
        if not outcome.num_drafted:
            return memory
        mean = MEMORY * memory.mean + (1 - MEMORY) * outcome.num_accepted / outcome.num_drafted
        move = self.step if mean < self.aim else 0.0 if outcome.num_drafted >= self.max_tokens else -self.step
        return Drift(threshold=min(max(memory.threshold + (1 - INERTIA) * move, 0.0), 1.0), mean=mean)


@dataclass(frozen=True, kw_only=True)
class DraftVerify(AdaptivePolicy):
    """Stop once the last draft token has q(x) < threshold, the threshold following outcomes (Zhang et al. 2023).

    It starts at 0.5, their value for sampling; for greedy decoding theirs is 0.8.
    """

    short: ClassVar[str] = "draft-verify:threshold"

    def rule(self, memory: Drift, costs: "Costs | None") -> Rule:
        return Rule(Evidence.LAST_Q, (0.0, memory.threshold))


@dataclass(frozen=True, kw_only=True)
class AdaptiveEntropy(AdaptivePolicy):
    """Stop once 1 - sqrt(gamma * H(q)) < threshold, H in nats: AdaEDL (Agrawal et al. 2024, arXiv 2410.18351; gamma 0.2).

    The left side approximates a lower bound on the chance that the draft token is accepted. That the threshold adapts is
    theirs; here it moves as in Draft & Verify, and its start of 0.4 is ours.
    """

    short: ClassVar[str] = "adaptive-entropy:threshold"
    threshold: float = 0.4
    gamma: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gamma > 0:
            raise ValueError(f"AdaptiveEntropy needs gamma > 0, got {self.gamma}")

    def rule(self, memory: Drift, costs: "Costs | None") -> Rule:
        return Rule(Evidence.NEGATIVE_ENTROPY, (-math.inf, -((1 - memory.threshold) ** 2) / self.gamma))
