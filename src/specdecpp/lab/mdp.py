"""The decision process behind a step: draft one more, or verify? Solved exactly where acceptance is a known Markov chain.

    Process -> Lattice (all that a step can come to) -> Plan (where to go on) -> StepTally (tokens, draft tokens) -> tokens/s

Draft token i is accepted with probability a_i = min(1, p/q) if those before it were, so k draft tokens all survive with
probability S_k = a_1 ... a_k, and a step with N of them makes 1 + S_1 + ... + S_N tokens on average: one is always the
target's own. Steps are taken to renew: each begins in a state drawn from `Process.start`, whatever came before. What is
maximised is then rho = E[tokens]/E[seconds] of a step, and by Dinkelbach (1967) the best plan is the one that maximises
E[tokens] - rho E[seconds] at its own rho.

Source: Huang, Guo, Wang (arXiv 2405.19715), sections 3 and 4, for the costs; Yin et al. 2024 for the
distribution of rejections. The letters: M situations, E edges, n states, K most
draft tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from specdecpp.costs import Costs

Plan = tuple[Bool[np.ndarray, " _"], ...]
"""Decisions for k = 0..K-1 draft tokens and every situation of that layer: True to draft one more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTally:
    """Means of a step: its tokens, and `steps[k]`, the share of steps with k draft tokens."""

    num_tokens: float
    steps: Float[np.ndarray, " K1"]

    @property
    def num_drafted(self) -> float:
        return float(self.steps @ np.arange(len(self.steps)))

    def seconds(self, costs: Costs) -> float:
        return float(self.steps @ [costs.step_s(k) for k in range(len(self.steps))])

    def tokens_per_second(self, costs: Costs) -> float:
        return self.num_tokens / self.seconds(costs)

    def speed_up(self, costs: Costs) -> float:
        """Over the target alone, which makes one token a pass."""
        return self.tokens_per_second(costs) * costs.verify_s(1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Process:
    """Acceptance along a step: a Markov chain, one step a draft token, whose states the rule observes.

    s_0 ~ `start` is what is known before anything is drafted. Drafting draft token k draws s_k from `transition[s_{k-1}]`,
    and then `acceptance[s_k]` is known: a look-ahead score, free of error. (A score with errors is a process too: its states
    are the values of the score, its acceptances what the score means on average, as long as they multiply.)

    Raises ValueError where shapes disagree or rows are not probabilities.
    """

    start: Float[np.ndarray, " n"]
    transition: Float[np.ndarray, "n n"]
    acceptance: Float[np.ndarray, " n"]

    def __post_init__(self) -> None:
        num = len(self.acceptance)
        rows = [self.start, *self.transition]
        if len(rows) != num + 1 or any(row.shape != (num,) or row.min() < 0 or abs(row.sum() - 1) > 1e-9 for row in rows):
            raise ValueError(
                f"a process over {num} acceptances needs a start [{num}] and a transition [{num}, {num}] of probabilities that "
                f"sum to 1, got {self.start} and {self.transition}"
            )
        if not ((self.acceptance >= 0) & (self.acceptance <= 1)).all():
            raise ValueError(f"acceptances must lie in [0, 1], got {self.acceptance}")

    @classmethod
    def constant(cls, acceptance: float) -> "Process":
        """Every draft token is accepted with the same probability."""
        return cls.iid([acceptance], [1.0])

    @classmethod
    def iid(cls, acceptance: Sequence[float], weight: Sequence[float]) -> "Process":
        """Independent draws from a few values: TV(p, q) is 1 minus their mean."""
        num = len(acceptance)
        return cls(
            start=np.eye(num)[0],  # where it begins says nothing
            transition=np.tile(np.asarray(weight, float), (num, 1)),
            acceptance=np.asarray(acceptance, float),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class LatticeLayer:
    """The M situations with k draft tokens: the state, S_k, and E edges from layer k - 1."""

    state: Int[np.ndarray, " M"]
    survival: Float[np.ndarray, " M"]
    source: Int[np.ndarray, " E"]
    target: Int[np.ndarray, " E"]
    chance: Float[np.ndarray, " E"]

    def spread(self, mass: Float[np.ndarray, " _"]) -> Float[np.ndarray, " M"]:
        """Mass on the layer before, one draft token later."""
        return np.bincount(self.target, self.chance * mass[self.source], minlength=len(self.state))

    def expect(self, values: Float[np.ndarray, " M"], num_sources: int) -> Float[np.ndarray, " _"]:
        """Seen from the layer before: the expected value after one more draft token."""
        return np.bincount(self.source, self.chance * values[self.target], minlength=num_sources)


@dataclass(frozen=True, kw_only=True, eq=False)
class Lattice:
    """All that a step of at most K draft tokens can come to: survival times state, exactly, as a graph of layers 0..K.

    Survival is a product, so what it was made of matters and the order does not: a layer has at most
    n C(k + n - 1, n - 1) situations instead of n^k paths.
    """

    start: Float[np.ndarray, " M0"]
    layers: tuple[LatticeLayer, ...]

    @classmethod
    def of(cls, process: Process, *, max_tokens: int) -> "Lattice":
        """Walk the process from its start, merging paths that differ only in the order of their acceptances.

        >>> len(Lattice.of(Process.iid([0.3, 0.9], [0.5, 0.5]), max_tokens=3).layers[3].state)  # the last, the two before it
        6
        """
        factors, factor_of = np.unique(process.acceptance, return_inverse=True)
        state = np.flatnonzero(process.start)
        key = np.column_stack([state, np.zeros((len(state), len(factors)), int)])
        one, nothing = np.ones(len(state)), np.zeros(0, int)
        layers = [LatticeLayer(state=state, survival=one, source=nothing, target=nothing, chance=np.zeros(0))]
        for _ in range(max_tokens):
            source, state = np.nonzero(process.transition[key[:, 0]])
            chance = process.transition[key[source, 0], state]
            counts = key[source, 1:]
            counts[np.arange(len(source)), factor_of[state]] += 1
            counts[(counts[:, factors == 0] > 0).any(-1)] = factors == 0  # what cannot survive is one situation per state
            key, target = np.unique(np.column_stack([state, counts]), axis=0, return_inverse=True)
            state, survival = key[:, 0], (factors ** key[:, 1:]).prod(-1)
            target = target.reshape(-1)
            layers.append(LatticeLayer(state=state, survival=survival, source=source, target=target, chance=chance))
        return cls(start=process.start[layers[0].state], layers=tuple(layers))

    @property
    def max_tokens(self) -> int:
        return len(self.layers) - 1

    def tally(self, plan: Plan) -> StepTally:
        """The expected tokens of a step under a plan, and the distribution of its number of draft tokens."""
        mass, num_tokens, steps = self.start, 1.0, []
        for go, layer in zip(plan, self.layers[1:], strict=True):
            steps.append(mass[~go].sum())
            mass = layer.spread(mass * go)
            num_tokens += float(mass @ layer.survival)
        return StepTally(num_tokens=num_tokens, steps=np.array([*steps, mass.sum()]))


def fixed(lattice: Lattice, k: int) -> Plan:
    """Draft k draft tokens, whatever they are (K if k is larger)."""
    return tuple(np.full(len(layer.state), depth < k) for depth, layer in enumerate(lattice.layers[:-1]))


def threshold(lattice: Lattice, h: float) -> Plan:
    """SpecDec++: stop once 1 - S > h."""
    return tuple(1 - layer.survival <= h for layer in lattice.layers[:-1])


def plan_at(lattice: Lattice, costs: Costs, rate: float) -> Plan:
    """The plan that maximises E[tokens] - rate E[seconds], by backward induction."""
    plan, worth = [], np.zeros(len(lattice.layers[-1].state))
    for k in reversed(range(lattice.max_tokens)):
        layer, after = lattice.layers[k : k + 2]
        surplus = after.expect(after.survival + worth, len(layer.state)) - rate * costs.added_s(k)
        plan.append(surplus > 0)
        worth = np.maximum(surplus, 0)
    return tuple(reversed(plan))


@dataclass(frozen=True, kw_only=True, eq=False)
class Optimum:
    """The best plan, what it comes to, and the rates on the way to it, rising, from the target alone (tokens/s)."""

    plan: Plan
    tally: StepTally
    rates: tuple[float, ...]

    @property
    def rate(self) -> float:
        return self.rates[-1]


def optimum(lattice: Lattice, costs: Costs) -> Optimum:
    """The plan with the most tokens per second among all that see what the process shows, by Dinkelbach's iteration.

    >>> best = optimum(Lattice.of(Process.constant(0.8), max_tokens=20), Costs.relative(0.22))
    >>> float(best.tally.num_drafted), round(best.rate, 3)
    (4.0, 1.788)
    """

    def best(rate: float) -> StepTally:
        return lattice.tally(plan_at(lattice, costs, rate))

    rates = _dinkelbach(best, costs)
    plan = plan_at(lattice, costs, rates[-1])
    return Optimum(plan=plan, tally=lattice.tally(plan), rates=rates)


def hindsight(lattice: Lattice, costs: Costs) -> StepTally:
    """The bound that no rule passes: it knows beforehand how many draft tokens L would be accepted, and drafts none in vain.

    Of each run it drafts what pays, all of it where c < 1 and a pass takes the same at any width. Then, with no bound on the
    number of draft tokens, its speed-up is 1/(c + (1 - c) TV): see docs/how-it-works.md for what that supposes.
    """
    most = lattice.max_tokens
    mass, reaches = lattice.start, [1.0]
    for layer in lattice.layers[1:]:
        mass = layer.spread(mass)
        reaches.append(float(mass @ layer.survival))
    distribution = -np.diff([*reaches, 0.0])  # P(L = l), the last one P(L >= K)
    tokens, seconds = np.arange(1.0, most + 2), np.array([costs.step_s(k) for k in range(most + 1)])

    def best(rate: float) -> StepTally:
        value = tokens - rate * seconds
        drafted = [int(value[: length + 1].argmax()) for length in range(most + 1)]
        return StepTally(
            num_tokens=float(distribution @ tokens[drafted]), steps=np.bincount(drafted, distribution, minlength=most + 1)
        )

    return best(_dinkelbach(best, costs)[-1])


def _dinkelbach(best: Callable[[float], StepTally], costs: Costs) -> tuple[float, ...]:
    """Rates that rise until they stand, where `best(rate)` maximises E[tokens] - rate E[seconds] over finitely many rules."""
    rates = [1 / costs.verify_s(1)]
    while (rate := best(rates[-1]).tokens_per_second(costs)) > rates[-1]:
        rates.append(rate)
    return tuple(rates)
