"""The tokenizer of a model: checks that it can spell at all, and that two are one.

Two are one if the same id means the same token, and the same text gives the same ids. Equal sizes prove nothing, and unequal
sizes may be padding; so the vocabularies are compared id by id, then the ids of texts chosen to tell common normalisers and
pre-tokenisers apart. The roles of special tokens may differ: the draft's are never asked.
"""

from collections.abc import Callable
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


def loaded(what: str, name: str | Path, load: Callable[[], Any]) -> Any:
    """The result of `load`, another library's function, for a folder or hub name. Raises `PairError` with what to do."""
    path, text = Path(name), str(name)
    is_path = isinstance(name, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1
    if is_path and not path.exists():  # the hub's answer would mislead
        raise PairError(f"there is no folder {name}. Give the folder of a saved model, or a hub name like org/name.")
    try:
        return load()
    except Exception as error:  # transformers lets through whatever a damaged file raises
        line, kind = first_line(error), type(error).__name__
        reason = line if line == kind or isinstance(error, OSError | ValueError) else f"{kind}: {line}"
        hint = "A file is missing, damaged, or was not fetched whole: fetch the model again."
        if not path.exists():
            hint = f"There is no folder {name} here, and the hub did not give it. Check the name and the connection."
        elif not (path / "config.json").exists():
            hint = f"There is no {name}/config.json. Give the folder of a saved model, or a hub name."
        raise PairError(f"no {what} could be loaded from {name} ({reason}). {hint}") from error


def load_tokenizer(name: str | Path) -> Any:
    """The tokenizer of a folder or hub name. Raises `PairError`."""
    from transformers import AutoTokenizer

    return loaded("tokenizer", name, lambda: AutoTokenizer.from_pretrained(str(name)))


def files_of(name: str | Path) -> dict[str, Any]:
    """The contents of the files of a saved tokenizer: where two have the same, it need be loaded once."""
    folder = folder_of(name)
    found = [path for end in _FILES for path in folder.glob(end) if path.is_file()] if folder else []
    return {path.name: path.read_bytes() for path in found}


def check_spells(tokenizer: Any, name: str | Path) -> None:
    """Raise `PairError` where texts become special tokens only, as by what transformers makes up without tokenizer files."""
    special = set(tokenizer.all_special_ids)
    found = [list(tokenizer(text, add_special_tokens=False).input_ids) for text in PROBES]
    if all(special.issuperset(ids) for ids in found):
        raise PairError(
            f"the tokenizer of {name} cannot spell: {PROBES[0]!r} becomes {found[0][:8]}, which reads "
            f"{tokenizer.decode(found[0])!r}. Perhaps its files are missing. Put those of the model it was trained with there "
            "(tokenizer.json, tokenizer_config.json), or give load_pair(tokenizer=...)."
        )


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
    for text in PROBES:
        ours, theirs = (list(tokenizer(text, add_special_tokens=False).input_ids) for tokenizer in (target, draft))
        if ours != theirs:
            at = next(i for i in range(len(ours) + 1) if ours[i : i + 1] != theirs[i : i + 1])
            raise PairError(
                f"the tokenizers have one vocabulary but split text differently: {text!r} becomes {ours[at : at + 5]} in the "
                f"target and {theirs[at : at + 5]} in the draft from token {at} on (normaliser or pre-tokeniser differ). "
                f"{_ADVICE}"
            )
