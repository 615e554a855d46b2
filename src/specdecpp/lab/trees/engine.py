"""The step of a tree: the draft reads the open nodes of a depth, the target all nodes, and one branch is accepted.

    pending -> q of the root -> children -> open -> q of each -> their children -> ... -> verify

Both models are read by `extend` and `rollback` alone, branch by branch, so that any of them takes trees: the specification of a
pass over a whole tree, which takes the time of one for each leaf.

Uniforms of the draft: one for each child that is drawn, in the order of the nodes: depth by depth, of a depth in the order in
which the rule opened its nodes, of a node child after child. Those of the verification: `verification`. With one child a
node the step is the chain's, to the last bit of what is drawn and decided where a model's rows do not depend on the pass.
"""

from collections.abc import Callable, Collection, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from specdecpp.backends import Cache
from specdecpp.costs import Costs
from specdecpp.lab.trees.protocol import TreePolicy
from specdecpp.lab.trees.tree import ROOT, Tree
from specdecpp.lab.trees.verification import verified
from specdecpp.policies.protocol import END_OF_TEXT, Decision, Stop
from specdecpp.sampling import Sampling, penalised, probabilities
from specdecpp.scheduler import Reading
from specdecpp.step import Plan, Request, Result, Rows

Read = Callable[[Sequence[int]], Sequence[Tensor]]
"""Open nodes, all of one depth -> the draft's distribution after each of them."""
Draw = Callable[[int], int | None]
"""An open node -> the token of its next child; None where its distribution has no more."""
ENOUGH = Stop("no node is worth reading")


class Trees:
    """Runs the steps of a `TreePolicy`."""

    has_batches = reads_alone = False

    def refusal(self, request: Request) -> None:
        return None

    def run(self, plans: Sequence[Plan], readings: Sequence[Reading] = ()) -> list[Result]:
        assert not readings, "sessions read their prompts themselves here"
        return [run(plan) for plan in plans]


TREES = Trees()


def run(plan: Plan) -> Result:
    """One step of a request whose policy is a `TreePolicy`: the accepted branch comes first among its tokens, and `extra` is
    the tree (`Grown`)."""
    request, started = plan.request, perf_counter()
    policy: Any = request.policy
    grower = _Grower(plan)
    tree = grower.tree
    grow(tree, policy, plan.decision, read=grower.read, draw=grower.draw, ends=request.ends, is_drawn=grower.is_drawn)
    drafted = perf_counter()
    target = _Branches(request.target, plan.tokens)
    logits = rows_of_nodes(target, tree)
    made = penalised if request.verification.greedy_only else probabilities
    seen = None if request.seen is None else request.seen.to(logits[ROOT].device)
    verdict = verified(
        request.verification,
        tree,
        lambda node: made(logits[node], request.sampling, with_path(seen, tree, node)),
        request.randomness[1],
    )
    accepted = [tree.tokens[node] for node in verdict.path]
    target.end(accepted, is_read=True)
    grower.draft.end(accepted)
    order = [*verdict.path, *(node for node in tree.kept if node not in verdict.path)]
    grown = tree.grown(verdict.path, verdict.tried)
    rows = torch.stack([logits[node] for node in (ROOT, *verdict.path)])
    return Result(
        tokens=[tree.tokens[node] for node in order],
        num_accepted=len(verdict.path),
        next_token=verdict.next_token,
        stop=tree.stop,
        q=[tree.chances[node] for node in order],
        draft_s=drafted - started,
        verify_s=perf_counter() - drafted,
        forward_s=grower.draft.forward_s + target.forward_s,
        rows=rows_of(tree, verdict.path, rows, request.sampling, seen) if plan.wants_rows else None,
        overlaps=verdict.overlaps,
        expected_s=None if plan.costs is None else tree_s(plan.costs, grown.widths, grown.num_verified),
        extra=grown,
    )


def tree_s(costs: Costs, widths: Sequence[int], num_verified: int) -> float:
    """Seconds of a tree: the draft's passes over so many rows each, and the target's over all nodes."""
    return sum(map(costs.draft_pass_s, widths)) + costs.verify_s(num_verified + 1)


