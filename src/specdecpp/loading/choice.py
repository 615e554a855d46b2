"""Which runners a pair gets: by name, or whatever decodes fastest here.

    two models -> options that can run them -> real rounds of each, timed -> Chosen, with its reason

Without a draft model the rounds are of candidates copied from the text.

The figures are remembered, so a pair that is loaded again is run as before and its answers stay the same.
"""

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Any

import torch

from specdecpp import machine
from specdecpp.drafters import SuffixDrafter
from specdecpp.errors import RunnerError
from specdecpp.loading.checks import code
from specdecpp.loading.gguf import is_gguf
from specdecpp.loading.models import BY_NAME, KINDS, Model
from specdecpp.policies import Fixed
from specdecpp.policies.protocol import decide
from specdecpp.rounds import engine_for
from specdecpp.runners import Runner
from specdecpp.sampling import Sampling, streams
from specdecpp.step import Plan, Request
from specdecpp.verify import TokenVerification

BUDGET_S = 1.8
"""For all options together, once each has had two rounds."""
CANDIDATES, CONTEXT, TURN, CYCLES = 4, 64, 4, 8
COPIED_BYTES = 2**28
"""The largest pair that is written as GGUF unasked, to see whether llama.cpp is faster."""
METHOD = 10
FAR, CLOSE = 4.0, 1.5
"""How much slower than the fastest an option may be in its first rounds and have more of them, and how much in its first two
turns: the rest cannot catch up."""
QUICKER, LOOK, OFTEN = 1.3, 3, 3
"""Kept figures are those of a busy machine where the option that they chose is quicker by this factor in a turn of so many
rounds when the pair is loaded again. Then all are measured again, until they were measured three times."""
LONG_S = 1.0
"""A first round that takes longer says enough; a shorter one may have been spent on beginning."""
CROWDED = 2.0
"""Times as long with more threads as with fewer that only a machine at other work takes."""
log = logging.getLogger("specdecpp.loading")
_THREADED = {"native", "native-int8", "llama.cpp"}  # with threads of their own; the others have torch's


