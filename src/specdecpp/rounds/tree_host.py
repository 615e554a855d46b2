"""The round of a tree on the host: a pass of the draft for all open nodes of a depth, one of the target for all nodes.

    pending -> pass -> q of the root -> children -> open -> pass over those -> q of each -> their children -> ... -> verify

Uniforms of the draft: one for each child that is drawn, in the order of the nodes: depth by depth, of a depth in the order in
which the rule opened its nodes, of a node child after child. Those of the verification: `tree_verification`. With one child a
node the round is the chain's, to the last bit of what is drawn and decided where the runner gives the same logits.
"""

from collections.abc import Callable, Collection, Sequence
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from specdecpp.policies.protocol import END_OF_TEXT, Stop
from specdecpp.policies.trees import TreePolicy
from specdecpp.rounds.plan import Plan, Result, Rows
from specdecpp.rounds.tree import ROOT, Tree
from specdecpp.rounds.tree_verification import TreeVerdict, verified
from specdecpp.sampling import Sampling, penalised, probabilities

Read = Callable[[Sequence[int]], Sequence[Tensor]]
"""Open nodes, all of one depth -> the draft's distribution after each of them."""
Draw = Callable[[int], int | None]
"""An open node -> the token of its next child; None where its distribution has no more."""
ENOUGH = Stop("no node is worth reading")


@runtime_checkable
class Drafter(Protocol):
    """The draft's side of one round, and its tree."""

    is_drawn: bool
    forward_s: float

    @property
    def tree(self) -> Tree: ...
    def read(self, nodes: Sequence[int]) -> Sequence[Tensor]: ...
    def draw(self, node: int) -> int | None: ...
    def keep(self, path: Sequence[int]) -> None:
        """What the draft has read of the accepted branch becomes text."""
        ...


Verified = tuple[TreeVerdict, float, Rows | None]
"""What became of a tree; the seconds of the target's pass; what was decided on, where somebody wants it."""


def run(plan: Plan) -> Result:
    """One round of a request whose policy is a `TreePolicy`."""
    return run_by(plan, _Grower(plan), _verify)


def run_by(plan: Plan, grower: Drafter, verify: Callable[[Plan, Tree], Verified]) -> Result:
    """The same with the given means of reading, drawing and verifying."""
    request, started = plan.request, perf_counter()
    policy: Any = request.policy
    grow(
        grower.tree,
        policy,
        plan.decision.memory,
        read=grower.read,
        draw=grower.draw,
        limit=plan.decision.limit,
        at_limit=plan.decision.at_limit,
        ends=request.ends,
        is_drawn=grower.is_drawn,
    )
    tree = grower.tree
    if policy.removes and (removed := policy.removed(tree, plan.decision.memory)):
        tree.remove(removed)
    drafted = perf_counter()
    verdict, pass_s, rows = verify(plan, tree)
    grower.keep(verdict.path)
    return Result(
        tokens=[tree.tokens[node] for node in tree.kept],
        num_accepted=len(verdict.path),
        next_token=verdict.next_token,
        stop=tree.stop,
        q=[tree.chances[node] for node in tree.kept],
        draft_s=drafted - started,
        verify_s=perf_counter() - drafted,
        forward_s=grower.forward_s + pass_s,
        rows=rows,
        grown=tree.grown(verdict.path, verdict.tried),
        overlaps=verdict.overlaps,
    )


def grow(
    tree: Tree,
    policy: TreePolicy,
    memory: Any,
    *,
    read: Read,
    draw: Draw,
    limit: int,
    at_limit: Stop,
    ends: Collection[int],
    is_drawn: bool,
) -> None:
    """Let a rule grow a tree of at most `limit` depths. What `training.tree_replay` replays is this very function."""
    tree.stop = at_limit
    while tree.depth < limit and tree.num_nodes < policy.max_nodes:
        opened = list(policy.open(tree, memory))
        if not opened:
            tree.stop = ENOUGH
            return
        rows = read(opened)
        tree.widths.append(len(opened))
        first = tree.num_nodes
        for node, row in zip(opened, rows, strict=True):
            tree.branch(node, row)
        for node in opened:
            while tree.num_nodes < policy.max_nodes and policy.wants_child(tree, node, memory):
                if (token := draw(node)) is None:
                    break
                tree.add(node, token, is_drawn=is_drawn)
        tree.frontier = [node for node in range(first, tree.num_nodes) if tree.tokens[node] not in ends]
        if not tree.frontier:
            tree.stop = END_OF_TEXT if tree.num_nodes > first else ENOUGH
            return