def rows_of_nodes(target: "_Branches", tree: Tree) -> dict[int, Tensor]:
    """The target's logits after the text and after each node that is verified: leaf by leaf, a chain in one pass."""
    parents, logits = {tree.parents[node] for node in tree.kept}, dict[int, Tensor]()
    leaves = [node for node in tree.kept if node not in parents]
    for leaf in sorted(leaves, key=tree.path) or [ROOT]:
        rows = target.read(tree.branch_of(leaf))
        logits.update(zip([ROOT, *tree.path(leaf)][-len(rows) :], rows, strict=True))
    return logits


class _Branches:
    """A model behind a text, read along branches one after the other."""

    def __init__(self, model: Cache, text: list[int]):
        self._model, self._pending = model, text[model.length :]
        self._start, self._held = len(text), list[int]()
        self.forward_s = 0.0

    def read(self, branch: Sequence[int]) -> Tensor:
        """Logits [rows, V] after the tokens of a branch that were not read, the last of them at least. The first time the text
        is read too, and has the first row."""
        started = perf_counter()
        if self._model.length < self._start:
            rest, rows = [*self._pending, *branch], 1 + len(branch)
        else:
            common = min(common_length(self._held, branch), len(branch) - 1)
            self._model.rollback(self._start + common)
            rest, rows = list(branch[common:]), len(branch) - common
        logits, _ = self._model.extend(rest, rows=rows)
        self._held = list(branch)
        self.forward_s += perf_counter() - started
        return logits

    def end(self, branch: Sequence[int], *, is_read: bool = False) -> None:
        """Cut the cache to what it holds of this branch; with `is_read` read the rest of it."""
        if self._model.length < self._start:
            return  # the text was not read: there was no room for a draft token
        common = common_length(self._held, branch)
        self._model.rollback(self._start + common)
        if is_read and common < len(branch):
            self._model.extend(list(branch[common:]), rows=1)


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of tokens that two branches begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def grow(
    tree: Tree, policy: TreePolicy, decision: Decision, *, read: Read, draw: Draw, ends: Collection[int], is_drawn: bool
) -> None:
    """Let a rule grow a tree of at most `decision.limit` depths, and leave out what it removes. What `replay` replays is this
    very function."""
    tree.stop = _grow(tree, policy, decision, read, draw, ends, is_drawn)
    if policy.removes:
        tree.remove(policy.removed(tree, decision.memory))


def _grow(
    tree: Tree, policy: TreePolicy, decision: Decision, read: Read, draw: Draw, ends: Collection[int], is_drawn: bool
) -> Stop:
    memory = decision.memory
    while tree.depth < decision.limit and tree.num_nodes < policy.max_nodes:
        opened = list(policy.open(tree, memory))
        if not opened:
            return ENOUGH
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
            return END_OF_TEXT if tree.num_nodes > first else ENOUGH
    return decision.at_limit


class _Grower:
    """The draft's side of one step: what it reads of the open nodes, and draws from what they give."""

    def __init__(self, plan: Plan):
        request = self._request = plan.request
        policy: Any = request.policy
        self.is_drawn = not request.sampling.is_greedy and policy.children == "drawn"
        self.tree = Tree(costs=plan.costs)
        self.draft = _Branches(request.draft, plan.tokens)
        self._seen = {ROOT: request.seen.to(request.draft.device)} if request.seen is not None else {}

    def read(self, nodes: Sequence[int]) -> list[Tensor]:
        tree, sampling = self.tree, self._request.sampling
        rows = [(node, self.draft.read(tree.branch_of(node))[-1]) for node in nodes]
        return [believed(row, sampling, with_path(self._seen.get(ROOT), tree, node)) for node, row in rows]

    def draw(self, node: int) -> int | None:
        return self.tree.draw(node, self._request.randomness[0] if self.is_drawn else None)


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


def rows_of(tree: Tree, path: Sequence[int], logits: Tensor, sampling: Sampling, seen: Tensor | None) -> Rows:
    """Rows of the branch that was accepted."""
    at = [ROOT, *path]
    q = [tree.open[node].row.to(logits.device) for node in at[:-1]]
    masks = None if seen is None else torch.stack([mask for n in at if (mask := with_path(seen, tree, n)) is not None])
    return Rows(q=torch.stack(q) if q else logits[:0], logits=logits, sampling=sampling, seen=masks)
