"""Trees of draft tokens: which nodes the draft reads at each depth, and how many children each of them gets.

| rule | shape | file |
|---|---|---|
| `CostAwareTree` | nodes that are worth the time they add; with one child a node `CostAware` | cost_aware.py |
| `Widths` | so many children a node at each depth | shapes.py |
| `Eagle2`, `DynamicDepth`, `OptTree`, `C2T` | those of other papers | shapes.py |

`protocol.py` says how a tree rule is asked, `tree.py` is the tree while it grows, `engine.py` runs a step, `verification.py`
accepts a branch and keeps the target's distribution, `replay.py` replays rules on recorded answers.
"""

from specdecpp.lab.trees.cost_aware import CostAwareTree as CostAwareTree
from specdecpp.lab.trees.protocol import TreePolicy as TreePolicy
from specdecpp.lab.trees.shapes import C2T as C2T
from specdecpp.lab.trees.shapes import DynamicDepth as DynamicDepth
from specdecpp.lab.trees.shapes import Eagle2 as Eagle2
from specdecpp.lab.trees.shapes import OptTree as OptTree
from specdecpp.lab.trees.shapes import Widths as Widths
from specdecpp.lab.trees.shapes import parse_tree as parse_tree
from specdecpp.lab.trees.tree import Tree as Tree
