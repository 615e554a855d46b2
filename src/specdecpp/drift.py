"""Acceptance that falls: figures of requests against those that the pair's last check found.

    steps of a request -> Figures -> Fall, the evidence of each figure -> a warning, once for a pair in a process

The unit is a request, since tokens of one answer resemble each other, and a prompt counts once. A check is found by the names
of the models, so that it outlives an upgrade: by both, else by the target's alone, since another draft often has another name.
"""

import hashlib
import json
import logging
import os
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf, log, log1p
from pathlib import Path
from statistics import fmean
from time import strftime
from typing import TYPE_CHECKING, Any, NamedTuple

from specdecpp import cache_dir
from specdecpp.metrics import Step

if TYPE_CHECKING:
    from specdecpp.loading.pair import Pair

logger = logging.getLogger(__name__)
RATE = 1e-3
"""The chance, at most, that a process ever warns while its requests are like those of the check (`Fall`). Figures, ways to
decode and beginnings have shares of it, in all twice as much, since half is for rises, of which nothing is said."""
LEAST, TESTED = 16, 32
"""Requests of a check, and tested draft tokens of figures, at least: shorter requests are put together."""
MAX_PROMPTS, MAX_WAYS = 2**20, 64
"""Requests with prompts of their own, and ways to decode, that are compared."""
EFFECT = 0.5
"""Prior variance of a fall, in variances of a request."""
WINDOW, BEGINNINGS = 200, 32
"""Requests after which the evidence begins anew too, so that a fall after many good ones is noticed; the last of these stay."""
CARD = "card.json"
"""A file beside a draft that `distil` made; it holds the figures of its check (`reference`)."""


class Figures(NamedTuple):
    """Means over the tested draft tokens of a request."""

    acceptance: float
    """Chance of acceptance. It depends on the text."""
    surplus: float | None
    """Chance minus estimate, the head's or by q: a draft tells hard text from easy, so this depends little on the text, and it
    falls where the draft is worse than it believes. None where nobody estimates."""


MARGINS = Figures(0.02, 0.005)
"""Falls that are not worth a warning."""
NAMES = ("acceptance", "acceptance beyond what was expected of it")


def _tested(steps: Iterable[Step]) -> list[Step]:
    return [step for step in steps if step.chances and not step.finish_reason and step.extra is None]


def figures(steps: Iterable[Step]) -> Figures | None:
    """Figures of steps, those of trees and the last of a request left out; None of fewer than `TESTED` draft tokens."""
    tested = [one for step in _tested(steps) for one in zip_longest(step.chances, step.judged[: len(step.chances)])]
    if len(tested) < TESTED:
        return None
    beyond = [chance - estimate for chance, estimate in tested if estimate is not None]
    return Figures(round(fmean(chance for chance, _ in tested), 4), round(fmean(beyond), 4) if beyond else None)


class Fall:
    """Evidence that the mean of a figure lies more than `margin` below that of `values`.

    The Bayes factor of a two-sample t-test, normal prior on the fall and right Haar prior on mean and variance. Where nothing
    has fallen it ever exceeds x with probability at most 1/x, the error of `values` included, if the figures of requests are
    normal (Hendriksen, de Heide and Gruenwald, arXiv 1807.09077); `benchmarks/drift.py` draws them from real ones.
    """

    def __init__(self, values: Sequence[float], margin: float):
        self.before = fmean(values)
        self._num, self._low = len(values), self.before - margin
        self._squares = sum((value - self.before) ** 2 for value in values)
        self._seen, self._begun = 0, deque[list[float]](maxlen=BEGINNINGS)

    def add(self, value: float) -> float:
        """Log evidence after one more request."""
        if self._seen % WINDOW == 0:
            k = self._seen // WINDOW + 1
            self._begun.append([-log(k * (k + 1)), 0, 0.0, 0.0])  # shares of which all together are 1
        self._seen += 1
        below = self._low - value
        for sums in self._begun:
            sums[1:] = sums[1] + 1, sums[2] + below, sums[3] + below**2
        return max(share + self._log_odds(int(num), total, squares) for share, num, total, squares in self._begun)

    def _log_odds(self, num: int, total: float, squares: float) -> float:
        freedom, size, fall = self._num + num - 2, self._num * num / (self._num + num), total / num
        rest = self._squares + squares - num * fall**2
        if fall <= 0:
            return -inf  # where it rose instead
        ratio, wide = fall**2 * size / max(rest, 1e-9), 1 + EFFECT * size
        return (freedom + 1) / 2 * (log1p(ratio) - log1p(ratio / wide)) - log(wide) / 2


class Comparison:
    """Requests of one way to decode beside figures of a check, found in the same way (`is_alike`) or in another: then
    acceptance alone is compared. `rate` is the chance, at most, that a change is seen where there is none."""

    def __init__(self, rows: Sequence[Figures], *, is_alike: bool, rate: float):
        columns = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
        used = {i: column for i, column in enumerate(columns) if len(column) >= LEAST and (is_alike or i == 0)}
        self.is_alike = is_alike
        self._falls = {i: Fall(column, MARGINS[i] or 0.0) for i, column in used.items()}
        self._most = log(max(1, len(used)) / rate)
        self._found, self._steps = deque[Figures](maxlen=WINDOW), list[Step]()

    def add(self, steps: Sequence[Step]) -> bool:
        """True where the evidence suffices after a request."""
        self._steps += _tested(steps)
        if (found := figures(self._steps)) is None:
            return False
        self._steps = []
        return self.saw(found)

    def saw(self, found: Figures) -> bool:
        """`add`, its figures being known."""
        self._found.append(found)
        values = [(fall, value) for i, fall in self._falls.items() if (value := found[i]) is not None]
        return any([fall.add(value) >= self._most for fall, value in values])

    def means(self) -> list[tuple[int, float, float]]:
        """(figure, its mean over the last requests, its mean at the check), of those that are compared and known."""
        columns = {i: [value for one in self._found if (value := one[i]) is not None] for i in self._falls}
        return [(i, fmean(column), self._falls[i].before) for i, column in columns.items() if column]


