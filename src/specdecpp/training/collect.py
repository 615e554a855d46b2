"""Collection: prompts in, shards of labelled answers out. Killed at any moment and started again, it gives the same bytes.

    prompts -> fixed groups, one for each shard -> answers sampled in batches -> labels -> two files, written atomically

Everything random in a shard comes from the recipe's seed and the number of the shard, so it does not matter in which run,
in which order or in which process it is made. What may change the bytes is recorded in `collection.json` before the first
shard is made, and a run that would differ is refused. On another kind of processor the last digits may differ, and we have
not measured whether a GPU repeats itself to the last digit.
"""

import errno
import hashlib
import json
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, get_args

import torch

import specdecpp
from specdecpp import cache_dir
from specdecpp.errors import DataError
from specdecpp.loading.fingerprints import fingerprint
from specdecpp.loading.pair import Pair
from specdecpp.training import jobs, shards
from specdecpp.training.folders import claimed
from specdecpp.training.jobs import Question, ShardWork
from specdecpp.training.labels import TOP_K
from specdecpp.training.prompts import Split, gather
from specdecpp.training.recipe import Recipe

LARGE = 20e9
"""Bytes past which a collection must be confirmed."""
_TRIAL_TOKENS = 5


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The work that is left, at most: every answer as long as it may be. The time comes from a short trial."""

    num_prompts: int
    num_tokens: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a collection stands. Tokens and seconds are of this run."""

    num_prompts: int
    prompts_done: int
    prompts_before: int
    """Done by earlier runs."""
    num_shards: int
    shards_done: int
    tokens: int
    elapsed_s: float
    estimate: Estimate

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds left at the pace of the prompts done in this run; None before the first shard."""
        made = self.prompts_done - self.prompts_before
        return self.elapsed_s * (self.num_prompts - self.prompts_done) / made if made else None


def collect(
    recipe: Recipe,
    pair: Pair,
    *,
    progress: Callable[[Progress], None] = lambda progress: None,
    assume_yes: bool = False,
    check: Callable[[Sequence[Split]], None] = lambda splits: None,
) -> Progress:
    """Make what is missing of the collection in `recipe.labels`, and say where it stands then.

    `progress` is told as tokens come and shards are finished, first of all with the estimate.

    Raises `DataError` when the folder holds another collection or a damaged shard, when it is to become larger than 20 GB
    or than the disk and `assume_yes` is not set, when another run works in it, when it cannot be written into, and when the
    disk is full; finished shards stay and are not made again. `check` is told the split of every prompt that leaves room for
    an answer, before any model is run, and may raise.
    """
    items, provenance = prepared(recipe, pair)
    check([q.split for q in items])
    folder, work = recipe.labels, _work(recipe, pair, provenance)
    groups = jobs.groups(items, size=recipe.collect.shard_size)
    with claimed(folder):
        jobs.check(pair, work, items)
        finished = _opened(folder, provenance)
        missing = {i: group for i, group in enumerate(groups) if i not in finished}
        counter = _Counter(groups, finished, estimate_of(pair, work, list(missing.values())), progress)
        _check_size(folder, counter.now.estimate, assume_yes=assume_yes)
        counter.tell()
        try:
            if not (folder / shards.COLLECTION).exists():
                cache_dir.write(folder / shards.COLLECTION, json.dumps(provenance, indent=1) + "\n")
            for index, group in missing.items():
                shards.write(folder, index, jobs.make(pair, work, index, group, tick=counter.tick))
                counter.finish(index)
        except OSError as error:
            raise _unwritten(folder, error, counter.now.shards_done) from error
        return counter.now


def _unwritten(folder: Path, error: OSError, num_done: int) -> DataError:
    """The refusal of a disk, in words."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    problem = f"the disk that holds {folder} is full" if is_full else f"{folder} cannot be written into ({error.strerror})"
    return DataError(
        f"{problem}. The {num_done} finished shards are safe: {'make room' if is_full else 'mend that'} and run the same "
        "command again; it goes on where it stopped."
    )


