"""Trees that grow while they pay: the rule of `cost_aware`, with several children a node.

A node's survival S is the chance that it ends in the output: that its parent does, that its elder siblings are rejected, and
that it is accepted then. All three come from the free score (`score`), one for each rank: the chance that a child is accepted
given that its elder siblings were not. By the same argument as for chains, at the rate rho that is being achieved,

    open   the nodes of a depth if  sum S_v (1 - prod (1 - m_j))  >  rho * (a draft pass over them + the rows of their children)
    child  j of an open node if     S_v prod (1 - m_i) m_j  >  rho * (one more row), and the price of a place

m_j is expected before the draw, from what is left of q. A row costs what it adds along the convex curve below that of the
passes. Where those take steps, a row that adds less than that brings the next step nearer, which not every step reaches: it
costs `REACHED` of the difference. Behind the rows that were counted with when a depth was opened, a step is paid in full. Where
rows cost nothing places are limited, and what one is worth is learned: it rises after steps that have used all of them.
With one child a node both are the chain's rule, and decide the same; so it is where further children are far from paying.
"""

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from specdecpp.lab.trees.protocol import TreePolicy
from specdecpp.lab.trees.tree import Tree, Tried
from specdecpp.policies.cost_aware import CostAware
from specdecpp.policies.learning import Account, Belief
from specdecpp.policies.protocol import NO_PAST, Given, check_probability
from specdecpp.policies.score import Score, by_q

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from specdecpp.costs import Costs
    from specdecpp.policies.protocol import Outcome

BY_SHARE = (Belief(Score(-1.2, 1.3)), Belief(Score(-1.9, 2.0)), Belief(Score(-2.1, 2.2)))
"""Correction of the share of second, third and further children: fitted on development prompts of the reference pair."""
PRIORS = (0.3, 0.2, 0.15)
"""Acceptance of such children before there is anything to go by, and the weight of that in tested children below."""
WEIGHT = 16
RISES, FALLS = 1.2, 0.99
"""Factors of the price of a place after a step that has used all of them, and after one that has not."""
LEAST_PRICE = 1e-3
REACHED = 0.4
"""Share of the steps that get to the next step of the passes: between .3 and .6 no better one was found."""

HOPE = 1.5
"""Times that a second child may be worth more, where q is broad, than one is in the mean."""


@dataclass(frozen=True, kw_only=True)
class FirstChildren(Account):
    """The chain's account, which learns its score from the first children of a tree."""

    @classmethod
    def of(cls, chain: Account) -> "FirstChildren":
        own = object.__new__(cls)
        own.__dict__.update(chain.__dict__)
        return own

    def after(self, outcome: "Outcome") -> Account:
        after, costs = super().after(outcome), outcome.costs
        if not outcome.num_drafted or costs is None:
            return after
        belief, num_tested, num_accepted = self.belief, self.num_tested, self.num_accepted
        for tried, chance in _tested(outcome):
            if not tried.rank:
                belief = belief.after((by_q(tried.share),), int(tried.is_accepted))
                num_tested, num_accepted = num_tested + 1, num_accepted + chance
        if (gains := after.gains) is not self.gains:
            own, more = gains[costs.load], _length_alike(costs, outcome) - outcome.num_drafted
            gains = {**gains, costs.load: own._replace(drafted=own.drafted + more)}
        return after.like(belief=belief, num_tested=num_tested, num_accepted=num_accepted, gains=gains)


@dataclass(frozen=True, kw_only=True)
class TreeAccount:
    """Statistics of a request: the chain's account of first children, scores and sums of the others by rank, and the price of
    a place in survival."""

    chain: Account
    beliefs: tuple[Belief, ...] = BY_SHARE
    tested: tuple[int, ...] = (0, 0, 0)
    accepted: tuple[float, ...] = (0.0, 0.0, 0.0)
    price: float = 0.005

    def mean(self, rank: int) -> float:
        """Acceptance of children of this rank, from 1, given that their elder siblings were rejected."""
        i = min(rank, len(PRIORS)) - 1
        return (self.accepted[i] + WEIGHT * PRIORS[i]) / (self.tested[i] + WEIGHT)

    def score(self, rank: int) -> Score:
        return self.chain.belief.score if not rank else self.beliefs[min(rank, len(self.beliefs)) - 1].score


