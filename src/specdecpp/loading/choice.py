"""The choice of a pair's backends: by name, or the first kind that can run both models, with one thread or all of torch's.

    two models -> kinds in the order of their speed -> numbers of threads, timed by real steps -> Chosen, with its reason

The order is that of all measurements so far (`benchmarks/results`): a step takes `lean` 12 times as long as `native` on two
cores, and 7 times as long as `graphs` on a GPU. On a quiet machine all threads are faster, on a busy one they wait for those
that were sent away. The figures are remembered, so a pair that is loaded again is run as before and its answers stay the same.
"""

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple

import torch

from specdecpp import cache_dir
from specdecpp.backends import Model
from specdecpp.backends.engines import BACKENDS, engine_for
from specdecpp.drafters import SuffixDrafter
from specdecpp.errors import BackendError
from specdecpp.loading.checks import code
from specdecpp.loading.gguf import is_gguf
from specdecpp.loading.models import ModelSource
from specdecpp.policies import Fixed
from specdecpp.policies.protocol import decide
from specdecpp.sampling import Sampling, streams
from specdecpp.step import Plan, Request
from specdecpp.verify import TokenVerification

BUDGET_S = 1.8
"""Seconds after which no further turn begins."""
CANDIDATES, TURN, TURNS = 4, 4, 8
METHOD = 15
LONG_S = 1.0
"""A first step of a turn that takes longer says enough; a shorter one may have been spent on beginning."""
log = logging.getLogger("specdecpp.loading")
_THREADED = {"native", "native-int8", "llama.cpp"}  # with threads of their own; the others have torch's


class Chosen(NamedTuple):
    """The backends of a pair, and why it has these."""

    target: Model
    draft: Model | SuffixDrafter
    reason: str


@dataclass(frozen=True)
class BackendOption:
    """A way to run a target, and a draft where there is one: the kind of backend of each, and how many ids are scored."""

    models: tuple[ModelSource, ...]
    kinds: tuple[str, ...]
    vocab_size: int

    @property
    def name(self) -> str:
        target, draft = self.kinds[0], self.kinds[-1]
        return target if target == draft else f"{target} with {draft} for the draft"

    def check(self, *, is_order: bool) -> None:
        """Raise `BackendError` where a kind cannot run its model, or copies more weights than there is room for."""
        for model, kind in zip(self.models, self.kinds, strict=True):
            if reason := model.refusal(kind):
                raise BackendError(reason)
        copy = sum(model.copied_bytes(kind) for model, kind in zip(self.models, self.kinds, strict=True))
        free = cache_dir.free_bytes()
        if free is not None and copy > free and not is_order:
            raise BackendError(
                f"its copy of the weights takes {copy / 1e9:.1f} GB, and {free / 1e9:.1f} are free (ask for it by name)"
            )

    def backends(self, num_threads: int) -> tuple[Model, Model | SuffixDrafter]:
        """The backends of target and draft. Raises `BackendError`."""
        target, *drafts = (
            model.backend(kind, vocab_size=self.vocab_size, num_threads=num_threads)
            for model, kind in zip(self.models, self.kinds, strict=True)
        )
        return target, drafts[0] if drafts else SuffixDrafter(self.vocab_size, device=target.device)


def choose(target: ModelSource, draft: ModelSource | None, *, vocab_size: int, kinds: Collection[str] | None = None) -> Chosen:
    """The first of `kinds` that can run the models (None: all, the likely fast ones first), in its fastest form.

    Raises `BackendError` where none can, ValueError for a kind that does not exist.
    """
    if unknown := [kind for kind in kinds or () if kind not in BACKENDS]:
        raise ValueError(f"there is no backend {unknown[0]!r}. Backends: {', '.join(BACKENDS)}.")
    is_order = kinds is not None and len(kinds) == 1
    models = (target,) if draft is None else (target, draft)
    refused: dict[str, None] = {}
    for kind in kinds or [kind for kind, backend in BACKENDS.items() if backend.is_chosen]:
        own = tuple(_kind(model, kind, is_order=is_order, is_draft=model is draft) for model in models)
        option = BackendOption(models, own, vocab_size)
        try:
            option.check(is_order=is_order)
            num_threads, figures = _fastest(option)
            why = "as asked" if is_order else f"not others: {'; '.join(refused)}" if refused else "the first choice"
            return Chosen(*option.backends(num_threads), f"{figures} ({why})")
        except BackendError as error:
            refused[f"{option.name}: {str(error).rstrip('.')}"] = None
    beside = "" if draft is None else f" with {draft.name}"
    raise BackendError(f"no backend can run {target.name}{beside}: {'; '.join(refused)}.")


