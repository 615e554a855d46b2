"""Verification of a tree of draft tokens: pure functions for the accepted branch and the token after it, exact in distribution.

**Recursive rejection** (`TokenVerification`; SpecInfer, Miao et al. 2305.09781; without replacement Jeon et al. 2402.14160,
Yang et al. 2401.06706). At a node with the target's distribution p_1 = p the children x_1, x_2, ... are tried in the order in
which they were drawn, x_j from q_j = q without x_1..x_(j-1), renormalised:

    accept x_j with probability min(1, p_j(x_j)/q_j(x_j)), and go on at that node
    else p_(j+1) = norm((p_j - q_j)+), and try x_(j+1)
    no child left: draw the next token from p_(j+1); at a node without children that is p itself

*One child changes nothing.* Let x_j ~ q_j, whatever q_j is. Then y is emitted at this node with probability

    q_j(y) min(1, p_j(y)/q_j(y)) + P(reject) norm((p_j - q_j)+)(y) = min(p_j, q_j) + (p_j - q_j)+ = p_j(y),

as P(reject) = sum (q_j - p_j)+ = sum (p_j - q_j)+: just as often as without x_j, when y is drawn from p_j. And where x_j is
accepted, what follows is drawn from p after x_j, as the target alone would.

*So no adapted shape changes anything.* Let L(T) be the distribution of the text if the tree T were verified now and the target
went on alone. By the above E[L(T with one more child)] = L(T), given T and all that was drawn before: L is a martingale in the
draws. Whether, where and how often children are drawn may depend on all that was drawn anywhere in the tree, in any order, and
on q; with the tree that such a rule ends with, E[L] = L(no tree), the target's distribution. What is *not* adapted is to remove
a drawn child after looking at it: the draws that are left are then no draws from q_j (tests/test_tree_law.py enumerates the
bias). Removing is sound where nothing was drawn: for children that are the likeliest tokens, whose q_j is one at x_j.

**Comparison** (`CompareVerification`): draw y ~ p at a node and go on at the child that equals it, if there is one. Exact for
any tree at all. **Greedy**: the same with y the target's likeliest token.

Block verification of a tree is refused: it weighs a prefix by what may follow it, and which of several siblings that is has no
distribution known to us.

Uniforms of recursive rejection: one for each node in its order, used or not, then one for the next token. A tree of one child a
node is thus decided as the chain.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecpp.errors import UnsoundError
from specdecpp.lab.trees.protocol import TreePolicy
from specdecpp.lab.trees.tree import ROOT, Tree
from specdecpp.sampling import Randomness, Uniforms
from specdecpp.verify import (
    BlockVerification,
    CompareVerification,
    GreedyVerification,
    TokenVerification,
    Verification,
    overlap,
    residual,
)

Distribution = Callable[[int], Tensor]
"""A node -> the target's distribution after it [V]; under greedy verification logits do."""
Test = tuple[int, float, float]
"""A child, the chance that it is accepted given that its elder siblings were not, and that of any draw in its place."""


@dataclass(frozen=True, kw_only=True)
class TreeVerdict:
    """The accepted nodes, each a child of the one before it; the token that follows; the nodes that were tried, in order."""

    path: tuple[int, ...]
    next_token: int
    tried: tuple[int, ...]
    overlaps: tuple[float, ...] = ()
    """Chances that a draw in the place of a node tried by recursive rejection passes, sum min(p_j, q_j)."""


def refusal(verification: Verification, *, removes_drawn: bool = False) -> str | None:
    """Reason why trees are not verified so; None where they are. `removes_drawn`: the rule drops children that it drew."""
    if isinstance(verification, BlockVerification):
        return (
            "block verification is known for chains only, and a tree of draft tokens would change the distribution. Use "
            "TokenVerification()."
        )
    if removes_drawn and not verification.allows_dropping:
        return (
            f"the rule removes sampled draft tokens after looking at them, and {type(verification).__name__} then no longer "
            "keeps the target's distribution. Take the likeliest tokens as children (children='likeliest'), or use "
            "CompareVerification()."
        )
    if type(verification) not in _WALKS:
        return f"{type(verification).__name__} does not know trees. Use TokenVerification() or CompareVerification()."
    return None


