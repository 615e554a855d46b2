"""Steps in turns on practice prompts: every length for a few steps, then the default rule for as long, prompt by prompt.

Every answer has the target's distribution whatever the lengths, so one answer serves all of them: acceptance is pooled over
the steps that reached a depth, and what a step takes is known by its length. A machine's speed drifts within a second, and
others use it too: a stint is told by its median, in passes of the target alone of the same visit, and stints are averaged as
ratios are (geometrically). Nothing here is counted in tokens: a length has steps for `STINT_S`, whoever asks says when to
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
from specdecpp.policies.protocol import UNTAUGHT, Given
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
rule to take part, which may have costs measured first."""
PIECE = 256
"""Tokens of a prompt between two looks at the clock."""


@dataclass(frozen=True)
class Sums:
    """Sums over a prompt, or over several: the trailing axes `...` are those of the sums.

    lengths: by length of `LENGTHS`, stints, and logarithms of their medians, of drafting and of the pass with everything else,
    both in passes of the target alone; the row of length 0 has the logarithm of its seconds.
    depths: draft tokens tested at depth 1, 2, ... and, of these, those accepted in expectation.
    reading: times a prompt was read and its seconds, by the target; and the same of what drafting adds.
    default: tokens of the default rule, what its steps take by their lengths, and its head, in passes of the target alone;
    stints, and logarithms of what they took over that (by their medians); draft tokens.
    """

    lengths: Float[np.ndarray, "L 3 ..."]
    depths: Float[np.ndarray, "D 2 ..."]
    reading: Float[np.ndarray, "2 2 ..."]
    default: Float[np.ndarray, "6 ..."]

    @classmethod
    def of(cls, columns: Float[np.ndarray, "C ..."]) -> "Sums":
        """The inverse of `columns`."""
        shapes = (len(LENGTHS), 3), (LENGTHS[-1], 2), (2, 2), (6,)
        ends = np.cumsum([np.prod(shape) for shape in shapes])[:-1]
        parts = np.split(columns, ends)
        return cls(*(part.reshape(*shape, *columns.shape[1:]) for part, shape in zip(parts, shapes, strict=True)))

    @classmethod
    def empty(cls) -> "Sums":
        return cls.of(np.zeros(3 * len(LENGTHS) + 2 * LENGTHS[-1] + 10))

    @property
    def columns(self) -> Float[np.ndarray, "C ..."]:
        parts = self.lengths, self.depths, self.reading, self.default
        num = self.default.ndim - 1
        return np.concatenate([part.reshape(-1, *part.shape[part.ndim - num :]) for part in parts])

    def __add__(self, other: "Sums") -> "Sums":
        return Sums.of(self.columns + other.columns)


@dataclass(frozen=True, kw_only=True)
class _Asked(Fixed):
    """Draft as many tokens as the session's memory says."""

    k: int = LENGTHS[-1]

    def start(self, given: Given = UNTAUGHT) -> int:
        return 0

    def limit(self, memory: int) -> int:
        return memory


class Turns:
    """Steps in turns on some prompts with a pair. `longest` gives the longest length to try from what was seen until then."""

    def __init__(self, pair: Pair, prompts: Sequence[Sequence[int]], sampling: Sampling, *, max_tokens: int, seed: int):
        self.prompts, self.sampling = prompts, sampling
        self.max_tokens, self.seed = max(ANSWER, max_tokens), seed
        self.sums = [Sums.empty() for _ in prompts]
        self.num_visits = [0] * len(prompts)
        self.default = Decoder(pair)
        """Asked without a seed: what it learns is kept, and later requests begin with it (`policies.learning`)."""
        self.has_joined = False
        self.alone_s = self.step_s = 0.0
        """Seconds of the target alone, and what a draft token adds to a step, as they were seen last."""
        self._pair = pair
        self._lengths = [_Lengths(self, place) for place in range(len(prompts))]
        self._sessions: list[Session | None] = [None] * len(prompts)

    @property
    def num_answers(self) -> list[int]:
        """Answers that were begun, by prompt."""
        return [lengths.num_answers for lengths in self._lengths]

    @property
    def num_prompts(self) -> int:
        """Prompts on which something was seen."""
        return sum(num > 0 for num in self.num_visits)

    def run(self, *, until: float, longest: Callable[[], int]) -> Iterator[None]:
        """Visit prompt after prompt until the clock (`perf_counter`) says `until`; yields after every visit."""
        began = perf_counter()
        while True:
            for place in range(len(self.prompts)):
                spent = (perf_counter() - began) / max(until - began, 1e-9)
                if not self.num_visits[place] and self.num_prompts >= MIN_PROMPTS and spent > OPENING:
                    continue
                is_first = not self.num_visits[place]
                took_s = self._lengths[place].visit(until, FIRST if is_first else longest())
                if not is_first and (self.has_joined or spent < 1 - JOINING) and perf_counter() < until:
                    self._default(place, until, took_s)
                if perf_counter() >= until:
                    return
                yield

    def add(self, place: int, seen: Sums) -> None:
        """Results of a stint, all at once: an interrupt finds it whole or not at all."""
        self.sums[place] = self.sums[place] + seen

    def started(self, decoder: Decoder, place: int, *, seed: int | None) -> Session:
        return decoder.start(self.prompts[place], max_tokens=self.max_tokens, sampling=self.sampling, seed=seed)

    def decoder(self) -> Decoder:
        """A decoder of any length, with prefix caches of its own: the prompt is read whole once, and not again."""
        return Decoder(replace(self._pair, head=None), policy=_Asked())

    def _default(self, place: int, until: float, seconds: float) -> None:
        """The default rule for some seconds, where it stopped last time; the reading of the prompt is known from elsewhere."""
        session, self.has_joined = self._sessions[place], True
        if session is None or session.finish_reason:
            session = self._sessions[place] = self.started(self.default, place, seed=None)
        steps: list[Step] = []
        if _read(session, until):
            until = min(until, perf_counter() + seconds)
            while session.finish_reason is None and perf_counter() < until:
                steps.append(session.step())
        timed = steps[1:]  # the first finds the caches of others, and may read the prompt
        if timed and self.alone_s:
            expected = [1 + r.num_drafted * self.step_s / self.alone_s for r in timed]
            ratio = median(_seconds(r) / self.alone_s / passes for r, passes in zip(timed, expected, strict=True))
            head = sum(r.head_s for r in timed) / self.alone_s
            seen = Sums.empty()
            num_tokens, num_drafted = (sum(getattr(r, name) for r in timed) for name in ("num_tokens", "num_drafted"))
            seen.default[:] = num_tokens, sum(expected), head, 1.0, log(ratio), num_drafted
            self.add(place, seen)


