"""The tokenizer in a GGUF file, as transformers has it, and the ids that end a text.

    Header -> tokenizer.json inside | tokenizer.ggml.*: tokens, kinds, merges or scores, how texts are cut -> tokenizer

Two kinds are rebuilt: byte-level BPE ("gpt2"), whose way to cut a text before merging is named in the file, and SentencePiece
BPE ("llama"), whose merges follow from its scores. The names of the ways to cut are llama.cpp's (src/llama-vocab.cpp); the
patterns are those of the tokenizers they stand for.

transformers converts the same keys with code that is no part of its interface, is in its latest versions only, reads the file a
second time, and does not compose characters as Qwen's tokenizer does.
"""

import json
from typing import Any

import numpy as np

from specdecpp.loading.gguf_header import Header

_OWN = {"specdecpp.special_tokens"}
_NORMAL, _UNKNOWN, _CONTROL, _ADDED = 1, 2, 3, 4
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LIKE_GPT4 = rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%(end)s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%(end)s"
    r"|%(digits)s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_THREE = r"\p{N}{1,3}"
_PATTERNS = {
    "llama-bpe": _LIKE_GPT4 % _THREE,
    "dbrx": _LIKE_GPT4 % _THREE,
    "smaug-bpe": _LIKE_GPT4 % _THREE,
    "qwen2": _LIKE_GPT4 % r"\p{N}",
    "deepseek-r1-qwen": _LIKE_GPT4 % r"\p{N}",
    "tekken": _CASES % {"end": "", "digits": r"\p{N}"},
    "gpt-4o": _CASES % {"end": rf"{_CONTRACTED}?", "digits": _THREE},
    "smollm": None,  # GPT-2's own, digits one by one
    "gpt-2": None,
}
"""Patterns that cut a text before merging."""
_SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "starcoder": "smollm"}
WHOLE_WORDS = {"llama-bpe", "tekken"}
"""Ways in which a word that is a token skips the merges."""
_STARTED = {"llama-bpe", "tekken"}  # a start token where the file says nothing of it
_COMPOSED = {"qwen2"}  # characters in Unicode's composed form, as its tokenizer has them (llama.cpp leaves them)
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_NAMED_ENDS = ("im_end", "eot_id", "eom_id", "end", "endoftext", "end_of_text")
_ENDS = {f"<|{name}|>" for name in _NAMED_ENDS} | {"<end_of_turn>", "<eos>", "<EOT>", "<end_of_utterance>"}
"""Special tokens that end a text whatever file they are in, as llama.cpp has it; those for filling gaps in code are no ends."""


def tokenizer_of(header: Header, *, num_rows: int) -> Any:
    """A fast tokenizer of transformers, made of the tokenizer.json in the file, else of the keys of GGUF.

    Raises `BackendError` for one that is damaged, of a kind that is not known here, or with ids that the model has no row for.
    """
    from tokenizers import Tokenizer

    try:
        whole = header.text("tokenizer.huggingface.json", "")
        backend = Tokenizer.from_str(whole) if whole else _built(header)
        ids = backend.get_vocab(with_added_tokens=True).values() if whole else [backend.get_vocab_size() - 1]
    except Exception as error:  # the package's own, of all kinds
        if type(error).__module__.startswith("specdecpp"):
            raise
        header.fail(f"has a tokenizer that cannot be built ({str(error).strip() or type(error).__name__})")
    if (most := max(ids, default=-1)) >= num_rows:
        header.fail(f"has a tokenizer with ids up to {most}, and its model scores {num_rows}")
    return _wrapped(backend, header)


def same_keys(header: Header, other: Header) -> bool:
    """True where two files say the same of their tokenizers."""

    def of(one: Header) -> dict[str, Any]:
        found = {key: value for key, value in one.values.items() if key.startswith("tokenizer.") or key in _OWN}
        found.pop("tokenizer.chat_template", None)
        return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in found.items()}

    return of(header) == of(other)


def ends_of(header: Header, *, num_rows: int) -> tuple[int, ...]:
    """The ids that end a text: those the file names, and special tokens that are known to end one. Each has a row."""
    if named := header.text("specdecpp.end_token_ids", ""):
        parts = named.split(",")
        if not all(part.isascii() and part.isdecimal() and len(part) < 10 and int(part) < num_rows for part in parts):
            header.fail(f"says specdecpp.end_token_ids = {named[:40]!r}, which are no ids of its {num_rows}")
        return tuple(map(int, parts))
    tokens, kinds = _vocabulary(header)
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    found = {_id(header, key, num_rows) for key in keys if key in header}
    found |= {i for i, token in enumerate(tokens) if i < num_rows and token in _ENDS and kinds[i] in (_CONTROL, _ADDED)}
    return tuple(sorted(found))


def _vocabulary(header: Header) -> tuple[list[str], np.ndarray]:
    """Tokens and their kinds; no two tokens are one."""
    tokens = header.texts("tokenizer.ggml.tokens")
    kinds = header.numbers("tokenizer.ggml.token_type") if "tokenizer.ggml.token_type" in header else np.ones(len(tokens), int)
    if not tokens or len(kinds) != len(tokens):
        header.fail(f"has {len(tokens)} tokens and {len(kinds)} kinds of them")
    if len(set(tokens)) < len(tokens) or "" in tokens:
        seen: set[str] = set()
        for i, token in enumerate(tokens):
            tokens[i] = f"[PAD{i}]" if not token or token in seen else token
            seen.add(tokens[i])
    return tokens, kinds


