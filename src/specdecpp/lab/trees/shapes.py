"""Shapes of trees: widths for each depth, those of other papers, and the short forms of all.

| rule | reads a node | and another depth | source |
|---|---|---|---|
| `Widths` | always | up to a fixed depth | |
| `Eagle2` | among the `width` likeliest by the product of q | up to a fixed depth | Li et al. 2406.16858 |
| `DynamicDepth` | likewise | while log of the sum of the beam's products is above a threshold | Brown et al. 2409.00142 |
| `OptTree` | likewise | while the last depth has added so much to the sum of all products | Wang et al. 2406.17276 |
| `C2T` | where a classifier of product, entropy and depth says so | while there is one | Huo et al. 2502.13652 |

In those papers children are the likeliest tokens, `children="likeliest"` here, and so they are at temperature 0; EAGLE-2 cuts
the tree once it has grown. Drawn children stay (`tree`), so a tree of them is as large as what it verifies.
"""

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from specdecpp.lab.trees.cost_aware import CostAwareTree
from specdecpp.lab.trees.protocol import TreePolicy
from specdecpp.lab.trees.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Widths(TreePolicy):
    """`widths[d]` children for every node of depth d; (1, 1, 1) is a chain of three.

    >>> Widths(widths=(4, 2)).max_tokens
    2
    """

    widths: tuple[int, ...] = (4, 2, 1, 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_tokens", len(self.widths))
        super().__post_init__()
        if not all(width >= 1 for width in self.widths):
            raise ValueError(f"Widths needs at least 1 child at each depth, got widths={self.widths}")

    def wants_child(self, tree: Tree, node: int, memory: Any) -> bool:
        return len(tree.children(node)) < self.widths[tree.depth - 1]

    def most_children(self, tree: Tree) -> int:
        return self.widths[tree.depth]


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

    def open(self, tree: Tree, memory: Any) -> Sequence[int]:
        """The likeliest nodes of the frontier, the likeliest first."""
        return heapq.nlargest(self.width, tree.frontier, key=tree.product)

    def wants_child(self, tree: Tree, node: int, memory: Any) -> bool:
        return len(tree.children(node)) < self.branch


@dataclass(frozen=True, kw_only=True)
class Eagle2(Beam):
    """A beam of fixed depth, of which the likeliest `verified` nodes are verified. Drawn children stay, and end at as many."""

    max_nodes: int = 200
    verified: int = 31

    @property
    def removes(self) -> bool:
        return self.children == "likeliest"

    def removed(self, tree: Tree, memory: Any) -> Collection[int]:
        """All but the likeliest `verified`; a parent is never less likely than its child."""
        kept = heapq.nlargest(self.verified, range(tree.num_nodes), key=lambda node: (tree.product(node), -node))
        return set(range(tree.num_nodes)) - set(kept)

    def wants_child(self, tree: Tree, node: int, memory: Any) -> bool:
        return super().wants_child(tree, node, memory) and (self.removes or tree.num_nodes < self.verified)


@dataclass(frozen=True, kw_only=True)
class DynamicDepth(Beam):
    """One more depth while log sum of products over the beam is at least `threshold`."""

    max_tokens: int = 12
    threshold: float = -0.7

    def open(self, tree: Tree, memory: Any) -> Sequence[int]:
        beam = super().open(tree, memory)
        return beam if math.log(max(sum(map(tree.product, beam)), 1e-30)) >= self.threshold else ()


@dataclass(frozen=True, kw_only=True)
class OptTree(Beam):
    """One more depth while the last one has added at least `gain` to the sum of all products, the accepted length expected."""

    max_tokens: int = 12
    gain: float = 0.5

    def open(self, tree: Tree, memory: Any) -> Sequence[int]:
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

    def open(self, tree: Tree, memory: Any) -> Sequence[int]:
        return [node for node in super().open(tree, memory) if node < 0 or self._chance(tree, node) >= self.threshold]

    def _chance(self, tree: Tree, node: int) -> float:
        bias, product, entropy, depth = self.weights
        logit = bias + product * math.log(max(tree.product(node), 1e-30)) + depth * tree.depths[node]
        logit += entropy * tree.entropy(tree.parents[node])
        return 1 / (1 + math.exp(-max(-50.0, min(50.0, logit))))


def parse_tree(spec: str) -> TreePolicy:
    """A tree rule by its short form: costs, or the widths of each depth. Raises ValueError for anything else.

    >>> parse_tree("4x2").widths
    (4, 2)
    """
    widths = spec.split("x")
    if spec == "costs":
        return CostAwareTree()
    if not all(width.isdecimal() and int(width) for width in widths):
        raise ValueError(f"there is no tree {spec!r}. Give costs, or widths from 1 as in 4x2x1.")
    return Widths(widths=tuple(map(int, widths)))


def tree_spec(policy: TreePolicy) -> str | None:
    """The short form of a tree rule: the inverse of `parse_tree`. None where it has none.

    >>> tree_spec(Widths(widths=(4, 2)))
    'tree:4x2'
    """
    if isinstance(policy, Widths) and policy == Widths(widths=policy.widths):
        return f"tree:{'x'.join(map(str, policy.widths))}"
    return "tree:costs" if policy == CostAwareTree() else None
