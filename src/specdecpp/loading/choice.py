"""The choice of a pair's backends: by name, or the first kind that can run both models, with the threads that are fastest here.

    two models -> kinds in the order of their speed -> threads, timed by real steps -> Chosen, with its reason

The order is that of all measurements so far (`benchmarks/results`): a step takes `lean` 12 times as long as `native` on two
cores, and 7 times as long as `graphs` on a GPU. Figures of threads are remembered, so a pair that is loaded again is run as
before and its answers stay the same.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from specdecpp import cache_dir
from specdecpp.backends import Model
from specdecpp.backends.engines import engine_for
from specdecpp.drafters import SuffixDrafter
from specdecpp.errors import BackendError
from specdecpp.loading.checks import code
from specdecpp.loading.gguf import is_gguf
from specdecpp.loading.models import BY_NAME, KINDS, ModelSource
from specdecpp.policies import Fixed
from specdecpp.policies.protocol import decide
from specdecpp.sampling import Sampling, streams
from specdecpp.step import Plan, Request
from specdecpp.verify import TokenVerification

BUDGET_S = 1.8
"""Seconds for all numbers of threads together, once each has had two steps."""
CANDIDATES, CONTEXT, TURN, CYCLES = 4, 64, 4, 8
METHOD = 12
CLOSE = 1.5
"""Threads with which a step takes so many times as long as with others get no more steps, from the third turn on."""
QUICKER, LOOK = 1.3, 3
"""Kept figures are those of a busy machine where the threads that they chose are quicker by this factor in a turn of so many
steps when the pair is loaded again. Then all are measured again."""
LONG_S = 1.0
"""A first step of a turn that takes longer says enough; a shorter one may have been spent on beginning."""
CROWDED = 2.0
"""More threads take this many times as long as fewer only where others are at work on the machine, and threads wait for those
that were sent away."""
log = logging.getLogger("specdecpp.loading")
_THREADED = {"native", "native-int8", "llama.cpp"}  # with threads of their own; the others have torch's
Threads = tuple[int, int]
"""Numbers of threads of the target and the draft."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The backends of a pair, empty, and why it has these."""

    target: Model
    draft: Model | SuffixDrafter
    reason: str


@dataclass(frozen=True, kw_only=True)
class BackendOption:
    """A way to run a pair: its models, the kinds of their backends, and how many ids are scored."""

    target: ModelSource
    draft: ModelSource | None
    kinds: tuple[str, str]
    vocab_size: int

    @property
    def name(self) -> str:
        target, draft = self.kinds
        return target if target == draft else f"{target} with {draft} for the draft"

    def named(self, threads: Threads) -> str:
        """The name with the threads, where they are its own."""
        p, q = threads
        if not _THREADED & {*self.kinds}:
            return self.name
        return f"{self.name} ({p} thread{'s' * (p > 1)})" if p == q else f"{self.name} ({p} threads, {q} for the draft)"

    @property
    def threads(self) -> list[Threads]:
        """Threads to choose from, the same where there is no draft; where torch runs a model its own setting counts."""
        most = torch.get_num_threads()
        p, q = (sorted({1, most}) if kind in _THREADED else [1] for kind in self.kinds)
        if self.draft is None:
            return [(m, m) for m in p]
        return [(m, n) for m in p for n in q if self.kinds[0] != self.kinds[1] or n <= m]

    def backends(self, threads: Threads) -> dict[str, Any]:
        """The two backends by role, empty. Raises `BackendError`."""
        (p, q), (m, n) = self.kinds, threads
        target = self.target.backend(p, vocab_size=self.vocab_size, num_threads=m)
        if self.draft is None:
            return {"target": target, "draft": SuffixDrafter(self.vocab_size, device=target.device)}
        return {"target": target, "draft": self.draft.backend(q, vocab_size=self.vocab_size, num_threads=n)}


def choose(target: ModelSource, draft: ModelSource | None, *, vocab_size: int, kinds: Collection[str] | None = None) -> Chosen:
    """The first of `kinds` that can run the models (None: all, the likely fast ones first), in its fastest form.

    Raises `BackendError` where none can, ValueError for a kind that does not exist.
    """
    if unknown := [kind for kind in kinds or () if kind not in KINDS]:
        raise ValueError(f"there is no backend {unknown[0]!r}. Backends: {', '.join(KINDS)}.")
    is_order = kinds is not None and len(kinds) == 1
    refused: dict[str, None] = {}
    for kind in kinds or [kind for kind in KINDS if kind not in BY_NAME]:
        models = (target,) if draft is None else (target, draft)
        own = [_kind(model, kind, is_order=is_order, is_draft=model is draft) for model in models]
        option = BackendOption(target=target, draft=draft, kinds=(own[0], own[-1]), vocab_size=vocab_size)
        try:
            _check(list(zip(own, models, strict=True)), is_order=is_order)
            threads, reason = _fastest(option)
            why = "as asked" if is_order else f"not others: {'; '.join(refused)}" if refused else "the first choice"
            return Chosen(**option.backends(threads), reason=f"{reason} ({why})")
        except BackendError as error:
            refused[f"{option.name}: {str(error).rstrip('.')}"] = None
    beside = "" if draft is None else f" with {draft.name}"
    raise BackendError(f"no backend can run {target.name}{beside}: {'; '.join(refused)}.")


