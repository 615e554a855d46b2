"""Shapes of other papers: a beam of the likeliest nodes is read at each depth, and each of them gets so many children.

| rule | reads a node | and another depth | source |
|---|---|---|---|
| `Eagle2` | among the `width` likeliest by the product of q | up to a fixed depth | Li et al. 2406.16858 |
| `DynamicDepth` | the same | while log of the sum of the beam's products is above a threshold | Brown et al. 2409.00142 |
| `OptTree` | the same | while the last depth has added so much to the sum of all products | Wang et al. 2406.17276 |
| `C2T` | where a classifier of product, entropy and depth says so | while there is one | Huo et al. 2502.13652 |

There children are the likeliest tokens, `children="likeliest"` here, and so they are at temperature 0; EAGLE-2 cuts the tree
once it has grown. Drawn children stay (`tree`), so a tree of them is as large as what it verifies.
"""

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from specdecpp.lab.trees.protocol import Growing, TreePolicy


@dataclass(frozen=True, kw_only=True)
class Beam(TreePolicy):
    """Base: at each depth the `width` likeliest nodes are read, and each gets `branch` children."""

    max_tokens: int = 6
    width: int = 4
    branch: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width < 1 or self.branch < 1:
            raise ValueError(f"{type(self).__name__} needs width and branch of at least 1, got {self.width} and {self.branch}")

    def open(self, tree: Growing, memory: Any) -> Sequence[int]:
        """The likeliest nodes of the frontier, the likeliest first."""
        return heapq.nlargest(self.width, tree.frontier, key=tree.product)

    def wants_child(self, tree: Growing, node: int, memory: Any) -> bool:
        return len(tree.children(node)) < self.branch


@dataclass(frozen=True, kw_only=True)
class Eagle2(Beam):
    """A beam of fixed depth, of which the likeliest `verified` nodes are verified. Drawn children stay, and end at as many."""

    max_nodes: int = 200
    verified: int = 31

    @property
    def removes(self) -> bool:
        return self.children == "likeliest"

    def removed(self, tree: Growing, memory: Any) -> Collection[int]:
        """All but the likeliest `verified`; a parent is never less likely than its child."""
        kept = heapq.nlargest(self.verified, range(tree.num_nodes), key=lambda node: (tree.product(node), -node))
        return set(range(tree.num_nodes)) - set(kept)

    def wants_child(self, tree: Growing, node: int, memory: Any) -> bool:
        return super().wants_child(tree, node, memory) and (self.removes or tree.num_nodes < self.verified)


@dataclass(frozen=True, kw_only=True)
class DynamicDepth(Beam):
    """One more depth while log sum of products over the beam is at least `threshold`."""

    max_tokens: int = 12
    threshold: float = -0.7

    def open(self, tree: Growing, memory: Any) -> Sequence[int]:
        beam = super().open(tree, memory)
        return beam if math.log(max(sum(map(tree.product, beam)), 1e-30)) >= self.threshold else ()


@dataclass(frozen=True, kw_only=True)
class OptTree(Beam):
    """One more depth while the last one has added at least `gain` to the sum of all products, the accepted length expected."""

    max_tokens: int = 12
    gain: float = 0.5

    def open(self, tree: Growing, memory: Any) -> Sequence[int]:
        added = sum(map(tree.product, tree.frontier))
        return super().open(tree, memory) if added >= self.gain else ()


@dataclass(frozen=True, kw_only=True)
class C2T(Beam):
    """Nodes are read where a logistic classifier says at least `threshold`; `weights` are those of 1, the log of the product of
    q, the entropy of the distribution that the node came from, and its depth. The text itself is always read."""

    max_tokens: int = 12
    width: int = 8
    threshold: float = 0.3
    weights: tuple[float, float, float, float] = (2.0, 1.0, -0.3, 0.0)

    def open(self, tree: Growing, memory: Any) -> Sequence[int]:
        return [node for node in super().open(tree, memory) if node < 0 or self.score(tree, node) >= self.threshold]

    def score(self, tree: Growing, node: int) -> float:
        """The chance that a node ends in the output, as the classifier has it."""
        bias, product, entropy, depth = self.weights
        logit = bias + product * math.log(max(tree.product(node), 1e-30)) + depth * tree.depths[node]
        logit += entropy * tree.entropy(tree.parents[node])
        return 1 / (1 + math.exp(-max(-50.0, min(50.0, logit))))
