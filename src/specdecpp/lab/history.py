"""Rules that follow the outcomes of earlier steps: the coming step is as long as what was accepted lately makes worth while.

They look at no draft token, so a step's length is known before it begins.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from specdecpp.policies.protocol import NO_PAST, Evidence, Given, Policy, Rule, check_probability

if TYPE_CHECKING:
    from specdecpp.costs import Costs
    from specdecpp.policies.protocol import Outcome


ALIKE = 0.1
"""Two utilities that differ by less are those of neighbours of a maximum."""


@dataclass(frozen=True, kw_only=True)
class Priced(Policy):
    """Base of the rules that weigh costs."""

    @property
    def needs_costs(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Heuristic(Policy):
    """k += 2 after a step that accepted everything, else k = max(1, k - 1): the "heuristic" schedule of transformers."""

    short: ClassVar[str] = "heuristic:start_tokens"
    start_tokens: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start_tokens < 1:
            raise ValueError(f"Heuristic needs start_tokens of at least 1, got {self.start_tokens}")

    def start(self, given: Given = NO_PAST) -> int:
        return min(self.start_tokens, self.max_tokens)

    def limit(self, memory: int) -> int:
        return max(self.min_tokens, min(memory, self.max_tokens))

    def learn(self, memory: int, outcome: "Outcome") -> int:
        return min(memory + 2, self.max_tokens) if outcome.num_accepted == outcome.num_drafted else max(1, memory - 1)


@dataclass(frozen=True, kw_only=True)
class AcceptanceEMA(Policy):
    """One draft token more than was accepted lately: gamma = round(L) + 1, L = (1 - eta) L + eta * accepted (eta 0.3).

    GammaTune (Gautam et al. 2025, arXiv 2504.00030) and the adaptive steps of SGLang follow such a running mean. The one more
    is what lets the length grow again: a step that accepts everything lies above the mean. Starts at `start_tokens`.
    """

    short: ClassVar[str] = "ema:start_tokens"
    start_tokens: int = 4
    eta: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("AcceptanceEMA.eta", self.eta)
        if self.start_tokens < 1:
            raise ValueError(f"AcceptanceEMA needs start_tokens of at least 1, got {self.start_tokens}")

    def start(self, given: Given = NO_PAST) -> float:
        return float(self.start_tokens - 1)

    def limit(self, memory: float) -> int:
        return max(self.min_tokens, min(math.floor(memory + 0.5) + 1, self.max_tokens))

    def learn(self, memory: float, outcome: "Outcome") -> float:
        return memory + self.eta * (outcome.num_accepted - memory) if outcome.num_drafted else memory


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Draft tokens tested so far and those of them that were accepted, older ones fading."""

    num_tested: float = 0.0
    num_accepted: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ArgmaxLength(Priced):
    """The length that is best at the acceptance seen so far: the formula for a fixed length, evaluated on the fly.

        gamma = argmax_g  (1 - a^(g+1))/(1 - a) / (g t_draft + t_target(g + 1))

    after Leviathan et al. 2023 (theorem 3.8), with a the share of the tested draft tokens that was accepted: what comes after a
    rejection was not tested and counts for nothing. With `fading` every step's draft tokens weigh (1 - fading) times those of
    the next, so a is a moving average that knows what a rejection hides (vllm#44336 keeps one for each place, EMA of 0.1).
    `prior` is a before anything was tested, and counts for `prior_tokens` draft tokens. With `min_tokens=0` it may give up
    drafting for good.
    """

    short: ClassVar[str] = "argmax:prior"
    min_tokens: int = 1
    prior: float = 0.7
    prior_tokens: int = 8
    fading: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("ArgmaxLength.prior", self.prior)
        check_probability("ArgmaxLength.fading", self.fading)
        if self.prior_tokens < 1:
            raise ValueError(f"ArgmaxLength needs prior_tokens of at least 1, got {self.prior_tokens}")

    def start(self, given: Given = NO_PAST) -> Counts:
        return Counts()

    def learn(self, memory: Counts, outcome: "Outcome") -> Counts:
        if not outcome.num_drafted:
            return memory
        kept, num = 1 - self.fading, outcome.num_accepted
        return Counts(
            num_tested=kept * memory.num_tested + min(num + 1, outcome.num_drafted),
            num_accepted=kept * memory.num_accepted + num,
        )

    def acceptance(self, memory: Counts) -> float:
        """a: of the draft tokens tested so far, the prior's included."""
        return (memory.num_accepted + self.prior_tokens * self.prior) / (memory.num_tested + self.prior_tokens)

    def rule(self, memory: Counts, costs: "Costs | None") -> Rule:
        assert costs is not None, "the session gives costs to a policy that needs them"
        best = costs.best_length(self.acceptance(memory), range(self.min_tokens, self.max_tokens + 1))
        return _exactly(best, f"best length {best}")


