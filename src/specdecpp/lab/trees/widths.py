"""Trees of one shape: so many children a node at each depth, whatever is drawn."""

from dataclasses import dataclass
from typing import Any

from specdecpp.lab.trees.protocol import Growing, TreePolicy


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

    def wants_child(self, tree: Growing, node: int, memory: Any) -> bool:
        return len(tree.children(node)) < self.widths[tree.depth - 1]
