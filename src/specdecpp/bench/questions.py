"""The prompts of a comparison: some choose settings, others are measured, and no prompt does both.

A prompt's side is decided by its hash, as in `training.prompts`, so that it depends neither on the order of the rows nor on
how many are asked for; the first of each side, in an order that also comes from hashes, take part.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from specdecpp.decoder import encode
from specdecpp.demo import DEV_PROMPTS, PROMPTS
from specdecpp.errors import DataError
from specdecpp.loading.pair import Pair
from specdecpp.policy_spec import as_prompt
from specdecpp.training.prompts import Source, gather, sources

DEV_SHARE = 0.3


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The user messages of one data set: `dev` may choose settings, `test` may be measured."""

    dataset: str
    dev: tuple[str, ...]
    test: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Those that take part, as ids."""

    dataset: str
    dev: tuple[tuple[int, ...], ...]
    test: tuple[tuple[int, ...], ...]


BUILT_IN = Texts(dataset="built-in", dev=DEV_PROMPTS, test=PROMPTS)


def read(files: Sequence[str], prompts: Sequence[str]) -> list[Texts]:
    """The texts of files under prompt builders: one for each file, one for all, or none where rows have a column `text`.

    No files: the demo's own few prompts. Raises ValueError where the two do not go together and `DataError` for a file that
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
    return [_texts(source) for source in found]


def encoded(pair: Pair, texts: Texts, *, num_dev: int, num_test: int) -> Questions:
    """The first prompts of both sides that leave room for an answer. Raises `DataError` where a side that is asked for has
    none."""
    dev, test = (tuple(islice(_ids(pair, side), num)) for side, num in ((texts.dev, num_dev), (texts.test, num_test)))
    for name, prompts, asked in (("development", dev, num_dev), ("test", test, 1)):
        if asked and not prompts:
            raise DataError(
                f"{texts.dataset} has no {name} prompts that leave room for an answer ({len(texts.dev)} may choose settings, "
                f"{len(texts.test)} may be measured). Give a file with more prompts, or with shorter ones."
            )
    return Questions(dataset=texts.dataset, dev=dev, test=test)


def _texts(source: Source) -> Texts:
    found = gather([replace(source, dev_share=DEV_SHARE)], seed=0)
    sides = {is_dev: tuple(p.text for p in found if (p.split == "dev") is is_dev) for is_dev in (True, False)}
    return Texts(dataset=source.label, dev=sides[True], test=sides[False])


def _ids(pair: Pair, texts: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """User messages as ids; those that leave no room for an answer are left out."""
    room = min((n for n in (pair.target.max_length, pair.draft.max_length) if n is not None), default=2**31)
    for text in texts:
        if 0 < len(ids := tuple(encode(pair, as_prompt(pair, text)))) < room:
            yield ids
