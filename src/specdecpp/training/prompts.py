"""Prompts for collection: rows of a file or a data set, a builder that makes each row a user message, and a split.

The builders are the paper's (Huang et al. 2025, appendix): only prompts are used, never a data set's answers.
The side of a prompt is decided by its hash, so that it depends neither on the order of the rows nor on how many there are.
"""

import gzip
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specdecpp.detokenize import half_character
from specdecpp.errors import DataError, MissingExtraError, first_line

Row = dict[str, Any]
Split = Literal["train", "dev", "test"]


def alpaca(row: Row) -> str:
    """The instruction, with its input under "Input:" where it has one."""
    return row["instruction"].strip() + (f"\nInput: {row['input'].strip()}" if row.get("input") else "")


def gsm8k(row: Row) -> str:
    """The question, and a request to think step by step."""
    return f"{row['question'].strip()}\nLet's think step by step."


def humaneval(row: Row) -> str:
    """A request for a script, and the function's signature with its docstring."""
    return f"Write a Python script for this problem:\n\n{row['prompt'].strip()}"


def field(name: str) -> Callable[[Row], str]:
    """One column as it is."""
    return lambda row: row[name].strip()


BUILDERS: dict[str, Callable[[Row], str]] = {"alpaca": alpaca, "gsm8k": gsm8k, "humaneval": humaneval, "text": field("text")}
KINDS = (".jsonl", ".jsonl.gz", ".json", ".parquet")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt: the user message, where it came from, and the side of the split it is on."""

    text: str
    source: str
    split: Split


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where prompts come from, and how a row becomes one.

    `path` is a .jsonl, .jsonl.gz, .json or .parquet file, or the hub name of a data set, which needs the extra [data].
    `prompt` names a builder (alpaca, gsm8k, humaneval, text), or a column as `field:NAME`.

    >>> Source(path="gsm8k_test.jsonl", prompt="gsm8k", split="test").label
    'gsm8k_test'
    """

    path: str
    prompt: str
    name: str | None = None
    rows: int | None = None
    """Use this many rows, spread evenly over all; None for all."""
    part: str = "train"
    """Which part of a data set is read; files have none."""
    dev_share: float = 0.1
    split: Split | None = None
    """Put every prompt on this side; None to decide by hash, `dev_share` of them for dev."""

    def __post_init__(self) -> None:
        if self.prompt not in BUILDERS and not self.prompt.startswith("field:"):
            raise ValueError(f"there is no prompt builder {self.prompt!r}. There are {', '.join(BUILDERS)}, and field:NAME.")
        if not 0 <= self.dev_share < 1:
            raise ValueError(f"dev_share must lie in [0, 1), got {self.dev_share}; to put all on one side, set split")
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows must be at least 1, got {self.rows}; leave it out to use all")

    @property
    def label(self) -> str:
        """The name of the prompts' source in the records."""
        return self.name or Path(self.path).name.split(".")[0]

    def prompts(self) -> list[Prompt]:
        """Every prompt once, in the order of the rows. Raises `DataError` for data that cannot be read or lacks a column."""
        build = BUILDERS.get(self.prompt) or field(self.prompt.removeprefix("field:"))
        rows = list(_rows(self.path, part=self.part))
        if self.rows is not None and self.rows < len(rows):
            rows = [rows[i * len(rows) // self.rows] for i in range(self.rows)]
        texts: dict[str, None] = {}
        for number, row in enumerate(rows, 1):
            try:
                text = build(row)
            except (KeyError, AttributeError, TypeError) as error:
                columns = ", ".join(row) if isinstance(row, dict) else f"no columns, being a {type(row).__name__}"
                raise DataError(
                    f"row {number} of {self.path} does not suit the prompt {self.prompt!r} ({type(error).__name__}: {error}); "
                    f"it has {columns}. Choose another of {', '.join(BUILDERS)}, or field:NAME."
                ) from error
            if half := half_character(text):
                raise DataError(
                    f"row {number} of {self.path} holds half of a character ({half}), which has no encoding. Write whole "
                    "characters, or leave the row out."
                )
            texts[text] = None
        return [
            Prompt(text=t, source=self.label, split=self.split or split_of(t, dev_share=self.dev_share)) for t in texts if t
        ]


def sources(files: Sequence[str], prompts: Sequence[str]) -> tuple[Source, ...]:
    """One for each file; of prompt builders one each, one for all, or none where rows have a column `text`. Raises ValueError.

    >>> [source.prompt for source in sources(["a.jsonl", "b.jsonl"], ["gsm8k"])]
    ['gsm8k', 'gsm8k']
    """
    if len(prompts) not in (0, 1, len(files)):
        raise ValueError(
            f"there are {len(files)} files and {len(prompts)} prompt builders. Give one --prompt a file, or one for all."
        )
    builders = prompts if len(prompts) == len(files) else [*prompts, "text"][:1] * len(files)
    return tuple(Source(path=path, prompt=prompt) for path, prompt in zip(files, builders, strict=True))


def split_of(text: str, *, dev_share: float) -> Split:
    """The side of a prompt: its SHA-256 as a number in [0, 1), below `dev_share` or not."""
    digest = hashlib.sha256(text.encode()).digest()
    return "dev" if int.from_bytes(digest[:8]) / 2**64 < dev_share else "train"


def gather(sources: Sequence[Source], *, seed: int, splits: Collection[Split] = ("train", "dev", "test")) -> list[Prompt]:
    """The prompts of all sources on some sides, each text once, in an order that depends on the texts and the seed only.

    A text that occurs in several sources belongs to the first, but to one with a forced split before all others: a test
    prompt is never trained on. Raises `DataError` when there are none.
    """
    found: dict[str, Prompt] = {}
    for source in sorted(sources, key=lambda s: s.split is None):
        for prompt in source.prompts():
            found.setdefault(prompt.text, prompt)
    kept = [prompt for prompt in found.values() if prompt.split in splits]
    if not kept:
        named = ", ".join(s.path for s in sources) or "none is named"
        raise DataError(f"the sources hold no prompts for {', '.join(splits)}: {named}. Name files with rows, or other splits.")
    return sorted(kept, key=lambda p: hashlib.sha256(f"{seed}:{p.text}".encode()).digest())


def _rows(path: str, *, part: str) -> Iterator[Row]:
    file = Path(path)
    if file.is_file():
        yield from _file_rows(file)
    elif not file.exists() and (path.startswith((".", "/", "~")) or path.endswith(KINDS)):
        raise DataError(f"there is no file {path}. Give a {', '.join(KINDS)} file, or the name of a data set.")
    else:
        yield from _data_set(path, part=part)


def _data_set(path: str, *, part: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(
            f"reading the data set {path} needs the package datasets. Install it with: pip install 'specdecpp[data]'"
        ) from error
    try:
        return datasets.load_dataset(path, split=part)
    except Exception as error:  # whatever the hub raises
        raise DataError(
            f"the data set {path} cannot be read ({first_line(error)}). Give a {', '.join(KINDS)} file, or another data set."
        ) from error


def _file_rows(file: Path) -> Iterator[Row]:
    kind = "".join(file.suffixes[-2:]) if file.suffix == ".gz" else file.suffix
    if kind not in KINDS:
        raise DataError(f"{file} is of an unknown kind. Give a {', '.join(KINDS)} file.")
    try:
        if kind == ".parquet":
            import pyarrow.parquet as pq

            yield from pq.read_table(file).to_pylist()
        elif kind == ".json":
            yield from _json_rows(file)
        else:
            with (gzip.open if kind.endswith(".gz") else open)(file, "rt", encoding="utf-8-sig") as lines:
                yield from _lines(file, lines)
    except (OSError, EOFError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file} is not readable as {kind} ({first_line(error)}).") from error


def _json_rows(file: Path) -> list[Row]:
    rows = json.loads(file.read_text(encoding="utf-8-sig"))
    if not isinstance(rows, list):
        raise DataError(f"{file} holds a {type(rows).__name__}, not a list of rows. For one object a line, name it .jsonl.")
    return rows


def _lines(file: Path, lines: Any) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"line {number} of {file} is not JSON ({error}). Each line is one object.") from error
