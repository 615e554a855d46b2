"""The recipe: one YAML file that says how a head comes about, read into frozen dataclasses.

    pair: {target: Qwen/Qwen3-8B, draft: Qwen/Qwen3-0.6B}     # leave it out for the reference pair
    sampling: {temperature: 0.7, top_p: 0.9}                  # as it will be served
    collect:
      sources:
        - {path: gsm8k_train.jsonl, prompt: gsm8k, rows: 3000}
        - {path: openai/openai_humaneval, prompt: humaneval, part: test, split: test}
    train: {head: {form: look_ahead}}
    out: runs/qwen3

Paths are relative to the recipe. A key nobody knows, a value of the wrong type and a file that is not there are refused by
their names before anything is loaded.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import field, replace
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from specdecpp.errors import DataError
from specdecpp.sampling import Sampling
from specdecpp.training.prompts import KINDS, Source, Split

Feature = Literal["mixed", "leaf"]
Scalar = Literal["log_q", "entropy", "gap", "depth"]
DTypeName = Literal["auto", "float64", "float32", "bfloat16", "float16"]
GRID = {"rejection_weight": (1.0, 3.0, 6.0, 12.0), "num_layers": (0, 1, 2, 3, 4)}
"""The paper's grid of 20 heads (section 4)."""
_CHECKED = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, kw_only=True, config=_CHECKED)
class PairPlan:
    """The pair, as `load_pair` takes it. No names: the reference pair."""

    target: str | None = None
    draft: str | None = None
    dtype: DTypeName = "auto"
    device: str | None = None


@dataclass(frozen=True, kw_only=True, config=_CHECKED)
class BranchPlan:
    """Which answers get discarded branches, how many tokens a branch may have, and whether the target judges
    them too: then an oracle that knows every chance of acceptance can be replayed."""

    splits: tuple[Split, ...] = ("dev", "test")
    sources: tuple[str, ...] | None = None
    length: PositiveInt = 10
    odds: bool = False


@dataclass(frozen=True, kw_only=True, config=_CHECKED)
class CollectPlan:
    """The plan of `collect`. `draws` draft tokens are scored at every position; a shard holds the answers to `shard_size`
    prompts, sampled `batch` at a time."""

    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    splits: Annotated[tuple[Split, ...], Field(min_length=1)] = ("train", "dev", "test")
    """The sides that are collected; prompts of the others are left out."""
    max_tokens: PositiveInt = 256
    seed: NonNegativeInt = 0
    draws: PositiveInt = 4
    features: tuple[Feature, ...] = ("mixed",)
    draft_vocabulary: PositiveInt | None = None
    """Number of tokens that the draft scores beside those of the text, as in `load_pair`; None: all."""
    branches: BranchPlan | None = field(default_factory=BranchPlan)
    shard_size: PositiveInt = 128
    batch: PositiveInt = 64

    def branch_length(self, source: str, split: str) -> int:
        """The most tokens of a branch in the answers to these prompts; 0: they get none."""
        plan = self.branches
        if plan is None or split not in plan.splits or (plan.sources is not None and source not in plan.sources):
            return 0
        return plan.length


@dataclass(frozen=True, kw_only=True, config=_CHECKED)
class HeadPlan:
    """One head: its form and how it is trained. The defaults are ours.

    `text` is where a lagged head finds the state at the draft token: `mixed` or `leaf` (exact). `batch` counts
    answers, of which every position has as many draft tokens as were drawn; the learning rate is reached after a share
    `warmup` of the steps and falls as a cosine. `dropout` is the share of the state's entries that are left out of a row, where
    a layer stands before the blocks. `token_table` gives a look-ahead head a row for each token of the vocabulary, which takes
    many answers to learn. Raises ValueError for what cannot be trained.
    """

    form: Literal["lagged", "look_ahead"] = "look_ahead"
    text: Feature = "mixed"
    num_layers: NonNegativeInt = 2
    width: PositiveInt | None = None
    scalars: tuple[Scalar, ...] = ("log_q", "entropy", "gap")
    rejection_weight: PositiveFloat = 1.0
    token_table: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.8
    epochs: PositiveInt = 16
    batch: PositiveInt = 1
    lr: PositiveFloat = 1e-3
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.03
    seed: NonNegativeInt = 0

    @property
    def is_ahead(self) -> bool:
        return self.form == "look_ahead"


