"""The choice of a pair's backends: by name, or the first kind that can run both models.

The kinds are tried in the order of their speed in all measurements so far (`benchmarks/results`): a step takes `lean` 12 times
as long as `native` on two cores, and 7 times as long as `graphs` on a GPU. Compiled code has all of torch's threads where these
are faster than one: on a busy machine, or in a container with fewer cores than it sees, they wait for each other.
"""

import logging
from collections.abc import Collection
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from specdecpp import cache_dir
from specdecpp.backends import Cache, Model
from specdecpp.backends.engines import BACKENDS
from specdecpp.backends.native import NativeModel, library
from specdecpp.drafters import SuffixDrafter
from specdecpp.errors import BackendError
from specdecpp.loading.gguf import GGUF, is_gguf
from specdecpp.loading.models import Checkpoint, code

BUDGET_S, LONG_S = 1.8, 1.0
"""Seconds after which no further turn begins, and those of a first pass that says enough."""
TOKENS, TURN, TURNS = 5, 4, 8
log = logging.getLogger("specdecpp.loading")
ModelSource = Checkpoint | GGUF


def model_of(name: str | Path, *, dtype: Any, device: Any, device_map: Any = None) -> ModelSource:
    """A GGUF file or a checkpoint, by its name."""
    kind = GGUF if is_gguf(name) else Checkpoint
    return kind(name, dtype=dtype, device=device, device_map=device_map)


def choose(
    target: ModelSource, draft: ModelSource | None, *, vocab_size: int, kinds: Collection[str] | None = None
) -> tuple[Model, Model | SuffixDrafter, str]:
    """Backends of target and draft, of the first of `kinds` that can run both (None: all, the likely fast ones first), and why.

    Raises `BackendError` where none can, ValueError for a kind that does not exist.
    """
    if unknown := [kind for kind in kinds or () if kind not in BACKENDS]:
        raise ValueError(f"there is no backend {unknown[0]!r}. Backends: {', '.join(BACKENDS)}.")
    is_order = kinds is not None and len(kinds) == 1
    models = (target,) if draft is None else (target, draft)
    refused: dict[str, None] = {}
    for kind in kinds or BACKENDS:
        own = [_kind(model, kind, is_order=is_order, is_draft=model is draft) for model in models]
        try:
            _check(dict(zip(models, own, strict=True)), is_order=is_order)
            made = [target.backend(own[0], vocab_size=vocab_size)]
            if draft is not None:
                own[1], drafts = _drafting(draft, own[1], vocab_size=vocab_size)
                made.append(drafts)
        except BackendError as error:
            refused[f"{own[0]}: {str(error).rstrip('.')}"] = None
        else:
            if kinds is None and (reason := library.refusal()) and any(reason.rstrip(".") in line for line in refused):
                log.warning("compiled code would be several times as fast: %s", reason)
            name = own[0] if own[0] == own[-1] else f"{own[0]} with {own[-1]} for the draft"
            why = "as asked" if is_order else f"not others: {'; '.join(refused)}" if refused else "the first choice"
            if isinstance(made[0], NativeModel) and torch.get_num_threads() > 1:
                num = _num_threads(made[0], target.identity)
                made = [model.with_threads(num) if isinstance(model, NativeModel) else model for model in made]
                name += f", {num} of {torch.get_num_threads()} threads"
            proposer = made[-1] if draft is not None else SuffixDrafter(vocab_size, device=made[0].device)
            return made[0], proposer, f"{name} ({why})"
    beside = "" if draft is None else f" with {draft.name}"
    advice = " Leave the backend out, or name another." if is_order else ""
    raise BackendError(f"no backend can run {target.name}{beside}: {'; '.join(refused)}.{advice}")


def _kind(model: ModelSource, kind: str, *, is_order: bool, is_draft: bool) -> str:
    """The kind of backend that a model gets where the pair gets `kind`."""
    if is_gguf(model.name) and not is_order and model.refusal("eager"):
        return "llama.cpp"  # of an architecture that nothing else knows
    if kind == "native-int8" and is_draft and model.refusal(kind):
        return "native"  # a draft without quantised weights is run with its exact ones
    return "eager" if kind == "lean" and not is_order and model.refusal("lean") else kind


def _drafting(draft: ModelSource, kind: str, *, vocab_size: int) -> tuple[str, Model]:
    """A draft's kind of backend, and the backend. One that rounding to bytes changes too much has exact activations."""
    try:
        return kind, draft.backend(kind, vocab_size=vocab_size)
    except BackendError:
        if kind != "native-int8":
            raise
        return "native", draft.backend("native", vocab_size=vocab_size)


def _check(kinds: dict[ModelSource, str], *, is_order: bool) -> None:
    """Raise `BackendError` where a kind cannot run its model, or copies more weights than there is room for."""
    for model, kind in kinds.items():
        if reason := model.refusal(kind):
            raise BackendError(reason)
    copy, free = sum(model.copied_bytes(kind) for model, kind in kinds.items()), cache_dir.free_bytes()
    if free is not None and copy > free and not is_order:
        raise BackendError(
            f"its copy of the weights takes {copy / 1e9:.1f} GB, and {free / 1e9:.1f} are free (ask for it by name)"
        )


def _num_threads(model: NativeModel, identity: dict[str, Any]) -> int:
    """One thread or all, whichever reads a few tokens faster here; one is not kept for good: it is faster on a busy machine."""
    most = torch.get_num_threads()
    facts = {"method": 16, "model": identity, "code": code(), **cache_dir.about()}
    kept = (cache_dir.recall("threads", facts) or {}).get("num")
    if kept in (1, most):
        return kept
    log.info("trying one thread and all")
    caches, times, began = {num: model.with_threads(num).new_cache() for num in (1, most)}, {1: [], most: []}, perf_counter()
    for _ in range(TURNS):
        for num, cache in caches.items():
            first = _pass_s(cache)  # it finds the processor's caches as others left them
            times[num] += [first] if first > LONG_S else [_pass_s(cache) for _ in range(TURN - 1)]
        if perf_counter() - began > BUDGET_S:
            break
    best = min(times, key=lambda num: sorted(times[num])[len(times[num]) // 4])  # a busy machine adds to some
    cache_dir.remember("threads", facts, {"num": best}, is_steady=best == most and cache_dir.is_steady(times.values()))
    return best


def _pass_s(cache: Cache) -> float:
    """Seconds of a pass over a few tokens."""
    num, began = min(TOKENS, cache.max_length or TOKENS), perf_counter()
    cache.extend([0] * num, rows=num)
    seconds = perf_counter() - began
    cache.rollback(0)
    return seconds
