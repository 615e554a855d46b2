"""A recorded answer as any policy may meet it: what `replay` decodes again and again.

Shapes: N tokens of an answer; K of a branch; W = 1 + K columns, of which column 0 of row i is about the answer's token X_i
and columns 1..K are about the branch at i; D = 1, or K scores of each token, by its place in the step.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int

NEVER = 2**62
ROUNDING = 1e-3
"""How far below 1 odds may lie that should be 1: where no token can be rejected there is no branch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Opinion:
    """Opinions on every token of a trace, as probabilities: by a head, or by an oracle, which is right.

    `next` is about the position after the token; `first` about the first draft token of a step at i, which only oracles know.
    """

    accept: Float[np.ndarray, "N W D"]
    next: Float[np.ndarray, "N W D"] | None = None
    first: Float[np.ndarray, " N"] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """One answer as any policy may meet it. `training.traces` makes it from a label record.

    `odds` are the b_i and `overlap` is 1 - TV(p_i, q_i). log_q, entropy (nats) and gap are of the distribution that gave the
    token. `branch_length` counts the tokens of each branch, `is_closed` says where the last of them ends the text, and
    `is_ended` whether the answer's last token does; else the answer was cut. Draft tokens may stand at the first `num_places`
    positions: as many as max_tokens or the context allow, less one for the target's own token.

    `opinions[head, calibrated]` are those of the very head object that a policy holds. `truth` is min(1, p/q) of every token
    and 1 - TV after it, None where the recording does not know it beyond a rejection.

    Raises ValueError where a branch is too short to say what a policy would have met.
    """

    source: str = ""
    tokens: Int[np.ndarray, "N W"]
    odds: Float[np.ndarray, " N"]
    overlap: Float[np.ndarray, " N"]
    log_q: Float[np.ndarray, "N W"]
    entropy: Float[np.ndarray, "N W"]
    gap: Float[np.ndarray, "N W"]
    branch_length: Int[np.ndarray, " N"]
    is_closed: Bool[np.ndarray, " N"]
    is_ended: bool
    num_places: int
    opinions: Mapping[tuple[Hashable, bool], Opinion] = field(default_factory=dict)
    truth: Opinion | None = None

    def __post_init__(self) -> None:
        at = np.arange(len(self))
        is_met = at < self.num_places
        is_closed = self.is_closed & (self.branch_length > 0)
        is_whole = is_closed | (self.branch_length >= np.minimum(self.branch_size, self.num_places - at))
        if not (len(self) and (self.is_ended or self.num_places < len(self))):
            raise ValueError(
                f"a trace has a token, and one that was cut ends with the target's own, got {len(self)} tokens of which "
                f"{self.num_places} may be draft tokens. num_places is one less than the tokens the answer could have had."
            )
        if (broken := np.flatnonzero(is_met & ~self.is_sure & ~is_whole)).size:
            i = int(broken[0])
            raise ValueError(
                f"the branch at token {i} has {self.branch_length[i]} of {self.branch_size} tokens, though it does not end the "
                f"text there and odds are {self.odds[i]:.4g}. Say at which tokens a text ends, and how long it may become, as "
                "when the labels were collected."
            )

    def __len__(self) -> int:
        return len(self.odds)

    @property
    def branch_size(self) -> int:
        """K: the most draft tokens of a step that can be replayed."""
        return self.tokens.shape[1] - 1

    @cached_property
    def is_greedy(self) -> bool:
        """Tell whether nothing was left to chance: at temperature 0 a draft token is the target's token or is not."""
        return not ((self.odds > 0) & (self.odds < 1)).any()

    @property
    def is_sure(self) -> Bool[np.ndarray, " N"]:
        """Where nothing could be rejected, and odds are 1 but for rounding."""
        return (self.branch_length == 0) & (self.odds >= 1 - ROUNDING)

    def runs(self, coins: Float[np.ndarray, "R N"]) -> Int[np.ndarray, "R N"]:
        """For every start of a step the position of its first rejection, N where there is none. Coins lie in [0, 1)."""
        is_accepted = (coins < self.odds) | self.is_sure
        rejections = np.where(is_accepted, len(self), np.arange(len(self)))
        return np.minimum.accumulate(rejections[:, ::-1], axis=1)[:, ::-1]

    def ends(self) -> list[int]:
        """For a first rejection at 0..N (N: none) the position where an end of text stops drafting."""
        ends = np.where(self.is_closed & (self.branch_length > 0), np.arange(len(self)) + self.branch_length, NEVER)
        return [*ends.tolist(), len(self) if self.is_ended else NEVER]
