"""Caches of requests that have ended, for those whose prompts begin as their texts did: the next turn of a conversation, other
questions behind one system prompt, several answers to one question.

    request -> what there is of its prompt, taken over or copied -> ... -> its end: both caches kept with the text

Only of runners that can `fork`: whose bits of a row do not depend on the pass that made it, so that an answer is the same
whatever was asked before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol, runtime_checkable

from specdecpp.runners.protocol import Runner

LEAST = 16
"""Tokens in common that are worth it."""
MOST = 8
"""Texts that are kept."""
MOST_BYTES = 256 * 2**20
"""What their caches may hold together; the last text is kept whatever its size."""


@runtime_checkable
class Forks(Runner, Protocol):
    """A runner whose cache can be copied, and whose rows have the same bits in whatever pass they are read."""

    @property
    def num_bytes(self) -> int:
        """What its cache holds in memory."""
        ...

    def fork(self, length: int) -> "Runner":
        """Another runner over the same weights, with a copy of the first `length` tokens of this one's cache."""
        ...


@dataclass(frozen=True, eq=False)
class _Text:
    tokens: list[int]
    runners: tuple[Runner, ...]

    @property
    def num_bytes(self) -> int:
        return sum(runner.num_bytes for runner in self.runners if isinstance(runner, Forks))


@dataclass(eq=False)
class Kept:
    """The caches of a pair's last requests. Used from any thread."""

    _texts: list[_Text] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def put(self, tokens: Sequence[int], *runners: Runner) -> None:
        """Keep caches whose contents are the first tokens of a text; nobody else uses them from now on."""
        if not any(isinstance(runner, Forks) for runner in runners):
            return
        with self._lock:
            self._texts.append(_Text(list(tokens), runners))
            while len(self._texts) > MOST or (len(self._texts) > 1 and sum(t.num_bytes for t in self._texts) > MOST_BYTES):
                del self._texts[0]

    def begin(self, prompt: Sequence[int], *runners: Runner) -> tuple[Runner, ...]:
        """A runner for each of these, over the same weights: with what there is of the prompt's beginning, else empty.

        Its last token is always left to read. A text that goes on in this prompt, or nearly so, gives its caches away; of
        another the common part is copied.
        """
        prompt = list(prompt)
        with self._lock:
            common = {text: min(_common(text.tokens, prompt), len(prompt) - 1) for text in self._texts}
            best = max(common, key=lambda text: common[text], default=None)
            if best is None or common[best] < LEAST:
                return tuple(runner.fresh() for runner in runners)
            num = common[best]
            is_taken = 2 * num >= len(best.tokens)
            if is_taken:
                self._texts.remove(best)
            return tuple(_begun(kept, runner, num, is_taken) for kept, runner in zip(best.runners, runners, strict=True))

    def clear(self) -> None:
        """Let go of all of them."""
        with self._lock:
            self._texts.clear()


def _begun(kept: Runner, runner: Runner, num: int, is_taken: bool) -> Runner:
    if not isinstance(kept, Forks):
        return runner.fresh()
    length = min(num, kept.length)
    if not is_taken:
        return kept.fork(length)
    kept.rollback(length)
    return kept


def _common(a: list[int], b: list[int]) -> int:
    """How many tokens two texts begin with alike; a comparison of lists is quick, so by halves."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