class _Grower:
    """The draft's side of one round: passes over nodes, and draws from what they give."""

    def __init__(self, plan: Plan):
        request = self._request = plan.request
        policy: Any = request.policy
        self.is_drawn = not request.sampling.is_greedy and policy.children == "drawn"
        self.tree = Tree(costs=plan.costs)
        self.forward_s = 0.0
        self._draft: Any = request.draft
        self._pending = plan.tokens[self._draft.length :]
        self._number: dict[int, int] = {ROOT: -1}  # of a node's row among the open rows of the draft
        self._seen = {ROOT: request.seen.to(self._draft.device)} if request.seen is not None else {}

    def read(self, nodes: Sequence[int]) -> list[Tensor]:
        tree, started = self.tree, perf_counter()
        if nodes[0] == ROOT:
            logits, _ = self._draft.extend(self._pending, rows=1)
        else:
            parents = [self._number[tree.parents[node]] for node in nodes]
            self._number |= {node: len(self._number) - 1 + i for i, node in enumerate(nodes)}
            logits, _ = self._draft.extend([tree.tokens[node] for node in nodes], rows=len(nodes), parents=parents)
        self.forward_s += perf_counter() - started
        return [believed(row, self._request.sampling, self._seen_at(node)) for node, row in zip(nodes, logits, strict=True)]

    def draw(self, node: int) -> int | None:
        return self.tree.draw(node, self._request.randomness[0] if self.is_drawn else None)

    def keep(self, path: Sequence[int]) -> None:
        self._draft.keep([self._number[node] for node in path if node in self._number])

    def _seen_at(self, node: int) -> Tensor | None:
        return with_path(self._seen.get(ROOT), self.tree, node)


def believed(logits: Tensor, sampling: Sampling, seen: Tensor | None) -> Tensor:
    """q; under greedy drafting the softmax at temperature 1."""
    return penalised(logits, sampling, seen).softmax(-1) if sampling.is_greedy else probabilities(logits, sampling, seen)


def with_path(seen: Tensor | None, tree: Tree, node: int) -> Tensor | None:
    """The tokens that a node's context has, where somebody asks."""
    if seen is None or node == ROOT:
        return seen
    seen = seen.clone()
    seen[[tree.tokens[i] for i in tree.path(node)]] = True
    return seen


def _verify(plan: Plan, tree: Tree) -> Verified:
    """One pass of the target over its unread token and all nodes, its seconds, and the test."""
    request, sampling = plan.request, plan.request.sampling
    target: Any = request.target
    started = perf_counter()
    unread = plan.tokens[target.length :]
    if len(unread) > 1:
        target.extend(unread[:-1], rows=1)
    at = {node: row for row, node in enumerate((ROOT, *tree.kept))}  # row 0 is the unread token
    parents = [-1, *(at[tree.parents[node]] for node in tree.kept)]
    logits, _ = target.extend([unread[-1], *(tree.tokens[node] for node in tree.kept)], rows=len(parents), parents=parents)
    pass_s = perf_counter() - started
    made = penalised if request.verification.greedy_only else probabilities
    seen = None if request.seen is None else request.seen.to(logits.device)
    verdict = verified(
        request.verification,
        tree,
        lambda node: made(logits[at[node]], sampling, with_path(seen, tree, node)),
        request.randomness[1],
    )
    branch = [at[node] for node in (ROOT, *verdict.path)]
    target.keep(branch)
    rows = rows_of(tree, verdict.path, logits[branch], sampling, seen) if plan.wants_rows else None
    return verdict, pass_s, rows


def rows_of(tree: Tree, path: Sequence[int], logits: Tensor, sampling: Sampling, seen: Tensor | None) -> Rows:
    """Of the branch that was accepted."""
    at = [ROOT, *path]
    q = [tree.open[node].row.to(logits.device) for node in at[:-1]]
    masks = None if seen is None else torch.stack([mask for n in at if (mask := with_path(seen, tree, n)) is not None])
    return Rows(q=torch.stack(q) if q else logits[:0], logits=logits, sampling=sampling, seen=masks)
