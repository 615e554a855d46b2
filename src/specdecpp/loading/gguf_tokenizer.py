"""The tokenizer in a GGUF file, as transformers has it, and the ids that end a text.

    Header -> tokenizer.json inside | tokenizer.ggml.*: tokens, kinds, merges or scores, how texts are cut -> tokenizer

Two kinds are rebuilt: byte-level BPE ("gpt2"), whose way to cut a text before merging is named in the file, and SentencePiece
BPE ("llama"), whose merges follow from its scores. The names of the ways to cut are llama.cpp's (src/llama-vocab.cpp); the
patterns are those of the tokenizers they stand for.

transformers converts the same keys with code that is no part of its interface, and does not compose characters as Qwen's
tokenizer does.
"""

from typing import Any, NamedTuple

import numpy as np

from specdecpp.errors import BackendError
from specdecpp.loading.gguf_header import Header

ENDS = "specdecpp.end_token_ids"
"""The metadata key of all ids that end a text, with commas: GGUF itself has room for one or two."""
JSON, TEMPLATE = "tokenizer.huggingface.json", "tokenizer.chat_template"
_NORMAL, _UNKNOWN, _CONTROL, _ADDED = 1, 2, 3, 4
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LIKE_GPT4 = rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%(end)s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%(end)s"
    r"|%(digits)s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Way(NamedTuple):
    """A way to cut texts before merging, and what goes with it."""

    pattern: str | None
    """None: GPT-2's own."""
    has_words: bool = False
    """A word that is a token skips the merges, and texts have a start token where the file does not say."""
    is_composed: bool = False
    """Characters are composed by Unicode's rules first (llama.cpp leaves them)."""
    has_digits: bool = False
    """Digits are cut one by one."""

    @property
    def cutting(self) -> Any:
        """The pre-tokenizer that cuts texts in this way."""
        from tokenizers import Regex, pre_tokenizers

        first = [] if self.pattern is None else [pre_tokenizers.Split(Regex(self.pattern), "isolated")]
        first += [pre_tokenizers.Digits(individual_digits=True)] if self.has_digits else []
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)
        return pre_tokenizers.Sequence([*first, last])


_LLAMA3 = Way(_LIKE_GPT4 % r"\p{N}{1,3}", has_words=True)
_GPT4 = Way(_LIKE_GPT4 % r"\p{N}{1,3}")
_SMOLLM = Way(None, has_digits=True)
WAYS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _GPT4),
    "qwen2": Way(_LIKE_GPT4 % r"\p{N}", is_composed=True),
    "deepseek-r1-qwen": Way(_LIKE_GPT4 % r"\p{N}"),
    "tekken": Way(_CASES % {"end": "", "digits": r"\p{N}"}, has_words=True),
    "gpt-4o": Way(_CASES % {"end": rf"{_CONTRACTED}?", "digits": r"\p{N}{1,3}"}),
    **dict.fromkeys(("smollm", "starcoder"), _SMOLLM),
    "gpt-2": Way(None),
}
"""Ways to cut texts by llama.cpp's names."""
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_NAMED_ENDS = ("im_end", "eot_id", "eom_id", "end", "endoftext", "end_of_text")
_ENDS = {f"<|{name}|>" for name in _NAMED_ENDS} | {"<end_of_turn>", "<eos>", "<EOT>", "<end_of_utterance>"}
"""Special tokens that end a text whatever file they are in, as llama.cpp has it; those for filling gaps in code are no ends."""
_BESIDE = "Put the tokenizer.json of its checkpoint beside it"


def tokenizer_of(header: Header, *, num_rows: int) -> Any:
    """A fast tokenizer of transformers, made of the tokenizer.json in the file, else of the keys of GGUF.

    Raises `BackendError` for one that is damaged, of a kind that is not known here, or with ids that the model has no row for.
    """
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_str(header.text(JSON)) if JSON in header else _built(header)
        ids = backend.get_vocab().values() if JSON in header else [backend.get_vocab_size() - 1]
        if (most := max(ids, default=-1)) >= num_rows:
            header.fail(f"has a tokenizer with ids up to {most}, and its model scores {num_rows}")
        return _wrapped(backend, header)
    except BackendError:
        raise
    except Exception as error:  # the packages' own, of all kinds
        header.fail(f"has a tokenizer that cannot be built ({str(error).strip() or type(error).__name__})")


def keys_of(header: Header) -> dict[str, Any]:
    """All that a file says of its tokenizer but for the chat template: where two files say the same, one need be built."""
    found = {key: value for key, value in header.values.items() if key.startswith("tokenizer.") and key != TEMPLATE}
    return {key: value.tobytes() if isinstance(value, np.ndarray) else value for key, value in found.items()}


