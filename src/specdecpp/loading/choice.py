"""The choice of a pair's backends: by name, or the ones that decode fastest here.

    two models -> options that can run them -> real steps of each, timed -> Chosen, with its reason

Without a draft model the steps are of draft tokens copied from the text.

The figures are remembered, so a pair that is loaded again is run as before and its answers stay the same.
"""

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import inf
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
"""Seconds for all options together, once each has had two steps."""
CANDIDATES, CONTEXT, TURN, CYCLES = 4, 64, 4, 8
METHOD = 11
FAR, CLOSE = 4.0, 1.5
"""An option this many times as slow as the fastest gets no more steps: in the first steps, and from the third turn on."""
QUICKER, LOOK = 1.3, 3
"""Kept figures are those of a busy machine where the option that they chose is quicker by this factor in a turn of so many
steps when the pair is loaded again. Then all are measured again."""
LONG_S = 1.0
"""A first step of a turn that takes longer says enough; a shorter one may have been spent on beginning."""
CROWDED = 2.0
"""More threads take this many times as long as fewer only where the machine is at other work."""
log = logging.getLogger("specdecpp.loading")
_THREADED = {"native", "native-int8", "llama.cpp"}  # with threads of their own; the others have torch's


@dataclass(frozen=True, kw_only=True)
class BackendOption:
    """A way to run a pair: a kind of backend for each model, and the threads of those that have their own."""

    kinds: tuple[str, str]
    threads: tuple[int, int] = (1, 1)

    @property
    def name(self) -> str:
        target, draft = self.kinds
        name = target if target == draft else f"{target} with {draft} for the draft"
        if not self.has_threads:
            return name
        p, q = self.threads
        return f"{name} ({p} thread{'s' * (p > 1)})" if p == q else f"{name} ({p} threads, {q} for the draft)"

    @property
    def has_threads(self) -> bool:
        return bool(_THREADED & {*self.kinds})


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The backends of a pair, empty, and why it has these."""

    target: Model
    draft: Model | SuffixDrafter
    reason: str


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of a step of each option, and the reasons of those that failed, by name."""

    seconds: dict[BackendOption, float]
    failed: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class _Models:
    """The models that backends are made for."""

    target: ModelSource
    draft: ModelSource | None
    vocab_size: int

    def backends(self, option: BackendOption, *, is_checked: bool = True) -> dict[str, Model | SuffixDrafter]:
        """The two backends of an option, empty. Raises `BackendError`."""
        (p, q), (m, n) = option.kinds, option.threads
        more: dict[str, Any] = {"vocab_size": self.vocab_size, "is_checked": is_checked}
        target = self.target.backend(p, num_threads=m, **more)
        if self.draft is None:
            return {"target": target, "draft": SuffixDrafter(self.vocab_size, device=target.device)}
        return {"target": target, "draft": self.draft.backend(q, num_threads=n, **more)}


def choose(target: ModelSource, draft: ModelSource | None, *, vocab_size: int, kinds: Collection[str] | None = None) -> Chosen:
    """The fastest of the options, `kinds` being those to choose from (None: all that can run them).

    A single kind must be possible; of several those that cannot run the models are left out. Raises
    `BackendError` where none can, ValueError for a kind that does not exist.
    """
    options, refused = _options(target, draft, kinds)
    if not options:
        beside = "" if draft is None else f" with {draft.name}"
        raise BackendError(f"no backend can run {target.name}{beside}: {'; '.join(refused)}.")
    models = _Models(target=target, draft=draft, vocab_size=vocab_size)
    if len(options) == 1:
        (only,) = options
        why = "as asked" if kinds and len(kinds) == 1 else f"not others: {'; '.join(refused)}" if refused else "the only one"
        return Chosen(**models.backends(only), reason=f"{only.name} ({why})")
    facts = {
        "method": METHOD,
        "models": [target.identity, None if draft is None else draft.identity],
        "options": [option.name for option in options],
        "code": code(),
        **cache_dir.about(),
    }
    kept = _kept(facts, options)
    best, backends, figures = _best(models, kept or _measured_and_kept(models, options, facts))
    if kept and best.has_threads and QUICKER * min(_Trial(**backends).turn(LOOK)) < kept.seconds[best]:
        best, backends, figures = _best(models, _measured_and_kept(models, options, facts))
    return Chosen(**backends, reason=_reason(best, figures, refused))


def _best(models: _Models, figures: StepTimes) -> tuple[BackendOption, dict[str, Any], StepTimes]:
    """The fastest option that can be made, with its backends, and the figures with what failed only now."""
    failed = dict(figures.failed)
    for best in sorted(figures.seconds, key=figures.seconds.__getitem__):
        try:
            return best, models.backends(best), StepTimes(seconds=figures.seconds, failed=failed)
        except BackendError as error:  # it was fine when it was measured
            failed[best.name] = str(error)
    raise BackendError(_listed("no backend works", failed))


