"""The walk over a tree whose rows are on a device: tests of all children come in one transfer, the walk is the host's."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from specdecpp.backends.graphs.cache import sent
from specdecpp.backends.graphs.trees import sibling_tests
from specdecpp.backends.graphs.verdicts import pick
from specdecpp.lab.trees.tree import ROOT, Tree
from specdecpp.lab.trees.verification import Test, TreeVerdict, following, walked
from specdecpp.sampling import Uniforms
from specdecpp.verify import GreedyVerification, TokenVerification, Verification


def verified(
    verification: Verification, tree: Tree, p: Float[Tensor, "n V"], nodes: Sequence[int], uniforms: Uniforms
) -> TreeVerdict:
    """`verification.verified` from the target's distributions, or logits, after the root and all kept nodes."""
    if isinstance(verification, TokenVerification):
        return _rejecting(tree, p, nodes, uniforms)
    if isinstance(verification, GreedyVerification):
        return following(tree, dict(zip(nodes, p.argmax(-1).tolist(), strict=True)).__getitem__)
    coins = uniforms.peek(tree.num_nodes + 1)
    own = sent([coins[0 if node == ROOT else tree.depths[node]] for node in nodes], p.device, torch.float64)
    verdict = following(tree, dict(zip(nodes, pick(p, own).tolist(), strict=True)).__getitem__)
    uniforms.take(len(verdict.path) + 1)
    return verdict


def _rejecting(tree: Tree, p: Float[Tensor, "n V"], nodes: Sequence[int], uniforms: Uniforms) -> TreeVerdict:
    coins = uniforms.take(tree.num_nodes + 1)
    inner = sorted((node for node in nodes if tree.children(node)), key=lambda node: -len(tree.children(node)))
    most = max((len(tree.children(node)) for node in inner), default=0)
    ranks = [[tree.children(node)[j] for node in inner if len(tree.children(node)) > j] for j in range(most)]
    padded = [[tree.tokens[child] for child in rank] + [0] * (len(inner) - len(rank)) for rank in ranks]
    left, found = p, list[Tensor]()
    if inner:
        at, *tokens = sent([list(map(nodes.index, inner)), *padded], p.device).unbind()
        q = torch.stack([tree.open[node].row for node in inner])
        is_drawn = tree.is_drawn[ranks[0][0]]
        rows, found = sibling_tests(p.index_select(0, at), q, tokens, list(map(len, ranks)), is_drawn=is_drawn)
        left = p.index_copy(0, at, rows)
    after = pick(left, p.new_full((len(p),), coins[-1], dtype=torch.float64))
    told = iter(torch.cat([*found, after.double()]).tolist())
    tests = [dict(zip(rank, told, strict=False)) for rank in ranks for _ in range(2)]  # chances and overlaps, rank by rank
    token_after = dict(zip(nodes, map(int, told), strict=True))

    def of(node: int) -> list[Test]:
        return [(child, tests[2 * j][child], tests[2 * j + 1][child]) for j, child in enumerate(tree.children(node))]

    return walked(tree, lambda child, chance: coins[child] < chance, of, token_after.__getitem__)
