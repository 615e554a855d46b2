"""The candidates of a round while they are drafted: what a policy sees."""

import math
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from specdecpp.head import features
from specdecpp.policies import Costs, Stop
from specdecpp.policies.protocol import LIMIT


@dataclass
class Draft:
    """The candidates of one round, and what the draft's side knows about them. This is all a policy sees.

    q[i] [V] is the distribution candidate i was drawn from (None under greedy drafting); `judged` are the head's estimates
    of the first candidates, in order: of those that were read or, where the policy looks ahead, of all.
    """

    costs: Costs | None = None
    tokens: list[int] = field(default_factory=list)
    q: list[Float[Tensor, " V"] | None] = field(default_factory=list)
    judged: list[float] = field(default_factory=list)
    stop: Stop = LIMIT
    forward_s: float = 0.0
    head_s: float = 0.0
    _logits: list[Float[Tensor, " V"] | None] = field(default_factory=list)
    _confidences: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def is_greedy(self) -> bool:
        """Whether the last candidate is an argmax rather than a draw."""
        return self.num_tokens > 0 and self.q[-1] is None

    @property
    def survival(self) -> float:
        """Estimated probability that every judged candidate is accepted: the product of `judged`."""
        return math.prod(self.judged, start=1.0)

    def distribution(self, i: int) -> Float[Tensor, " V"]:
        """What the draft believed at candidate i: q itself, or under greedy drafting the softmax at T = 1."""
        q, logits = self.q[i], self._logits[i]
        if q is not None:
            return q
        assert logits is not None, "a candidate has a distribution or logits"
        return logits.softmax(-1)

    def confidence(self, i: int) -> float:
        """q(Y_i) of candidate i (from 0; -1 is the last), under `distribution(i)`."""
        for k in range(len(self._confidences), self.num_tokens):
            q = self.distribution(k)
            token = self.tokens[k]
            self._confidences.append(q.numpy().item(token) if q.device.type == "cpu" else float(q[token]))
        return self._confidences[i]

    @property
    def cumulative_confidence(self) -> float:
        """The product of q(Y_i) over the round."""
        if self.num_tokens:
            self.confidence(-1)
        return math.prod(self._confidences, start=1.0)

    @property
    def known_confidences(self) -> list[float]:
        """q(Y_i) of the candidates as far as somebody asked, and of all that were drawn."""
        if self.num_tokens and not self.is_greedy:
            self.confidence(-1)
        return self._confidences

    def entropy(self, i: int) -> float:
        """Entropy in nats of `distribution(i)`."""
        return float(features.entropy(self.distribution(i)))

    def gap(self, i: int) -> float:
        """How far the two largest probabilities of `distribution(i)` lie apart (0 in a vocabulary of one)."""
        return float(features.gap(self.distribution(i)))

    def append(self, token: int, *, q: Float[Tensor, " V"] | None = None, logits: Float[Tensor, " V"] | None = None) -> None:
        """Add a candidate with the q it was drawn from, or with the logits it was the argmax of."""
        self.tokens.append(token)
        self.q.append(q)
        self._logits.append(logits)

    def drop_last(self) -> None:
        for column in (self.tokens, self.q, self._logits):
            column.pop()
        del self._confidences[self.num_tokens :], self.judged[self.num_tokens :]
