"""The choice of a draft's vocabulary: all tokens, or a list of them and those of each text (`backends.trimmed`).

    draft, "auto" -> draft tokens with and without, timed -> the draft that is faster

A tokenizer made by merges has its ids in the order of how frequent the tokens were in its training text. What answers have
more often than that text is put before them.
"""

import logging
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
"""Tokens of the list that "auto" takes. In answers of Qwen2.5-Coder 1.5B to HumanEval, GSM8K and Alpaca .6, .5 and 1.1 % of the
tokens are neither on it nor earlier in the text, and without `ANSWERS` 1.5, 1.4 and 1.1 %."""
ANSWERS = Path(__file__).with_name("answers.txt")
"""Marks of Markdown and LaTeX, and words that sentences of answers begin with."""
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
    """The list of so many ids, in rising order: those of `ANSWERS`, and the first of all others."""
    forms = ("{}", " {}", "\n{}", "{}\n", "{}\n\n")
    texts = [form.format(one) for word in ANSWERS.read_text("utf-8").split() for one in (word, word.lower()) for form in forms]
    try:
        first = sorted({i for ids in tokenizer(texts, add_special_tokens=False)["input_ids"] for i in ids})
    except (TypeError, ValueError, KeyError):  # a tokenizer of another kind
        first = []
    return sorted([*dict.fromkeys([*first, *range(num)])][:num])


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
