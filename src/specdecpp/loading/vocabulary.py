"""The choice of a draft's vocabulary: all tokens, or a list of them and those of each text (`backends.trimmed`).

    draft, "auto" -> draft tokens with and without, timed -> the draft that is faster

A tokenizer made by merges has its ids in the order of how frequent the tokens were in its training text. Answers have more
words than that text, and less of other scripts, so both are ranked anew.
"""

import logging
import re
from pathlib import Path
from typing import Any, Literal

from specdecpp import cache_dir
from specdecpp.backends import Model, Reduces
from specdecpp.errors import BackendError
from specdecpp.loading.models import code
from specdecpp.policies import Fixed
from specdecpp.sampling import Sampling, streams
from specdecpp.session import Session
from specdecpp.verify import GreedyVerification

DraftVocabulary = int | Literal["auto"] | None
LISTED = 40_960
"""Tokens of the list that "auto" takes. In answers of Qwen2.5-Coder 1.5B at .7 to HumanEval, GSM8K and Alpaca, ten of each, .9,
.2 and 1.8 % of the tokens are neither on it nor earlier in the text; 1.1, .4 and 3.2 % without the factors of `_factor`."""
ANSWERS = Path(__file__).with_name("answers.txt")
"""Marks of Markdown and LaTeX, and words that sentences of answers begin with."""
WORD, MARKS = re.compile("[Ġ▁][A-Za-z]?[a-z]+"), str.maketrans("", "", "Ġ▁Ċĉ")
"""A word with the space before it, as tokenizers write it, and the blanks that they write in letters of other scripts."""
WORTH = 0.9
"""Share of a draft token's time from which on downwards "auto" takes the reduced vocabulary."""
NUM, WARM, TIMED = 4, 2, 5
log = logging.getLogger("specdecpp.loading")


def reduced(draft: Any, asked: DraftVocabulary, *, tokenizer: Any, identity: Any) -> tuple[Any, str]:
    """The draft with the vocabulary that is asked for, and words about it; `identity` tells the draft from others.

    Raises `BackendError` for a backend that has no reduced vocabulary, ValueError for a number below 1.
    """
    is_whole = isinstance(draft, Reduces) and getattr(draft, "output_ids", None) is None
    if asked is None or (asked == "auto" and not (is_whole and is_large(draft.vocab_size))):
        return draft, ""
    if asked != "auto" and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 1):
        raise ValueError(f'draft_vocabulary must be a number of tokens, "auto" or None, got {asked!r}')
    if not isinstance(draft, Reduces):
        raise BackendError(
            f"draft_vocabulary={asked}: {type(draft).__name__} has none. Name a draft, and use backend='native'."
        )
    num = LISTED if asked == "auto" else min(asked, draft.vocab_size)
    if num == draft.vocab_size:
        return draft, ""
    some = draft.reduced(listed(tokenizer, num))
    words = f"; q over {num:,} of {draft.vocab_size:,} tokens and those of the text"
    if asked != "auto":
        return some, words
    share = _share(draft, some, {"draft": identity, "num": num, "code": code(), **cache_dir.about()})
    return (some, f"{words}: {share:.0%} of the time of a draft token") if share <= WORTH else (draft, "")


def listed(tokenizer: Any, num: int) -> list[int]:
    """The list of so many ids, in rising order: those of `ANSWERS`, and the first of all others, where a word's id counts half
    and that of a token in another script four times."""
    forms = ("{}", " {}", "\n{}", "{}\n", "{}\n\n")
    texts = [form.format(one) for word in ANSWERS.read_text("utf-8").split() for one in (word, word.lower()) for form in forms]
    try:
        first = {i for ids in tokenizer(texts, add_special_tokens=False)["input_ids"] for i in ids}
        tokens = tokenizer.convert_ids_to_tokens(list(range(min(2 * num, len(tokenizer)))))
    except (TypeError, ValueError, KeyError, AttributeError):  # a tokenizer of another kind
        return list(range(num))
    others = sorted(range(len(tokens)), key=lambda i: i * _factor(tokens[i]))
    return sorted([*dict.fromkeys([*sorted(first), *others, *range(num)])][:num])


def _factor(token: str | None) -> float:
    if token is None or not token.translate(MARKS).isascii():
        return 4.0
    return 0.5 if WORD.fullmatch(token) else 1.0


def is_large(num: int) -> bool:
    """True for a vocabulary of which the list is half at most."""
    return num >= 2 * LISTED


def _share(draft: Any, some: Any, facts: dict[str, Any]) -> float:
    """Time of a draft token with the reduced vocabulary over that with all tokens; from memory where it was measured before."""
    kept = (cache_dir.recall("vocabulary", facts) or {}).get("share")
    if isinstance(kept, float):
        return kept
    log.info("timing a draft token with a reduced vocabulary")
    by_draft = [[draft_s for draft_s, _ in times] for times in step_seconds(draft, draft, some)]
    whole_s, some_s = map(min, by_draft)
    cache_dir.remember("vocabulary", facts, {"share": some_s / whole_s}, is_steady=cache_dir.is_steady(by_draft))
    return some_s / whole_s


def step_seconds(target: Model, *drafts: Any) -> list[list[tuple[float, float]]]:
    """Seconds of a draft token and of a pass of the target over NUM + 1 rows, several times for each draft, in turns."""
    sessions = [_session(target, one) for one in drafts]
    steps = [[session.step() for session in sessions] for _ in range(WARM + TIMED)]
    return [[(step.draft_s / NUM, step.verify_s) for step in column] for column in zip(*steps[WARM:], strict=True)]


def _session(target: Model, draft: Model) -> Session:
    """A greedy answer to made-up tokens, with the same number of draft tokens in each step."""
    session = Session(
        target=target.new_cache(),
        draft=draft.new_cache(),
        policy=Fixed(NUM),
        verification=GreedyVerification(),
        sampling=Sampling(temperature=0.0),
        prompt=list(range(8)),
        max_tokens=(WARM + TIMED) * (NUM + 2),
        randomness=streams(0),
    )
    session.prefill()
    return session