def grid(plan: HeadPlan) -> dict[str, HeadPlan]:
    """A plan at every point of `GRID`, by a name that says its values.

    >>> list(grid(HeadPlan()))[:2]
    ['rejection_weight=1,num_layers=0', 'rejection_weight=1,num_layers=1']
    """
    points = [dict(zip(GRID, values, strict=True)) for values in product(*GRID.values())]
    return {",".join(f"{k}={v:g}" for k, v in point.items()): replace(plan, **point) for point in points}


@dataclass(frozen=True, kw_only=True, config=_CHECKED)
class Recipe:
    """A recipe that has been read and checked."""

    collect: CollectPlan
    pair: PairPlan = field(default_factory=PairPlan)
    sampling: Sampling = field(default_factory=Sampling)
    train: Mapping[str, HeadPlan] = field(default_factory=dict)
    out: Path = Path("out")
    name: str = "recipe.yaml"

    @property
    def labels(self) -> Path:
        """The folder of the collection."""
        return self.out / "labels"

    @property
    def heads(self) -> Path:
        """The folder of the heads."""
        return self.out / "heads"

    @classmethod
    def read(cls, path: Path | str) -> "Recipe":
        """Read a recipe. Raises `DataError` that names the key and what is allowed there.

        >>> Recipe.read("recipes/qwen3.yaml").collect.max_tokens        # doctest: +SKIP
        """
        path = Path(path)
        content = {key: value for key, value in _yaml(path).items() if value is not None}
        try:
            return _placed(replace(_checked(content), name=path.name), path.resolve().parent)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error


def _checked(content: dict[str, Any]) -> Recipe:
    """The recipe of a mapping. Raises `DataError` with the key of the first value that does not fit."""
    heads = content.get("train", {})
    if not isinstance(heads, dict):
        raise DataError(f"train must be a mapping of names to heads, got {heads!r}.")
    for name in map(str, heads):
        if name in (".", "..") or not name.strip() or "/" in name or "\\" in name or "\0" in name:
            raise DataError(f"train.{name}: a head's name is that of its folder under heads, so it cannot be {name!r}.")
    content = content | {"train": {str(name): plan or {} for name, plan in heads.items()}}
    try:  # as JSON has them lists are tuples, and texts paths
        return TypeAdapter(Recipe).validate_json(json.dumps(content, default=str))
    except ValidationError as error:
        first = min(error.errors(), key=lambda found: found["type"] != "unexpected_keyword_argument")
    key = ""
    for part in (part for part in first["loc"] if not isinstance(part, str) or part.isidentifier()):
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else part
    match first["type"]:
        case "missing" | "missing_argument":
            raise DataError(f"{key} is missing, and it has no default.")
        case "unexpected_keyword_argument":
            schema = TypeAdapter(Recipe).json_schema()
            names = [name for part in (schema, *schema.get("$defs", {}).values()) for name in part.get("properties", ())]
            near = get_close_matches(str(first["loc"][-1]), names, n=1)
            raise DataError(f"{key} is not a key{f'; is {near[0]} meant?' if near else '.'}")
        case "value_error":
            raise DataError(f"{key}: {first['ctx']['error']}")  # pyright: ignore[reportTypedDictNotRequiredAccess]
    raise DataError(f"{key}: {first['msg'].replace('Input', 'it')}, got {first['input']!r}.")


def _yaml(path: Path) -> dict[str, Any]:
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML's own, which takes 1e-3 for text, with the numbers of YAML 1.2."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), [*"-+0123456789"])
    if not path.is_file():
        raise DataError(f"there is no recipe {path}. Give the path of a YAML file.")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not readable YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no recipe. It needs at least collect, with its sources.")
    return content


def _placed(recipe: Recipe, base: Path) -> Recipe:
    """The recipe with its paths made absolute. Raises `DataError` for a file that is not there."""
    sources = tuple(
        replace(s, path=_path(s.path, base, where=f"collect.sources[{i}].path")) for i, s in enumerate(recipe.collect.sources)
    )
    names = {
        role: None if name is None else _path(name, base, where=f"pair.{role}")
        for role, name in (("target", recipe.pair.target), ("draft", recipe.pair.draft))
    }
    return replace(
        recipe,
        collect=replace(recipe.collect, sources=sources),
        pair=replace(recipe.pair, **names),
        out=base / recipe.out.expanduser(),
    )


def _path(name: str, base: Path, *, where: str) -> str:
    """A path beside the recipe where there is one, else a hub name as it is."""
    path = base / Path(name).expanduser()
    if path.exists():
        return str(path)
    if name.startswith((".", "/", "~")) or name.endswith(KINDS) or name.count("/") > 1:
        raise DataError(f"{where}: there is nothing at {path}. Paths are relative to the recipe's folder.")
    return name
