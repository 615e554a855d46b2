"""The decision process behind a step: draft one more, or verify? Solved exactly where acceptance is a known Markov chain.

    Process -> Lattice (all that a step can come to) -> Plan (where to go on) -> StepTally (tokens, draft tokens) -> tokens/s

Draft token i is accepted with probability a_i = min(1, p/q) if those before it were, so k draft tokens all survive with
probability S_k = a_1 ... a_k, and a step with N of them makes 1 + S_1 + ... + S_N tokens on average: one is always the
target's own. Steps are taken to renew: each begins in a state drawn from `Process.start`, whatever came before. What is
maximised is then rho = E[tokens]/E[seconds] of a step, and by Dinkelbach (1967) the best plan is the one that maximises
E[tokens] - rho E[seconds] at its own rho.

Source: Huang, Guo, Wang (arXiv 2405.19715), sections 3 and 4, for the costs and the theorem; Yin et al. 2024 for the
distribution of rejections. The letters: M situations, E edges, n states, K most
draft tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float, Int

from specdecpp.costs import Costs

Plan = tuple[Bool[np.ndarray, " _"], ...]
"""Decisions for k = 0..K-1 draft tokens and every situation of that layer: True to draft one more."""


def speed_up(*, discard_rate: float, verification_rate: float, c: float) -> float:
    """Speed-up over the target alone from two rates that do not depend on hardware, R_d and R_v, with c = t_draft/t_target.

    N_draft = N + N_discarded - N_target, since each target pass makes one token of its own (paper, section 3), and a target
    pass is taken to last as long at any width.

    >>> round(speed_up(discard_rate=0.333, verification_rate=0.193, c=0.023 / 0.108), 2)
    2.29
    """
    return 1 / (c * (1 + discard_rate) + (1 - c) * verification_rate)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTally:
    """Sums of steps: tokens, and `steps[k]`, the number of steps with k draft tokens. Counts, or means per step.

    It generalises R_d and R_v to target passes that take longer the more positions they read. Counting supposes that every
    step ends with a token of the target's own, which fails only where an answer is cut.
    """

    num_tokens: float
    steps: Float[np.ndarray, " K1"]

    @property
    def num_steps(self) -> float:
        return float(self.steps.sum())

    @property
    def num_drafted(self) -> float:
        return float(self.steps @ np.arange(len(self.steps)))

    @property
    def discard_rate(self) -> float:
        """R_d: draft tokens that do not end in the output, per token."""
        return (self.num_drafted - (self.num_tokens - self.num_steps)) / self.num_tokens

    @property
    def verification_rate(self) -> float:
        """R_v: target passes per token."""
        return self.num_steps / self.num_tokens

    def seconds(self, costs: Costs) -> float:
        return float(self.steps @ [costs.round_s(k) for k in range(len(self.steps))])

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
    are the values of the score, its acceptances what the score means on average, as long as they multiply.) `unjudged[s]`
    is the expected acceptance of draft tokens that are drawn but not judged yet: 1 here, less in `lagged`.

    Raises ValueError where shapes disagree or rows are not probabilities.
    """

    start: Float[np.ndarray, " n"]
    transition: Float[np.ndarray, "n n"]
    acceptance: Float[np.ndarray, " n"]
    unjudged: Float[np.ndarray, " n"] = field(default_factory=lambda: np.ones(1))

    def __post_init__(self) -> None:
        num = len(self.acceptance)
        object.__setattr__(self, "unjudged", np.broadcast_to(self.unjudged, num))
        rows = [self.start, *self.transition]
        if len(rows) != num + 1 or any(row.shape != (num,) or row.min() < 0 or abs(row.sum() - 1) > 1e-9 for row in rows):
            raise ValueError(
                f"a process over {num} acceptances needs a start [{num}] and a transition [{num}, {num}] of probabilities that "
                f"sum to 1, got {self.start} and {self.transition}"
            )
        if not all(((chance >= 0) & (chance <= 1)).all() for chance in (self.acceptance, self.unjudged)):
            raise ValueError(f"acceptances must lie in [0, 1], got {self.acceptance} and {self.unjudged} for the unjudged")

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

    @property
    def next_acceptance(self) -> Float[np.ndarray, " n"]:
        """m(s): the expected acceptance of the next draft token."""
        return self.transition @ (self.acceptance * self.unjudged)

    def lagged(self) -> "Process":
        """A process seen one token later: a draft token is judged by the step that draws its successor.

        With k draft tokens s_{k-1} is known, so E[S_k] = S_{k-1} m(s_{k-1}). Three copies of the states: nothing drafted, one
        draft token and nothing judged, and from then on.
        """
        num = len(self.acceptance)
        zero, one, nothing = np.zeros((num, num)), np.eye(num), np.ones(num)
        return Process(
            start=np.concatenate([self.start, np.zeros(2 * num)]),
            transition=np.block([[zero, one, zero], [zero, zero, self.transition], [zero, zero, self.transition]]),
            acceptance=np.concatenate([nothing, nothing, self.acceptance]),
            unjudged=np.concatenate([nothing, self.next_acceptance, self.next_acceptance]),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class LatticeLayer:
    """The M situations with k draft tokens: the state, S of the judged draft tokens, E[S_k], and E edges from layer k - 1."""

    state: Int[np.ndarray, " M"]
    survival: Float[np.ndarray, " M"]
    gain: Float[np.ndarray, " M"]
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
        layers = [LatticeLayer(state=state, survival=one, gain=one, source=nothing, target=nothing, chance=np.zeros(0))]
        for _ in range(max_tokens):
            source, state = np.nonzero(process.transition[key[:, 0]])
            chance = process.transition[key[source, 0], state]
            counts = key[source, 1:]
            counts[np.arange(len(source)), factor_of[state]] += 1
            counts[(counts[:, factors == 0] > 0).any(-1)] = factors == 0  # what cannot survive is one situation per state
            key, target = np.unique(np.column_stack([state, counts]), axis=0, return_inverse=True)
            state, survival = key[:, 0], (factors ** key[:, 1:]).prod(-1)
            gain, target = survival * process.unjudged[state], target.reshape(-1)
            layers.append(LatticeLayer(state=state, survival=survival, gain=gain, source=source, target=target, chance=chance))
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
            num_tokens += float(mass @ layer.gain)
        return StepTally(num_tokens=num_tokens, steps=np.array([*steps, mass.sum()]))


def fixed(lattice: Lattice, k: int) -> Plan:
    """Draft k draft tokens, whatever they are (K if k is larger)."""
    return tuple(np.full(len(layer.state), depth < k) for depth, layer in enumerate(lattice.layers[:-1]))


def threshold(lattice: Lattice, h: float) -> Plan:
    """SpecDec++: stop once 1 - S > h, where S is the product over the judged draft tokens."""
    return tuple(1 - layer.survival <= h for layer in lattice.layers[:-1])


def plan_at(lattice: Lattice, costs: Costs, rate: float) -> Plan:
    """The plan that maximises E[tokens] - rate E[seconds], by backward induction."""
    plan, worth = [], np.zeros(len(lattice.layers[-1].state))
    for k in reversed(range(lattice.max_tokens)):
        layer, after = lattice.layers[k : k + 2]
        surplus = after.expect(after.gain + worth, len(layer.state)) - rate * costs.step_s(k)
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
        reaches.append(float(mass @ layer.gain))
    distribution = -np.diff([*reaches, 0.0])  # P(L = l), the last one P(L >= K)
    tokens, seconds = np.arange(1.0, most + 2), np.array([costs.round_s(k) for k in range(most + 1)])

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Bound:
    """The theorem's (c2 + D)/(c1 + c2 + D) for the M situations of a layer: stop where P(some draft token is rejected) is at
    least `rejection`. c1 and c2 in seconds, as in the paper; D, which the paper cannot compute, too."""

    c1: float
    c2: float
    d: Float[np.ndarray, " M"]

    @property
    def rejection(self) -> Float[np.ndarray, " M"]:
        worth = np.maximum(self.c2 + self.d, 0)
        return np.divide(worth, self.c1 + worth, out=np.zeros_like(worth), where=worth > 0)


def bounds(lattice: Lattice, costs: Costs, plan: Plan) -> tuple[Bound, ...]:
    """The theorem's bound for k = 0..K-1 draft tokens, where going on means: one more, and then as the plan says.

    If something is rejected already, going on wastes c1 = t_draft + dt_verify at the least. If nothing is, it brings G tokens,
    each worth 1/rho seconds at the rate of the plan, for U seconds: this is c2 + D = G/rho - U, with c2 = t_target - t_draft.
    """
    rate = lattice.tally(plan).tokens_per_second(costs)
    tokens = seconds = np.zeros(len(lattice.layers[-1].state))
    found = []
    for k in reversed(range(lattice.max_tokens)):
        layer, after = lattice.layers[k : k + 2]
        num = len(layer.state)
        more, longer = after.expect(after.gain + tokens, num), costs.step_s(k) + after.expect(seconds, num)
        gained = np.divide(more, layer.gain, out=np.zeros(num), where=layer.gain > 0)
        c2 = costs.verify_s(k + 1) - costs.draft_s
        found.append(Bound(c1=costs.step_s(k), c2=c2, d=gained / rate - longer - c2))
        tokens, seconds = plan[k] * more, plan[k] * longer
    return tuple(reversed(found))
