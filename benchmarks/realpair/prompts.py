"""Prompts of five kinds, as chat messages: rows of public data sets, chosen by a hash and nothing else.

Answers are long enough for 96 tokens and prompts fit every pair's context, by the lengths of the rows' texts. Answers of a data
set are read in `chat` only, as the turn before.
"""

import gzip
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from specdecpp.errors import DataError
from specdecpp.training.prompts import alpaca, gsm8k, humaneval

Row = dict[str, str]
Messages = list[dict[str, str]]
SALT = "real pair"
FOLLOW_UPS = (
    "Explain the same once more, for a child of ten.",
    "What speaks against what you have just said?",
    "Give three examples, with a sentence about each.",
    "Which part of this matters most, and why?",
)


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def _chat(row: Row) -> Messages:
    """A turn that was answered, and a question about the answer."""
    again = FOLLOW_UPS[hashlib.sha256(row["output"].encode()).digest()[0] % len(FOLLOW_UPS)]
    return [*_user(alpaca(row)), {"role": "assistant", "content": row["output"].strip()}, *_user(again)]


class Set(NamedTuple):
    """Where the prompts of a kind come from: a file, the rows of it that suit, and how a row becomes messages."""

    file: str
    suits: Callable[[Row], bool]
    build: Callable[[Row], Messages]


SETS = {
    "question": Set(
        "alpaca_1k.jsonl", lambda row: not row["input"] and len(row["output"]) > 500, lambda row: _user(alpaca(row))
    ),
    "mathematics": Set("gsm8k_test.jsonl", lambda row: len(row["answer"]) > 200, lambda row: _user(gsm8k(row))),
    "chat": Set("alpaca_long_2k.jsonl", lambda row: not row["input"] and 300 < len(row["output"]) < 900, _chat),
    "code": Set("HumanEval.jsonl.gz", lambda row: len(row["prompt"]) < 1200, lambda row: _user(humaneval(row))),
    "summary": Set(
        "dolly_2k.jsonl",
        lambda row: 600 < len(row["input"]) < 1500,
        lambda row: _user(f"Summarise this text in four sentences.\n\n{row['input'].strip()}"),
    ),
}

BENCHMARKS = {
    "humaneval": Set("HumanEval.jsonl.gz", lambda row: True, lambda row: _user(humaneval(row))),
    "gsm8k": Set("gsm8k_test.jsonl", lambda row: True, lambda row: _user(gsm8k(row))),
    "alpaca": Set("alpaca_1k.jsonl", lambda row: True, lambda row: _user(alpaca(row))),
}
"""The paper's three sets, none of their prompts left out."""


def prompts(folder: Path, num: int, sets: Mapping[str, Set] = SETS) -> dict[str, list[Messages]]:
    """The first `num` prompts of every set; more of them begin with the same ones. Raises `DataError`."""
    found = {}
    for name, of in sets.items():
        path = folder / of.file
        if not path.is_file():
            files = ", ".join(each.file for each in sets.values())
            raise DataError(
                f"there is no {of.file} in {folder}, for prompts of the kind {name}. --data names a folder with {files}."
            )
        try:
            texts = {json.dumps(of.build(row)) for row in _rows(path) if of.suits(row)}
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise DataError(
                f"{path} cannot be read ({type(error).__name__}: {error}). Name a folder with other files."
            ) from error
        if len(texts) < num:
            raise DataError(f"{path} has {len(texts)} prompts that suit, and {num} are asked for. Ask for fewer: --prompts.")
        found[name] = [json.loads(text) for text in sorted(texts, key=_place)[:num]]
    return found


def _place(text: str) -> bytes:
    return hashlib.sha256(f"{SALT}:{text}".encode()).digest()


def _rows(path: Path) -> Iterator[Any]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)
