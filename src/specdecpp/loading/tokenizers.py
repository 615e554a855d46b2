"""The tokenizer of a model: checks that it can spell at all, and that two are one.

Two are one if the same id means the same token, and the same text gives the same ids. Equal sizes prove nothing, and unequal
sizes may be padding; so the vocabularies are compared id by id, then the special tokens, then the behaviour of normaliser and
pre-tokeniser on texts chosen to tell common ones apart.
"""

import unicodedata
from pathlib import Path
from typing import Any

from specdecpp.errors import PairError, first_line
from specdecpp.loading.fingerprints import folder_of

_ADVICE = "Choose a draft that was trained with the target's tokenizer (usually a smaller model of the same family)."

# Case, accents in both normal forms, runs of blanks, digits, code, right-to-left, CJK, emoji, control characters.
PROBES = (
    "Hello world",
    " leading and  double   blanks\t and tabs ",
    "l'\u00e9t\u00e9 e\u0301te\u0301 STRASSE stra\u00dfe \ufb01ne",
    "3.14159 + 2718281828 = 1,000,000 (10%)",
    "def f(x):\n    return x[::-1]  # ok\n\n\n",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \uc548\ub155",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u043f\u0440\u0438\u0432\u0435\u0442",
    "\U0001f600\u200d\U0001f525 \u00a0\u2009narrow\u202f\r\n",
    "don't we'll I'M can\u2019t",
)

_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken")
_OWN_TOKENS = 64  # of a vocabulary that are tried where no common text can be spelt: there are models of proteins and of chess


def load_tokenizer(name: str | Path) -> Any:
    """The tokenizer of a folder or hub name. Raises `PairError`."""
    from transformers import AutoTokenizer

    check_path(name)
    try:
        return AutoTokenizer.from_pretrained(str(name))
    except Exception as error:  # transformers lets through whatever a damaged file raises
        raise PairError(f"no tokenizer could be loaded from {name} ({reason_of(error)}).{hint(name)}") from error


def files_of(name: str | Path) -> dict[str, Any]:
    """The contents of the files of a saved tokenizer: where two have the same, it need be loaded once."""
    folder = folder_of(name)
    found = [path for end in _FILES for path in folder.glob(end) if path.is_file()] if folder else []
    return {path.name: path.read_bytes() for path in found}


def check_spells(tokenizer: Any, name: str | Path) -> None:
    """Raise `PairError` unless some text comes back from its ids, but for blanks and case.

    A text of `PROBES` will do, or two tokens of its own: there are models of proteins and of chess. Where there are no files of
    a tokenizer, transformers makes one up whose only answer is a start token.
    """
    if any(_comes_back(tokenizer, text) for text in PROBES):
        return
    special = set(tokenizer.all_special_ids)
    ids = [i for i in sorted(tokenizer.get_vocab().values()) if i not in special]
    if sum(_comes_back(tokenizer, tokenizer.decode([i])) for i in ids[:: max(1, len(ids) // _OWN_TOKENS)]) > 1:
        return
    ids = tokenizer(PROBES[0], add_special_tokens=False).input_ids
    raise PairError(
        f"the tokenizer of {name} cannot spell: {PROBES[0]!r} becomes {list(ids)[:8]}, which reads {tokenizer.decode(ids)!r}. "
        "Perhaps its files are missing. Put those of the model it was trained with there (tokenizer.json, "
        "tokenizer_config.json), or give load_pair(tokenizer=...)."
    )


def _comes_back(tokenizer: Any, text: str) -> bool:
    """True where a text with something in it is encoded without special tokens, and decoded to itself."""
    ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    return bool(_plain(text)) and _plain(tokenizer.decode(ids, skip_special_tokens=True)) == _plain(text)


def _plain(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def check_same_tokenizer(target: Any, draft: Any) -> None:
    """Raise `PairError` with the first difference unless both tokenizers agree."""
    ours, theirs = ({i: token for token, i in tokenizer.get_vocab().items()} for tokenizer in (target, draft))
    if differing := [i for i in sorted(ours.keys() | theirs.keys()) if ours.get(i) != theirs.get(i)]:
        shown = "; ".join(
            f"id {i} is {' / '.join(repr(v[i]) if i in v else 'missing' for v in (ours, theirs))}" for i in differing[:3]
        )
        raise PairError(
            f"the vocabularies of target ({len(ours)} tokens) and draft ({len(theirs)} tokens) differ at {len(differing)} "
            f"ids, first (target / draft): {shown}. {_ADVICE}"
        )
    for name in ("bos_token_id", "eos_token_id", "unk_token_id"):
        ours, theirs = getattr(target, name, None), getattr(draft, name, None)
        if ours != theirs and None not in (ours, theirs):  # GGUF files name a start token that nobody uses
            raise PairError(
                f"the tokenizers differ in {name}: {ours} in the target, {theirs} in the draft. {_ADVICE} If the "
                "vocabularies are otherwise the same, correct the draft's tokenizer_config.json."
            )
    padding = {str(tokenizer.pad_token) for tokenizer in (target, draft)}  # differs within families, and reaches no model
    ours, theirs = (_special(tokenizer) - padding for tokenizer in (target, draft))
    if ours != theirs:
        raise PairError(
            f"the tokenizers mark different special tokens: only the target has {sorted(ours - theirs)[:5]}, only the draft "
            f"has {sorted(theirs - ours)[:5]}. {_ADVICE}"
        )
    for text in PROBES:
        ours, theirs = (list(tokenizer(text, add_special_tokens=False).input_ids) for tokenizer in (target, draft))
        if ours != theirs:
            at = next(i for i in range(len(ours) + 1) if ours[i : i + 1] != theirs[i : i + 1])
            raise PairError(
                f"the tokenizers have one vocabulary but split text differently: {text!r} becomes {ours[at : at + 5]} in the "
                f"target and {theirs[at : at + 5]} in the draft from token {at} on (normaliser or pre-tokeniser differ). "
                f"{_ADVICE}"
            )


def _special(tokenizer: Any) -> set[str]:
    """Tokens with a role, and those that are marked as special in the vocabulary: a GGUF file may keep the marks alone."""
    marked = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return marked | set(map(str, tokenizer.all_special_tokens))


def check_path(name: str | Path) -> None:
    """A name that can only be a path must exist: the hub's answer to it would mislead. Raises `PairError`."""
    text = str(name)
    if not Path(name).exists() and (isinstance(name, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1):
        raise PairError(f"there is no folder {name}. Give the folder of a saved model, or a hub name like org/name.")


def hint(name: str | Path) -> str:
    """A sentence to add to an error about a model by this name where no saved model lies there: it may be a mistyped path."""
    path = Path(name)
    if not path.exists():
        return f" There is no folder {name} here. Give that of a saved model, or a hub name."
    return "" if (path / "config.json").exists() else f" There is no {name}/config.json. Give the folder of a saved model."


def reason_of(error: Exception) -> str:
    """The first line of another library's error, with its class in front where the words alone say little."""
    line, kind = first_line(error), type(error).__name__
    return line if line == kind or isinstance(error, OSError | ValueError) else f"{kind}: {line}"
