"""Grammars: which tokens an answer may go on with. It then has the target's distribution under the grammar.

    Grammar -> Matcher of one answer -> allowed tokens of each place -> p and q without the others (`step`)

Logits of forbidden tokens become minus infinity in p and q alike, before temperature and filters. Draft tokens follow the
grammar along a fork of the matcher, so nothing has to be undone when they are rejected.

llguidance compiles the grammars, as it does for vLLM, SGLang and llama.cpp: a mask takes it tens of microseconds, a fork three,
and a keyword of JSON Schema that it does not know is an error rather than ignored.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdecpp.errors import MissingExtraError

BLANKS = r"( |\r?\n[ \t]{0,40})?"
"""Blanks between the parts of JSON: a space, or a new line and its indentation. Without a bound some models never end."""


class Matcher:
    """A grammar's place in one answer, by llguidance."""

    def __init__(self, found: Any, vocab_size: int):
        self._found, self._size = found, vocab_size
        self._bits = np.zeros((vocab_size + 31) // 32, dtype=np.int32)

    @property
    def is_over(self) -> bool:
        """True where nothing can follow: the answer has ended."""
        return self._found.is_stopped()

    def allowed(self) -> Bool[Tensor, " V"]:
        """True for tokens that may come next, ends of text among them. All of them where the answer has ended."""
        if self.is_over:
            return torch.ones(self._size, dtype=torch.bool)
        self._found.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        _check(self._found)
        found = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._size]
        return torch.from_numpy(found.view(bool))

    def forced(self) -> list[int]:
        """The next tokens where the text can go on in one way only: drafted without a model."""
        found = self._found.compute_ff_tokens()
        return found[: self._found.validate_tokens(found)] if found else found  # text that reads like a special token is none

    def push(self, token: int) -> None:
        """Go on by a token that is allowed."""
        self._found.consume_token(token)
        _check(self._found)

    def fork(self) -> "Matcher":
        """A copy that goes its own way."""
        return Matcher(self._found.deep_copy(), self._size)


def restricted(logits: Float[Tensor, "*rows V"], allowed: Bool[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
    """Logits with minus infinity in place of forbidden tokens."""
    return logits.masked_fill(~allowed.to(logits.device), -torch.inf)


def allowed_rows(matcher: Matcher, tokens: list[int]) -> Bool[Tensor, "K1 V"]:
    """Tokens that may come next after none, one, ... all K of these tokens."""
    matcher = matcher.fork()
    rows = [matcher.allowed()]
    for token in tokens:
        matcher.push(token)
        rows.append(matcher.allowed())
    return torch.stack(rows)


def fitting(matcher: Matcher, tokens: list[int]) -> int:
    """Number of these tokens, from the first on, that the grammar allows."""
    matcher = matcher.fork()
    for i, token in enumerate(tokens):
        if matcher.is_over or not matcher.allowed()[token]:
            return i
        matcher.push(token)
    return len(tokens)


@dataclass(frozen=True)
class Grammar:
    """A grammar as text: a JSON schema, a regular expression, or rules in llguidance's dialect of Lark.

    >>> Grammar("regex", "yes|no")
    Grammar(kind='regex', text='yes|no')
    """

    kind: Literal["json", "regex", "lark"]
    text: str

    @classmethod
    def json(cls, schema: Any) -> "Grammar":
        """The JSON texts that fit a schema (a dict or a bool, or its text). Raises ValueError for what is no JSON."""
        try:
            schema = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the JSON schema is no JSON ({error}). Give a dict, a bool, or the text of one.") from error
        if not isinstance(schema, dict | bool):
            raise ValueError(f"the JSON schema must be an object or a bool, got {text:.40}. Give {{}} for any JSON.")
        return cls("json", text)

    def matcher(self, tokenizer: Any, *, vocab_size: int, ends: tuple[int, ...]) -> Matcher:
        """Compile it for answers in the tokens of a fast tokenizer, which `ends` may end. Raises ValueError for a grammar that
        cannot be compiled, `MissingExtraError` without llguidance."""
        return Matcher(_compiled(self, _spelling(tokenizer, vocab_size, ends)).deep_copy(), vocab_size)


def grammar_of(grammar: Any, json_schema: Any) -> Grammar | None:
    """The grammar of a request from its options, None without one: a `Grammar` or the text of one in Lark, or a JSON schema."""
    if grammar is not None and json_schema is not None:
        raise ValueError("both grammar and json_schema were given. Give one of them.")
    if json_schema is not None:
        return Grammar.json(json_schema)
    if grammar is None or isinstance(grammar, Grammar):
        return grammar
    if isinstance(grammar, str):
        return Grammar("lark", grammar)
    raise ValueError(f"grammar must be a Grammar, or rules in Lark as a text, got {grammar!r:.60}.")


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or takes too much to be followed: that may show in the middle of an answer."""


def _check(found: Any) -> None:
    if found.is_error():
        reason = found.get_error().partition("<state>")[0].strip()
        raise GrammarError(f"the grammar cannot be followed: {reason}. Give a simpler one, or none.")


@lru_cache(maxsize=64)
def _compiled(grammar: Grammar, spelling: Any) -> Any:
    """The matcher that those of answers begin as: a server sees the same grammar again and again."""
    from llguidance import LLMatcher as make

    if grammar.kind == "json":
        source = make.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": BLANKS})
    else:
        source = (make.grammar_from_regex if grammar.kind == "regex" else make.grammar_from_lark)(grammar.text)
    found = make(spelling, source, log_level=0)
    _check(found)
    return found


_SPELLINGS: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
"""Vocabularies as llguidance has them, by tokenizer: one takes a second."""


def _spelling(tokenizer: Any, vocab_size: int, ends: tuple[int, ...]) -> Any:
    try:
        from llguidance.hf import from_tokenizer
    except ImportError as error:
        raise MissingExtraError(
            "an answer under a grammar needs the package llguidance. Install it: pip install 'specdecpp[grammar]'."
        ) from error
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"a grammar needs a fast tokenizer, which says how each token is spelled, and this is {type(tokenizer).__name__}. "
            "Leave the grammar out, or load the pair with a tokenizer.json."
        )
    known = _SPELLINGS.setdefault(tokenizer, {})
    if (vocab_size, ends) not in known:
        known[vocab_size, ends] = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(ends) or None)
    return known[vocab_size, ends]