@dataclass(frozen=True, kw_only=True)
class LengthSums:
    """Sums of each length: how many steps had it, the tokens they made, and their seconds."""

    steps: tuple[float, ...]
    tokens: tuple[float, ...]
    seconds: tuple[float, ...]

    def least(self, k: int, width: float) -> float:
        """The time a token of length k, less its confidence of this width; -inf for a length that was never drafted."""
        if not self.steps[k]:
            return -math.inf
        return (self.seconds[k] - width * math.sqrt(self.steps[k])) / self.tokens[k]


@dataclass(frozen=True, kw_only=True)
class UCBSpecStop(Priced):
    """The length whose time a token may be the least: ratio-type optimal stopping with an upper confidence bound.

        k = argmin_k  seconds_k / tokens_k  -  exploration * t_draft * sqrt(steps_k ln n) / tokens_k

    over the n steps so far, sums over those with k draft tokens (Sun et al. 2026, arXiv 2606.20591, algorithm 1). Each length
    from 1 to `max_tokens` is tried once first. Their bonus is 1 ms where a draft step takes 1 ms, and 10 are the most. It
    was made for slow links between draft and target, and goes on learning from request to request, as it does here where
    requests have no seed. A step that had no room for its length counts for the length that it had.
    """

    short: ClassVar[str] = "ucb-specstop:exploration"
    exploration: float = 1.0
    max_tokens: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.exploration >= 0:
            raise ValueError(f"UCBSpecStop needs exploration of at least 0, got {self.exploration}")

    def start(self, given: Given = NO_PAST) -> LengthSums:
        past, none = given.past or {}, (0.0,) * (self.max_tokens + 1)
        columns = {name: tuple(past.get(name) or ()) for name in ("steps", "tokens", "seconds")}
        sound = all(len(column) == len(none) for column in columns.values())
        return LengthSums(**(columns if sound else dict.fromkeys(columns, none)))

    def carry(self, past: Mapping[str, Any] | None, memory: LengthSums) -> Mapping[str, Any]:
        return {"steps": memory.steps, "tokens": memory.tokens, "seconds": memory.seconds}

    def learn(self, memory: LengthSums, outcome: "Outcome") -> LengthSums:
        k = outcome.num_drafted
        if not 0 < k <= self.max_tokens:
            return memory
        return LengthSums(
            steps=_plus(memory.steps, k, 1.0),
            tokens=_plus(memory.tokens, k, float(outcome.num_tokens)),
            seconds=_plus(memory.seconds, k, outcome.expected_s),
        )

    def rule(self, memory: LengthSums, costs: "Costs | None") -> Rule:
        assert costs is not None, "the session gives costs to a policy that needs them"
        lengths = range(max(1, self.min_tokens), self.max_tokens + 1)
        width = self.exploration * costs.draft_s * math.sqrt(math.log(max(1.0, sum(memory.steps))))
        best = min(lengths, key=lambda k: memory.least(k, width), default=0)
        return _exactly(best, f"length {best}")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """State of a request: `num_tokens` drafted in each of `num_left` more steps, and what the steps of a trial made.

    `target_s` is 0 until the step without draft tokens that begins a request. `trials` are lengths and their utilities.
    """

    num_tokens: int = 0
    num_left: int = 1
    target_s: float = 0.0
    is_test: bool = False
    made: int = 0
    seconds: float = 0.0
    trials: tuple[tuple[int, float], ...] = ()
    best: int = 0
    pause: int = 0


