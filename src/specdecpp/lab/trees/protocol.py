"""The protocol of a tree rule: which nodes the draft reads next, and how many children each of them gets.

    open -> one pass of the draft over those nodes -> wants_child?, draw, wants_child?, draw ... -> open -> ... -> verify

Why any such rule is lossless: what it decides may depend on all that has been drawn, and what was drawn stays
(`verification` has the proof; tests/test_tree_law.py enumerates it). A rule that removes nodes says so (`removes`):
that is sound only where nothing was drawn, or where nobody asks q.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from specdecpp.lab.trees.tree import Tree
from specdecpp.policies.protocol import Policy, Rule

if TYPE_CHECKING:
    from specdecpp.costs import Costs

Children = Literal["drawn", "likeliest"]


@dataclass(frozen=True, kw_only=True)
class TreePolicy(Policy):
    """Base of every tree rule: at most `max_nodes` draft tokens, none deeper than `max_tokens`.

    `children` says what they are: "drawn" from q without replacement, or the "likeliest" tokens, as always at temperature 0.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class TwoWhereUnsure(TreePolicy):
    ...     def wants_child(self, tree, node, memory):
    ...         return len(tree.children(node)) < (2 if tree.entropy(node) > 1 else 1)
    """

    short: ClassVar[str] = "tree:SHAPE"
    max_nodes: int = 31
    children: Children = "drawn"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_nodes < 0 or self.children not in ("drawn", "likeliest"):
            raise ValueError(
                f"{type(self).__name__} needs max_nodes of at least 0 and children 'drawn' or 'likeliest', got "
                f"max_nodes={self.max_nodes} and children={self.children!r}"
            )

    @classmethod
    def read(cls, text: str) -> "TreePolicy":
        """The rule of a shape: costs, or the widths of each depth. Raises ValueError for anything else."""
        from specdecpp.lab.trees.shapes import parse_tree

        return parse_tree(text)

    def written(self) -> str | None:
        from specdecpp.lab.trees.shapes import tree_spec

        return tree_spec(self)

    def engine(self) -> Any:
        from specdecpp.lab.trees.engine import TREES

        return TREES

    def check(self, verification: Any, *, is_greedy: bool = False) -> None:
        from specdecpp.lab.trees.verification import check_trees

        check_trees(self, verification, is_greedy=is_greedy)

    def limit(self, memory: Any) -> int:
        """The most depths of a tree."""
        return min(self.max_tokens, self.max_nodes)

    @property
    def removes(self) -> bool:
        """Tell whether `removed` may name nodes."""
        return False

    def rule(self, memory: Any, costs: "Costs | None") -> Rule | None:
        """None: the rule is asked node by node."""
        return None

    def open(self, tree: Tree, memory: Any) -> Sequence[int]:
        """The nodes of `tree.frontier` that the draft reads next, in the order in which they are to get children; none to end
        the step's drafting. Asked before each pass of the draft, first with the root alone."""
        return tree.frontier

    def wants_child(self, tree: Tree, node: int, memory: Any) -> bool:
        """Tell whether this node, which the draft has just read, gets one more child. Asked before each."""
        return not tree.children(node)

    def most_children(self, tree: Tree) -> int:
        """Children of each node of the coming depth that are drawn at once where a device does; further ones one by one."""
        return 4

    def removed(self, tree: Tree, memory: Any) -> Collection[int]:
        """Nodes that are not verified after all; all below them are not either. Only asked where `removes` says so."""
        return ()
