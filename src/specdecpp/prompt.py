"""Prompts: a text, token ids or a conversation, turned into token ids."""

from collections.abc import Mapping, Sequence
from operator import index
from reprlib import repr as short
from typing import Any

import numpy as np
from torch import Tensor

from specdecpp.detokenize import half_character
from specdecpp.errors import PromptError
from specdecpp.loading.pair import Pair

Prompt = str | Sequence[int] | Sequence[dict[str, Any]] | np.ndarray | Tensor | Mapping[str, Any]
"""One prompt: a text, token ids, chat messages, an array of ids [n] or [1, n], or a tokenizer's encoding of one text."""
TAKEN = (
    "Give a text, a list of whole numbers as token ids, a list of messages (dicts with role and content), an integer array [n] "
    "or [1, n], or a tokenizer's encoding of one text. generate takes a list of texts too, generate_all a list of any of these."
)


def are_several(prompt: Any) -> bool:
    """True for a list of texts: several prompts."""
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(p, str) for p in prompt)


def encode(pair: Pair, prompt: Prompt, *, tools: list[dict[str, Any]] | None = None) -> list[int]:
    """Token ids of a prompt: text as it is, ids as they are, or chat messages, with tools, through the tokenizer's template.

    A prompt without a token, such as an empty text, becomes the tokenizer's start token where it has one. Raises `PromptError`
    for what is no prompt, for ids outside the vocabulary, for half a character, and for messages without a template or that it
    refuses.
    """
    given = _row(prompt)
    if isinstance(given, bytes | bytearray | Mapping) or not isinstance(given, Sequence):
        raise PromptError(f"the prompt is {type(prompt).__name__} {short(prompt)}. {TAKEN}")
    is_chat = bool(given) and all(isinstance(t, dict) for t in given)
    if is_chat or isinstance(given, str):
        text = _rendered(pair, given, tools) if is_chat else str(given)
        if half := half_character(text):
            raise PromptError(f"the prompt holds half of a character ({half}), which has no encoding. Give whole characters.")
        ids = list(pair.tokenizer(text, add_special_tokens=not is_chat).input_ids)
    else:
        ids = _checked(pair, given)
    if not ids and pair.tokenizer.bos_token_id is not None:
        ids = [pair.tokenizer.bos_token_id]
    return ids


def _checked(pair: Pair, given: Sequence[Any]) -> list[int]:
    """Ids as whole numbers of Python's."""
    try:
        ids = [index(t) for t in given if not isinstance(t, bool)]
    except TypeError:
        ids = []
    if len(ids) < len(given):
        kinds = " and ".join(dict.fromkeys(type(t).__name__ for t in given))
        raise PromptError(f"the prompt is a list of {kinds}, {short(given)}. {TAKEN}")
    if outside := [t for t in ids if not 0 <= t < pair.target.vocab_size]:
        raise PromptError(f"token id {outside[0]} is outside the pair's common vocabulary of {pair.target.vocab_size} ids.")
    return ids


def _row(prompt: Any) -> Any:
    """The ids that an array or an encoding of one text holds, as a list; any other prompt as it is."""
    if not isinstance(prompt, Mapping):
        return _listed(prompt) if isinstance(prompt, np.ndarray | Tensor) else prompt
    if "input_ids" not in prompt:
        return prompt
    if not all(_listed(prompt.get("attention_mask")) or ()):
        raise PromptError(
            "the prompt's attention_mask leaves tokens out, and all tokens of a prompt are read. Encode it alone."
        )
    return _listed(prompt["input_ids"])


def _listed(rows: Any) -> Any:
    """An array or a list, without the first of two axes where that holds one row."""
    found = rows.tolist() if isinstance(rows, np.ndarray | Tensor) else rows
    return found[0] if isinstance(found, list) and len(found) == 1 and isinstance(found[0], list) else found


def _rendered(pair: Pair, messages: Sequence[Any], tools: list[dict[str, Any]] | None) -> str:
    from jinja2 import TemplateError

    if not getattr(pair.tokenizer, "chat_template", None):
        raise PromptError("the prompt is a list of messages, but the tokenizer has no chat template. Give plain text.")
    try:
        return pair.tokenizer.apply_chat_template(list(messages), tools=tools, add_generation_prompt=True, tokenize=False)
    except (TemplateError, KeyError, TypeError, AttributeError) as error:  # what templates raise, and what they stumble over
        raise PromptError(
            f"the tokenizer's chat template refuses these messages ({error}). Give messages with role and content, in an order "
            "that it knows."
        ) from error
