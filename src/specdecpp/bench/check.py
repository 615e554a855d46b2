"""The check of a pair: real steps on practice prompts for as long as one waits, and what follows from them at any moment.

    practice (every length in turns, then the default rule) -> sums by prompt -> acceptance by depth, seconds by length
      -> speed-ups over the target alone, in decoding and of whole answers, with intervals -> verdict and advice

    tokens a step: 1 + a_1 + a_1 a_2 + ..., a_d the acceptance at depth d      time of a step: by its length, linear between

The steps are bounded by time: a check ends when its seconds are over, when the interval of the best is tight, or when more
steps on these prompts would say little more. Intervals resample prompts (`replay.intervals`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from math import inf, isfinite
from random import Random
from time import perf_counter
from typing import Any

import numpy as np

from specdecpp import drift
from specdecpp.backends import ReadsBoth
from specdecpp.bench.questions import Questions
from specdecpp.bench.results import Interval
from specdecpp.bench.rows import MIN_PROMPTS
from specdecpp.bench.turns import FIRST, LENGTHS, Sums, Turns
from specdecpp.decoder import Decoder, run
from specdecpp.errors import DataError
from specdecpp.loading.pair import Pair
from specdecpp.policies import Costs, Fixed, Policy
from specdecpp.policies.head import heads
from specdecpp.policy_spec import label_of
from specdecpp.replay.intervals import of_few, resampled
from specdecpp.sampling import Sampling

LEAST_GAIN = 1.01
"""Over the target alone: a draft that brings less is not worth its memory."""
CHEAP = 0.05
"""Time of a draft step over that of a target pass, with a cheap draft."""
GOOD = 0.8
"""The acceptance of a draft that is good."""
WIDE = 5
"""Positions of the wider target pass that the report compares with a pass of one."""
TIGHT = 0.04
"""Half the width of the interval of the best, over its value, at which a check ends before its time."""
ENOUGH = 5
"""The practice answer to every prompt at whose beginning a check ends: further steps say little, prompts differ more."""
HARDLY = 0.05
"""Draft tokens for a token of the answer below which a rule is taken to leave it to the target."""
MOST = 20
"""Draft tokens a step that are considered on other machines."""
USUAL_S, QUICK_S = 60.0, 15.0
REQUESTS, REQUEST = 200, 64
"""Answers, and tokens of each, whose figures are kept, at most."""

Figure = Any
"""A number, or one for each resample."""
Tell = Callable[[str], None]
Pace = Callable[[Sums], Figure]
"""Time of a token, in passes of the target alone."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Limits and sampling of a check. Raises ValueError for what cannot be run."""

    seconds: float = USUAL_S
    max_tokens: int = 96
    """Tokens of the whole answers whose time is given."""
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 8:
            raise ValueError(f"a check needs answers of at least 8 tokens, got {self.max_tokens}")
        if not (isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"a check needs a time above 0, got {self.seconds / 60:g} minutes")


@dataclass(frozen=True, kw_only=True)
class Option:
    """A rule and its speed-ups over the target alone: of whole answers, prompts read by both models, and in decoding."""

    policy: Policy
    speedup: float
    interval: Interval | None
    decoding: float
    decoding_interval: Interval | None
    tokens_per_second: float
    """In decoding."""
    tokens_per_pass: float | None = None

    @property
    def label(self) -> str:
        return label_of(self.policy)


