"""Whether two tokenizers are one: the same id must mean the same token, and the same text must give the same ids.

Equal sizes prove nothing, and unequal sizes may be padding; so the vocabularies are compared id by id, then the special
tokens, then the behaviour of normaliser and pre-tokeniser on texts chosen to tell common ones apart.
"""

from typing import Any

from specdecpp.errors import PairError

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


def check_same_tokenizer(target: Any, draft: Any) -> None:
    """Raise `PairError` with the first difference unless both tokenizers agree."""
    _check_vocabularies(target.get_vocab(), draft.get_vocab())
    _check_specials(target, draft)
    for text in PROBES:
        ours, theirs = (t(text, add_special_tokens=False).input_ids for t in (target, draft))
        if list(ours) != list(theirs):
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
            raise PairError(
                f"the tokenizers have one vocabulary but split text differently: {text!r} becomes {list(ours)[at : at + 5]} "
                f"in the target and {list(theirs)[at : at + 5]} in the draft from token {at} on (normaliser or pre-tokeniser "
                f"differ). {_ADVICE}"
            )


def _check_vocabularies(target: dict[str, int], draft: dict[str, int]) -> None:
    ours, theirs = ({i: t for t, i in vocabulary.items()} for vocabulary in (target, draft))
    differing = [i for i in sorted(ours.keys() | theirs.keys()) if ours.get(i) != theirs.get(i)]
    if differing:
        shown = "; ".join(f"id {i} is {_name(ours.get(i))} / {_name(theirs.get(i))}" for i in differing[:3])
        raise PairError(
            f"the vocabularies of target ({len(ours)} tokens) and draft ({len(theirs)} tokens) differ at {len(differing)} "
            f"ids, first (target / draft): {shown}. {_ADVICE}"
        )


def _name(token: str | None) -> str:
    return "missing" if token is None else repr(token)


def _check_specials(target: Any, draft: Any) -> None:
    for name in ("bos_token_id", "eos_token_id", "unk_token_id"):
        ours, theirs = getattr(target, name, None), getattr(draft, name, None)
        if ours != theirs and None not in (ours, theirs):  # GGUF files name a start token that nobody uses
            raise PairError(
                f"the tokenizers differ in {name}: {ours} in the target, {theirs} in the draft. {_ADVICE} If the "
                "vocabularies are otherwise the same, correct the draft's tokenizer_config.json."
            )
    # Padding never reaches a model here, and sizes of one family often pad differently.
    padding = {str(t.pad_token) for t in (target, draft)}
    ours, theirs = (_special(t) - padding for t in (target, draft))
    if ours != theirs:
        raise PairError(
            f"the tokenizers mark different special tokens: only the target has {sorted(ours - theirs)[:5]}, only the draft "
            f"has {sorted(theirs - ours)[:5]}. {_ADVICE}"
        )


def _special(tokenizer: Any) -> set[str]:
    """Tokens with a role, and those that are marked as special in the vocabulary: a GGUF file may keep the marks alone."""
    marked = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return marked | set(map(str, tokenizer.all_special_tokens))
