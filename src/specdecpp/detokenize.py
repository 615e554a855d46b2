"""Tokens to text, one at a time: no broken characters, nothing of a stop string, the same text however steps fall.

A token's text is released once it can no longer change: an incomplete UTF-8 sequence waits for its last byte, and a tail
that could be the beginning of a stop string waits until it is decided.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

_BROKEN = "\ufffd"
_WINDOW = 8  # tokens that are decoded again with each new one
_LONGEST = 4  # tokens of one character: its bytes
CALL_TAGS = "<tool_call>", "</tool_call>"
"""Tags of a call, which are shown where they are special tokens too."""


class Detokenizer:
    """The text of one growing answer.

    `push` gives the text that a token releases, and whether a stop string has now been completed; `flush` releases what was
    still held back. The stop string itself is never released. Some tokenizers drop the space that a text begins with: `before`
    is what the answer follows.
    """

    def __init__(self, tokenizer: Any, stop: str | Sequence[str] | None = (), *, before: Sequence[int] = ()):
        stop = () if stop is None else (stop,) if isinstance(stop, str) else stop
        if not isinstance(stop, list | tuple) or not all(isinstance(s, str) for s in stop):
            raise ValueError(f"stop must be a text or a list of texts, got {stop!r}")
        if not all(stop):
            raise ValueError("a stop string is empty; remove it, or give the text to stop at")
        self._read, self._hidden = _reader(tokenizer), _hidden(tokenizer)
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._start = 0  # tokens before this one no longer influence how the next ones read
        self._known = ""  # the text of the tokens from `_start` to `_end`, which is already in `_text`
        self._end = 0  # the first token that is not
        self._text = ""
        self._released = 0
        tails = ([t for t in before[-num:] if t not in self._hidden] for num in range(1, _LONGEST + 1))
        if tail := next((tail for tail in tails if not self._read(tail).endswith(_BROKEN)), None):
            self._tokens, self._known, self._end = tail, self._read(tail), len(tail)

    def push(self, token: int) -> tuple[str, bool]:
        if token in self._hidden:
            return "", False
        self._tokens.append(token)
        longer = self._read(self._tokens[self._start :])
        if len(longer) > len(self._known) and not longer.endswith(_BROKEN):
            self._text += longer[len(self._known) :]
            self._known = longer
            before, self._end = self._end, len(self._tokens)
            if self._end - self._start > _WINDOW:
                self._start, self._known = before, self._read(self._tokens[before:])
        # What could begin a stop string has been held back, so none begins in what was released.
        hits = [(at + len(s), at) for s in self._stop if (at := self._text.find(s, self._released)) >= 0]
        if hits:
            _, start = min(hits)  # the one that is completed first, as if the text came character by character
            return self._release(start), True
        return self._release(len(self._text) - self._undecided()), False

    def flush(self) -> str:
        """The rest: an incomplete character, or what looked like the beginning of a stop string."""
        self._text += self._read(self._tokens[self._start :])[len(self._known) :]
        return self._release(len(self._text))

    def _release(self, end: int) -> str:
        text, self._released = self._text[self._released : end], end
        return text

    def _undecided(self) -> int:
        """Length of the longest tail that begins a stop string."""
        longest = min(len(self._text), max(map(len, self._stop), default=1) - 1)
        lengths = (n for n in range(longest, 0, -1) if any(s.startswith(self._text[-n:]) for s in self._stop))
        return next(lengths, 0)


def half_character(text: str) -> str | None:
    """Place of half a surrogate pair in a text, or of a byte that was no UTF-8, which no tokenizer can read; None without one.

    >>> half_character("ab\\ud800")
    'U+D800 at character 3'
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"U+{ord(text[error.start]):04X} at character {error.start + 1}"
    return None


def _reader(tokenizer: Any) -> Callable[[list[int]], str]:
    """Ids to text, without hidden ones. What transformers wraps around a fast tokenizer takes longer than that."""
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    if issubclass(kind, Fast) and kind.decode is Fast.decode and kind._decode is Fast._decode:
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=False)
    return partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@lru_cache
def _hidden(tokenizer: Any) -> frozenset[int]:
    """Ids of the special tokens that no text shows."""
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if not isinstance(added, dict):  # transformers' wrapper of mistral-common has none
        return frozenset(tokenizer.all_special_ids)
    return frozenset(i for i, token in added.items() if token.special and token.content not in CALL_TAGS)
