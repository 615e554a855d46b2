"""Collection: prompts in, shards of labelled answers out. Killed at any moment and started again, it gives the same bytes.

    prompts -> fixed groups, one for each shard -> answers sampled in batches -> labels -> two files, written atomically

Everything random in a shard comes from the recipe's seed and the number of the shard, so it does not matter in which run,
in which order or in which process it is made. What may change the bytes is recorded in `collection.json` before the first
shard is made, and a run that would differ is refused. On another kind of processor the last digits may differ.
"""

import hashlib
import json
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, get_args

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

import specdecpp
from specdecpp import cache_dir
from specdecpp.backends import EagerModel
from specdecpp.decoder import encode
from specdecpp.errors import BackendError, DataError
from specdecpp.loading.fingerprints import fingerprint
from specdecpp.loading.pair import Pair
from specdecpp.loading.vocabulary import listed as first_tokens
from specdecpp.policy_spec import as_prompt
from specdecpp.training import shards
from specdecpp.training.branches import TARGET_ADVICE, check_tree_mask
from specdecpp.training.folders import claimed, writing
from specdecpp.training.labels import TOP_K, Labelling, Record, Sampled, label
from specdecpp.training.prompts import Prompt, Split, gather
from specdecpp.training.recipe import Recipe
from specdecpp.training.responses import sample_responses

LARGE = 20e9
"""Bytes past which a collection must be confirmed."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a collection stands. Tokens and seconds are of this run."""

    num_prompts: int
    prompts_done: int
    prompts_before: int
    """Done by earlier runs."""
    num_shards: int
    shards_done: int
    tokens: int = 0
    elapsed_s: float = 0.0


def collect(
    recipe: Recipe,
    pair: Pair,
    *,
    progress: Callable[[Progress], None] = lambda progress: None,
    assume_yes: bool = False,
    check: Callable[[Sequence[Split]], None] = lambda splits: None,
) -> Progress:
    """Make what is missing of the collection in `recipe.labels`, and say where it stands then.

    `progress` is told as tokens come and shards are finished.

    Raises `DataError` when the folder holds another collection or a damaged shard, when it is to become larger than 20 GB
    or than the disk and `assume_yes` is not set, when another run works in it, when it cannot be written into, and when the
    disk is full; finished shards stay and are not made again. `check` is told the split of every prompt that leaves room for
    an answer, before any model is run, and may raise.
    """
    items, provenance = prepared(recipe, pair)
    check([q.split for q in items])
    folder, size, started = recipe.labels, recipe.collect.shard_size, perf_counter()
    groups = [items[i : i + size] for i in range(0, len(items), size)]
    with claimed(folder):
        _check_pair(recipe, pair, items)
        finished = _opened(folder, provenance)
        missing = [i for i in range(len(groups)) if i not in finished]
        _check_size(folder, most_bytes(recipe, pair, [q for i in missing for q in groups[i]]), assume_yes=assume_yes)
        done = sum(len(groups[i]) for i in finished)
        num = {"num_prompts": len(items), "num_shards": len(groups)}
        now = Progress(prompts_done=done, prompts_before=done, shards_done=len(finished), **num)

        def tell(num_tokens: int = 0, **changes: int) -> None:
            nonlocal now
            now = replace(now, tokens=now.tokens + num_tokens, elapsed_s=perf_counter() - started, **changes)
            progress(now)

        tell()
        if not (folder / shards.COLLECTION).exists():
            with writing(folder, safe="The 0 finished shards"):
                cache_dir.write(folder / shards.COLLECTION, json.dumps(provenance, indent=1) + "\n")
        kept = {key: provenance[key] for key in ("digest", "pair", "sampling", "versions")}
        for index in missing:
            records = _shard(recipe, pair, index, groups[index], tick=tell)
            files = shards.encoded(records, {**kept, "shard": index})
            with writing(folder, safe=f"The {now.shards_done} finished shards"):
                shards.write(folder, index, files)
            tell(shards_done=now.shards_done + 1, prompts_done=now.prompts_done + len(groups[index]))
        return now


