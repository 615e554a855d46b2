"""Label records as `replay` reads them: the target's distributions along an answer, and the draft to ask anywhere.

records + the terms and the sampling they were collected on + the pair -> RecordedDistributions -> replay_trees
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from specdecpp.backends import Draws
from specdecpp.lab.trees.engine import common_length
from specdecpp.loading.pair import Pair
from specdecpp.sampling import Sampling, probabilities
from specdecpp.training.labels import Record
from specdecpp.training.traces import Terms

_ROWS = 256
"""AnswerRows off an answer that are kept; the oldest make room."""


class RecordedDistributions:
    """`replay.AnswerRows` of a record. AnswerRows are read when they are first asked for. V vocabulary.

    `draw` is the draft's way to draw a token, where it has one.
    """

    def __init__(self, record: Record, pair: Pair, terms: Terms, sampling: Sampling):
        self.source = record.source
        self.tokens: list[int] = record.answer.tolist()
        self.ends = frozenset(terms.ends)
        is_ended = self.tokens[-1] in self.ends
        self.num_places = terms.num_places(len(record.prompt)) if is_ended else len(self.tokens) - 1
        self.is_greedy = sampling.is_greedy
        self._prompt: list[int] = record.prompt.tolist()
        self._pair, self._sampling = pair, sampling
        self._draft: Any = None
        self._held: list[int] = []
        self._along: dict[str, Tensor] = {}
        self._off: OrderedDict[tuple[int, tuple[int, ...]], Tensor] = OrderedDict()
        self.draw = pair.draft.draw if isinstance(pair.draft, Draws) else None
        if sampling.needs_seen:
            raise ValueError("a repetition penalty depends on the branch. Replay trees on labels collected without one.")

    def p(self, i: int) -> Float[Tensor, " V"]:
        return self._of("target")[i]

    def q(self, i: int, branch: Sequence[int]) -> Float[Tensor, " V"]:
        if not branch and i < len(self.tokens):
            return self._of("draft")[i]
        key = i, tuple(branch)
        if key in self._off:
            self._off.move_to_end(key)
            return self._off[key]
        row = self._off[key] = self._distribution(self._read([*self._prompt, *self.tokens[:i], *branch]))
        if len(self._off) > _ROWS:
            self._off.popitem(last=False)
        return row

    def _of(self, role: str) -> Float[Tensor, "N V"]:
        """Along the answer, by one model."""
        if role not in self._along:
            backend = getattr(self._pair, role).new_cache()
            logits, _ = backend.extend([*self._prompt, *self.tokens[:-1]], rows=len(self.tokens))
            self._along[role] = self._distribution(logits)
        return self._along[role]

    def _distribution(self, logits: Float[Tensor, "*n V"]) -> Float[Tensor, "*n V"]:
        """Under greedy sampling what a rule sees of it, at temperature 1."""
        return logits.softmax(-1) if self.is_greedy else probabilities(logits, self._sampling)

    def _read(self, tokens: list[int]) -> Float[Tensor, " V"]:
        """The draft's logits after a text, of which it reads what it has not."""
        if self._draft is None:
            self._draft = self._pair.draft.new_cache()
        common = common_length(self._held, tokens[:-1])
        self._draft.rollback(common)
        logits, _ = self._draft.extend(tokens[common:], rows=1)
        self._held = tokens
        return logits[0]


def recorded(records: Iterable[Record], pair: Pair, terms: Terms, sampling: Sampling) -> list[RecordedDistributions]:
    """The distributions of every record. Raises ValueError under a repetition penalty.

    >>> answers = recorded(shards.read(folder, split="test"), pair, Terms.of(about), sampling)     # doctest: +SKIP
    """
    return [RecordedDistributions(record, pair, terms, sampling) for record in records]