def prepared(recipe: Recipe, pair: Pair) -> tuple[list[Question], dict[str, Any]]:
    """The encoded prompts in their order, and what `collection.json` says of them and of the run."""
    prompts = gather(recipe.collect.sources, seed=recipe.collect.seed, splits=recipe.collect.splits)
    items = jobs.questions(pair, prompts)
    if not items:
        raise DataError(f"none of the {len(prompts)} prompts leaves room for an answer in the context of the models.")
    settings = _settings(recipe, pair, items)
    counts: dict[str, Counter[str]] = {}
    for q in items:
        counts.setdefault(q.source, Counter())[q.split] += 1
    return items, {
        "command": f"specdecpp train {recipe.name} --only collect",
        "git": git_sha(),
        "vocab_size": pair.draft.vocab_size,
        "names": {"target": pair.target_name, "draft": pair.draft_name},
        "digest": _digest(settings),
        **settings,
        "prompts": {source: dict(sorted(counts[source].items())) for source in sorted(counts)},
        "num_prompts": len(items),
        "num_left_out": len(prompts) - len(items),
        "num_shards": -(-len(items) // recipe.collect.shard_size),
    }


def estimate_of(pair: Pair, work: ShardWork, groups: Sequence[Sequence[Question]]) -> Estimate:
    """At most what the shards will take, from a short trial on the first of them."""
    items = [q for group in groups for q in group]
    plan, context = work.plan, work.context
    lengths = [plan.max_tokens if context is None else min(plan.max_tokens, context - len(q.ids)) for q in items]
    width = 2 * pair.draft.hidden_size
    num_bytes = 0
    for q, n in zip(items, lengths, strict=True):
        num_bytes += 4 * len(q.ids) + n * (4 * (3 * plan.draws + TOP_K + 7) + width * (1 + len(plan.features)))
        if plan.branches and plan.branches.includes(source=q.source, split=q.split):
            num_bytes += n * plan.branches.length * (24 + width)
    seconds = _trial_s(pair, work, groups) if items else 0.0
    return Estimate(num_prompts=len(items), num_tokens=sum(lengths), num_bytes=num_bytes, seconds=seconds)


def _trial_s(pair: Pair, work: ShardWork, groups: Sequence[Sequence[Question]]) -> float:
    """Seconds for all groups if every answer is as long as it may be: one batch answered and labelled, scaled."""
    batch = groups[0][-work.plan.batch :]
    num_batches = sum(map(len, groups)) / len(batch)
    times = [perf_counter()]
    short = replace(work, plan=replace(work.plan, max_tokens=_TRIAL_TOKENS))
    answers = jobs.answer_all(pair, short, 0, batch, tick=lambda num_tokens: times.append(perf_counter()))
    started = perf_counter()
    jobs.label_all(pair, work, answers, 0)
    label_s = perf_counter() - started
    prompt_s, *steps = (b - a for a, b in pairwise(times))
    growth = 1 + work.plan.max_tokens * len(answers) / sum(a.num_tokens for a in answers)
    return num_batches * (prompt_s + median(steps or [prompt_s]) * work.plan.max_tokens + label_s * growth)


def _work(recipe: Recipe, pair: Pair, provenance: Mapping[str, Any]) -> ShardWork:
    kept = ("digest", "pair", "sampling", "versions")
    return ShardWork(
        plan=recipe.collect,
        sampling=recipe.sampling,
        ends=pair.ends,
        context=jobs.context_of(pair),
        provenance={key: provenance[key] for key in kept},
    )


def _settings(recipe: Recipe, pair: Pair, items: Sequence[Question]) -> dict[str, Any]:
    """All that may change the bytes of a shard, where the files lie aside."""
    target, draft = jobs.backends_of(pair)
    plan = json.loads(json.dumps(asdict(recipe.collect)))
    for source in plan["sources"]:
        source["path"] = Path(source["path"]).name
    for keys, name, usual in ((plan, "splits", [*get_args(Split)]), (plan["branches"] or {}, "odds", False)):
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
        "data": _digest([[q.source, q.split, q.ids] for q in items]),
        "threads": torch.get_num_threads(),
        "versions": {
            "specdecpp": specdecpp.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "pyarrow", "safetensors")},
        },
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def git_sha() -> str | None:
    """The commit of this source tree, None where it is not one."""
    here = Path(specdecpp.__file__)
    commands = ["git", "ls-files", "--error-unmatch", here.name], ["git", "rev-parse", "HEAD"]
    try:
        done = [subprocess.run(c, cwd=here.parent, capture_output=True, text=True, check=True) for c in commands]
    except (OSError, subprocess.CalledProcessError):
        return None
    return done[1].stdout.strip()


def _opened(folder: Path, provenance: Mapping[str, Any]) -> list[int]:
    """See that a folder holds nothing, or this very collection; the shards that are finished."""
    finished, recorded = shards.done(folder), shards.about(folder)
    if finished and not recorded:
        raise DataError(f"{folder} holds shards but no {shards.COLLECTION}. Collect into another folder, or empty this one.")
    if recorded and recorded.get("digest") != provenance["digest"]:
        before, now = (dict(_flat({k: p.get(k) for k in _SETTINGS})) for p in (recorded, provenance))
        changed = [
            f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
            for key in [*before, *(k for k in now if k not in before)]
            if before.get(key) != now.get(key)
        ]
        raise DataError(
            f"{folder} holds a collection of another kind: {'; '.join(changed[:4])}{' ...' if changed[4:] else ''}. Collect "
            "into another folder (out in the recipe, or --out), or put back what was changed; nothing is lost."
        )
    return finished


_SETTINGS = ("pair", "sampling", "collect", "data", "threads", "versions")


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


def _check_size(folder: Path, estimate: Estimate, *, assume_yes: bool) -> None:
    free = shutil.disk_usage(folder).free
    size = f"the collection in {folder} may grow by {estimate.num_bytes / 1e9:.1f} GB"
    advice = "Say --yes to go on, or ask for fewer rows, draws or features, a smaller max_tokens, or branches for fewer splits."
    if estimate.num_bytes > free and not assume_yes:
        raise DataError(f"{size}, and its disk has {free / 1e9:.1f} GB free. {advice}")
    if estimate.num_bytes > LARGE and not assume_yes:
        raise DataError(f"{size}, and more than {LARGE / 1e9:.0f} GB must be asked for. {advice}")


class _Counter:
    """Progress of a run, told whenever it changes."""

    def __init__(
        self,
        groups: Sequence[Sequence[Question]],
        finished: Sequence[int],
        estimate: Estimate,
        progress: Callable[[Progress], None],
    ):
        self.sizes, self.progress, self.started = [len(g) for g in groups], progress, perf_counter()
        num_done = sum(self.sizes[i] for i in finished)
        self.now = Progress(
            num_prompts=sum(self.sizes),
            prompts_done=num_done,
            prompts_before=num_done,
            num_shards=len(groups),
            shards_done=len(finished),
            tokens=0,
            elapsed_s=0.0,
            estimate=estimate,
        )

    def tell(self, **changes: int) -> None:
        self.now = replace(self.now, elapsed_s=perf_counter() - self.started, **changes)
        self.progress(self.now)

    def tick(self, num_tokens: int) -> None:
        self.tell(tokens=self.now.tokens + num_tokens)

    def finish(self, index: int) -> None:
        self.tell(shards_done=self.now.shards_done + 1, prompts_done=self.now.prompts_done + self.sizes[index])
