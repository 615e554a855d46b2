"""Exact replay of trees: what any tree rule would have done on recorded answers, at any costs.

    answer X + the distributions p along it + the draft + coins + rule -> Steps -> TreesReplayed

The coupling of `replay.replay`, child by child. At a position of the answer the text that comes out is X ~ p whatever is
drafted, and verification of siblings (`lab.trees.verification`) is read backwards. As long as no child has been accepted, X
is a draw from p_j, and the child that is drawn next

    is X itself, and accepted       with probability min(p_j, q_j)(X)/p_j(X)
    else a draw from norm((q_j - p_j)+), rejected; then p_(j+1) = norm((p_j - q_j)+)

since P(x_j = X = y, accepted) = min(p_j, q_j)(y), and given a rejection x_j and what is emitted in the end are independent, the
latter a draw from p_(j+1). Children behind an accepted one, and all below a rejected one, are plain draws: they cost, and the
rule sees them. Likeliest children draw nothing: the one that equals X is accepted, as under comparison and at temperature 0.

So an answer needs its p, position by position, and the draft itself, which is run where the rule goes (`AnswerRows`): what
hangs below rejected children would be exponentially much to record. The rule meets the tree that the host grows, by the very
same function (`engine.grow`). tests/test_tree_replay.py enumerates the joint distribution of text and trees.

Shapes: V vocabulary; A answers.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdecpp.lab.trees.engine import common_length, grow, tree_s
from specdecpp.lab.trees.protocol import TreePolicy
from specdecpp.lab.trees.tree import ROOT, Tree
from specdecpp.policies import Costs
from specdecpp.policies.protocol import Given, decide
from specdecpp.replay.replayed import Rates, ReplayedStep
from specdecpp.sampling import Randomness, streams
from specdecpp.verify import overlap, residual


@runtime_checkable
class AnswerRows(Protocol):
    """One answer: its tokens, the target's distribution before each of them, and the draft's anywhere."""

    @property
    def source(self) -> str: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def ends(self) -> Collection[int]: ...
    @property
    def num_places(self) -> int:
        """Draft tokens may stand at so many of its first positions, as in `Trace`."""
        ...

    @property
    def is_greedy(self) -> bool: ...
    def p(self, i: int) -> Float[Tensor, " V"]:
        """The target's distribution of token i; not asked where nothing is drawn."""
        ...

    def q(self, i: int, branch: Sequence[int]) -> Float[Tensor, " V"]:
        """The draft's distribution after the first i tokens and those of `branch`."""
        ...


def played(
    answer: AnswerRows, policy: TreePolicy, costs: Costs, randomness: Randomness, *, compares: bool = False
) -> Iterator[ReplayedStep]:
    """Steps of a rule on one answer. `compares`: children are verified by comparison, not by q."""
    memory = policy.start(Given(is_greedy=answer.is_greedy))
    is_drawn = policy.children == "drawn" and not answer.is_greedy
    at, num = 0, len(answer.tokens)
    while at < num:
        decision = decide(policy, memory, costs, max(0, answer.num_places - at))
        tree = Tree(costs=costs)
        game = _Game(tree, answer, at, randomness, is_drawn=is_drawn, is_coupled=is_drawn and not compares)
        grow(tree, policy, decision, read=game.read, draw=game.draw, ends=answer.ends, is_drawn=is_drawn)
        path = game.path()
        tried = game.tried(path)
        grown = tree.grown(path, tried)
        emitted = min(len(path) + 1, num - at)
        verify_s = costs.verify_s(grown.num_verified + 1)
        seconds = tree_s(costs, grown.widths, grown.num_verified)
        took = seconds, seconds - verify_s, verify_s
        overlaps = [game.overlaps[node] for node in tried] if game.is_coupled else ()
        outcome = ReplayedStep(emitted, grown.num_verified, len(path), *took, extra=grown, costs=costs, overlaps=overlaps)
        yield outcome
        memory = policy.learn(memory, outcome)
        at += emitted


