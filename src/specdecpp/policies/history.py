"""Rules that follow the outcomes of earlier rounds: the coming round is as long as what was accepted lately makes worth while.

They look at no candidate, so a round's length is known before it begins.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdecpp.policies.cost_aware import Ledger
from specdecpp.policies.protocol import Evidence, Policy, Rule, check_probability

if TYPE_CHECKING:
    from specdecpp.costs import Costs
    from specdecpp.policies.protocol import Outcome


@dataclass(frozen=True, kw_only=True)
class AcceptanceEMA(Policy):
    """One candidate more than was accepted lately: gamma = round(L) + 1, L = (1 - eta) L + eta * accepted (eta 0.3).

    GammaTune (Gautam et al. 2025, arXiv 2504.00030) and the adaptive steps of SGLang follow such a running mean. The one more
    is what lets the length grow again: a round that accepts everything lies above the mean. Starts at `start_tokens`.
    """

    start_tokens: int = 4
    eta: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("AcceptanceEMA.eta", self.eta)
        if self.start_tokens < 1:
            raise ValueError(f"AcceptanceEMA needs start_tokens of at least 1, got {self.start_tokens}")

    def start(self) -> float:
        return float(self.start_tokens - 1)

    def limit(self, memory: float) -> int:
        return max(self.min_tokens, min(math.floor(memory + 0.5) + 1, self.max_tokens))

    def learn(self, memory: float, outcome: "Outcome") -> float:
        return memory + self.eta * (outcome.num_accepted - memory) if outcome.num_drafted else memory


@dataclass(frozen=True, kw_only=True)
class ArgmaxLength(Policy):
    """The length that is best at the acceptance seen so far: the formula for a fixed length, evaluated on the fly.

        gamma = argmax_g  (1 - a^(g+1))/(1 - a) / (g t_draft + t_target(g + 1))

    after Leviathan et al. 2023 (theorem 3.8), with a the share of the tested candidates that was accepted. `prior` is a before
    anything was tested, and counts for `prior_tokens` candidates. With `min_tokens=0` it may give up drafting for good.
    """

    min_tokens: int = 1
    prior: float = 0.7
    prior_tokens: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("ArgmaxLength.prior", self.prior)
        if self.prior_tokens < 1:
            raise ValueError(f"ArgmaxLength needs prior_tokens of at least 1, got {self.prior_tokens}")

    @property
    def needs_costs(self) -> bool:
        return True

    def start(self) -> Ledger:
        return Ledger()

    def learn(self, memory: Ledger, outcome: "Outcome") -> Ledger:
        return memory.with_round(outcome)

    def acceptance(self, memory: Ledger) -> float:
        """a: of the candidates tested so far, the prior's included."""
        return memory.acceptance(self.prior, self.prior_tokens)

    def rule(self, memory: Ledger, costs: "Costs | None", limit: int) -> Rule:
        assert costs is not None, "the session gives costs to a policy that needs them"
        best = costs.best_length(self.acceptance(memory), range(self.min_tokens, self.max_tokens + 1))
        return Rule(Evidence.NOTHING, (-math.inf,) * best + (math.inf,), f"best length {best}")
