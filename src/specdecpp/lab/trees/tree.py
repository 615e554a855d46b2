"""The draft tokens of a step as a tree, while it grows: what a tree rule sees, and what verification reads.

Nodes are numbered in the order in which they were drawn; -1 is the root, the text so far. A node is *open* once the draft has
read it: its distribution is then known, and children are drawn from it, one after the other and none twice.

    drawn      child j from q without the children before it, renormalised: draws without replacement
    likeliest  child j is the likeliest token that is no child yet: nothing is drawn (temperature 0 always)

Shapes: V vocabulary.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from specdecpp.backends.graphs.trees import ROOT as ROOT
from specdecpp.costs import Costs
from specdecpp.head import features
from specdecpp.policies.protocol import LIMIT, Stop
from specdecpp.sampling import Randomness

LIKELIEST = 16
"""Number of tokens of an open node that are known in order."""


class Tried(NamedTuple):
    """A draft token that was tested: what was known of it (see `Tree`), and whether it was accepted."""

    depth: int
    rank: int
    chance: float
    share: float
    is_accepted: bool


class Grown(NamedTuple):
    """Outcome of a step's tree: of every node its token and parent, the branch that was accepted, the rows of each pass of
    the draft, how many nodes were verified, and what was tested, in order."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]
    widths: tuple[int, ...]
    num_verified: int
    tried: tuple[Tried, ...]


@dataclass(eq=False)
class Branching:
    """An open node: its distribution, the children so far and their tokens."""

    row: Float[Tensor, " V"]
    children: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    top: list[tuple[int, float]] | None = None
    """The likeliest tokens, once somebody asks."""
    known: dict[int, float] = field(default_factory=dict)
    """Probabilities that the host has been told."""

    def left(self, num: int | None = None) -> Float[Tensor, " V"]:
        """Distribution without the first `num` children (None: all), not divided by its sum; no copy before the first."""
        if not self.tokens[:num]:
            return self.row
        left = self.row.clone()
        left[self.tokens[:num]] = 0.0
        return left

    def given(self, num: int | None = None) -> Float[Tensor, " V"]:
        """`left` as a distribution: the row itself before the first child, so that a chain is decided by the same numbers."""
        left = self.left(num)
        return left / left.sum() if self.tokens[:num] else left


@dataclass(eq=False)
class Tree:
    """The nodes of one step, column by column.

    `is_drawn` is False where a node was taken as the likeliest token. `chance` is q(x) in its parent's whole distribution,
    `share` the same given that it is none of its elder siblings, `rank` how many of those there are. `frontier` are the nodes
    of the last depth that may be opened.
    """

    costs: Costs | None = None
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    products: list[float] = field(default_factory=list)
    is_drawn: list[bool] = field(default_factory=list)
    open: dict[int, Branching] = field(default_factory=dict)
    frontier: list[int] = field(default_factory=lambda: [ROOT])
    widths: list[int] = field(default_factory=list)
    """Rows of each pass of the draft so far."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Notes of a rule about this tree."""
    removed: set[int] = field(default_factory=set)
    """Nodes that are not verified."""
    stop: Stop = LIMIT

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Depth of the frontier: tokens from the text to there."""
        return len(self.widths)

    def children(self, node: int) -> Sequence[int]:
        """Children in the order in which they were drawn; none of a node that is not open."""
        found = self.open.get(node)
        return [] if found is None else [child for child in found.children if child not in self.removed]

    @property
    def kept(self) -> list[int]:
        """The nodes that are verified, in order."""
        return [node for node in range(self.num_nodes) if node not in self.removed]

    def path(self, node: int) -> list[int]:
        """The nodes from the text to this one; none for the root."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def branch_of(self, node: int) -> list[int]:
        """The tokens from the text to this node."""
        return [self.tokens[i] for i in self.path(node)]

    def product(self, node: int) -> float:
        """The product of q along the path; 1 for the root."""
        return 1.0 if node == ROOT else self.products[node]

    def entropy(self, node: int) -> float:
        """Entropy in nats of an open node's distribution."""
        return float(features.entropy(self.open[node].row))

    def ahead(self, node: int) -> list[float]:
        """The largest probabilities that an open node's next child may have, given that it is none of those there are."""
        branching = self.open[node]
        if branching.top is None:
            new = [one for one in self.open.values() if one.top is None]
            top = torch.stack([one.row for one in new]).topk(min(LIKELIEST, len(branching.row)))
            for one, *row in zip(new, top.indices.tolist(), top.values.tolist(), strict=True):
                one.top = list(zip(*row, strict=True))
        drawn = {self.tokens[child] for child in branching.children}
        left = 1.0 - sum(self.chances[child] for child in branching.children)
        return [min(1.0, q / left) for token, q in branching.top or () if token not in drawn and q > 0] if left > 0 else []

    def branch(self, node: int, row: Float[Tensor, " V"]) -> None:
        """Open a node whose distribution is `row`, which sums to 1."""
        self.open[node] = Branching(row)

    def draw(self, node: int, randomness: Randomness | None) -> int | None:
        """The token of the next child, to be added then; the likeliest without randomness. None where q has no more."""
        left = self.open[node].left()
        if not bool(left.any()):
            return None
        return int(left.argmax()) if randomness is None else randomness.categorical(left)

    def q(self, child: int) -> Float[Tensor, " V"] | None:
        """The distribution that a node was drawn from given its elder siblings; None for one that was not drawn."""
        return self.open[self.parents[child]].given(self.ranks[child]) if self.is_drawn[child] else None

    def add(self, node: int, token: int, *, is_drawn: bool) -> int:
        """Add a child that is not there yet; its number."""
        branching, child = self.open[node], len(self.tokens)
        chance = branching.known[token] if token in branching.known else float(branching.row[token])
        left = 1.0 - sum(self.chances[elder] for elder in branching.children)
        self.tokens.append(token)
        self.parents.append(node)
        self.ranks.append(len(branching.children))
        self.depths.append(len(self.widths))
        self.chances.append(chance)
        self.shares.append(min(1.0, chance / left) if left > 0 else 1.0)
        self.products.append(self.product(node) * chance)
        self.is_drawn.append(is_drawn)
        branching.children.append(child)
        branching.tokens.append(token)
        return child

    def remove(self, nodes: Collection[int]) -> None:
        """Leave nodes out of verification, with all below them."""
        for node in range(self.num_nodes):
            if node in nodes or self.parents[node] in self.removed:
                self.removed.add(node)

    def grown(self, path: Sequence[int], tried: Sequence[int]) -> Grown:
        """The record of the tree once it was verified."""
        accepted = set(path)
        return Grown(
            tokens=tuple(self.tokens),
            parents=tuple(self.parents),
            path=tuple(path),
            widths=tuple(self.widths),
            num_verified=self.num_nodes - len(self.removed),
            tried=tuple(Tried(self.depths[i], self.ranks[i], self.chances[i], self.shares[i], i in accepted) for i in tried),
        )
