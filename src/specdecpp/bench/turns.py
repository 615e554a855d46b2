"""Steps in turns on practice prompts: every length for a few steps, then the default rule for as long, prompt by prompt.

Every answer has the target's distribution whatever the lengths, so one answer serves all of them: acceptance is pooled over
the steps that reached a depth, and the time of a step is known by its length. A machine's speed drifts within a second, and
others use it too: the time of a stint is its median, in passes of the target alone of the same visit, and stints are averaged
as ratios are (geometrically). Nothing here is counted in tokens: a length has steps for `STINT_S`, whoever asks says when to
stop, and what was seen until then is in `Turns.sums`, prompt by prompt.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, log
from statistics import median
from time import perf_counter

import numpy as np
from jaxtyping import Float

from specdecpp.bench.rows import MIN_PROMPTS
from specdecpp.decoder import Decoder
from specdecpp.loading.pair import Pair
from specdecpp.policies import Fixed
from specdecpp.policies.protocol import NO_PAST, Given
from specdecpp.sampling import Sampling
from specdecpp.session import Session, Step

LENGTHS = (0, 1, 2, 4, 8, 16)
FIRST = 4
"""The longest length of the first visits; later ones go up to twice the length that pays best."""
STINT_S, LEAST, MOST = 0.02, 3, 24
"""How long a length has its turn, and how many steps at least and at most. The first half is not timed: it finds other things
in the caches of the processor than steps that follow others of their length."""
ANSWER = 96
"""Tokens of a practice answer, at least."""
OPENING = JOINING = 1 / 3
"""Shares of the time: in which further prompts are begun, once there are `MIN_PROMPTS`, and that must be left for the default
rule to take part."""
PIECE = 256
"""Tokens of a prompt between two looks at the clock."""


@dataclass(frozen=True)
class Sums:
    """Sums over steps; the leading axes `...` are prompts, or sets of prompts. Times are in passes of the target alone."""

    lengths: Float[np.ndarray, "... L 3"]
    """By length of `LENGTHS`: stints, and logarithms of their medians, of drafting and of the pass with everything else; of
    length 0 the logarithm of its seconds."""
    depths: Float[np.ndarray, "... D 2"]
    """Draft tokens tested at depth 1, 2, ... and those of them accepted, in expectation."""
    reading: Float[np.ndarray, "... 2 2"]
    """Times a prompt was read and the seconds: by the target, and what drafting adds."""
    default: Float[np.ndarray, "... 4"]
    """Of the default rule: tokens, draft tokens, time, and the time of its head."""

    @classmethod
    def empty(cls, num: int) -> "Sums":
        depth, num_lengths = LENGTHS[-1], len(LENGTHS)
        return cls(*(np.zeros((num, *shape)) for shape in ((num_lengths, 3), (depth, 2), (2, 2), (4,))))

    def weighted(self, weights: Float[np.ndarray, "*R A"]) -> "Sums":
        """The sums over prompts, each counted so often."""
        return Sums(*(np.tensordot(weights, part, 1) for part in vars(self).values()))

    def of(self, places: Sequence[int]) -> "Sums":
        """Those of some prompts."""
        return Sums(*(part[list(places)] for part in vars(self).values()))


@dataclass(frozen=True, kw_only=True)
class _Asked(Fixed):
    """Draft as many tokens as the session's memory says."""

    k: int = LENGTHS[-1]

    def start(self, given: Given = NO_PAST) -> int:
        return 0

    def limit(self, memory: int) -> int:
        return memory


@dataclass
class _Place:
    """A prompt: the answer on which the lengths take turns, and that of the default rule."""

    decoder: Decoder
    """Of any length, with prefix caches of its own: the prompt is read whole once, and not again."""
    session: Session | None = None
    own: Session | None = None
    num_answers: int = 0
    num_visits: int = 0
    has_drafted: bool = False