@dataclass(frozen=True, kw_only=True)
class CostAwareTree(TreePolicy):
    """Grow the tree while its nodes are worth the time they add. Nothing to tune; at most `max_children` a node.

    `prior`, `prior_steps` and `regret` are those of `CostAware`.

    >>> Decoder(pair, policy=CostAwareTree())                                           # doctest: +SKIP
    """

    max_tokens: int = 20
    max_children: int = 8
    prior: float = 0.7
    prior_steps: int = 8
    regret: float = 0.01
    _chain: CostAware = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("CostAwareTree.prior", self.prior)
        if self.max_children < 1:
            raise ValueError(f"CostAwareTree needs max_children of at least 1, got {self.max_children}")
        most = max(self.max_tokens, self.max_nodes) if self.max_children > 1 else self.max_tokens
        chain = CostAware(prior=self.prior, prior_steps=self.prior_steps, regret=self.regret, max_tokens=most)
        object.__setattr__(self, "_chain", chain)

    @property
    def needs_costs(self) -> bool:
        return True

    def start(self, given: Given = NO_PAST) -> TreeAccount:
        return TreeAccount(chain=FirstChildren.of(self._chain.start(given)))

    def carry(self, past: "Mapping[str, Any] | None", memory: TreeAccount) -> "Mapping[str, Any] | None":
        """Statistics of first children; the others are learned anew."""
        return self._chain.carry(past, memory.chain)

    def learn(self, memory: TreeAccount, outcome: Any) -> TreeAccount:
        chain = memory.chain.with_step(outcome)
        if not outcome.num_drafted:
            return replace(memory, chain=chain)
        is_full = len(outcome.extra.tokens) >= self.max_nodes
        price = min(1.0, memory.price * RISES) if is_full else max(LEAST_PRICE, memory.price * FALLS)
        beliefs = list(memory.beliefs)
        tested, accepted = list(memory.tested), list(memory.accepted)
        for tried, chance in _tested(outcome):
            if not tried.rank:
                continue
            i = min(tried.rank, len(beliefs)) - 1
            beliefs[i] = beliefs[i].after((by_q(tried.share),), int(tried.is_accepted))
            tested[i] += 1
            accepted[i] += chance
        return TreeAccount(chain=chain, beliefs=tuple(beliefs), tested=tuple(tested), accepted=tuple(accepted), price=price)

    def open(self, tree: Tree, memory: TreeAccount) -> "Sequence[int]":
        costs = tree.costs
        assert costs is not None, "the session gives costs to a policy that needs them"
        num = tree.num_nodes
        least = self._thresholds(tree, memory)
        if num >= len(least):
            return ()
        nodes = sorted(tree.frontier, key=lambda node: -self._survival(tree, node, memory))
        first = self._chain.mean_acceptance(memory.chain)
        rho = self._chain.rate(memory.chain, costs)
        _, even_s = _rows(costs, self.max_nodes)[num]
        least_worth = max(memory.price, rho * even_s)
        best, worth, value, rows, counted = 0, 0.0, 0.0, -1, num  # the first child of the first node is in the threshold
        for count, node in enumerate(nodes, 1):
            gain, children = self._expected(self._survival(tree, node, memory), first, least_worth, memory, tree.notes["most"])
            if not children and count > 1:
                break
            value += gain
            rows += max(children, 1)
            more = costs.draft_pass_s(count) - costs.draft_pass_s(1) + costs.verify_s(num + 2 + rows) - costs.verify_s(num + 2)
            if count == 1 or value - rho * more > worth:
                best, worth, counted = count, value - rho * more, num + 1 + rows
        tree.notes["counted"] = counted
        return nodes[:best] if worth >= least[num] * first else ()

    def wants_child(self, tree: Tree, node: int, memory: TreeAccount) -> bool:
        children = tree.children(node)
        if not children and tree.num_nodes == tree.notes["before"]:
            return True  # what the pass was for
        if len(children) >= tree.notes["most"]:
            return False
        costs: Any = tree.costs
        survival = self._survival(tree, node, memory)
        for child in children:
            survival *= 1 - self._estimate(tree, child, memory)
        score = memory.score(len(children))
        expected = sum(share * score(by_q(share)) for share in tree.ahead(node))
        worth = survival * expected
        rho = self._chain.rate(memory.chain, costs)
        row_s = _row_s(costs, tree.num_nodes, self.max_nodes, counted=tree.notes["counted"])
        return worth > max(memory.price, rho * row_s)

    def most_children(self, tree: Tree) -> int:
        return min(4, tree.notes["most"])

    def _may_branch(self, memory: TreeAccount, costs: "Costs") -> bool:
        """Tell whether a second child can be worth its row, by those that a chain may have, about the best of them."""
        if min(self.max_children, self.max_nodes) < 2:
            return False
        least = self._chain.rate(memory.chain, costs) * _row_s(costs, 1, self.max_nodes, counted=self.max_nodes)
        worth = HOPE * (1 - self._chain.mean_acceptance(memory.chain)) * memory.mean(1)
        return worth > max(memory.price, least)

    def _thresholds(self, tree: Tree, memory: TreeAccount) -> tuple[float, ...]:
        """The chain's, by the number of nodes so far: the least survival that is worth another pass and row."""
        tree.notes["before"] = tree.num_nodes
        if "least" not in tree.notes:
            costs: Any = tree.costs
            tree.notes["least"] = self._chain.rule(memory.chain, costs).least
            tree.notes["most"] = self.max_children if self._may_branch(memory, costs) else 1
        return tree.notes["least"]

    def _expected(self, survival: float, first: float, least: float, memory: TreeAccount, most: int) -> tuple[float, int]:
        """(The chance that a child of a node is accepted, how many children pay, at most `most`) by mean acceptance."""
        left, gain, num = survival, 0.0, 0
        while num < most:
            worth = left * (memory.mean(num) if num else first)
            if num and worth <= least:
                break
            gain, left, num = gain + worth, left - worth, num + 1
        return gain, num if survival * first > memory.price else 0

    def _survival(self, tree: Tree, node: int, memory: TreeAccount) -> float:
        if node < 0:
            return 1.0
        known = tree.notes.setdefault("survival", {})
        if node not in known:
            parent, chance = tree.parents[node], self._estimate(tree, node, memory)
            for elder in tree.children(parent)[: tree.ranks[node]]:
                chance *= 1 - self._estimate(tree, elder, memory)
            known[node] = self._survival(tree, parent, memory) * chance
        return known[node]

    def _estimate(self, tree: Tree, node: int, memory: TreeAccount) -> float:
        return memory.score(tree.ranks[node])(by_q(tree.shares[node]))