def _kept(facts: dict[str, Any], options: list[BackendOption]) -> StepTimes | None:
    """The figures that were remembered for these options; None where there are none, or they cannot be read."""
    try:
        found = cache_dir.recall("runners", facts) or {}
        seconds = {option: float(found["round_s"][option.name]) for option in options if option.name in found["round_s"]}
        failed = {option.name: str(found["failed"][option.name]) for option in options if option.name in found["failed"]}
    except (KeyError, TypeError, ValueError):
        return None
    return StepTimes(seconds=seconds, failed=failed) if seconds else None


def _measured_and_kept(models: _Models, options: list[BackendOption], facts: dict[str, Any]) -> StepTimes:
    times, failed = _measured(models, options)
    seconds = {option: _typical(found) for option, found in times.items()}
    named = {"round_s": {option.name: s for option, s in seconds.items()}, "failed": failed}
    cache_dir.remember("runners", facts, named, is_steady=cache_dir.is_steady(times.values()) and not _is_crowded(seconds))
    return StepTimes(seconds=seconds, failed=failed)


def _is_crowded(seconds: dict[BackendOption, float]) -> bool:
    """True where one kind takes far longer with more threads than with fewer: others are at work on the machine, and threads
    wait for those that were sent away."""
    return any(
        a.kinds == b.kinds and a.threads > b.threads and seconds[a] > CROWDED * seconds[b] for a in seconds for b in seconds
    )


