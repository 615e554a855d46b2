"""Trees of draft tokens: which nodes the draft reads at each depth, and how many children each of them gets.

| rule | shape | file |
|---|---|---|
| `CostAwareTree` | nodes that are worth the time they add; with one child a node `CostAware` | cost_aware.py |
| `Widths` | so many children a node at each depth | widths.py |
| `Eagle2`, `DynamicDepth`, `OptTree`, `C2T` | those of other papers | beams.py |

`protocol.py` says what a tree rule is and what it sees, `tree.py` is the tree while it grows, `engine.py` runs a step,
`verification.py` accepts a branch and keeps the target's distribution, `replay.py` replays rules on recorded answers.
"""

from specdecpp.lab.trees.beams import C2T, Beam, DynamicDepth, Eagle2, OptTree
from specdecpp.lab.trees.cost_aware import CostAwareTree
from specdecpp.lab.trees.protocol import Growing, Grown, TreePolicy, Tried
from specdecpp.lab.trees.shapes import parse_tree, tree_spec
from specdecpp.lab.trees.widths import Widths

__all__ = [
    "C2T",
    "Beam",
    "CostAwareTree",
    "DynamicDepth",
    "Eagle2",
    "Growing",
    "Grown",
    "OptTree",
    "TreePolicy",
    "Tried",
    "Widths",
    "parse_tree",
    "tree_spec",
]
