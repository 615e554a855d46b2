"""The number of draft tokens that transformers adapts from outcomes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from specdecpp.policies.protocol import Policy

if TYPE_CHECKING:
    from specdecpp.policies.protocol import Outcome


@dataclass(frozen=True, kw_only=True)
class Heuristic(Policy):
    """k += 2 after a round that accepted everything, else k = max(1, k - 1): the "heuristic" schedule of transformers."""

    short: ClassVar[str] = "heuristic:start_tokens"
    start_tokens: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start_tokens < 1:
            raise ValueError(f"Heuristic needs start_tokens of at least 1, got {self.start_tokens}")

    def start(self) -> int:
        return min(self.start_tokens, self.max_tokens)

    def limit(self, memory: int) -> int:
        return max(self.min_tokens, min(memory, self.max_tokens))

    def learn(self, memory: int, outcome: "Outcome") -> int:
        return min(memory + 2, self.max_tokens) if outcome.num_accepted == outcome.num_drafted else max(1, memory - 1)