class _Game:
    """The tree of one step that begins after `at` tokens of an answer, and which of its nodes are the answer's."""

    def __init__(self, tree: Tree, answer: AnswerRows, at: int, randomness: Randomness, *, is_drawn: bool, is_coupled: bool):
        self.tree, self._distributions, self._at = tree, answer, at
        self._randomness, self._own = randomness, randomness if is_drawn else None
        self.is_coupled = is_coupled
        self._place = {ROOT: at}  # of nodes that are the answer's: the position after them
        self._left: dict[int, Tensor] = {}  # p_j at those of them whose child that is X has not been drawn
        self.overlaps: dict[int, float] = {}  # of their children: how likely a draw in such a place is accepted

    def read(self, nodes: Sequence[int]) -> list[Tensor]:
        return [self._distributions.q(*self._context(node)) for node in nodes]

    def _context(self, node: int) -> tuple[int, tuple[int, ...]]:
        """The position where a node's branch leaves the answer, and the tokens from there."""
        branch = self.tree.branch_of(node)
        num = common_length(branch, self._distributions.tokens[self._at :])
        return self._at + num, tuple(branch[num:])

    def draw(self, node: int) -> int | None:
        tree, place = self.tree, self._place.get(node)
        if place is None or place >= len(self._distributions.tokens):
            return tree.draw(node, self._own)
        own = self._distributions.tokens[place]
        has_own = any(tree.tokens[child] == own for child in tree.children(node))
        token = tree.draw(node, self._own) if has_own or not self.is_coupled else self._coupled(node, place, own)
        if token == own and not has_own:
            self._place[tree.num_nodes] = place + 1
        return token

    def _coupled(self, node: int, place: int, own: int) -> int | None:
        """The next child at a node of the answer, given that the children so far were rejected."""
        if not bool(self.tree.open[node].left().any()):
            return None
        distribution = self.tree.open[node].given()
        p = self._left.get(node)
        if p is None:
            p = self._distributions.p(place)
        self.overlaps[self.tree.num_nodes] = float(overlap(p, distribution))
        chance = min(1.0, float(distribution[own] / p[own]))
        if bool(self._randomness.bernoulli(torch.tensor([chance], dtype=torch.float64))[0]):
            return own
        self._left[node] = residual(p, distribution)
        rejected = (distribution - p).clamp(min=0)
        rejected[own] = 0.0  # where rounding has left a chance of rejecting what cannot be
        return self._randomness.categorical(rejected) if bool(rejected.any()) else own

    def path(self) -> list[int]:
        """The branch that is the answer's, as far as it is verified."""
        tree = self.tree
        return [node for node in sorted(self._place) if node != ROOT and node not in tree.removed]

    def tried(self, path: Sequence[int]) -> list[int]:
        """The children that are tested along it."""
        found, accepted = [], set(path)
        for node in (ROOT, *path):
            for child in self.tree.children(node):
                found.append(child)
                if child in accepted:
                    break
        return found


Shape = tuple[tuple[int, ...], int]
"""Facts that price a step: rows of each pass of the draft, nodes verified."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TreesReplayed(Rates):
    """Trees replayed: steps by shape, of which seconds are made."""

    shapes: tuple[Mapping[Shape, int], ...]

    @property
    def seconds(self) -> Float[np.ndarray, " A"]:
        each = {shape: tree_s(self.costs, *shape) for shapes in self.shapes for shape in shapes}
        return np.array([sum(each[shape] * count for shape, count in shapes.items()) for shapes in self.shapes])

    @property
    def passes(self) -> Int[np.ndarray, " A"]:
        """Passes of the target."""
        return np.array([sum(shapes.values()) for shapes in self.shapes])

    @property
    def num_verified(self) -> int:
        return sum(num * count for shapes in self.shapes for (_, num), count in shapes.items())

    @property
    def num_draft_passes(self) -> int:
        return sum(len(widths) * count for shapes in self.shapes for (widths, _), count in shapes.items())


def replay_trees(
    answers: Sequence[AnswerRows],
    policy: TreePolicy,
    costs: Costs,
    *,
    seed: int = 0,
    repeats: int = 1,
    compares: bool = False,
) -> TreesReplayed:
    """Decode every answer `repeats` times with a tree rule, exactly in distribution: under token verification, or with
    `compares` under comparison. A seed gives the same coins again, for each answer by its place in the list.

    Raises ValueError without answers or repeats, and for a rule that removes drawn children under token verification.

    >>> print(replay_trees(answers, Widths(widths=(4, 2)), Costs.relative(0.22)).speed_up)           # doctest: +SKIP
    """
    if not (answers and repeats >= 1):
        raise ValueError(f"a replay needs answers and at least one repeat, got {len(answers)} and {repeats}")
    is_greedy = all(answer.is_greedy for answer in answers)
    if policy.removes and policy.children == "drawn" and not compares and not is_greedy:
        raise ValueError(f"{type(policy).__name__} removes children that were drawn, which token verification cannot bear")
    tokens, shapes = [], []
    for i, answer in enumerate(answers):
        num, counts = 0, Counter[Shape]()
        draw = getattr(answer, "draw", None)
        for repeat in range(repeats):
            coins = streams(seed + 1000003 * i + repeat, draw=draw)[0]
            for r in played(answer, policy, costs, coins, compares=compares):
                counts[r.extra.widths, r.num_drafted] += 1
                num += r.num_tokens
        tokens.append(num)
        shapes.append(counts)
    return TreesReplayed(
        sources=tuple(answer.source for answer in answers),
        costs=costs,
        tokens=np.array(tokens),
        shapes=tuple(shapes),
        is_priced=policy.needs_costs,
    )