def _tested(outcome: Any) -> "Iterable[tuple[Tried, float]]":
    """Each node that was tested, with how likely it was to be accepted: where nobody knows, 1 if it was and 0 if not."""
    tried = outcome.extra.tried
    chances = [min(1.0, chance) for chance in outcome.overlaps] or [float(one.is_accepted) for one in tried]
    return zip(tried, chances, strict=True)


def _length_alike(costs: "Costs", outcome: "Outcome") -> float:
    """Draft tokens of the chain whose step takes as long as this one with a tree: `Gains` has the time of chains."""
    num, seconds = outcome.num_drafted, outcome.expected_s
    k = bisect_right(range(num), seconds, key=costs.step_s) - 1
    return min(num, k + (seconds - costs.step_s(k)) / costs.added_s(k))


def _row_s(costs: "Costs", num_nodes: int, max_nodes: int, *, counted: int) -> float:
    """Seconds that one more node adds: to the target's pass, of which `counted` nodes are expected."""
    own, even = _rows(costs, max_nodes)[num_nodes]
    if own < even:
        return own + REACHED * (even - own)
    return even if num_nodes < counted else own


@lru_cache(maxsize=64)
def _rows(costs: "Costs", max_nodes: int) -> tuple[tuple[float, float], ...]:
    """After 0, 1, ... draft tokens: seconds that one more adds to the pass, and to the greatest convex curve below the
    passes."""
    seconds = [costs.pass_s(num + 1) for num in range(max_nodes + 2)]
    even: list[float] = []
    while (at := len(even)) < len(seconds) - 1:
        end = min(range(at + 1, len(seconds)), key=lambda to: ((seconds[to] - seconds[at]) / (to - at), -to))
        even += [(seconds[end] - seconds[at]) / (end - at)] * (end - at)
    own = [after - before for before, after in pairwise(seconds)]
    return tuple(zip(own, even, strict=True))