@dataclass(frozen=True, kw_only=True)
class Check:
    """Estimates at a moment. Speed-ups are over the target alone; intervals are 95 % over prompts, None with fewer than
    four prompts. The length that is best is chosen on the steps that its interval is from."""

    seen: Sums
    """By prompt, of those on which something was seen."""
    default: Policy
    trial: Trial
    elapsed_s: float
    num_prompts: int
    """Practice prompts there are."""
    read_along: float = 0.0
    backends: str = ""
    """How forward passes are run, and why so."""
    is_interrupted: bool = False

    @property
    def num_seen(self) -> int:
        return len(self.seen.default)

    @cached_property
    def total(self) -> Sums:
        return self.seen.weighted(np.ones(self.num_seen))

    @cached_property
    def _draws(self) -> Sums | None:
        """The sums of prompts drawn anew, many times; None where there are too few to say anything about their spread. Where a
        draw lacks a length or a depth, those of all prompts, whose weight is else negligible, stand in for it."""
        if self.num_seen < MIN_PROMPTS:
            return None
        return self.seen.weighted(resampled(np.eye(self.num_seen), seed=self.trial.seed) + 1e-9)

    @property
    def longest(self) -> int:
        """The longest length that was timed."""
        return max(k for k, (num, *_) in zip(LENGTHS, self.total.lengths, strict=True) if num)

    @cached_property
    def costs(self) -> Costs:
        """Costs of steps; the start of a step is part of its draft tokens."""
        alone_s = float(alone(self.total))
        timed = {k: parts(self.total, i) for i, k in enumerate(LENGTHS) if k and self.total.lengths[i, 0]}
        draft = sum(part[0] for part in timed.values()) / sum(timed)
        passes = {1: alone_s} | {k + 1: float(part[1]) * alone_s for k, part in timed.items()}
        return Costs(draft_s=float(draft) * alone_s, passes=passes)

    @property
    def c(self) -> float:
        return self.costs.draft_s / self.costs.verify_s(1)

    @property
    def width(self) -> float:
        """A pass over a few positions, over that of one."""
        return self.costs.verify_s(WIDE) / self.costs.verify_s(1)

    @property
    def acceptance(self) -> float:
        """The chance that a draft token is accepted where those before it were: the mean over what was tested."""
        tested, accepted = self.total.depths.sum(0)
        return float(accepted / tested)

    @property
    def by_depth(self) -> list[float]:
        """Acceptance of the first, second, ... draft token, as far as enough were tested."""
        return [float(accepted / tested) for tested, accepted in self.total.depths if tested >= 10]

    @cached_property
    def lengths(self) -> tuple[Option, ...]:
        """Every fixed length up to the longest that was timed."""
        return tuple(
            self._option(Fixed(k=k), lambda sums, k=k: step_of(sums, k) / tokens_of(sums, k), float(tokens_of(self.total, k)))
            for k in range(1, self.longest + 1)
        )

    @cached_property
    def own(self) -> Option | None:
        """The default rule, by the clock; None before it had its turn on enough prompts."""
        if (self.seen.default[:, 0] > 0).sum() < min(MIN_PROMPTS, self.num_prompts):
            return None
        return self._option(self.default, lambda sums: ratio(sums.default[..., 2], sums.default[..., 0]))

    @cached_property
    def best(self) -> Option:
        """The one whose whole answers are surely fastest: whose interval begins highest, for the most uncertain one is often
        highest by chance. Not the default rule where it hardly drafts, which leaves all to the target."""
        num_tokens, num_drafted, *_ = self.total.default
        own = [self.own] if self.own and num_drafted > HARDLY * num_tokens else []
        return max((*self.lengths, *own), key=lambda option: option.interval[0] if option.interval else option.speedup)

    @property
    def is_worth(self) -> bool | None:
        """True: the whole interval of the best lies above 1; False: below `LEAST_GAIN`. None: too close, or too few prompts."""
        if self.best.interval is None:
            return None
        low, high = self.best.interval
        return False if high < LEAST_GAIN else True if low > 1 else None

    @property
    def is_tight(self) -> bool:
        low, high = self.best.interval or (0.0, inf)
        return (high - low) / 2 <= TIGHT * self.best.speedup

    @property
    def what_if(self) -> dict[str, float]:
        """The best speed-up in decoding on machines that lack one fault: `draft` with a cheap one, `verification` with one that
        is flat, `acceptance` with a good one, `head` with one that takes no time for the default rule."""
        single, depths = self.costs.verify_s(1), self.by_depth or [self.acceptance]
        found = {"verification": best_speedup(replace(self.costs, passes={1: single}), depths)}
        if self.costs.draft_s > CHEAP * single:
            found["draft"] = best_speedup(replace(self.costs, draft_s=CHEAP * single), depths)
        if self.acceptance < GOOD:
            found["acceptance"] = best_speedup(self.costs, [GOOD])
        tokens, _, passes, head = self.total.default
        if head and heads(self.default):
            found["head"] = float(tokens / (passes - head))
        return found

    def _option(self, policy: Policy, pace: Pace, tokens_per_pass: float | None = None) -> Option:
        def speedup(sums: Sums) -> Figure:
            """Whole answers: of what drafting adds to the reading, a share `read_along` is done in the target's passes."""
            target, draft = (ratio(sums.reading[..., i, 1], sums.reading[..., i, 0]) / alone(sums) for i in (0, 1))
            num = self.trial.max_tokens
            return (target + num) / (target + (1 - self.read_along) * draft + num * pace(sums))

        decoding = float(1 / pace(self.total))
        return Option(
            policy=policy,
            speedup=float(speedup(self.total)),
            interval=self._interval(speedup),
            decoding=decoding,
            decoding_interval=self._interval(lambda sums: 1 / pace(sums)),
            tokens_per_second=decoding / self.costs.verify_s(1),
            tokens_per_pass=tokens_per_pass,
        )

    def _interval(self, figure: Pace) -> Interval | None:
        if self._draws is None:
            return None
        return of_few(figure(self._draws), float(figure(self.total)), self.num_seen)


def parts(sums: Sums, i: int) -> tuple[Figure, Figure]:
    """Time of drafting and of the pass of a measured length, in passes of the target alone; of length 0 (1, its seconds)."""
    num = sums.lengths[..., i, 0]
    return np.exp(ratio(sums.lengths[..., i, 1], num)), np.exp(ratio(sums.lengths[..., i, 2], num))


def alone(sums: Sums) -> Figure:
    """Seconds of a token of the target alone."""
    return parts(sums, 0)[1]