@dataclass(frozen=True, kw_only=True)
class Cascade(Priced):
    """The length that a test found to be the fastest, none where it was slower than the target alone: Cascade (Saxena et al.
    2025, arXiv 2506.20675).

    The utility of a length is how many tokens its steps make over how many passes of the target they take,

        U = tokens / (seconds / t_target),

    the speed-up over the target alone. A request alternates between two phases.

    - test: at most 4 trials of 4 steps each, the first with the length that has been best so far, then uphill by one: on in
      the direction in which U grows, back once where it falls. It ends early where two trials differ by less than 10 %, where
      a maximum has been passed, or where one draft token does not pay (U < 1).
    - set: 16 steps of the length with the largest U, of none if that is below 1. Each time there is none twice as many steps
      follow before the next test.

    Those numbers are theirs. Theirs reads the clock, and the target's own time off a few steps without draft tokens, again
    every 100; here seconds are the cost model's, so that a seed gives the same steps again, and one such step suffices. They
    do not say with which length a request begins, by how much a step goes up, or whether a length that pays undoes the
    doubling: 3, 1, yes.

    Where `AutoOff` switches another rule off and on, this chooses the length itself and pauses for longer each time.
    """

    short: ClassVar[str] = "cascade:start_tokens"
    start_tokens: int = 3
    trial_steps: int = 4
    max_trials: int = 4
    set_steps: int = 16
    max_tokens: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        phases = self.trial_steps, self.max_trials, self.set_steps
        if not 1 <= self.start_tokens <= self.max_tokens or min(phases) < 1:
            raise ValueError(
                "Cascade needs 1 <= start_tokens <= max_tokens, and trial_steps, max_trials and set_steps of at least 1, got "
                f"start_tokens={self.start_tokens}, max_tokens={self.max_tokens} and {phases}"
            )

    def start(self, given: Given = NO_PAST) -> Phase:
        return Phase(best=self.start_tokens, pause=self.set_steps)

    def limit(self, memory: Phase) -> int:
        return max(self.min_tokens, memory.num_tokens)

    def learn(self, memory: Phase, outcome: "Outcome") -> Phase:
        if not memory.target_s:
            if outcome.num_drafted:
                return memory
            return self._trial(replace(memory, target_s=outcome.expected_s), memory.best)
        made, seconds = memory.made + outcome.num_tokens, memory.seconds + outcome.expected_s
        memory = replace(memory, made=made, seconds=seconds, num_left=memory.num_left - 1)
        if memory.num_left:
            return memory
        if not memory.is_test:
            return self._trial(replace(memory, trials=()), memory.best)
        memory = replace(memory, trials=(*memory.trials, (memory.num_tokens, made * memory.target_s / seconds)))
        following = self._uphill(memory.trials) if len(memory.trials) < self.max_trials else None
        return self._set(memory) if following is None else self._trial(memory, following)

    def _trial(self, memory: Phase, num_tokens: int) -> Phase:
        return replace(memory, num_tokens=num_tokens, num_left=self.trial_steps, is_test=True, made=0, seconds=0.0)

    def _set(self, memory: Phase) -> Phase:
        best, utility = max(memory.trials, key=lambda trial: trial[1])
        if utility < 1:
            return replace(memory, num_tokens=0, num_left=memory.pause, is_test=False, pause=2 * memory.pause)
        return replace(memory, num_tokens=best, num_left=self.set_steps, is_test=False, best=best, pause=self.set_steps)

    def _uphill(self, trials: tuple[tuple[int, float], ...]) -> int | None:
        """The length of the next trial; None where the test is over."""
        (num, utility), tried = trials[-1], {length for length, _ in trials}
        if len(trials) == 1:
            following = num - 1 if utility < 1 or num == self.max_tokens else num + 1
        else:
            before, old = trials[-2]
            if abs(utility - old) < ALIKE * old:
                return None
            step = num - before
            following = num + step if utility > old else before - step  # on, or to the other side of where it began
        return None if following in tried or not 1 <= following <= self.max_tokens else following


def _exactly(num: int, words: str) -> Rule:
    """So many draft tokens."""
    return Rule(Evidence.NOTHING, (-math.inf,) * num + (math.inf,), words)


def _plus(values: tuple[float, ...], k: int, more: float) -> tuple[float, ...]:
    return (*values[:k], values[k] + more, *values[k + 1 :])
