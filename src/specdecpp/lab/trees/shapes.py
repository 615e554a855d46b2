"""Tree rules by their short forms."""

from specdecpp.lab.trees.cost_aware import CostAwareTree
from specdecpp.lab.trees.protocol import TreePolicy
from specdecpp.lab.trees.widths import Widths


def parse_tree(spec: str) -> TreePolicy:
    """A tree rule by its short form: costs, costs:CHILDREN, or the widths of each depth. Raises ValueError for anything else.

    >>> parse_tree("4x2").widths
    (4, 2)
    """
    name, _, rest = spec.partition(":")
    if spec == "costs":
        return CostAwareTree()
    if name == "costs" and rest.isdecimal() and int(rest):
        return CostAwareTree(max_children=int(rest))
    widths = spec.split("x")
    if not all(width.isdecimal() and int(width) for width in widths):
        raise ValueError(
            f"there is no tree {spec!r}. Give costs, costs:CHILDREN for at most so many children a node, or widths from 1 as "
            "in 4x2x1."
        )
    return Widths(widths=tuple(map(int, widths)))


def tree_spec(policy: TreePolicy) -> str | None:
    """The short form of a tree rule: the inverse of `parse_tree`. None where it has none.

    >>> tree_spec(Widths(widths=(4, 2)))
    '4x2'
    """
    if isinstance(policy, Widths) and policy == Widths(widths=policy.widths):
        return "x".join(map(str, policy.widths))
    if isinstance(policy, CostAwareTree) and policy == CostAwareTree(max_children=policy.max_children):
        return "costs" if policy == CostAwareTree() else f"costs:{policy.max_children}"
    return None