def _id(header: Header, key: str, num: int) -> int:
    return header.integer(key, least=0, most=num - 1)


def _built(header: Header) -> Any:
    """A tokenizer made of GGUF's own keys."""
    tokens, kinds = _vocabulary(header)
    model = header.text("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        header.fail(
            f"has a tokenizer of the kind {model}, and byte-level BPE (gpt2) and SentencePiece (llama) are read",
            "Put the tokenizer.json of its checkpoint beside it",
        )
    if model == "gpt2":
        backend, is_started = _byte_level(header, tokens)
    else:
        backend, is_started = _sentencepiece(header, tokens, kinds), True
    _add(backend, tokens, kinds)
    _frame(backend, header, tokens, is_started=is_started)
    return backend


def _byte_level(header: Header, tokens: list[str]) -> tuple[Any, bool]:
    """Byte-level BPE, and True where its texts have a start token unless the file says otherwise."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    named = header.text("tokenizer.ggml.pre", "")
    way = _SAME.get(named, named)
    if way not in _PATTERNS:
        header.fail(
            f"cuts texts in a way called {named!r}, which is not known here (known: {', '.join(_PATTERNS)})",
            "Put the tokenizer.json of its checkpoint beside it",
        )
    merges = [(merge[: (at := merge.find(" ", 1))], merge[at + 1 :]) for merge in header.texts("tokenizer.ggml.merges", [])]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=way in WHOLE_WORDS))
    backend.pre_tokenizer = cutting(way)
    backend.decoder = decoders.ByteLevel()
    if way in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    return backend, way in _STARTED


def cutting(way: str) -> Any:
    """The pre-tokenizer that cuts texts in this way."""
    from tokenizers import Regex, pre_tokenizers

    pattern = _PATTERNS[way]
    first = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    first += [pre_tokenizers.Digits(individual_digits=True)] if way == "smollm" else []
    return pre_tokenizers.Sequence([*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)])


def _sentencepiece(header: Header, tokens: list[str], kinds: np.ndarray) -> Any:
    """SentencePiece BPE: of two neighbours those are merged first that make the token with the highest score."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = header.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens) or not np.isfinite(scores).all():
        header.fail(f"has {len(scores)} scores of {len(tokens)} tokens, or some that are not finite")
    ids = {token: i for i, token in enumerate(tokens)}
    merges = []
    for i in sorted(np.flatnonzero((kinds == _NORMAL) | (kinds == _ADDED)).tolist(), key=lambda i: -scores[i]):
        token = tokens[i]
        halves = [(token[:at], token[at:]) for at in range(1, min(len(token), 64)) if token[:at] in ids and token[at:] in ids]
        merges += sorted(halves, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    unknown = tokens[_id(header, "tokenizer.ggml.unknown_token_id", len(tokens))]
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    is_prefixed = header.flag("tokenizer.ggml.add_space_prefix", True)
    spaced = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaced]) if is_prefixed else spaced
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if is_prefixed else back)
    return backend


def _add(backend: Any, tokens: list[str], kinds: np.ndarray) -> None:
    """Special tokens, and those added by hand, which texts are searched for before all else."""
    from tokenizers import AddedToken

    def of(kind: int) -> list[str]:
        return [tokens[i] for i in np.flatnonzero(kinds == kind).tolist()]

    backend.add_special_tokens([AddedToken(t, normalized=False) for t in of(_CONTROL) + of(_UNKNOWN)])
    backend.add_tokens([AddedToken(t, normalized=False) for t in of(_ADDED)])


def _frame(backend: Any, header: Header, tokens: list[str], *, is_started: bool) -> None:
    """The tokens that a text starts and ends with."""
    from tokenizers import processors

    start, end = [], []
    for where, role, default in ((start, "bos", is_started), (end, "eos", False)):
        key = f"tokenizer.ggml.{role}_token_id"
        if header.flag(f"tokenizer.ggml.add_{role}_token", default) and key in header:
            where.append((tokens[i := _id(header, key, len(tokens))], i))
    if start or end:
        single = [*(f"{token}:0" for token, _ in start), "$A:0", *(f"{token}:0" for token, _ in end)]
        pair = [*single, *("$B:1" if part == "$A:0" else part.replace(":0", ":1") for part in single)]
        backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=[*start, *end])


def _wrapped(backend: Any, header: Header) -> Any:
    """A tokenizer of transformers, with its roles and its chat template."""
    from transformers import PreTrainedTokenizerFast

    special = _special(header)
    roles = {}
    for role, name in _ROLES.items():
        if (key := f"tokenizer.ggml.{name}_token_id") in header:
            token = backend.id_to_token(_id(header, key, 2**31))
            if token is None:
                header.fail(f"says {key} = {header.values[key]}, and its tokenizer has no such id")
            roles[f"{role}_token"] = token
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_Uncopied(backend), extra_special_tokens=special, **roles)
    tokenizer.chat_template = header.text("tokenizer.chat_template") if "tokenizer.chat_template" in header else None
    return tokenizer


class _Uncopied:
    """A tokenizer that transformers keeps as it is: it makes a copy of what it is given, by way of text, which takes as long as
    building it."""

    def __init__(self, backend: Any):
        self._backend = backend

    def __deepcopy__(self, memo: Any) -> Any:
        return self._backend


def _special(header: Header) -> list[str]:
    """Special tokens without a role, where the file was written here."""
    try:
        found = json.loads(header.text("specdecpp.special_tokens", "[]"))
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(token, str) for token in found):
        header.fail("has specdecpp.special_tokens that are no list of texts")
    return found