def step_of(sums: Sums, k: int) -> Figure:
    """Time of a step with k draft tokens, linear between the lengths that were timed."""
    known = {0: 1.0} | {n: sum(parts(sums, i)) for i, n in enumerate(LENGTHS) if n and np.any(sums.lengths[..., i, 0])}
    below, above = max(n for n in known if n <= k), min(n for n in known if n >= k)
    share = (k - below) / max(1, above - below)
    return (1 - share) * known[below] + share * known[above]


def tokens_of(sums: Sums, k: int) -> Figure:
    """Tokens of a step with k draft tokens. A depth that was never tested takes after the one before it."""
    tokens, survival, acceptance = 1.0, 1.0, 0.0
    for depth in range(k):
        tested, accepted = sums.depths[..., depth, 0], sums.depths[..., depth, 1]
        acceptance = ratio(accepted, tested) if np.any(tested) else acceptance
        survival = survival * acceptance
        tokens = tokens + survival
    return tokens


def ratio(top: Figure, bottom: Figure) -> Figure:
    """top / bottom, 0 where both are 0."""
    return top / np.maximum(bottom, 1e-300)


def best_speedup(costs: Costs, depths: Sequence[float]) -> float:
    """The speed-up in decoding of the best fixed length at other costs; what lies deeper is accepted as the last depth."""
    acceptance = np.array([*depths, *[depths[-1]] * MOST][:MOST])
    tokens = 1 + np.cumsum(np.cumprod(acceptance))
    return float(max(1.0, *(tokens[k - 1] / costs.step_s(k) * costs.verify_s(1) for k in range(1, MOST + 1))))


def check(
    pair: Pair,
    sets: Sequence[Questions],
    trial: Trial,
    *,
    tell: Callable[[Check], None] = lambda found: None,
    may_interrupt: bool = False,
) -> Check:
    """Measure a pair on all prompts, of both sides, until the time is over or more would say little. `tell` gets what is known
    after every visit to a prompt; `may_interrupt`: an interrupt ends the check with what is known until then.

    Raises `DataError` where nothing could be timed in that time.
    """
    sides = zip_longest(*((*questions.test, *questions.dev) for questions in sets))
    prompts = [ids for turn in sides for ids in turn if ids is not None]
    turns = Turns(pair, prompts, trial.sampling, max_tokens=trial.max_tokens, seed=trial.seed)
    began = perf_counter()

    def found(*, is_interrupted: bool = False) -> Check | None:
        """None as long as the target alone and one length have not both been timed."""
        stints = turns.sums.lengths[..., 0]
        if not (stints[:, 0].any() and stints[:, 1:].any()):
            return None
        return Check(
            seen=turns.sums.of(np.flatnonzero(stints.any(1)).tolist()),
            default=turns.default.policy,
            trial=trial,
            elapsed_s=perf_counter() - began,
            num_prompts=len(prompts),
            read_along=pair.target.share_of(pair.draft) if isinstance(pair.target, ReadsBoth) else 0.0,
            backends=pair.backends,
            is_interrupted=is_interrupted,
        )

    def longest() -> int:
        """Twice the length that pays best until now."""
        now = found()
        return max(1, 2 * max(now.lengths, key=lambda option: option.decoding).policy.max_tokens) if now else FIRST

    is_interrupted = False
    try:
        for _ in turns.run(until=began + trial.seconds, longest=longest):
            if now := found():
                tell(now)
                if now.own and (now.is_tight or min(turns.num_answers) >= ENOUGH):
                    break
    except KeyboardInterrupt:
        is_interrupted = True
    end = found(is_interrupted=is_interrupted)
    if is_interrupted and not (end and may_interrupt):
        raise KeyboardInterrupt
    if end is None:
        raise DataError(
            f"no length could be timed within {trial.seconds:g} s, so nothing is known of this pair. Give it more time "
            "(--minutes), or shorter prompts."
        )
    return end


def keep_figures(pair: Pair, prompts: Sequence[Sequence[int]], trial: Trial, *, tell: Tell = lambda line: None) -> Any:
    """Answer prompts by the default rule, for as long as the check at most, and keep the figures of the answers, so that it is
    noticed when acceptance falls (`drift`). What is kept; None of a pair that has no fingerprints, and of too few answers."""
    if not pair.is_identified:
        return None
    decoder, found = Decoder(pair), list[drift.Figures]()
    until, most = perf_counter() + trial.seconds, min(REQUEST, trial.max_tokens)
    for ids in Random(trial.seed).sample(prompts, min(len(prompts), REQUESTS)):
        session = decoder.start(ids, max_tokens=most, sampling=trial.sampling)
        session.tally = None
        if figures := drift.figures(run(session)):
            found.append(figures)
        tell(f"{len(found)} answers")
        if perf_counter() > until:
            break
    return drift.keep(pair, drift.text_of(decoder.memory.way(trial.sampling)), found) if len(found) >= drift.LEAST else None
