"""The prompts of a comparison: some choose settings, others are measured, and no prompt does both.

A prompt's side is decided by its hash, as in `training.prompts`, so that it depends neither on the order of the rows nor on
how many are asked for; the first of each side, in an order that also comes from hashes, take part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from specdecpp.decoder import encode
from specdecpp.errors import DataError
from specdecpp.loading.pair import Pair
from specdecpp.policy_spec import as_prompt
from specdecpp.testing import practice_prompts
from specdecpp.training.prompts import gather, sources

DEV_SHARE = 0.3


@dataclass(frozen=True, kw_only=True)
class Questions:
    """The prompts of one data set, as texts or as ids: `dev` may choose settings, `test` may be measured."""

    dataset: str
    dev: tuple[Any, ...]
    test: tuple[Any, ...]


PRACTICE = Questions(dataset="practice", dev=(), test=tuple(practice_prompts()))
"""Prompts of every kind."""
BUILT_IN = Questions(
    dataset="built-in",
    dev=tuple(PRACTICE.test[i] for i in (60, 101, 180)),
    test=tuple(PRACTICE.test[i] for i in (2, 90, 141, 45)),
)
"""A few of them, for those who name no file."""


def read(files: Sequence[str], prompts: Sequence[str]) -> list[Questions]:
    """The texts of files under prompt builders: one for each file, one for all, or none where rows have a column `text`.

    No files: a few practice prompts. Raises ValueError where the two do not go together and `DataError` for a file that
    cannot be read.

    >>> read(["gsm8k_test.jsonl"], ["gsm8k"])[0].dataset                                         # doctest: +SKIP
    'gsm8k_test'
    """
    if not files:
        if prompts:
            raise ValueError(f"--prompt {prompts[0]} says how a row of a file becomes a prompt; name the file with --prompts.")
        return [BUILT_IN]
    found = sources(files, prompts)
    labels = [source.label for source in found]
    if len(set(labels)) < len(labels):
        raise ValueError(f"two files go by one name: {', '.join(labels)}. Rename one.")
    of_files = []
    for source in found:
        texts = gather([replace(source, dev_share=DEV_SHARE)], seed=0)
        dev, test = (tuple(p.text for p in texts if (p.split == "dev") is is_dev) for is_dev in (True, False))
        of_files.append(Questions(dataset=source.label, dev=dev, test=test))
    return of_files


def encoded(pair: Pair, texts: Questions, *, num_dev: int, num_test: int) -> Questions:
    """The first prompts of both sides that leave room for an answer, as ids. Raises `DataError` where none can be measured."""
    room = min((n for n in (pair.target.max_length, pair.draft.max_length) if n is not None), default=2**31)

    def first(num: int, side: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        ids = (tuple(encode(pair, as_prompt(pair, text))) for text in side)
        return tuple(islice((of for of in ids if 0 < len(of) < room), num))

    found = Questions(dataset=texts.dataset, dev=first(num_dev, texts.dev), test=first(num_test, texts.test))
    if not found.test:
        raise DataError(
            f"{texts.dataset} has no prompts to measure that leave room for an answer ({len(texts.test)} may be measured). "
            "Give a file with more prompts, or with shorter ones."
        )
    return found
