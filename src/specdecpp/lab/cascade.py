"""Cascade (Saxena et al. 2025, arXiv 2506.20675): try a few lengths, keep the best for a while, draft nothing where none pays.

The utility of a length is how many tokens its rounds make over how many passes of the target they take,

    U = tokens / (seconds / t_target),

the speed-up over the target alone. A request goes round in two phases.

- test: at most 4 trials of 4 rounds each, the first with the length that has been best so far, then uphill by one: on in the
  direction in which U grows, back once where it falls. It ends early where two trials differ by less than 10 %, where a
  maximum has been passed, or where one candidate does not pay (U < 1).
- set: 16 rounds of the length with the largest U, of none if that is below 1. Each time there is none twice as many rounds
  follow before the next test.

Those numbers are theirs. Theirs reads the clock, and the target's own time off a few rounds without candidates, again every
100; here seconds are the cost model's, so that a seed gives the same rounds again, and one such round suffices. They do not say
with which length a request begins, by how much a step goes up, or whether a length that pays undoes the doubling: 3, 1, yes.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from specdecpp.policies.protocol import Policy

if TYPE_CHECKING:
    from specdecpp.policies.protocol import Outcome

ALIKE = 0.1
"""Two utilities that differ by less are those of neighbours of a maximum."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Where a request stands: `num_tokens` drafted in each of `num_left` more rounds, and what the rounds of a trial made.

    `target_s` is 0 until the round without candidates that begins a request. `trials` are lengths and their utilities.
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
class Cascade(Policy):
    """The length that a test found to be the fastest, none where it was slower than the target alone (see the module).

    Where `AutoOff` switches another rule off and on, this chooses the length itself and pauses for longer each time.
    """

    short: ClassVar[str] = "cascade:start_tokens"
    start_tokens: int = 3
    trial_rounds: int = 4
    max_trials: int = 4
    set_rounds: int = 16
    max_tokens: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.start_tokens <= self.max_tokens:
            raise ValueError(
                f"Cascade needs 1 <= start_tokens <= max_tokens, got start_tokens={self.start_tokens} and "
                f"max_tokens={self.max_tokens}"
            )
        if min(self.trial_rounds, self.max_trials, self.set_rounds) < 1:
            raise ValueError(
                "Cascade needs trial_rounds, max_trials and set_rounds of at least 1, got "
                f"{self.trial_rounds}, {self.max_trials} and {self.set_rounds}"
            )

    @property
    def needs_costs(self) -> bool:
        return True

    def start(self) -> Phase:
        return Phase(best=self.start_tokens, pause=self.set_rounds)

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
        return replace(memory, num_tokens=num_tokens, num_left=self.trial_rounds, is_test=True, made=0, seconds=0.0)

    def _set(self, memory: Phase) -> Phase:
        best, utility = max(memory.trials, key=lambda trial: trial[1])
        if utility < 1:
            return replace(memory, num_tokens=0, num_left=memory.pause, is_test=False, pause=2 * memory.pause)
        return replace(memory, num_tokens=best, num_left=self.set_rounds, is_test=False, best=best, pause=self.set_rounds)

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