def ends_of(header: Header, *, num_rows: int) -> tuple[int, ...]:
    """The ids that end a text: those the file names, and special tokens that are known to end one. Each has a row."""
    if named := header.text(ENDS, ""):
        parts = named.split(",")
        if not all(part.isascii() and part.isdecimal() and len(part) < 10 and int(part) < num_rows for part in parts):
            header.fail(f"says {ENDS} = {named[:40]!r}, which are no ids of its {num_rows}")
        return tuple(map(int, parts))
    tokens, kinds = _vocabulary(header)
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    found = {header.integer(key, most=num_rows - 1) for key in keys if key in header}
    special = np.flatnonzero((kinds[:num_rows] == _CONTROL) | (kinds[:num_rows] == _ADDED)).tolist()
    return tuple(sorted(found | {i for i in special if tokens[i] in _ENDS}))


def _vocabulary(header: Header) -> tuple[list[str], np.ndarray]:
    """Tokens and their kinds; no two tokens are one."""
    tokens = header.texts("tokenizer.ggml.tokens")
    kinds = header.numbers("tokenizer.ggml.token_type") if "tokenizer.ggml.token_type" in header else np.ones(len(tokens), int)
    if not tokens or len(kinds) != len(tokens):
        header.fail(f"has {len(tokens)} tokens and {len(kinds)} kinds of them")
    if len(set(tokens)) < len(tokens) or "" in tokens:
        seen = {""}
        for i, token in enumerate(tokens):
            tokens[i] = f"[PAD{i}]" if token in seen else token
            seen.add(token)
    return tokens, kinds


def _built(header: Header) -> Any:
    """A tokenizer made of GGUF's own keys."""
    from tokenizers import AddedToken, processors

    tokens, kinds = _vocabulary(header)
    model = header.text("tokenizer.ggml.model")
    if model == "gpt2":
        backend, is_started = _byte_level(header, tokens)
    elif model == "llama":
        backend, is_started = _sentencepiece(header, tokens, kinds), True
    else:
        header.fail(
            f"has a tokenizer of the kind {model}, and byte-level BPE (gpt2) and SentencePiece (llama) are read", _BESIDE
        )
    for kind in (_CONTROL, _UNKNOWN, _ADDED):  # texts are searched for these before all else
        add = backend.add_tokens if kind == _ADDED else backend.add_special_tokens
        add([AddedToken(tokens[i], normalized=False) for i in np.flatnonzero(kinds == kind).tolist()])
    start, end = [], []
    for where, role, default in ((start, "bos", is_started), (end, "eos", False)):
        key = f"tokenizer.ggml.{role}_token_id"
        if header.flag(f"tokenizer.ggml.add_{role}_token", default) and key in header:
            where.append(tokens[header.integer(key, most=len(tokens) - 1)])
    if used := start + end:
        first, second = ([f"{part}:{i}" for part in (*start, text, *end)] for i, text in enumerate(("$A", "$B")))
        special = [(token, tokens.index(token)) for token in used]
        backend.post_processor = processors.TemplateProcessing(single=first, pair=first + second, special_tokens=special)
    return backend


def _byte_level(header: Header, tokens: list[str]) -> tuple[Any, bool]:
    """Byte-level BPE, and True where its texts have a start token unless the file says otherwise."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    way = WAYS.get(named := header.text("tokenizer.ggml.pre", ""))
    if way is None:
        header.fail(f"cuts texts in a way called {named!r}, which is not known here (known: {', '.join(WAYS)})", _BESIDE)
    merges = [(merge[: (at := merge.find(" ", 1))], merge[at + 1 :]) for merge in header.texts("tokenizer.ggml.merges", [])]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=way.has_words))
    backend.pre_tokenizer, backend.decoder = way.cutting, decoders.ByteLevel()
    if way.is_composed:
        backend.normalizer = normalizers.NFC()
    return backend, way.has_words


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
    unknown = tokens[header.integer("tokenizer.ggml.unknown_token_id", most=len(tokens) - 1)]
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    is_prefixed = header.flag("tokenizer.ggml.add_space_prefix", True)
    spaced = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaced]) if is_prefixed else spaced
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if is_prefixed else back)
    return backend


def _wrapped(backend: Any, header: Header) -> Any:
    """A tokenizer of transformers, with its roles and its chat template."""
    from transformers import PreTrainedTokenizerFast

    roles = {}
    for role, name in _ROLES.items():
        if (key := f"tokenizer.ggml.{name}_token_id") in header:
            token = roles[f"{role}_token"] = backend.id_to_token(header.integer(key))
            if token is None:
                header.fail(f"says {key} = {header.values[key]}, and its tokenizer has no such id")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_Uncopied(backend), **roles)
    tokenizer.chat_template = header.text(TEMPLATE) if TEMPLATE in header else None
    return tokenizer


class _Uncopied:
    """A tokenizer that transformers keeps as it is: its copy, by way of text, takes as long as building one."""

    def __init__(self, backend: Any):
        self._backend = backend

    def __deepcopy__(self, memo: Any) -> Any:
        return self._backend