def prepared(recipe: Recipe, pair: Pair) -> tuple[list[Sampled], dict[str, Any]]:
    """The encoded prompts in their order, and what `collection.json` says of them and of the run."""
    prompts = gather(recipe.collect.sources, seed=recipe.collect.seed, splits=recipe.collect.splits)
    items = questions(pair, prompts)
    if not items:
        raise DataError(f"none of the {len(prompts)} prompts leaves room for an answer in the context of the models.")
    settings = _settings(recipe, pair, items)
    counts = {source: Counter(q.split for q in items if q.source == source) for source in sorted({q.source for q in items})}
    return items, {
        "command": f"specdecpp train {recipe.name} --only collect",
        "git": git_sha(),
        "vocab_size": pair.draft.vocab_size,
        "names": {"target": pair.target_name, "draft": pair.draft_name},
        "digest": _digest(settings),
        **settings,
        "prompts": {source: dict(sorted(splits.items())) for source, splits in counts.items()},
        "num_prompts": len(items),
        "num_left_out": len(prompts) - len(items),
        "num_shards": -(-len(items) // recipe.collect.shard_size),
    }


def backends_of(pair: Pair) -> tuple[EagerModel, EagerModel]:
    """(target, draft). Raises `BackendError` for backends that cannot run a batch."""
    found = []
    for role, backend in (("target", pair.target), ("draft", pair.draft)):
        if not isinstance(backend, EagerModel):
            raise BackendError(
                f"collection runs whole batches, and the {role} is a {type(backend).__name__}. Use an EagerModel."
            )
        found.append(backend)
    return found[0], found[1]


def context_of(pair: Pair) -> int | None:
    """The most tokens that both models hold, None without an end."""
    return min((n for n in (pair.target.max_length, pair.draft.max_length) if n is not None), default=None)


def questions(pair: Pair, prompts: Sequence[Prompt], *, room: int = 1) -> list[Sampled]:
    """The prompts as user messages (or as plain text, without a chat template), those left out that leave no room for an
    answer of `room` tokens."""
    context = context_of(pair)
    encoded = [Sampled(prompt=tuple(encode(pair, as_prompt(pair, p.text))), source=p.source, split=p.split) for p in prompts]
    return [q for q in encoded if q.prompt and (context is None or len(q.prompt) + room <= context)]


def most_bytes(recipe: Recipe, pair: Pair, items: Sequence[Sampled]) -> int:
    """The bytes of the labels of these prompts if every answer is as long as it may be."""
    plan, context, width = recipe.collect, context_of(pair), 2 * pair.draft.hidden_size
    num_bytes = 0
    for q in items:
        num_tokens = plan.max_tokens if context is None else min(plan.max_tokens, context - len(q.prompt))
        num_bytes += 4 * len(q.prompt) + num_tokens * (4 * (3 * plan.draws + TOP_K + 7) + width * (1 + len(plan.features)))
        num_bytes += num_tokens * plan.branch_length(q.source, q.split) * (24 + width)
    return num_bytes


def _check_pair(recipe: Recipe, pair: Pair, items: Sequence[Sampled]) -> None:
    """Raise `BackendError` if the pair cannot do what the plan asks."""
    (target, draft), plan, context = backends_of(pair), recipe.collect, context_of(pair)
    length = max(plan.branch_length(q.source, q.split) for q in items)
    if length or "leaf" in plan.features:
        longest = max(len(q.prompt) for q in items) + plan.max_tokens + max(length, 1)
        longest = longest if context is None else min(longest, context)
        check_tree_mask(draft, longest=longest)
        if length and plan.branches is not None and plan.branches.odds:
            check_tree_mask(target, longest=longest, advice=TARGET_ADVICE)


def _shard(recipe: Recipe, pair: Pair, index: int, items: Sequence[Sampled], *, tick: Callable[[int], None]) -> list[Record]:
    """An answer to each prompt of shard `index`, those of like lengths in one batch, with its labels; answers that get branches
    are labelled in batches of their own."""
    (target, draft), plan, context = backends_of(pair), recipe.collect, context_of(pair)
    generator, answers = _generator(plan.seed, index, 0, target.device), list[Sampled]()
    items = sorted(items, key=lambda q: len(q.prompt))
    for start in range(0, len(items), plan.batch):
        batch = items[start : start + plan.batch]
        sampled = sample_responses(
            target,
            [q.prompt for q in batch],
            sampling=recipe.sampling,
            max_tokens=plan.max_tokens,
            ends=pair.ends,
            generator=generator,
            max_length=context,
            tick=tick,
        )
        answers += [replace(q, answer=answer) for q, answer in zip(batch, sampled, strict=True)]
    generator = _generator(plan.seed, index, 1, draft.device)
    lengths = [plan.branch_length(a.source, a.split) for a in answers]
    listed = _listed(pair, plan.draft_vocabulary)
    records: dict[int, Record] = {}
    for length in sorted({*lengths}):
        chosen = [i for i, wanted in enumerate(lengths) if wanted == length]
        how = Labelling(
            sampling=recipe.sampling,
            ends=pair.ends,
            draws=plan.draws,
            features=plan.features,
            branch_length=length,
            branch_odds=plan.branches is not None and plan.branches.odds,
            max_length=context,
            listed=listed,
        )
        records |= zip(chosen, label(target, draft, [answers[i] for i in chosen], how, generator), strict=True)
    return [records[i] for i in range(len(answers))]


def _listed(pair: Pair, num: int | None) -> Bool[Tensor, " V"] | None:
    """True for the tokens of a reduced vocabulary of so many, None for all tokens."""
    if num is None or num >= pair.draft.vocab_size:
        return None
    mask = torch.zeros(pair.draft.vocab_size, dtype=torch.bool, device=pair.draft.device)
    mask[first_tokens(pair.tokenizer, num)] = True
    return mask


def _generator(seed: int, index: int, stream: int, device: torch.device) -> torch.Generator:
    """An independent stream for each shard and each half of its work."""
    state = np.random.SeedSequence([seed, index, stream]).generate_state(1, np.uint64)[0]
    return torch.Generator(device=device).manual_seed(int(state >> 1))


def _settings(recipe: Recipe, pair: Pair, items: Sequence[Sampled]) -> dict[str, Any]:
    """All that may change the bytes of a shard, where the files lie aside."""
    target, draft = backends_of(pair)
    plan = json.loads(json.dumps(asdict(recipe.collect)))
    for source in plan["sources"]:
        source["path"] = Path(source["path"]).name
    usually = (plan, "splits", [*get_args(Split)]), (plan, "draft_vocabulary", None), (plan["branches"] or {}, "odds", False)
    for keys, name, usual in usually:
        if keys.get(name) == usual:  # collections that were begun before there was this key have it as usual
            keys.pop(name)
    vocabulary = json.dumps(pair.tokenizer.get_vocab(), sort_keys=True)
    return {
        "pair": {
            "target": pair.target_fingerprint or fingerprint(target.model),
            "draft": pair.draft_fingerprint or fingerprint(draft.model),
            "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest()[:16],
            "dtypes": [str(backend.model.dtype).removeprefix("torch.") for backend in (target, draft)],
            "devices": [backend.device.type for backend in (target, draft)],
            "ends": list(pair.ends),
        },
        "sampling": asdict(recipe.sampling),
        "collect": plan,
        "data": _digest([[q.source, q.split, q.prompt] for q in items]),
        "threads": torch.get_num_threads(),
        "versions": versions("torch", "transformers", "pyarrow", "safetensors"),
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def versions(*packages: str) -> dict[str, str]:
    """The versions of this package, of Python and of some packages."""
    own = {"specdecpp": specdecpp.__version__, "python": platform.python_version()}
    return own | {name: version(name) for name in packages}


def git_sha() -> str | None:
    """The commit of this source tree, None where it is not one."""
    here = Path(specdecpp.__file__)
    run = partial(subprocess.check_output, cwd=here.parent, stderr=subprocess.DEVNULL, text=True)
    try:
        run(["git", "ls-files", "--error-unmatch", here.name])
        return run(["git", "rev-parse", "HEAD"]).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _opened(folder: Path, provenance: Mapping[str, Any]) -> list[int]:
    """The shards that are finished. Raises `DataError` for a folder that holds another collection."""
    finished, recorded = shards.done(folder), shards.about(folder)
    if finished and not recorded:
        raise DataError(f"{folder} holds shards but no {shards.COLLECTION}. Collect into another folder, or empty this one.")
    if recorded and recorded.get("digest") != provenance["digest"]:
        settings = ("pair", "sampling", "collect", "data", "threads", "versions")
        before, now = (dict(_flat({k: p.get(k) for k in settings})) for p in (recorded, provenance))
        changed = [
            f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in before | now if before.get(key) != now.get(key)
        ]
        raise DataError(
            f"{folder} holds a collection of another kind: {'; '.join(changed[:4])}{' ...' if changed[4:] else ''}. Collect "
            "into another folder (out in the recipe, or --out), or put back what was changed; nothing is lost."
        )
    return finished


def _flat(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Nested keys as `collect.sources[0].rows`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{at}.{key}" if at else key)
    elif isinstance(value, list) and any(isinstance(v, dict) for v in value):
        for i, inner in enumerate(value):
            yield from _flat(inner, f"{at}[{i}]")
    else:
        yield at, value


def _check_size(folder: Path, num_bytes: int, *, assume_yes: bool) -> None:
    free = shutil.disk_usage(folder).free
    size = f"the collection in {folder} may grow by {num_bytes / 1e9:.1f} GB"
    advice = "Say --yes to go on, or ask for fewer rows, draws or features, a smaller max_tokens, or branches for fewer splits."
    if num_bytes > free and not assume_yes:
        raise DataError(f"{size}, and its disk has {free / 1e9:.1f} GB free. {advice}")
    if num_bytes > LARGE and not assume_yes:
        raise DataError(f"{size}, and more than {LARGE / 1e9:.0f} GB must be asked for. {advice}")
