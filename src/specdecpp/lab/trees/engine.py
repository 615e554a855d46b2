"""The step of a tree: the draft reads the open nodes of a depth, the target all nodes, and one branch is accepted.

    pending -> q of the root -> children -> open -> q of each -> their children -> ... -> verify

Both models are read by `extend` and `rollback` alone, branch by branch, so that any of them takes trees: the specification of a
pass over a whole tree, which takes the time of one for each leaf. Two models of graphs read whole trees (`graphs.trees`).

Uniforms of the draft: one for each child that is drawn, in the order of the nodes: depth by depth, of a depth in the order in
which the rule opened its nodes, of a node child after child. Those of the verification: `verification`. With one child a
node the step is the chain's, to the last bit of what is drawn and decided where a model's rows do not depend on the pass.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from specdecpp.backends import Cache
from specdecpp.backends.graphs import trees
from specdecpp.backends.graphs.model import GraphCache
from specdecpp.backends.graphs.trees import believed
from specdecpp.costs import Costs
from specdecpp.lab.trees import walk
from specdecpp.lab.trees.protocol import TreePolicy
from specdecpp.lab.trees.tree import ROOT, Tree
from specdecpp.lab.trees.verification import verified
from specdecpp.policies.protocol import END_OF_TEXT, Decision, Stop
from specdecpp.sampling import Sampling, Uniforms, penalised, probabilities
from specdecpp.scheduler import Reading
from specdecpp.step import Engine, Plan, Request, Result, Rows

Read = Callable[[Sequence[int]], Sequence[Tensor]]
"""Open nodes, all of one depth -> the draft's distribution after each of them."""
Draw = Callable[[int], int | None]
"""An open node -> the token of its next child; None where its distribution has no more."""
ENOUGH = Stop("no node is worth reading")


class Trees(Engine):
    """Runs the steps of a `TreePolicy`."""

    def refusal(self, request: Request) -> None:
        return None

    def run(self, plans: Sequence[Plan], readings: Sequence[Reading] = ()) -> list[Result]:
        assert not readings, "sessions read their prompts themselves here"
        return [run(plan) for plan in plans]


TREES = Trees()


@torch.inference_mode()
def run(plan: Plan) -> Result:
    """One step of a request whose policy is a `TreePolicy`: the accepted branch comes first among its tokens, and `extra` is
    the tree (`Grown`)."""
    request, started = plan.request, perf_counter()
    policy: Any = request.policy
    recorded_s = _recording_s(request)
    grower = _Grower(plan)
    tree = grower.tree
    grow(tree, policy, plan.decision, read=grower.read, draw=grower.draw, ends=request.ends, is_drawn=grower.is_drawn)
    drafted, drafting_s = perf_counter(), _recording_s(request) - recorded_s
    target, nodes = grower.reader(request.target, tree, plan.tokens), [ROOT, *tree.kept]
    logits = dict(zip(nodes, rows := target.read(nodes), strict=True))
    made = penalised if request.verification.greedy_only else probabilities
    seen, coins = None if request.seen is None else request.seen.to(rows[0].device), request.randomness[1]
    if grower.offered is not None and isinstance(coins, Uniforms):
        verdict = walk.verified(request.verification, tree, made(rows, request.sampling), nodes, coins)
    else:
        p = {node: partial(made, row, request.sampling, with_path(seen, tree, node)) for node, row in logits.items()}
        verdict = verified(request.verification, tree, lambda node: p[node](), coins)
    target.end(verdict.path, is_read=True)
    grower.draft.end(verdict.path)
    order = [*verdict.path, *(node for node in tree.kept if node not in verdict.path)]
    grown = tree.grown(verdict.path, verdict.tried)
    accepted = [logits[node] for node in (ROOT, *verdict.path)]
    once_s = _recording_s(request) - recorded_s
    return Result(
        tokens=[tree.tokens[node] for node in order],
        num_accepted=len(verdict.path),
        next_token=verdict.next_token,
        stop=tree.stop,
        q=[tree.chances[node] for node in order],
        draft_s=drafted - started - drafting_s,
        verify_s=perf_counter() - drafted - (once_s - drafting_s),
        once_s=once_s,
        forward_s=grower.draft.forward_s + target.forward_s,
        rows=rows_of(tree, verdict.path, torch.stack(accepted), request.sampling, seen) if plan.wants_rows else None,
        overlaps=verdict.overlaps,
        expected_s=None if plan.costs is None else tree_s(plan.costs, grown.widths, grown.num_verified),
        extra=grown,
    )


def _recording_s(request: Request) -> float:
    """Seconds of recording so far, where passes are recorded."""
    return sum(cache.static.recording_s for cache in (request.target, request.draft) if isinstance(cache, GraphCache))


def tree_s(costs: Costs, widths: Sequence[int], num_verified: int) -> float:
    """Seconds of a tree: the draft's passes over so many rows each, and the target's over all nodes."""
    return sum(map(costs.draft_pass_s, widths)) + costs.verify_s(num_verified + 1)


class BranchReader:
    """A model behind a text, read along branches one after the other."""

    def __init__(self, model: Cache, tree: Tree, text: list[int]):
        self._model, self._tree, self._pending = model, tree, text[model.length :]
        self._start, self._held = len(text), list[int]()
        self.forward_s = 0.0

    def read(self, nodes: Sequence[int]) -> Tensor:
        """Logits [n, V] after nodes; the root comes first, with all of the text. Leaf by leaf, a chain in one pass."""
        tree, logits = self._tree, dict[int, Tensor]()
        parents = {tree.parents[node] for node in nodes if node != ROOT}
        for leaf in sorted((node for node in nodes if node not in parents), key=tree.path):
            rows = self._read(tree.branch_of(leaf))
            logits.update(zip([ROOT, *tree.path(leaf)][-len(rows) :], rows, strict=True))
        return torch.stack([logits[node] for node in nodes])

    def _read(self, branch: Sequence[int]) -> Tensor:
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

    def end(self, path: Sequence[int], *, is_read: bool = False) -> None:
        """Cut the cache to what it holds of this branch; with `is_read` read the rest of it."""
        if self._model.length < self._start:
            return  # the text was not read: there was no room for a draft token
        branch = [self._tree.tokens[node] for node in path]
        common = common_length(self._held, branch)
        self._model.rollback(self._start + common)
        if is_read and common < len(branch):
            self._model.extend(branch[common:], rows=1)


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
        self._randomness = request.randomness[0] if self.is_drawn else None
        self.tree = Tree(costs=plan.costs)
        is_whole = trees.takes(request)
        self.reader: Any = trees.Passes if is_whole else BranchReader
        self.draft = self.reader(request.draft, self.tree, plan.tokens)
        self.offered: trees.Offered | None = None
        if is_whole and (self._randomness is None or isinstance(self._randomness, Uniforms)):
            self.offered = trees.Offered(self.draft, self.tree, request.sampling, self._randomness)
        self._seen = None if request.seen is None else request.seen.to(request.draft.device)

    def read(self, nodes: Sequence[int]) -> Sequence[Tensor]:
        tree, logits = self.tree, self.draft.read(nodes)
        if self.offered is not None:
            policy: Any = self._request.policy
            return list(self.offered.rows(nodes, policy.most_children(tree)))
        rows = zip(nodes, logits, strict=True)
        return [believed(row, self._request.sampling, with_path(self._seen, tree, node)) for node, row in rows]

    def draw(self, node: int) -> int | None:
        return self.tree.draw(node, self._randomness) if self.offered is None else self.offered.draw(node)


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