def _kind(model: ModelSource, kind: str, *, is_order: bool, is_draft: bool) -> str:
    """The kind of backend that a model gets where the pair gets `kind`."""
    if is_gguf(model.name) and not is_order and model.refusals["eager"]:
        return "llama.cpp"  # of an architecture that nothing else knows
    if kind == "native-int8" and is_draft and model.refusals[kind]:
        return "native"  # a draft without quantised weights is run with its exact ones
    return "eager" if kind == "lean" and not is_order and model.refusals["lean"] else kind


def _check(models: list[tuple[str, ModelSource]], *, is_order: bool) -> None:
    """Raise `BackendError` where these kinds cannot run the models, or copy more of their weights than there is room for."""
    for kind, model in models:
        if reason := model.refusals[kind]:
            raise BackendError(reason)
    copy, free = sum(model.copied_bytes(kind) for kind, model in models), cache_dir.free_bytes()
    if free is not None and copy > free and not is_order:
        raise BackendError(
            f"its copy of the weights takes {copy / 1e9:.1f} GB, and {free / 1e9:.1f} are free (ask for it by name)"
        )


# Threads


def _fastest(option: BackendOption) -> tuple[Threads, str]:
    """The threads with the fastest steps, from memory or measured, and the option's name with the figures."""
    several = option.threads
    if len(several) == 1:
        option.backends(several[0])
        return several[0], option.named(several[0])
    facts = {
        "method": METHOD,
        "models": [option.target.identity, None if option.draft is None else option.draft.identity],
        "kinds": option.kinds,
        "code": code(),
        **cache_dir.about(),
    }
    seconds = _kept(facts, option)
    if seconds is None:
        seconds = _measured_and_kept(facts, option)
    best, *others = sorted(seconds, key=seconds.__getitem__)
    figures = f"{option.named(best)}: {1e3 * seconds[best]:.1f} ms a step of {CANDIDATES} draft tokens here"
    return best, "; ".join([figures, *(f"{option.named(threads)} {1e3 * seconds[threads]:.1f}" for threads in others)])


def _kept(facts: dict[str, Any], option: BackendOption) -> dict[Threads, float] | None:
    """The figures that were remembered; None where there are none, or they are those of a busy machine."""
    try:
        found = (cache_dir.recall("threads", facts) or {})["step_s"]
        seconds = {threads: float(found[option.named(threads)]) for threads in option.threads}
    except (KeyError, TypeError, ValueError):
        return None
    best = min(seconds, key=seconds.__getitem__)
    return None if QUICKER * min(_Trial(**option.backends(best)).turn(LOOK)) < seconds[best] else seconds


def _measured_and_kept(facts: dict[str, Any], option: BackendOption) -> dict[Threads, float]:
    times = _measured(option)
    seconds = {threads: sorted(found)[len(found) // 4] for threads, found in times.items()}  # a busy machine adds to some
    is_steady = cache_dir.is_steady(times.values()) and not _is_crowded(seconds)
    figures = {option.named(threads): s for threads, s in seconds.items()}
    cache_dir.remember("threads", facts, {"step_s": figures}, is_steady=is_steady)
    return seconds


def _is_crowded(seconds: dict[Threads, float]) -> bool:
    """True where steps take far longer with more threads than with fewer."""
    return any(a > b and seconds[a] > CROWDED * seconds[b] for a in seconds for b in seconds)


def _measured(option: BackendOption) -> dict[Threads, list[float]]:
    """Seconds of steps with each number of threads, in turns of several steps, of which the first finds the caches as others
    left them; who falls behind takes no more turns."""
    trials: dict[Threads, _Trial] = {}
    for threads in option.threads:
        log.info("trying %s", option.named(threads))
        trials[threads] = _Trial(**option.backends(threads))
        trials[threads].read()
    times = {threads: trial.turn(2) for threads, trial in trials.items()}
    near, started = list(trials), perf_counter()
    for cycle in range(CYCLES):
        best = {threads: min(times[threads]) for threads in near}
        if cycle > 1:  # a first step may be slow by chance
            near = [threads for threads in near if best[threads] < CLOSE * min(best.values())]
        if len(near) == 1 or perf_counter() - started + TURN * sum(best[threads] for threads in near) > BUDGET_S:
            break
        for threads in near:
            times[threads] += trials[threads].turn(TURN)
    return times


class _Trial:
    """Steps of a fixed length as they are decoded, in an empty cache or after a short context."""

    def __init__(self, *, target: Model, draft: Model | SuffixDrafter):
        self._caches = target.new_cache(), draft.new_cache()
        room = min((m for m in (target.max_length, draft.max_length) if m is not None), default=CONTEXT + CANDIDATES + 1)
        self._num = max(0, min(CANDIDATES, room - 2))
        self._room, self._context = min(CONTEXT, room - self._num - 1), 0
        self._request = Request(
            target=self._caches[0],
            draft=self._caches[1],
            policy=Fixed(k=self._num),
            verification=TokenVerification(),
            sampling=Sampling(),
            randomness=streams(0),
        )
        self._engine = engine_for(self._request)

    def read(self) -> None:
        """Read the context, once."""
        self._context = self._room
        for cache in self._caches:
            cache.extend([0] * self._context, rows=1)

    def turn(self, num: int) -> list[float]:
        """Seconds of so many steps behind a first one, which finds the caches as others left them; of that where it is long."""
        first = self._step_s()
        return [first] if first > LONG_S else [self._step_s() for _ in range(num - 1)]

    def _step_s(self) -> float:
        began = perf_counter()
        decision = decide(self._request.policy, None, None, self._num)
        self._engine.run([Plan(self._request, [0] * (self._context + 1), decision)])
        for cache in self._caches:
            cache.rollback(self._context)
        return perf_counter() - began
