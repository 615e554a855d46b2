"""The protocol of a tree rule: which nodes the draft reads next, and how many children each of them gets.

    open -> one pass of the draft over those nodes -> wants_child?, draw, wants_child?, draw ... -> open -> ... -> verify

Why any such rule is lossless: what it decides may depend on all that has been drawn, and what was drawn stays
(`verification` has the proof; tests/test_tree_law.py enumerates it). A rule that removes nodes says so (`removes`):
that is sound only where nothing was drawn, or where nobody asks q.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from specdecpp.policies.protocol import Policy, Rule

if TYPE_CHECKING:
    from specdecpp.costs import Costs

Children = Literal["drawn", "likeliest"]


@runtime_checkable
class Growing(Protocol):
    """A round as a tree rule sees it: `tree.Tree`. Nodes are numbered as they were drawn; -1 is the text so far.

    Of node i: its token, its parent, its depth from 1, how many siblings are older (`ranks`), q(x) (`chances`), q(x) given that
    it is none of those (`shares`), and the product of q(x) along its path.
    """

    costs: "Costs | None"
    tokens: list[int]
    parents: list[int]
    depths: list[int]
    ranks: list[int]
    chances: list[float]
    shares: list[float]
    frontier: list[int]
    widths: list[int]
    notes: dict[str, Any]
    """For what a rule works out about this tree."""

    @property
    def num_nodes(self) -> int: ...
    @property
    def depth(self) -> int: ...
    def children(self, node: int) -> Sequence[int]: ...
    def path(self, node: int) -> list[int]: ...
    def product(self, node: int) -> float: ...
    def entropy(self, node: int) -> float: ...
    def ahead(self, node: int) -> list[float]:
        """The largest probabilities that an open node's next child may have, given that it is none of those there are."""
        ...


class Tried(NamedTuple):
    """A candidate that was tested: what was known of it, and whether it was accepted."""

    depth: int
    rank: int
    chance: float
    share: float
    is_accepted: bool


class Grown(NamedTuple):
    """Outcome of a round's tree: of every node its token and parent, the branch that was accepted, the rows of each pass of
    the draft, how many nodes were verified, and what was tested, in order."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]
    widths: tuple[int, ...]
    num_verified: int
    tried: tuple[Tried, ...]


@dataclass(frozen=True, kw_only=True)
class TreePolicy(Policy):
    """Base of every tree rule: at most `max_nodes` candidates, none deeper than `max_tokens`.

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
        """The rule of a shape: costs, costs:CHILDREN, or the widths of each depth. Raises ValueError for anything else."""
        from specdecpp.lab.trees.shapes import parse_tree

        return parse_tree(text)

    def written(self) -> str | None:
        from specdecpp.lab.trees.shapes import tree_spec

        shape = tree_spec(self)
        return None if shape is None else f"tree:{shape}"

    def engine(self) -> Any:
        from specdecpp.lab.trees.engine import TREES

        return TREES

    def check(self, verification: Any, *, is_greedy: bool = False, draft: Any = None) -> None:
        from specdecpp.lab.trees.verification import check_trees

        check_trees(self, verification, is_greedy=is_greedy)

    @property
    def most_drafted(self) -> int:
        return self.max_nodes

    def limit(self, memory: Any) -> int:
        """The most candidates of a round that is a chain, and the depth of any other."""
        return min(self.max_tokens, self.max_nodes)

    @property
    def removes(self) -> bool:
        """Tell whether `removed` may name nodes."""
        return False

    def rule(self, memory: Any, costs: "Costs | None", limit: int) -> Rule | None:
        """None: the rule is asked node by node. A round that is to be a chain may have that one's thresholds; then it is
        told as one, without `grown`."""
        return None

    def stop(self, draft: Any, memory: Any) -> None:
        """A tree rule is asked `open` instead."""
        return

    def open(self, tree: Growing, memory: Any) -> Sequence[int]:
        """The nodes of `tree.frontier` that the draft reads next, in the order in which they are to get children; none to end
        the round's drafting. Asked before each pass of the draft, first with the root alone."""
        return tree.frontier

    def wants_child(self, tree: Growing, node: int, memory: Any) -> bool:
        """Tell whether this node, which the draft has just read, gets one more child. Asked before each."""
        return not tree.children(node)

    def removed(self, tree: Growing, memory: Any) -> Collection[int]:
        """Nodes that are not verified after all; all below them are not either. Only asked where `removes` says so."""
        return ()
