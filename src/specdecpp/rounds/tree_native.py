"""The round of a tree with compiled code for what is the same whatever its shape (`runners/native/cpp/tree.h`).

    open     the draft's pass over the nodes of a depth, q after each of them and its likeliest tokens: one call
    draw     one more child: a call
    test     the target's pass over all nodes and the test: one call

Between these calls the rule decides the shape, by the very function of the host. What is decided is what `tree_host` decides,
with the same uniforms (up to the rounding of exponentials and of sums).
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdecpp.rounds import tree_host
from specdecpp.rounds.plan import Plan, Request, Result
from specdecpp.rounds.tree import LIKELIEST, ROOT, Branching, Tree
from specdecpp.rounds.tree_verification import TreeVerdict
from specdecpp.rounds.verification_codes import COMPARE
from specdecpp.runners.native import Filters, Opening, Testing


class Trees:
    """The rounds of one request: the arguments of the calls, and the memory that they write to. R rows of open nodes.

    It holds what it needs of the request and not the request itself, whose end frees it.
    """

    def __init__(self, request: Request, filters: Filters, verification: int):
        self.target: Any = request.target
        self.draft: Any = request.draft
        self.sampling, self.seen = request.sampling, request.seen
        policy: Any = request.policy
        self.is_drawn = not request.sampling.is_greedy and policy.children == "drawn"
        self.drawing: Any
        self._verifying: Any
        self.drawing, self._verifying = request.randomness
        self.opening = Opening(most=LIKELIEST, sampling=filters)
        self._testing = Testing(sampling=filters, verification=verification, is_drawn=self.is_drawn)
        self._compares = verification == COMPARE
        self.rows = torch.empty(0, self.draft.vocab_size)
        self._logits, self._states = torch.empty(0, self.target.vocab_size), torch.empty(0, self.target.hidden_size)

    def run(self, plan: Plan) -> Result:
        """One round."""
        return tree_host.run_by(plan, _Grower(plan, self), self._verified)

    def make_room(self, num: int) -> None:
        """Memory for the distributions of so many open nodes; what there is stays."""
        if num > len(self.rows):
            self.rows = torch.cat((self.rows, torch.empty(max(num, 2 * len(self.rows)) - len(self.rows), self.rows.shape[1])))

    def _verified(self, plan: Plan, tree: Tree) -> tree_host.Verified:
        target, told, kept = self.target, self._testing, tree.kept
        unread, num = plan.tokens[target.length :], len(kept)
        if len(unread) > 1:
            target.extend(unread[:-1], rows=1)
        if num + 1 > len(self._logits):
            self._logits, self._states = torch.empty(num + 1, target.vocab_size), torch.empty(num + 1, target.hidden_size)
        at = {node: row for row, node in enumerate((ROOT, *kept))}
        order = {node: i for i, node in enumerate(tree.open)}
        raw = torch.empty(num + 1, target.vocab_size) if plan.wants_rows else None
        path, tried, overlaps = (ctypes.c_int32 * num)(), (ctypes.c_int32 * num)(), (ctypes.c_double * num)()
        given = (
            (ctypes.c_int64 * (num + 1))(unread[-1], *(tree.tokens[node] for node in kept)),
            (ctypes.c_int32 * (num + 1))(*(order.get(node, -1) for node in at)),
            (ctypes.c_double * (num + 1))(*self._uniforms(tree, kept)),
            *(path, tried, overlaps),
        )
        told.tokens, told.open, told.uniforms, told.path, told.tried, told.overlaps = map(ctypes.addressof, given)
        told.q, told.logits, told.states = self.rows.data_ptr(), self._logits.data_ptr(), self._states.data_ptr()
        told.raw, told.num = None if raw is None else raw.data_ptr(), num
        target.tree("native_tree_test", told, num + 1, [-1, *(at[tree.parents[node]] for node in kept)])
        rows = path[: told.num_path]
        target.keep([0, *rows])
        if self._compares and not self.sampling.is_greedy:
            self._verifying.take(len(rows) + 1)
        verdict = TreeVerdict(
            path=tuple(kept[row - 1] for row in rows),
            next_token=told.next,
            tried=tuple(kept[row - 1] for row in tried[: told.num_tried]),
            overlaps=tuple(overlaps[: told.num_tried]) if self.is_drawn and not self._compares else (),
        )
        seen = None if raw is None else tree_host.rows_of(tree, verdict.path, raw[[0, *rows]], self.sampling, self.seen)
        return verdict, told.forward_s, seen

    def _uniforms(self, tree: Tree, kept: Sequence[int]) -> Sequence[float]:
        """One for each node that is verified, by its number among all, and one more; comparing, they follow each other."""
        if self.sampling.is_greedy:
            return ()
        if self._compares:
            return self._verifying.peek(len(kept) + 1)
        uniforms = self._verifying.take(tree.num_nodes + 1)
        return [*(uniforms[node] for node in kept), uniforms[-1]]


@dataclass(eq=False)
class _Open(Branching):
    """`left` is not updated here; `share` is the mass of q that the children so far leave."""

    address: int = 0
    share: float = 1.0


class _Tree(Tree):
    """A tree whose laws lie where compiled code has put them."""

    draft: Any
    tops: list[list[tuple[int, float]]]
    """The likeliest tokens of the nodes that were read last, of the last of them first."""

    def branch(self, node: int, row: Tensor) -> None:
        self.open[node] = _Open(row, row, top=self.tops.pop(), address=row.data_ptr())

    def next(self, node: int, uniforms: Any) -> int | None:
        """The token of the next child; the likeliest that is none without uniforms."""
        found: Any = self.open[node]
        tokens = [self.tokens[child] for child in found.children]
        if uniforms is None:
            _, found.share = self.draft.draw_without(found.address, tokens, 0.0)
            if found.share <= 0:
                return None
            for token, _ in found.top:
                if token not in tokens:
                    return token
            left = found.row.clone()
            left[tokens] = 0.0
            return int(left.argmax())
        token, found.share = self.draft.draw_without(found.address, tokens, *uniforms.peek(1))
        if token < 0:
            return None
        uniforms.take(1)
        return token

    def _taken(self, node: int, token: int) -> tuple[float, float, None]:
        found: Any = self.open[node]
        chance = ctypes.c_float.from_address(found.address + 4 * token).value
        return chance, chance / found.share if found.children else chance, None


class _Grower:
    """The draft's side of one round."""

    def __init__(self, plan: Plan, trees: Trees):
        self.tree, self.is_drawn, self.forward_s = _Tree(costs=plan.costs), trees.is_drawn, 0.0
        self.tree.draft = trees.draft
        self._trees, self._pending = trees, plan.tokens[trees.draft.length :]
        self._number = {ROOT: -1}  # of a node's row among the open rows of the draft
        self._tokens: list[int] = []

    def read(self, nodes: Sequence[int]) -> Sequence[Tensor]:
        trees, tree, num, parents = self._trees, self.tree, len(nodes), None
        before, tokens = len(tree.open), self._pending
        if nodes[0] == ROOT:
            if len(tokens) > 2:
                trees.draft.extend(tokens[:-1], rows=1)
                tokens = tokens[-1:]
        else:
            parents = [self._number[tree.parents[node]] for node in nodes]
            self._number |= {node: before - 1 + i for i, node in enumerate(nodes)}
            self._tokens += [tree.tokens[node] for node in nodes]
            tokens = self._tokens
        trees.make_room(before + num)
        told, rows = trees.opening, trees.rows[before : before + num]
        given = (ctypes.c_int64 * len(tokens))(*tokens)
        likeliest, chances = (ctypes.c_int64 * (LIKELIEST * num))(), (ctypes.c_float * (LIKELIEST * num))()
        told.tokens, told.likeliest, told.chances = map(ctypes.addressof, (given, likeliest, chances))
        told.rows, told.num = rows.data_ptr(), len(tokens) if parents is None else num
        told.known = len(tokens) - told.num
        trees.draft.tree("native_tree_open", told, told.num, parents)
        self.forward_s += told.forward_s
        likely = list(zip(likeliest[:], chances[:], strict=True))
        each = (likely[i : i + LIKELIEST] for i in range(0, len(likely), LIKELIEST))
        tree.tops = [[pair for pair in top if pair[0] >= 0] for top in each][::-1]
        return rows.unbind()

    def draw(self, node: int) -> int | None:
        return self.tree.next(node, self._trees.drawing if self.is_drawn else None)

    def keep(self, path: Sequence[int]) -> None:
        self._trees.draft.keep([self._number[node] for node in path if node in self._number])
