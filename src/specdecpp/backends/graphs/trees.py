"""Trees on a device: whole trees in a pass, children of nodes and the tests of them. Rows [V] stay there.

    draft    pass over the open nodes -> q, and the child that each would get by any of the coming uniforms -> host: the rule
    target   pass over all nodes -> tests of every child and the token after every node -> host: the walk

Where a child's uniform stands depends on what is drawn before it, so that children are drawn for each place. The chance that a
child is accepted once its elder siblings are not depends on no coin, so that all tests are made side by side.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from specdecpp.backends.graphs.cache import StaticCache, bucket, sent
from specdecpp.backends.graphs.model import GraphCache
from specdecpp.backends.graphs.steps import MOST
from specdecpp.sampling import Sampling, Uniforms, penalised, probabilities
from specdecpp.step import Request
from specdecpp.verify import overlap

ROOT = -1
"""The text, as a node."""


def believed(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """q; under greedy drafting the softmax at temperature 1."""
    return penalised(logits, sampling, seen).softmax(-1) if sampling.is_greedy else probabilities(logits, sampling, seen)


def takes(request: Request) -> bool:
    """Tell whether the trees of a request are read by whole passes."""
    policy: Any = request.policy
    caches = request.target, request.draft
    are_graphs = all(isinstance(cache, GraphCache) and cache.takes_nodes for cache in caches)
    is_near = request.target.device == request.draft.device
    return are_graphs and is_near and policy.max_nodes <= MOST and not request.sampling.needs_seen


class Passes:
    """A model behind a text. A tree has the `tokens` and `parents` of its nodes (`lab.trees.tree.Tree`)."""

    def __init__(self, cache: GraphCache, tree: Any, text: list[int]):
        self.cache, self._tree, self._text = cache, tree, text
        self._rows, self._masks = dict[int, int](), list[int]()
        self.num_rows = 0  # of the last pass
        self.forward_s = 0.0  # a device runs them on its own

    def read(self, nodes: Sequence[int]) -> Float[Tensor, "n V"]:
        """Logits after nodes whose parents were read, until the next pass; the root comes first, with all of the text."""
        first, tokens = len(self._masks), list[int]()
        if not first:
            tokens = self._text[self.cache.length :]
            if len(tokens) > (2 if len(nodes) == 1 else 1):
                self.cache.extend(tokens[:-1], rows=1)
                tokens = tokens[-1:]
            self._masks += [(2 << i) - 1 for i in range(len(tokens))]
            self._rows[ROOT] = len(tokens) - 1
        for node in nodes:
            if node != ROOT:
                tokens.append(self._tree.tokens[node])
                self._rows[node] = len(self._masks)
                self._masks.append(self._masks[self._rows[self._tree.parents[node]]] | 1 << len(self._masks))
        self.num_rows = len(tokens)
        return self.cache.read_nodes(tokens, self._masks[first:], first)[-len(nodes) :]

    def end(self, path: Sequence[int], *, is_read: bool = False) -> None:
        """Keep what was read of a branch."""
        if self._masks:
            kept = takewhile(self._rows.__contains__, path)
            self.cache.keep([*range(self._rows[ROOT] + 1), *(self._rows[node] for node in kept)])


class Offers:
    """The children that open nodes would get, for each place of the coming uniforms (without: their likeliest tokens); work on
    fixed tensors for passes of one width."""

    def __init__(self, static: StaticCache, sampling: Sampling, width: int, num: int, *, is_drawn: bool):
        self._static, self._sampling, self._is_drawn = static, sampling, is_drawn
        self._width, self._num = width, min(num, static.logits.shape[1])
        self.uniforms = torch.zeros(MOST + num, dtype=torch.float64, device=static.device)
        self.found = self.uniforms.new_zeros(2, self._num, width, MOST if is_drawn else 1)
        others = static.offers.values()  # one memory for the rows of all
        self.rows = next(iter(others)).rows if others else torch.zeros_like(believed(static.logits, sampling))

    def __call__(self) -> None:
        rows = believed(self._static.logits[: self._width], self._sampling)
        self.rows[: self._width] = rows
        if self._is_drawn:
            self.found.copy_(children(rows, self.uniforms, self._num))
        else:
            top = rows.topk(self._num)
            self.found.copy_(torch.stack((top.indices.T, top.values.T)).unsqueeze(-1))


def children(rows: Float[Tensor, "n V"], uniforms: Float[Tensor, " u"], num: int) -> Float[Tensor, "2 num n places"]:
    """Tokens of the first `num` children of each row and their probabilities, by the uniforms from each place on. Where a row
    has no more, a token is of probability 0 or there twice."""
    before = F.pad(rows.cumsum(-1, dtype=torch.float64), (1, 0))
    windows = uniforms.unfold(0, MOST, 1)
    shape = (num, len(rows), MOST)
    tokens, masses, starts = (windows.new_zeros(shape) for _ in range(3))  # of elder siblings; what is left before each
    for j in range(num):
        point = windows[j] * (before[:, -1:] - masses[:j].sum(0))
        shift = (masses[:j] * (starts[:j] <= point)).sum(0)
        token = torch.searchsorted(before, point + shift, right=True).clamp(1, rows.shape[1]) - 1
        mass = rows.gather(1, token).double()
        starts[:j] -= mass * (token < tokens[:j])
        tokens[j], masses[j], starts[j] = token, mass, before.gather(1, token) - shift
    return torch.stack((tokens, masses))


class Offered:
    """Children that are offered to the open nodes of a step's tree; without uniforms their likeliest tokens."""

    def __init__(self, draft: Passes, tree: Any, sampling: Sampling, uniforms: Uniforms | None):
        self._draft, self._tree, self._sampling, self._uniforms = draft, tree, sampling, uniforms
        self._places, self._num_drawn = dict[int, int](), 0
        self._found: Any = None

    def rows(self, nodes: Sequence[int], num: int) -> Float[Tensor, "n V"]:
        """q after nodes that the draft has just read; each is offered `num` children."""
        static, num_rows, coins = self._draft.cache.static, self._draft.num_rows, self._uniforms
        key = "offers", bucket(num_rows), num, self._sampling, coins is not None
        if key not in static.offers:
            static.offers[key] = Offers(static, self._sampling, bucket(num_rows), num, is_drawn=coins is not None)
        offers = static.offers[key]
        program = static.program(key, offers, reset=lambda: None)
        if coins is not None:
            coming = sent(coins.peek(len(offers.uniforms)), static.device, torch.float64)
            offers.uniforms.copy_(coming, non_blocking=True)
        program()
        first = num_rows - len(nodes)
        self._places, self._num_drawn = {node: first + i for i, node in enumerate(nodes)}, 0
        self._found = offers.found.cpu().numpy()
        return offers.rows[first:num_rows].clone()

    def draw(self, node: int) -> int | None:
        """The token of the next child; drawn from the row itself where no more were offered."""
        opened, uniforms, rank = self._tree.open[node], self._uniforms, len(self._tree.open[node].tokens)
        if rank < self._found.shape[1] and rank == len(opened.known):
            place = 0 if uniforms is None else self._num_drawn - rank
            token, chance = self._found[:, rank, self._places[node], place]
            if chance > 0 and token not in opened.tokens:
                opened.known[int(token)] = float(chance)
                self._num_drawn += len(uniforms.take(1)) if uniforms else 1
                return int(token)
        drawn = self._tree.draw(node, uniforms)
        self._num_drawn += drawn is not None
        return drawn


def sibling_tests(
    p: Float[Tensor, "n V"], q: Float[Tensor, "n V"], tokens: Sequence[Tensor], nums: Sequence[int], *, is_drawn: bool
) -> tuple[Float[Tensor, "n V"], list[Tensor]]:
    """Recursive rejection of all children: what is left of p [n, V] after them, and for each rank j the chances that the
    children of the first `nums[j]` nodes are accepted, then the overlaps. Both p and q are written over."""
    found = []
    for num, whole in zip(nums, tokens, strict=True):
        token, a, b = whole[:num, None], p[:num], q[:num]
        own = (b / b.sum(-1, keepdim=True) if found else b) if is_drawn else torch.zeros_like(b).scatter_(1, token, 1.0)
        found += [(a.gather(1, token) / own.gather(1, token)).squeeze(1).clamp(max=1.0).double(), overlap(a, own).double()]
        more = (a - own).clamp(min=0)
        mass = more.sum(-1, keepdim=True)
        p[:num] = torch.where(mass > 0, more / mass, a)
        q[:num].scatter_(1, token, 0.0)
    return p, found