def _kind(model: ModelSource, kind: str, *, is_order: bool, is_draft: bool) -> str:
    """The kind of backend that a model gets where the pair gets `kind`."""
    if is_gguf(model.name) and not is_order and model.refusal("eager"):
        return "llama.cpp"  # of an architecture that nothing else knows
    if kind == "native-int8" and is_draft and model.refusal(kind):
        return "native"  # a draft without quantised weights is run with its exact ones
    return "eager" if kind == "lean" and not is_order and model.refusal("lean") else kind


def _fastest(option: BackendOption) -> tuple[int, str]:
    """The number of threads with the fastest steps, from memory or measured, and the option's name with the figures."""
    most = torch.get_num_threads()
    if not _THREADED & {*option.kinds} or most == 1:
        return 1, option.name
    facts = {
        "method": METHOD,
        "models": [model.identity for model in option.models],
        "kinds": option.kinds,
        "code": code(),
        **cache_dir.about(),
    }
    try:
        found = (cache_dir.recall("threads", facts) or {})["step_s"]
        seconds = {num: float(found[str(num)]) for num in (1, most)}
    except (KeyError, TypeError, ValueError):
        seconds = _measured(facts, option)
    best, other = sorted(seconds, key=seconds.__getitem__)
    return best, (
        f"{option.name}, {_named(best)}: {1e3 * seconds[best]:.1f} ms a step of {CANDIDATES} draft tokens here; "
        f"{_named(other)} {1e3 * seconds[other]:.1f}"
    )


def _named(num_threads: int) -> str:
    return "1 thread" if num_threads == 1 else f"{num_threads} threads"


def _measured(facts: dict[str, Any], option: BackendOption) -> dict[int, float]:
    """Seconds of a step with one thread and with all, in turns of several steps. They are kept for good where all are faster,
    as they are unless others are at work on the machine."""
    most, times = torch.get_num_threads(), {}
    trials: dict[int, Iterator[float]] = {}
    for num in (1, most):
        log.info("trying %s, %s", option.name, _named(num))
        trials[num] = _steps(option, num)
        times[num] = _turn(trials[num], 2)
    began = perf_counter()  # the weights have been read
    for _ in range(TURNS):
        if perf_counter() - began > BUDGET_S:
            break
        for num, trial in trials.items():
            times[num] += _turn(trial, TURN)
    seconds = {num: sorted(found)[len(found) // 4] for num, found in times.items()}  # a busy machine adds to some
    is_steady = cache_dir.is_steady(times.values()) and seconds[most] < seconds[1]
    cache_dir.remember("threads", facts, {"step_s": seconds}, is_steady=is_steady)
    return seconds


def _turn(steps: Iterator[float], num: int) -> list[float]:
    """Seconds of so many steps but for the first, which finds the caches as others left them; of that where it is long."""
    first = next(steps)
    return [first] if first > LONG_S else list(islice(steps, num - 1))


def _steps(option: BackendOption, num_threads: int) -> Iterator[float]:
    """Seconds of one step after another of a fixed length, as they are decoded behind one token."""
    target, draft = option.backends(num_threads)
    caches = target.new_cache(), draft.new_cache()
    room = min((m for m in (target.max_length, draft.max_length) if m is not None), default=CANDIDATES + 2)
    num = max(0, min(CANDIDATES, room - 2))
    request = Request(
        target=caches[0],
        draft=caches[1],
        policy=Fixed(k=num),
        verification=TokenVerification(),
        sampling=Sampling(),
        randomness=streams(0),
    )
    engine = engine_for(request)
    while True:
        began = perf_counter()
        engine.run([Plan(request, [0], decide(request.policy, None, None, num))])
        for cache in caches:
            cache.rollback(0)
        yield perf_counter() - began