class Turns:
    """Steps in turns on some prompts with a pair. `longest` gives the longest length to try from what was seen until then."""

    def __init__(self, pair: Pair, prompts: Sequence[Sequence[int]], sampling: Sampling, *, max_tokens: int, seed: int):
        self.prompts, self.sampling = prompts, sampling
        self.max_tokens, self.seed = max(ANSWER, max_tokens), seed
        self.sums = Sums.empty(len(prompts))
        self.default = Decoder(pair)
        """Asked without a seed: what it learns is kept, and later requests begin with it (`policies.learning`)."""
        self.default.memory.running_costs()  # measured before the time of the check begins
        self._places = [_Place(Decoder(replace(pair, head=None), policy=_Asked())) for _ in prompts]
        self._has_joined = False
        self._alone_s = self._step_s = 0.0  # the target alone, and what a draft token adds to a step, as seen last

    @property
    def num_answers(self) -> list[int]:
        """Answers that were begun, by prompt."""
        return [place.num_answers for place in self._places]

    def run(self, *, until: float, longest: Callable[[], int]) -> Iterator[None]:
        """Visit prompt after prompt until the clock (`perf_counter`) says `until`; yields after every visit."""
        began = perf_counter()
        while True:
            for i, place in enumerate(self._places):
                spent = (perf_counter() - began) / max(until - began, 1e-9)
                is_first, num_seen = not place.num_visits, sum(place.num_visits > 0 for place in self._places)
                if is_first and num_seen >= MIN_PROMPTS and spent > OPENING:
                    continue
                took_s = self._visit(i, until, FIRST if is_first else longest())
                if not is_first and (self._has_joined or spent < 1 - JOINING) and perf_counter() < until:
                    self._default(i, min(until, perf_counter() + took_s))
                if perf_counter() >= until:
                    return
                yield

    def _visit(self, i: int, until: float, longest: int) -> float:
        """Every length up to `longest` once; the seconds of it without the reading of prompts."""
        took_s = 0.0
        for k in LENGTHS:
            session = self._open(i, until)
            if session is None or k > longest or perf_counter() >= until:
                break
            took_s += self._stint(i, session, k, until)
        self._places[i].num_visits += took_s > 0
        return took_s

    def _start(self, i: int, decoder: Decoder, seed: int | None) -> Session:
        return decoder.start(self.prompts[i], max_tokens=self.max_tokens, sampling=self.sampling, seed=seed)

    def _open(self, i: int, until: float) -> Session | None:
        """The answer in hand, else a new one; None where time is up before the prompt is read."""
        place = self._places[i]
        session = place.session
        if session is None or session.finish_reason:
            session = place.session = self._start(i, place.decoder, self.seed + 1000 * place.num_answers + i)
            place.has_drafted, place.num_answers = False, place.num_answers + 1
        is_new = session.num_unread > 0
        if not _read(session, until):
            return None
        if is_new and place.num_answers == 1:
            self.sums.reading[i, 0] += 1.0, session.prefill_s
        return session

    def _stint(self, i: int, session: Session, k: int, until: float) -> float:
        session._memory = k
        place, steps = self._places[i], []
        began, quickest_s = perf_counter(), inf
        while session.finish_reason is None and len(steps) < MOST:
            if (steps and perf_counter() >= until) or (len(steps) >= LEAST and len(steps) * quickest_s >= STINT_S):
                break
            steps.append(session.step())
            quickest_s = min(quickest_s, sum(_seconds(steps[-1])))
        took_s = perf_counter() - began
        is_first_draft = k > 0 and not place.has_drafted and place.num_answers == 1
        place.has_drafted = place.has_drafted or (k > 0 and bool(steps))
        self._note(i, k, steps, is_first_draft=is_first_draft)
        return took_s

    def _note(self, i: int, k: int, steps: Sequence[Step], *, is_first_draft: bool) -> None:
        """Take in a stint. `is_first_draft`: its first step is the first of the prompt that drafts."""
        for step in steps:
            if not step.finish_reason:
                tested = np.array(step.chances).reshape(-1, 1)
                self.sums.depths[i, : len(tested)] += np.hstack([np.ones_like(tested), tested])
        timed = [r for r in steps[max(1, len(steps) // 2) :] if r.num_drafted == k]  # the end of an answer cuts steps short
        if not timed:
            return
        draft_s, pass_s = np.median([*map(_seconds, timed)], axis=0)
        if k == 0:
            self._alone_s = pass_s
            self.sums.lengths[i, 0] += 1.0, 0.0, log(pass_s)
        elif self._alone_s:
            self._step_s = max(0.0, draft_s + pass_s - self._alone_s) / k
            self.sums.lengths[i, LENGTHS.index(k)] += 1.0, log(draft_s / self._alone_s), log(pass_s / self._alone_s)
        if is_first_draft:  # what it took beyond the others: the draft has read the prompt
            self.sums.reading[i, 1] += 1.0, max(0.0, _seconds(steps[0])[0] - draft_s)

    def _default(self, i: int, until: float) -> None:
        """Steps of the default rule, from where it stopped last time; the reading of the prompt is known from elsewhere."""
        place, self._has_joined = self._places[i], True
        if place.own is None or place.own.finish_reason:
            place.own = self._start(i, self.default, None)
        steps: list[Step] = []
        if _read(place.own, until):
            while place.own.finish_reason is None and perf_counter() < until:
                steps.append(place.own.step())
        timed = steps[1:]  # the first finds the caches of others, and may read the prompt
        if timed and self._alone_s:
            expected = [1 + r.num_drafted * self._step_s / self._alone_s for r in timed]
            ratio = median(sum(_seconds(r)) / self._alone_s / passes for r, passes in zip(timed, expected, strict=True))
            head = sum(r.head_s for r in timed) / self._alone_s
            num_tokens, num_drafted = (sum(getattr(r, name) for r in timed) for name in ("num_tokens", "num_drafted"))
            self.sums.default[i] += num_tokens, num_drafted, ratio * sum(expected), head


def _read(session: Session, until: float) -> bool:
    """Read the prompt; False where not all of it was read in time. The first piece is in any case."""
    while not session.prefill(PIECE):
        if perf_counter() >= until:
            return False
    return True


def _seconds(step: Step) -> tuple[float, float]:
    """Seconds of drafting, and of the pass with everything else."""
    return step.draft_s + step.head_s, step.verify_s + step.other_s
