"""Label records as `replay` reads them: the target's distributions along an answer, and the draft to ask anywhere.

records + the terms and the sampling they were collected on + the pair -> RecordedDistributions -> replay_trees
"""

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any

from jaxtyping import Float
from torch import Tensor

from specdecpp.backends import Draws, Model
from specdecpp.lab.trees.engine import common_length
from specdecpp.loading.pair import Pair
from specdecpp.sampling import Sampling, probabilities
from specdecpp.training.labels import Record
from specdecpp.training.traces import Terms

_ROWS = 256
"""Rows off an answer that are kept; those that were not read for longest make room."""


class RecordedDistributions:
    """`replay.AnswerRows` of a record, read when they are first asked for. V vocabulary.

    `draw` is the draft's way to draw a token, where it has one.
    """

    def __init__(self, record: Record, pair: Pair, terms: Terms, sampling: Sampling):
        self.source = record.source
        self.tokens: list[int] = record.answer.tolist()
        self.ends = frozenset(terms.ends)
        is_ended = self.tokens[-1] in self.ends
        self.num_places = (terms.max_tokens if is_ended else len(self.tokens)) - 1
        self.is_greedy = sampling.is_greedy
        self._prompt: list[int] = record.prompt.tolist()
        self._pair, self._sampling = pair, sampling
        self._draft: Any = None
        self._held: list[int] = []
        self._off = lru_cache(maxsize=_ROWS)(self._after)
        self.draw = pair.draft.draw if isinstance(pair.draft, Draws) else None
        if sampling.needs_seen:
            raise ValueError("a repetition penalty depends on the branch. Replay trees on labels collected without one.")

    def p(self, i: int) -> Float[Tensor, " V"]:
        return self._along_target[i]

    def q(self, i: int, branch: Sequence[int]) -> Float[Tensor, " V"]:
        return self._off(i, tuple(branch)) if branch or i >= len(self.tokens) else self._along_draft[i]

    @cached_property
    def _along_target(self) -> Float[Tensor, "N V"]:
        return self._along(self._pair.target)

    @cached_property
    def _along_draft(self) -> Float[Tensor, "N V"]:
        return self._along(self._pair.draft)

    def _along(self, model: Model) -> Float[Tensor, "N V"]:
        """Rows along the answer, by one model."""
        logits, _ = model.new_cache().extend([*self._prompt, *self.tokens[:-1]], rows=len(self.tokens))
        return self._distribution(logits)

    def _after(self, i: int, branch: tuple[int, ...]) -> Float[Tensor, " V"]:
        """The draft's row off the answer, for which it reads what it has not."""
        if self._draft is None:
            self._draft = self._pair.draft.new_cache()
        tokens = [*self._prompt, *self.tokens[:i], *branch]
        common = common_length(self._held, tokens[:-1])
        self._draft.rollback(common)
        logits, _ = self._draft.extend(tokens[common:], rows=1)
        self._held = tokens
        return self._distribution(logits[0])

    def _distribution(self, logits: Float[Tensor, "*n V"]) -> Float[Tensor, "*n V"]:
        """Under greedy sampling the one that a rule sees, at temperature 1."""
        return logits.softmax(-1) if self.is_greedy else probabilities(logits, self._sampling)


def recorded(records: Iterable[Record], pair: Pair, terms: Terms, sampling: Sampling) -> list[RecordedDistributions]:
    """Distributions of every record. Raises ValueError under a repetition penalty.

    >>> answers = recorded(shards.read(folder, split="test"), pair, Terms.of(about), sampling)     # doctest: +SKIP
    """
    return [RecordedDistributions(record, pair, terms, sampling) for record in records]