class _Lengths:
    """The answer on which the lengths of one prompt take turns, and the next one when it has ended."""

    def __init__(self, practice: Turns, place: int):
        self.practice, self.place = practice, place
        self.decoder, self.session, self.num_answers = practice.decoder(), None, 0
        self.has_drafted = False

    def visit(self, until: float, longest: int) -> float:
        """Every length up to `longest` once; the seconds of it without the reading of prompts."""
        took_s = 0.0
        for k in LENGTHS:
            session = self._open(until)
            if session is None or k > longest or perf_counter() >= until:
                break
            took_s += self._stint(session, k, until)
        if took_s:
            self.practice.num_visits[self.place] += 1
        return took_s

    def _open(self, until: float) -> Session | None:
        """The answer in hand, else a new one; None where time is up before the prompt is read."""
        if self.session is None or self.session.finish_reason:
            seed = self.practice.seed + 1000 * self.num_answers + self.place
            self.session, self.has_drafted = self.practice.started(self.decoder, self.place, seed=seed), False
            self.num_answers += 1
        session, is_new = self.session, self.session.num_unread > 0
        if not _read(session, until):
            return None
        if is_new and self.num_answers == 1:
            seen = Sums.empty()
            seen.reading[0] = 1.0, session.prefill_s
            self.practice.add(self.place, seen)
        return session

    def _stint(self, session: Session, k: int, until: float) -> float:
        session._memory = k
        steps: list[Step] = []
        began, quickest_s = perf_counter(), inf
        while session.finish_reason is None and len(steps) < MOST:
            if (steps and perf_counter() >= until) or (len(steps) >= LEAST and len(steps) * quickest_s >= STINT_S):
                break
            steps.append(session.step())
            quickest_s = min(quickest_s, _seconds(steps[-1]))
        is_first = k > 0 and not self.has_drafted and self.num_answers == 1
        self.has_drafted = self.has_drafted or (k > 0 and bool(steps))
        self._note(k, steps, is_first=is_first)
        return perf_counter() - began

    def _note(self, k: int, steps: Sequence[Step], *, is_first: bool) -> None:
        """Take in a stint. `is_first`: its first step is the first of the prompt that drafts."""
        seen, practice = Sums.empty(), self.practice
        for r in steps:
            if not r.finish_reason:
                _test(seen.depths, r)
        timed = [r for r in steps[max(1, len(steps) // 2) :] if r.num_drafted == k]  # the end of an answer cuts steps short
        if timed:
            draft_s, pass_s = (median(map(part, timed)) for part in (_drafting, _passing))
            if k == 0:
                practice.alone_s = pass_s
                seen.lengths[0] = 1.0, 0.0, log(pass_s)
            elif practice.alone_s:
                practice.step_s = max(0.0, draft_s + pass_s - practice.alone_s) / k
                seen.lengths[LENGTHS.index(k)] = 1.0, log(draft_s / practice.alone_s), log(pass_s / practice.alone_s)
            if is_first:  # what it took beyond the others: the draft has read the prompt
                seen.reading[1] = 1.0, max(0.0, _drafting(steps[0]) - draft_s)
        practice.add(self.place, seen)


def _test(depths: Float[np.ndarray, "D 2"], r: Step) -> None:
    """Take in the draft tokens of a step that were tested: accepted in expectation where that is known, else by what became
    of them."""
    num = min(r.num_accepted + 1, r.num_drafted)
    accepted = r.overlaps if len(r.overlaps) >= num else [float(i < r.num_accepted) for i in range(num)]
    for depth in range(num):
        depths[depth] += 1.0, accepted[depth]


def _read(session: Session, until: float) -> bool:
    """Read the prompt. Whether all of it was read in time; the first piece is in any case."""
    while not session.prefill(PIECE):
        if perf_counter() >= until:
            return False
    return True


def _seconds(r: Step) -> float:
    return _drafting(r) + _passing(r)


def _drafting(r: Step) -> float:
    return r.draft_s + r.head_s


def _passing(r: Step) -> float:
    return r.verify_s + r.other_s