@dataclass(frozen=True, kw_only=True)
class Option:
    """A way to run a pair: a kind of runner for each model, and the threads of those that have their own."""

    kinds: tuple[str, str]
    threads: tuple[int, int] = (1, 1)

    @property
    def name(self) -> str:
        target, draft = self.kinds
        name = target if target == draft else f"{target} with {draft} for the draft"
        if not _THREADED & {*self.kinds}:
            return name
        p, q = self.threads
        return f"{name} ({p} thread{'s' * (p > 1)})" if p == q else f"{name} ({p} threads, {q} for the draft)"


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The runners of a pair, empty, and why it has these."""

    target: Runner
    draft: Runner | SuffixDrafter
    reason: str


def choose(target: Model, draft: Model | None, *, vocab_size: int, kinds: Collection[str] | None = None) -> Chosen:
    """The fastest of the options, `kinds` being those to choose from (None: all that can run them).

    A single kind must be possible; of several those that cannot run the models are left out. Raises
    `RunnerError` where none can, ValueError for a kind that does not exist.
    """
    options, refused = _options(target, draft, kinds)
    if not options:
        beside = "" if draft is None else f" with {draft.name}"
        raise RunnerError(f"no runner can run {target.name}{beside}: {'; '.join(refused)}.")
    if len(options) == 1:
        (only,) = options
        why = "as asked" if kinds and len(kinds) == 1 else f"not others: {'; '.join(refused)}" if refused else "the only one"
        return Chosen(**_runners(target, draft, only, vocab_size), reason=f"{only.name} ({why})")
    of = {
        "method": METHOD,
        "models": [target.identity, None if draft is None else draft.identity],
        "options": [option.name for option in options],
        "code": code(),
        **machine.about(),
    }
    kept = machine.recall("runners", of)
    found = _found(kept, options)
    seconds, failed = found or _kept(of, target, draft, options, vocab_size)
    best, runners, failed = _best(target, draft, seconds, failed, vocab_size)
    if kept and found and _num_measured(kept) < OFTEN and _is_quicker(best, runners, seconds[best]):
        seconds, failed = _kept(of, target, draft, options, vocab_size)
        best, runners, failed = _best(target, draft, seconds, failed, vocab_size)
    return Chosen(**runners, reason=_reason(best, seconds, failed, refused))


def _kept(
    of: dict[str, Any], target: Model, draft: Model | None, options: list[Option], vocab_size: int
) -> tuple[dict[Option, float], dict[str, str]]:
    """Seconds of a round of each option and why others fail, measured and kept with their spread. Where they were measured
    before, the lesser figure of each stands: a busy machine adds to rounds, and takes from none."""
    kept = machine.recall("runners", of, is_stale=True)
    before, _ = _found(kept, options) or ({}, {})
    times, failed = _measured(target, draft, options, vocab_size)
    seconds = {option: min(_typical(found), before.get(option, inf)) for option, found in times.items()}
    told = {"round_s": {option.name: s for option, s in seconds.items()}, "failed": failed}
    told["spread"] = {option.name: machine.spread([found]) for option, found in times.items()}
    told["num_measured"] = _num_measured(kept) + 1
    is_steady = machine.is_steady(times.values()) and not _is_crowded(seconds)
    machine.remember("runners", of, told, is_steady=is_steady)
    return seconds, failed


def _num_measured(kept: dict[str, Any] | None) -> int:
    """How often these figures have been measured."""
    num = (kept or {}).get("num_measured", 0)
    return num if isinstance(num, int) else 0


def _best(
    target: Model, draft: Model | None, seconds: dict[Option, float], failed: dict[str, str], vocab_size: int
) -> tuple[Option, dict[str, Any], dict[str, str]]:
    """The fastest option that can be made, with its runners; and why others fail."""
    for best in sorted(seconds, key=lambda option: seconds[option]):
        try:
            return best, _runners(target, draft, best, vocab_size), failed
        except RunnerError as error:  # it was fine when it was measured
            failed = {**failed, best.name: str(error)}
    raise RunnerError(_listed("no runner works", failed))


def _is_quicker(option: Option, runners: dict[str, Any], kept_s: float) -> bool:
    """Whether rounds take far less than was kept. Of options with threads of their own: those a busy machine gets wrong."""
    return bool(_THREADED & {*option.kinds}) and QUICKER * min(_Trial(**runners).turn(LOOK)) < kept_s


def _is_crowded(seconds: dict[Option, float]) -> bool:
    """Whether one and the same kind takes far longer with more threads than with fewer: others are at work on the machine, and
    threads wait for those that were sent away."""
    return any(
        a.kinds == b.kinds and a.threads > b.threads and seconds[a] > CROWDED * seconds[b] for a in seconds for b in seconds
    )


def _reason(best: Option, seconds: dict[Option, float], failed: dict[str, str], refused: list[str]) -> str:
    """What was measured, what failed, and what was not tried."""
    others = [option for option in sorted(seconds, key=lambda option: seconds[option]) if option != best]
    told = ", ".join(f"{option.name} {1e3 * seconds[option]:.1f}" for option in others if option.name not in failed)
    reason = f"{best.name}: {1e3 * seconds[best]:.1f} ms a round of {CANDIDATES} candidates here{told and '; '}{told}"
    if failed:
        reason += f". {_listed('Failed', failed)}"
    return f"{reason}. {_listed('Not tried', dict(told.split(': ', 1) for told in refused))}." if refused else reason


def _listed(what: str, failed: dict[str, str]) -> str:
    """Each reason once, with all that it stands against."""
    names: dict[str, list[str]] = {}
    for name, reason in failed.items():
        names.setdefault(reason.rstrip("."), []).append(name)
    return f"{what}: " + "; ".join(f"{', '.join(those)}: {reason}" for reason, those in names.items())


def _options(target: Model, draft: Model | None, kinds: Collection[str] | None) -> tuple[list[Option], list[str]]:
    """What can run the models, and what stands against the rest."""
    if unknown := [kind for kind in kinds or () if kind not in KINDS]:
        raise ValueError(f"there is no runner {unknown[0]!r}. Runners: {', '.join(KINDS)}.")
    models = (target,) if draft is None else (target, draft)
    options: dict[Option, None] = {}
    refused: list[str] = []
    free, copied = machine.free_bytes(), 0
    is_order = kinds is not None and len(kinds) == 1
    for kind in sorted(kinds or {*KINDS} - {*BY_NAME}, key=KINDS.index):  # the likely fast ones first
        own = [_kind(model, kind, is_order=is_order, is_draft=model is draft) for model in models]
        refusals = ((k, model.refusals[k]) for model, k in zip(models, own, strict=True))
        reasons = [f"{k}: {reason}" for k, reason in refusals if reason]
        is_copied = kind == "llama.cpp" and not all(is_gguf(model.name) for model in models)
        written = [m.name for m, k in zip(models, own, strict=True) if is_gguf(m.name) and k in ("lean", "eager")]
        if written and kinds is None and any(option.kinds[0] == "native" for option in options):
            reasons.append(f"{kind}: it would write out the weights of {written[0]} (ask for it by name)")
        if is_copied and kinds is None and sum(model.num_bytes for model in models) > COPIED_BYTES:
            reasons.append("llama.cpp: the weights are large, and it would need a copy of them (ask for it by name)")
        copy = 0 if reasons else sum(model.copied_bytes(k) for model, k in zip(models, own, strict=True))
        if copy and free is not None and not is_order and copied + copy > free:
            needs = f"its copy of the weights takes {copy / 1e9:.1f} GB, and {max(0, free - copied) / 1e9:.1f} are free"
            reasons.append(f"{kind}: {needs} (ask for it by name)")
        if reasons:
            refused += [reasons[0]] if reasons[0] not in refused else []
            continue
        copied += copy
        options |= {Option(kinds=(own[0], own[-1]), threads=threads): None for threads in _threads(own)}
    return list(options), refused


def _kind(model: Model, kind: str, *, is_order: bool, is_draft: bool) -> str:
    """The kind of runner that a model gets where the pair gets `kind`."""
    if is_gguf(model.name) and not is_order and model.refusals[kind]:
        return "llama.cpp"
    if kind == "native-int8" and is_draft and model.refusals[kind]:
        return "native"  # a draft without quantised weights is run with its exact ones
    return "eager" if kind == "lean" and not is_order and model.refusals["lean"] else kind


def _threads(kinds: list[str]) -> Iterator[tuple[int, int]]:
    """For the target and for the draft, the same where there is none; where torch runs a model its own setting counts."""
    most = torch.get_num_threads()
    p, q = ({1, most} if kind in _THREADED else {1} for kind in (kinds[0], kinds[-1]))
    if len(kinds) == 1:
        yield from ((m, m) for m in sorted(p))
    else:
        yield from ((m, n) for m in sorted(p) for n in sorted(q) if kinds[0] != kinds[1] or n <= m)


def _runners(
    target: Model, draft: Model | None, option: Option, vocab_size: int, *, is_checked: bool = True
) -> dict[str, Runner | SuffixDrafter]:
    (p, q), (m, n) = option.kinds, option.threads
    runner = target.runner(p, vocab_size=vocab_size, num_threads=m, is_checked=is_checked)
    if draft is None:
        return {"target": runner, "draft": SuffixDrafter(vocab_size, device=runner.device)}
    return {"target": runner, "draft": draft.runner(q, vocab_size=vocab_size, num_threads=n, is_checked=is_checked)}


def _found(told: dict[str, Any] | None, options: list[Option]) -> tuple[dict[Option, float], dict[str, str]] | None:
    """What was remembered: seconds of the options, and why others fail. None where it is not for these options."""
    try:
        known, failed = (told["round_s"], told["failed"]) if told else ({}, {})
        seconds = {option: float(known[option.name]) for option in options if option.name in known}
        reasons = {option.name: str(failed[option.name]) for option in options if option.name in failed}
        return (seconds, reasons) if seconds else None
    except (KeyError, TypeError, ValueError):
        return None


def _typical(seconds: list[float]) -> float:
    """A lower quartile, since a busy machine adds to some rounds and takes from none."""
    return sorted(seconds)[len(seconds) // 4]


def _measured(
    target: Model, draft: Model | None, options: list[Option], vocab_size: int
) -> tuple[dict[Option, list[float]], dict[str, str]]:
    """Seconds of rounds of each option, and why others fail.

    One after another they are looked at, and who is far behind is left out at once: its forwards may take seconds each, and a
    check takes many. The others then take turns of several rounds, of which the first finds the caches as another option left
    them: a short turn each, and those that are not far behind, later those that are close, then take more. One whose runner
    cannot be made is left out.
    """
    trials: dict[Option, _Trial] = {}
    times: dict[Option, list[float]] = {}
    failed: dict[str, str] = {}
    least = inf
    for option in options:
        log.info("trying %s", option.name)
        try:
            seen = _glanced(target, draft, option, vocab_size, FAR * least) if trials else inf
            if trials and seen > FAR * least:
                times[option] = [seen]
                continue
            trials[option] = trial = _Trial(**_runners(target, draft, option, vocab_size))
            least = min(least, seen) if len(trials) > 1 else trial.turn(2)[0]
        except RunnerError as error:  # it failed its check; another option may pass
            failed[option.name] = str(error)
    if not trials:
        raise RunnerError(_listed("no runner works", failed))
    least = inf
    for option, trial in trials.items():
        trial.read()
        times[option] = trial.turn(2, FAR * least)
        least = min(least, *times[option])
    near = [option for option in trials if min(times[option]) < FAR * least]
    is_slow = 2 * TURN * sum(sum(times[option]) for option in near) > BUDGET_S
    started = perf_counter()
    for cycle in range(1, 1 + CYCLES):
        if is_slow or cycle > 2:
            least = min(min(times[option]) for option in near)
            near = [option for option in near if min(times[option]) < CLOSE * least]
        spent_s, num = perf_counter() - started, 2 if is_slow else TURN
        if is_slow and (len(near) == 1 or spent_s + num * sum(min(times[option]) for option in near) > BUDGET_S):
            break
        for option in near:
            times[option] = (times[option] if cycle > 1 or is_slow else []) + trials[option].turn(num)
        if not is_slow and cycle > 1 and (1 + 1 / cycle) * (perf_counter() - started) > BUDGET_S:
            break  # another cycle would end too late
    return times, failed


def _glanced(target: Model, draft: Model | None, option: Option, vocab_size: int, enough_s: float) -> float:
    """Seconds of a round of runners that were not checked; 0 where they fail: the check that follows says why."""
    try:
        return _Trial(**_runners(target, draft, option, vocab_size, is_checked=False)).turn(2, enough_s)[0]
    except RunnerError:
        raise
    except Exception:
        return 0.0


class _Trial:
    """Rounds of a fixed length as they are decoded, in an empty cache or after a short context."""

    def __init__(self, *, target: Runner, draft: Runner | SuffixDrafter):
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
        """The context, once."""
        self._context = self._room
        for runner in (self._target, self._draft):
            runner.extend([0] * self._context, rows=1)

    def turn(self, num: int, enough_s: float = inf) -> list[float]:
        """Seconds of so many rounds but for the first, which finds the caches as another option left them.

        Of the first alone, where it takes long and more than is enough to know.
        """
        first = self._round_s()
        return [first] if first > max(enough_s, LONG_S) else [self._round_s() for _ in range(num - 1)]

    def _round_s(self) -> float:
        began = perf_counter()
        decision = decide(self._request.policy, None, None, self._num)
        self._engine.run([Plan(self._request, [0] * (self._context + 1), decision)])
        self._draft.rollback(self._context)
        self._target.rollback(self._context)
        return perf_counter() - began