def _typical(seconds: list[float]) -> float:
    """A lower quartile, since a busy machine adds to some steps and takes from none."""
    return sorted(seconds)[len(seconds) // 4]


# Why


def _reason(best: BackendOption, figures: StepTimes, refused: list[str]) -> str:
    """A sentence of the best option's figure, the others', what failed and what was not tried."""
    seconds, failed = figures.seconds, figures.failed
    others = [option for option in sorted(seconds, key=seconds.__getitem__) if option != best and option.name not in failed]
    reason = f"{best.name}: {1e3 * seconds[best]:.1f} ms a step of {CANDIDATES} draft tokens here"
    if others:
        reason += f"; {', '.join(f'{option.name} {1e3 * seconds[option]:.1f}' for option in others)}"
    if failed:
        reason += f". {_listed('Failed', failed)}"
    return f"{reason}. {_listed('Not tried', dict(told.split(': ', 1) for told in refused))}." if refused else reason


def _listed(what: str, failed: dict[str, str]) -> str:
    """Each reason once, with all that it stands against."""
    names: dict[str, list[str]] = {}
    for name, reason in failed.items():
        names.setdefault(reason.rstrip("."), []).append(name)
    return f"{what}: " + "; ".join(f"{', '.join(those)}: {reason}" for reason, those in names.items())


# Options


def _options(
    target: ModelSource, draft: ModelSource | None, kinds: Collection[str] | None
) -> tuple[list[BackendOption], list[str]]:
    """The options that can run the models, and the reasons against the rest."""
    if unknown := [kind for kind in kinds or () if kind not in KINDS]:
        raise ValueError(f"there is no backend {unknown[0]!r}. Backends: {', '.join(KINDS)}.")
    models = (target,) if draft is None else (target, draft)
    options: dict[BackendOption, None] = {}
    refused: list[str] = []
    free, copied = cache_dir.free_bytes(), 0
    is_order = kinds is not None and len(kinds) == 1
    for kind in sorted(kinds or {*KINDS} - {*BY_NAME}, key=KINDS.index):  # the likely fast ones first
        own = [_kind(model, kind, is_order=is_order, is_draft=model is draft) for model in models]
        both = list(zip(models, own, strict=True))
        reasons = [f"{k}: {reason}" for model, k in both if (reason := model.refusals[k])]
        written = [model.name for model, k in both if is_gguf(model.name) and k in ("lean", "eager")]
        if written and kinds is None and any(option.kinds[0] == "native" for option in options):
            reasons.append(f"{kind}: it would write out the weights of {written[0]} (ask for it by name)")
        copy = 0 if reasons else sum(model.copied_bytes(k) for model, k in both)
        if copy and free is not None and not is_order and copied + copy > free:
            needs = f"its copy of the weights takes {copy / 1e9:.1f} GB, and {max(0, free - copied) / 1e9:.1f} are free"
            reasons.append(f"{kind}: {needs} (ask for it by name)")
        if reasons:
            refused += [reasons[0]] if reasons[0] not in refused else []
            continue
        copied += copy
        options |= {BackendOption(kinds=(own[0], own[-1]), threads=threads): None for threads in _threads(own)}
    return list(options), refused


def _kind(model: ModelSource, kind: str, *, is_order: bool, is_draft: bool) -> str:
    """The kind of backend that a model gets where the pair gets `kind`."""
    if is_gguf(model.name) and not is_order and model.refusals[kind]:
        return "llama.cpp"
    if kind == "native-int8" and is_draft and model.refusals[kind]:
        return "native"  # a draft without quantised weights is run with its exact ones
    return "eager" if kind == "lean" and not is_order and model.refusals["lean"] else kind


def _threads(kinds: list[str]) -> Iterator[tuple[int, int]]:
    """Threads for the target and for the draft, the same where there is none; where torch runs a model its own setting
    counts."""
    most = torch.get_num_threads()
    p, q = ({1, most} if kind in _THREADED else {1} for kind in (kinds[0], kinds[-1]))
    if len(kinds) == 1:
        yield from ((m, m) for m in sorted(p))
    else:
        yield from ((m, n) for m in sorted(p) for n in sorted(q) if kinds[0] != kinds[1] or n <= m)


# Steps, timed


def _measured(models: _Models, options: list[BackendOption]) -> tuple[dict[BackendOption, list[float]], dict[str, str]]:
    """Seconds of steps of each option, and the reasons of those that failed.

    One after another they are looked at, and who is far behind is left out at once: its forwards may take seconds each, and a
    check takes many. The others then take turns of several steps, of which the first finds the caches as another option left
    them; who falls behind takes no more turns.
    """
    trials: dict[BackendOption, _Trial] = {}
    times: dict[BackendOption, list[float]] = {}
    failed: dict[str, str] = {}
    least = inf
    for option in options:
        log.info("trying %s", option.name)
        try:
            seen = _glanced(models, option) if trials else 0.0
            if seen > FAR * least:
                times[option] = [seen]
                continue
            trials[option] = _Trial(**models.backends(option))
            least = min(least, seen or trials[option].turn(2)[0])
        except BackendError as error:  # it failed its check; another option may pass
            failed[option.name] = str(error)
    if not trials:
        raise BackendError(_listed("no backend works", failed))
    for option, trial in trials.items():
        trial.read()
        times[option] = trial.turn(2)
    near, started = list(trials), perf_counter()
    for cycle in range(CYCLES):
        best = {option: min(times[option]) for option in near}
        # A first step may be slow by chance, where steps are short.
        is_early = cycle < 2 and TURN * sum(best.values()) < BUDGET_S / CYCLES
        near = [option for option in near if best[option] < (FAR if is_early else CLOSE) * min(best.values())]
        turn_s = TURN * sum(best[option] for option in near)
        if len(near) == 1 or perf_counter() - started + turn_s > BUDGET_S:
            break
        for option in near:
            times[option] += trials[option].turn(TURN)
    return times, failed


def _glanced(models: _Models, option: BackendOption) -> float:
    """Seconds of a step of backends that were not checked; 0 where they fail: the check that follows says why."""
    try:
        return _Trial(**models.backends(option, is_checked=False)).turn(2)[0]
    except BackendError:
        raise
    except Exception:
        return 0.0


class _Trial:
    """Steps of a fixed length as they are decoded, in an empty cache or after a short context."""

    def __init__(self, *, target: Model, draft: Model | SuffixDrafter):
        self._target, self._draft = target.new_cache(), draft.new_cache()
        room = min((m for m in (target.max_length, draft.max_length) if m is not None), default=CONTEXT + CANDIDATES + 1)
        self._num = max(0, min(CANDIDATES, room - 2))
        self._room, self._context = min(CONTEXT, room - self._num - 1), 0
        self._request = Request(
            target=self._target,
            draft=self._draft,
            policy=Fixed(k=self._num),
            verification=TokenVerification(),
            sampling=Sampling(),
            randomness=streams(0),
        )
        self._engine = engine_for(self._request)

    def read(self) -> None:
        """Read the context, once."""
        self._context = self._room
        for backend in (self._target, self._draft):
            backend.extend([0] * self._context, rows=1)

    def turn(self, num: int) -> list[float]:
        """Seconds of so many steps but for the first, which finds the caches as another option left them; of the first alone
        where it is long."""
        first = self._round_s()
        return [first] if first > LONG_S else [self._round_s() for _ in range(num - 1)]

    def _round_s(self) -> float:
        began = perf_counter()
        decision = decide(self._request.policy, None, None, self._num)
        self._engine.run([Plan(self._request, [0] * (self._context + 1), decision)])
        self._draft.rollback(self._context)
        self._target.rollback(self._context)
        return perf_counter() - began