def check_trees(policy: TreePolicy, verification: Verification, *, is_greedy: bool = False) -> None:
    """Raise `UnsoundError` for a tree rule and a verification that together would change the distribution."""
    removes_drawn = policy.removes and policy.children == "drawn" and not is_greedy
    if reason := refusal(verification, removes_drawn=removes_drawn):
        raise UnsoundError(f"{type(policy).__name__} drafts trees: {reason}")


def verified(verification: Verification, tree: Tree, distribution: Distribution, randomness: Randomness) -> TreeVerdict:
    """The outcome of one verification of a tree. Raises ValueError where trees are not verified so."""
    if reason := refusal(verification):
        raise ValueError(reason)
    return _WALKS[type(verification)](tree, distribution, randomness)


def _rejecting(tree: Tree, distribution: Distribution, randomness: Randomness) -> TreeVerdict:
    left: dict[int, Tensor] = {}

    def tests(node: int) -> Iterator[Test]:
        left[node] = distribution(node)
        for child in tree.children(node):
            p, q, token = left[node], tree.q(child), tree.tokens[child]
            if q is None:  # no draw: its q is one at the token
                q = torch.zeros_like(p)
                q[token] = 1.0
            yield child, min(1.0, float(p[token] / q[token])), float(overlap(p, q))
            left[node] = residual(p, q)

    return walked(tree, _coins(randomness, tree.num_nodes), tests, lambda node: randomness.categorical(left[node]))


def walked(
    tree: Tree, coin: Callable[[int, float], bool], tests: Callable[[int], Iterable[Test]], token_after: Callable[[int], int]
) -> TreeVerdict:
    """Recursive rejection, given the tests of a node's children and the token that is drawn where none is left."""
    node, path, tried, overlaps = ROOT, [], [], []
    while True:
        accepted = None
        for child, chance, common in tests(node):
            tried.append(child)
            if tree.is_drawn[child]:
                overlaps.append(common)
            if coin(child, chance):
                accepted = child
                break
        if accepted is None:
            return TreeVerdict(path=tuple(path), next_token=token_after(node), tried=tuple(tried), overlaps=tuple(overlaps))
        path.append(accepted)
        node = accepted


def _coins(randomness: Randomness, num: int) -> Callable[[int, float], bool]:
    """The coin of a node: by the uniform of its place, where there are uniforms."""
    if isinstance(randomness, Uniforms):
        uniforms = randomness.take(num)
        return lambda node, chance: uniforms[node] < chance
    return lambda node, chance: bool(randomness.bernoulli(torch.tensor([chance], dtype=torch.float64))[0])


def _comparing(tree: Tree, distribution: Distribution, randomness: Randomness) -> TreeVerdict:
    return following(tree, lambda node: randomness.categorical(distribution(node)))


def _greedy(tree: Tree, distribution: Distribution, randomness: Randomness) -> TreeVerdict:
    return following(tree, lambda node: int(distribution(node).argmax()))


def following(tree: Tree, token_after: Callable[[int], int]) -> TreeVerdict:
    """The branch whose nodes are the tokens that come after each other."""
    node, path, tried = ROOT, [], []
    while True:
        token = token_after(node)
        children = tree.children(node)
        found = next((i for i, child in enumerate(children) if tree.tokens[child] == token), None)
        if found is None:
            return TreeVerdict(path=tuple(path), next_token=token, tried=(*tried, *children))
        node = children[found]
        tried += children[: found + 1]
        path.append(node)


_WALKS: dict[type[Verification], Callable[[Tree, Distribution, Randomness], TreeVerdict]] = {
    TokenVerification: _rejecting,
    CompareVerification: _comparing,
    GreedyVerification: _greedy,
}
