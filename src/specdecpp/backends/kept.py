"""Prefix caches: caches of requests that have ended, for prompts that begin as their texts did.

Only caches that can `fork` serve again: the bits of a row do not depend on the pass that made it, so that an answer is the same
whatever was asked before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol, runtime_checkable

from specdecpp.backends.base import Cache, Model

LEAST = 16
"""Tokens in common that are worth it."""
MOST = 8
"""Texts that are kept."""
MOST_BYTES = 256 * 2**20
"""Bytes that their caches may hold together; the last text is kept whatever its size."""


@runtime_checkable
class Forks(Protocol):
    """A cache that can be copied, of a model whose rows have the same bits in whatever pass they are read."""

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        ...

    def fork(self, length: int) -> Cache:
        """A copy of the first `length` tokens."""
        ...


@dataclass(frozen=True, eq=False)
class _Text:
    tokens: list[int]
    caches: tuple[Cache, ...]

    @property
    def num_bytes(self) -> int:
        return sum(cache.num_bytes for cache in self.caches if isinstance(cache, Forks))


@dataclass(eq=False)
class Kept:
    """The caches of a pair's last requests. Used from any thread."""

    _texts: list[_Text] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def put(self, tokens: Sequence[int], *caches: Cache) -> None:
        """Keep caches whose contents are the first tokens of a text; nobody else uses them from now on."""
        if not any(isinstance(cache, Forks) for cache in caches):
            return
        with self._lock:
            self._texts.append(_Text(list(tokens), caches))
            while len(self._texts) > MOST or (len(self._texts) > 1 and sum(t.num_bytes for t in self._texts) > MOST_BYTES):
                del self._texts[0]

    def begin(self, prompt: Sequence[int], *models: Model) -> tuple[Cache, ...]:
        """A cache of each of these models, with what there is of the prompt but its last token. A text whose greater part is
        of use gives its caches away; of another the common part is copied."""
        with self._lock:
            common = {text: min(_common(text.tokens, list(prompt)), len(prompt) - 1) for text in self._texts}
            best = max(common, key=lambda text: common[text], default=None)
            if best is None or common[best] < LEAST:
                return tuple(model.new_cache() for model in models)
            if is_taken := 2 * common[best] >= len(best.tokens):
                self._texts.remove(best)
            found = []
            for cache, model in zip(best.caches, models, strict=True):
                length = min(common[best], cache.length)
                if not isinstance(cache, Forks):
                    found.append(model.new_cache())
                elif is_taken:
                    cache.rollback(length)
                    found.append(cache)
                else:
                    found.append(cache.fork(length))
            return tuple(found)


def _common(a: list[int], b: list[int]) -> int:
    """Number of tokens that two texts begin with alike, found by halves: lists are compared quickly."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
