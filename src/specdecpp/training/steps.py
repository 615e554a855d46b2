"""The steps of an answer and how likely each is, exactly, without decoding: the coupling of `replay.replay`.

A step that starts at position s of an answer X ~ p and has accepted everything up to position i meets there, in distribution,
X_i itself with probability b_i = min(1, q(X_i)/p(X_i)), which is accepted, and otherwise a draw from norm((q_i - p_i)+), which
is rejected; the draft goes on from it as the recorded branch does. So at depth k the step from s is, with weight

    b_s ... b_{s+k-1}              X_s ... X_{s+k-1}, all accepted: label 1
    b_s ... b_{j-1} (1 - b_j)      X_s ... X_{j-1} and k - (j - s) tokens of the branch at j: label 0,   s <= j < s+k

and what decides is the score of the whole step. A step starts at every position and has up to K draft tokens, none past the
answer's end; a branch that ends its text ends the step. The weights of a depth sum to 1 otherwise.

Shapes: N tokens of the answer, K draft tokens, R steps at some depth with positive weight.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from specdecpp.training.labels import Record
from specdecpp.training.scores import LENGTH, Judged


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of one answer: for each of R the depth it has reached (from 1), whether all was accepted, its weight."""

    depth: Int[np.ndarray, " R"]
    label: Float[np.ndarray, " R"]
    weight: Float[np.ndarray, " R"]
    _place: Int[np.ndarray, "N K"]
    _whole: Bool[np.ndarray, "N K"]
    _broken: Bool[np.ndarray, "N P"]

    def scores(self, judged: Judged) -> Float[np.ndarray, " R"]:
        """The score of each step, from logarithms of the scores of its tokens."""
        answer, branch = judged.answer, judged.branch
        assert answer is not None, "a record with branches has been judged on them"
        assert branch is not None, "a record with branches has been judged on them"
        place, length = self._place, self._place.shape[1]
        accepted = answer[place, np.arange(length)].cumsum(axis=1)
        before = np.concatenate([np.zeros((len(place), 1)), accepted[:, :-1]], axis=1)
        discarded = branch.cumsum(axis=1)
        m, k = np.triu_indices(length)
        rejected = before[:, m] + discarded[place[:, m], k - m, m]
        return np.concatenate([accepted[self._whole], rejected[self._broken]])


def steps(record: Record, *, length: int = LENGTH) -> Steps:
    """All steps of a record that has branches. A pair (m, k) of `_broken` is a first rejection at m, seen at k."""
    branches = record.branches
    assert branches is not None, "only records with branches have steps"
    num_tokens, length = len(record.answer), min(length, branches.token.shape[1])
    place = np.arange(num_tokens)[:, None] + np.arange(length)
    is_inside = place < num_tokens
    place = np.minimum(place, num_tokens - 1)
    odds = record.answer_odds.double().numpy()[place]
    reached = np.cumprod(odds, axis=1)
    rejected = np.concatenate([np.ones((num_tokens, 1)), reached[:, :-1]], axis=1) * (1 - odds)
    m, k = np.triu_indices(length)
    whole = is_inside & (reached > 0)
    broken = is_inside[:, k] & (rejected[:, m] > 0) & (k - m < branches.length.numpy()[place[:, m]])
    depth = np.arange(1, length + 1)
    return Steps(
        depth=np.concatenate([np.broadcast_to(depth, whole.shape)[whole], np.broadcast_to(depth[k], broken.shape)[broken]]),
        label=np.repeat([1.0, 0.0], [whole.sum(), broken.sum()]),
        weight=np.concatenate([reached[whole], rejected[:, m][broken]]),
        _place=place,
        _whole=whole,
        _broken=broken,
    )