class PairWatch:
    """All requests of a pair in this process, each way to decode compared with the check's. `warning` is set once."""

    def __init__(self, pair: "Pair"):
        self.warning: str | None = None
        self._made, self.kept = made_with(pair), recalled(pair)
        self._comparisons: dict[str, Comparison] = {}
        self._prompts: set[int] = set()

    def end(self, way: str, prompt: int, steps: Sequence[Step]) -> None:
        """Take in a request that ended: how it was decoded, and the hash of its prompt."""
        if self.kept is None or self.warning or prompt in self._prompts or len(self._prompts) >= MAX_PROMPTS:
            return
        self._prompts.add(prompt)
        if way not in self._comparisons and len(self._comparisons) < MAX_WAYS:
            ways, is_alike = self.kept.ways, way in self.kept.ways
            rows = ways[way] if is_alike else [*ways.values()][-1]
            self._comparisons[way] = Comparison(rows, is_alike=is_alike, rate=RATE / 2 ** len(self._comparisons))
        if (comparison := self._comparisons.get(way)) is not None and comparison.add(steps):
            self.warning = self._words(comparison, self.kept)
            logger.warning("%s", self.warning)

    def _words(self, comparison: Comparison, kept: "CheckFigures") -> str:
        found = [f"{NAMES[i]} {now:.3f} (then {before:.3f})" for i, now, before in comparison.means()]
        other = [name for name, fact in self._made.items() if kept.made.get(name) != fact]
        other += [] if comparison.is_alike else ["the sampling or the rule"]
        return (
            f"the target accepts fewer draft tokens than at the check of {kept.day}: {', '.join(found)}. Answers are as "
            f"right as before, but slower. Changed since: {', '.join(other) or 'nothing that is known'}. Causes may be a "
            "changed draft, another quantisation, another chat template or none, another sampling, and text of another kind "
            "or language. To measure anew with prompts like yours: specdecpp check --prompts FILE."
        )


@dataclass(frozen=True)
class RequestTally:
    """The steps of one request, for `watch`."""

    watch: PairWatch
    way: str
    prompt: int
    steps: list[Step] = field(default_factory=list)

    def add(self, step: Step) -> None:
        self.steps.append(step)
        if step.finish_reason:
            self.watch.end(self.way, self.prompt, self.steps)


class CheckFigures(NamedTuple):
    """Figures of a check's requests by the way they were decoded, the latest last."""

    day: str
    made: dict[str, Any]
    ways: dict[str, list[Figures]]


def keep(pair: "Pair", way: str, found: Sequence[Figures]) -> dict[str, Any]:
    """Keep figures of a check beside those of the same models decoded otherwise; what is kept. Later requests are compared."""
    before, made = recalled(pair), made_with(pair)
    ways = dict(before.ways) if before and before.made == made else {}
    ways.pop(way, None)
    kept = CheckFigures(strftime("%Y-%m-%d"), made, {**ways, way: [*found]})._asdict()
    for names in _names(pair):
        cache_dir.remember("acceptance", names, kept)
    pair.measured.pop("watch", None)
    return kept


def recalled(pair: "Pair") -> CheckFigures | None:
    """Figures of the pair's last check; else those on the draft's card, or of the target's last check."""
    both, target = _names(pair)
    card = Path(pair.draft_name).parent / CARD
    for read in (
        lambda: cache_dir.recall("acceptance", both),
        lambda: json.loads(card.read_text(encoding="utf-8"))["reference"],
        lambda: cache_dir.recall("acceptance", target),
    ):
        with suppress(OSError, ValueError, TypeError, KeyError):  # there is none, or it is damaged
            found: Any = read()
            ways = {way: [Figures(float(a), b and float(b)) for a, b in rows] for way, rows in found["ways"].items() if rows}
            if ways:
                return CheckFigures(str(found["day"]), dict(found["made"]), ways)
    return None


def made_with(pair: "Pair") -> dict[str, Any]:
    """Facts that may explain a fall."""
    target, draft = pair.identities or (pair.target_fingerprint, pair.draft_fingerprint)
    template = getattr(pair.tokenizer, "chat_template", None)
    facts = {"the target": target, "the draft": draft, "the chat template": template}
    digests = {name: hashlib.sha256(text_of(fact).encode()).hexdigest()[:16] for name, fact in facts.items()}
    return digests | {"the draft's name": _name(pair.draft_name)}


def text_of(facts: Any) -> str:
    """A key made of facts."""
    return json.dumps(facts, sort_keys=True, default=str)


def _names(pair: "Pair") -> tuple[dict[str, str], dict[str, str]]:
    """The keys of both models, and of the target."""
    target = {"target": _name(pair.target_name)}
    return target | {"draft": _name(pair.draft_name)}, target


def _name(name: str) -> str:
    """The end of a path, however it was given; a hub name as it is."""
    return "/".join(Path(os.path.abspath(name) if os.path.exists(name) else name).parts[-2:])
