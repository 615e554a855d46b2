"""Trees of draft tokens keep the target's distribution, computed: every shape under every verification."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from distributions import (
    Request,
    answer,
    chi_square_tail,
    distribution_of,
    finish,
    largest_difference,
    total_variation,
    unchecked,
)
from tables import greedy_trace
from test_law import PLAIN, SITUATIONS, pair_of_tables, table

from specdecpp import Decoder, UnsoundError
from specdecpp.lab import AutoOff
from specdecpp.lab.trees import C2T, CostAwareTree, DynamicDepth, Eagle2, OptTree, TreePolicy, Widths
from specdecpp.lab.trees.tree import ROOT, Tree
from specdecpp.lab.trees.verification import verified
from specdecpp.policies import CostAware, Costs, Fixed
from specdecpp.replay.replay import Player
from specdecpp.sampling import Sampling, streams
from specdecpp.verify import BlockVerification, CompareVerification, GreedyVerification, TokenVerification

pytestmark = pytest.mark.lab


@dataclass(frozen=True, kw_only=True)
class ByTokens(TreePolicy):
    """Opens and draws by what was drawn anywhere in the tree: by the tokens of elder siblings, cousins and ancestors."""

    max_tokens: int = 3
    max_nodes: int = 5

    def open(self, tree: Tree, memory: Any) -> Sequence[int]:
        return [node for node in reversed(tree.frontier) if node == ROOT or (sum(tree.tokens) + tree.tokens[node]) % 3 < 2]

    def wants_child(self, tree: Tree, node: int, memory: Any) -> bool:
        num = len(tree.children(node))
        return num == 0 or (num < 3 and sum(tree.tokens) % 2 == 0)


@dataclass(frozen=True, kw_only=True)
class ByChance(TreePolicy):
    """Opens what is likely, and draws until q has been covered."""

    max_tokens: int = 2
    max_nodes: int = 6

    def open(self, tree: Tree, memory: Any) -> Sequence[int]:
        return [node for node in tree.frontier if tree.product(node) > 0.2]

    def wants_child(self, tree: Tree, node: int, memory: Any) -> bool:
        return sum(tree.chances[child] for child in tree.children(node)) < 0.6


@dataclass(frozen=True, kw_only=True)
class Removing(Widths):
    """Looks at all children and verifies the likeliest ones only, as EAGLE-2 does."""

    widths: tuple[int, ...] = (2,)

    @property
    def removes(self) -> bool:
        return True

    def removed(self, tree: Tree, memory: Any) -> Collection[int]:
        return [node for node in range(tree.num_nodes) if tree.product(node) < 0.4]


@dataclass(frozen=True, kw_only=True)
class Everywhere(TreePolicy):
    """Draws in an order of its own: a second child after its younger cousins are there cannot be had, but nodes by the last."""

    max_tokens: int = 2
    max_nodes: int = 4

    def open(self, tree: Tree, memory: Any) -> Sequence[int]:
        return sorted(tree.frontier, key=lambda node: -1 if node == ROOT else tree.tokens[node])

    def wants_child(self, tree: Tree, node: int, memory: Any) -> bool:
        return len(tree.children(node)) < (2 if not tree.tokens or tree.tokens[-1] != 1 else 1)


class Asked(CostAwareTree):
    """Asks about further children, also where they are far from paying."""

    def _may_branch(self, memory: Any, costs: Any) -> bool:
        return True


SHAPES: dict[str, Callable[[], TreePolicy]] = {
    "wide": lambda: Widths(widths=(3,)),
    "two-by-two": lambda: Widths(widths=(2, 2)),
    "narrowing": lambda: Widths(widths=(2, 1, 1)),
    "more-than-there-are": lambda: Widths(widths=(9,), max_nodes=4),
    "by-tokens": lambda: ByTokens(),
    "by-chance": lambda: ByChance(),
    "last-token": lambda: Everywhere(),
    "none": lambda: Widths(widths=()),
    "eagle-2": lambda: Eagle2(max_tokens=2, width=2, branch=2),
    "dynamic-depth": lambda: DynamicDepth(max_tokens=3, width=1, branch=2, threshold=-0.5),
    "opt-tree": lambda: OptTree(max_tokens=2, width=2, branch=2, gain=0.6),
    "c2t": lambda: C2T(max_tokens=2, width=2, branch=2, threshold=0.5, weights=(1.0, 1.0, -1.0, 0.2)),
    "cost-aware": lambda: Asked(max_tokens=2, max_children=2, max_nodes=4, prior_steps=1),
}
VERIFICATIONS = {"token": TokenVerification(), "compare": CompareVerification()}
SMALL = (
    *("plain", "end-of-text", "two-ends", "one-token-left", "many-zeros", "disjoint-supports", "target-within-draft"),
    *("draft-within-target", "draft-is-target", "target-context-ends", "draft-context-ends", "draft-context-too-short"),
    *("one-token-prompt", "top-k-2", "top-p", "penalty", "all-processors"),
)
WAYS = [(kind, children) for kind in VERIFICATIONS for children in ("drawn", "likeliest")]


def cases() -> list[Any]:
    """Every situation meets every shape, every shape every way, as in a Latin square; the end of a text meets all of both."""
    square = [
        pytest.param(
            *(situation, shape, *WAYS[(i + 2 * j) % 4 if (i + j) % 3 == 0 else (i + j) % 2]),
            marks=[pytest.mark.slow] * ((i + j) % 3 == 2),
        )
        for i, situation in enumerate(SMALL)
        for j, shape in enumerate(SHAPES)
        if situation != "end-of-text"
    ]
    return square + [("end-of-text", shape, *way) for shape in SHAPES for way in WAYS]


def small(situation: str, max_tokens: int = 3) -> Request:
    request = SITUATIONS[situation]
    return replace(request, max_tokens=min(request.max_tokens, max_tokens))


@pytest.mark.parametrize(("situation", "shape", "verification", "children"), cases())
def test_every_shape_keeps_the_targets_distribution(situation: str, shape: str, verification: str, children: Any) -> None:
    """Catches any bias: in draws without replacement, residuals of siblings, a leaf's bonus, rows of another branch, ends."""
    request = small(situation)
    distribution = request.distribution(replace(SHAPES[shape](), children=children), VERIFICATIONS[verification])
    assert largest_difference(distribution, request.own_distribution()) < 1e-12


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("situation", SMALL)
def test_greedy_trees_give_the_targets_greedy_answer(situation: str, shape: str) -> None:
    """Catches a greedy answer other than the target's: a wrong row compared, a penalty on one branch, a late end."""
    request = SITUATIONS[situation]
    request = replace(request, sampling=replace(request.sampling, temperature=0.0))
    distribution = request.distribution(SHAPES[shape](), GreedyVerification())
    assert distribution == request.own_distribution()
    assert len(distribution) == 1


@pytest.mark.parametrize("shape", ["by-tokens", "by-chance", "last-token", "c2t", "cost-aware"])
def test_shapes_do_follow_the_draws(shape: str) -> None:
    """Catches distributions that hold vacuously: the trees of one context must differ in more than their tokens."""

    def form(coins: Any) -> Any:
        session = PLAIN.session(SHAPES[shape](), TokenVerification(), (coins, coins))
        session.prefill()
        grown = session.step().extra
        assert grown is not None
        return grown.parents

    assert len(distribution_of(form)) >= 2


# What is not sound


def test_removing_what_was_drawn_is_biased() -> None:
    """Documents why the pair is refused: what is left of a look at drawn children is no draw from q."""
    request = replace(SITUATIONS["three-tokens-left"], max_tokens=2)

    def unrefused(policy: TreePolicy) -> Any:
        """The distribution without the check at the door."""

        def run(coins: Any) -> Any:
            session = request.session(replace(policy, children="likeliest"), TokenVerification(), (coins, coins))
            object.__setattr__(session._request, "policy", policy)
            session.policy = policy
            finish(session)
            return tuple(session.tokens[2:]), session.finish_reason

        return distribution_of(run)

    assert total_variation(unrefused(Removing()), request.own_distribution()) > 0.01
    assert largest_difference(unrefused(Widths(widths=(2,))), request.own_distribution()) < 1e-12, "the door is what differs"
    with pytest.raises(UnsoundError, match="removes sampled draft tokens"):
        request.distribution(Removing(), TokenVerification())
    for policy, verification in ((Removing(children="likeliest"), TokenVerification()), (Removing(), CompareVerification())):
        assert largest_difference(request.distribution(policy, verification), request.own_distribution()) < 1e-12


def test_unsound_and_unknown_combinations_are_refused() -> None:
    """Catches block verification of a tree, and a removing rule, that run."""
    pair = pair_of_tables()
    with pytest.raises(UnsoundError, match="block verification is known for chains only"):
        Decoder(pair, policy=Widths(), verification=BlockVerification())
    with pytest.raises(UnsoundError, match="removes sampled draft tokens"):
        Decoder(pair, policy=Removing())
    Decoder(pair, policy=Removing(children="likeliest"))
    Decoder(pair, policy=Removing(), verification=CompareVerification())
    with pytest.raises(ValueError, match="Widths drafts otherwise"):
        Decoder(pair, policy=AutoOff(policy=Widths())).generate([1], max_tokens=2)
    with pytest.raises(ValueError, match=r"trees by lab\.trees\.replay"):
        Player(greedy_trace(PLAIN, (0, 1, 2, 0), length=2), Widths(), PLAIN.costs)
    with pytest.raises(ValueError, match="at least 1 child"):
        Widths(widths=(2, 0))
    with pytest.raises(ValueError, match="max_nodes"):
        Widths(max_nodes=-1)
    with pytest.raises(ValueError, match="chains only"):
        verified(BlockVerification(), Tree(), lambda node: torch.ones(1), streams(0)[1])


# The chain


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0), Sampling(temperature=0.7, top_p=0.9)])
@pytest.mark.parametrize("verification", ["token", "compare"])
def test_one_child_a_node_is_the_chain(sampling: Sampling, verification: str) -> None:
    """Catches a uniform that is used twice, or in another order than the chain's: step by step, for fifty seeds."""
    request = Request(
        target=table(6, vocab_size=7, depth=2),
        draft=table(7, vocab_size=7, depth=2),
        ends=(3,),
        max_tokens=30,
        sampling=sampling,
    )
    kind = GreedyVerification() if sampling.is_greedy else VERIFICATIONS[verification]
    with unchecked():
        for seed in range(50):
            chain = request.session(Fixed(k=4), kind, streams(seed))
            tree = request.session(Widths(widths=(1, 1, 1, 1)), kind, streams(seed))
            for a, b in zip(finish(chain), finish(tree), strict=True):
                assert a.pieces == b.pieces
                assert (a.num_drafted, a.num_accepted, a.expected_s) == (b.num_drafted, b.num_accepted, b.expected_s)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0)])
@pytest.mark.parametrize("row", [0.001, 0.45])
def test_steps_without_hope_of_a_second_child_are_chains(row: float, sampling: Sampling) -> None:
    """Catches a chain in place of a tree that decides or learns otherwise than the tree of one child does."""
    pair: Any = {"target": table(6, vocab_size=7, depth=2), "draft": table(7, vocab_size=7, depth=2)}
    costs = Costs(draft_s=0.05, passes={1: 1.0, 32: 1.0 + 31 * row})
    request = Request(**pair, max_tokens=60, sampling=sampling, costs=costs)
    kind = GreedyVerification() if sampling.is_greedy else TokenVerification()
    forms = set()
    with unchecked():
        for seed in range(4):
            told, asked = (finish(request.session(kind_of(), kind, streams(seed))) for kind_of in (CostAwareTree, Asked))
            forms |= {any(tried.rank for tried in r.extra.tried) for r in told if r.num_drafted}
            if row >= 0.3:
                chain = finish(request.session(CostAware(), kind, streams(seed)))
                assert [(r.pieces, r.num_drafted) for r in told] == [(r.pieces, r.num_drafted) for r in chain]
            else:
                assert [(r.pieces, r.extra) for r in told] == [(r.pieces, r.extra) for r in asked]
    assert (True in forms) == (row < 0.1)


def test_what_trees_gain_is_by_the_time_that_they_took() -> None:
    """Catches a tree of many nodes, drafted in few passes, that counts as a chain of as many, and so as a loss; and steps that
    are taken in together, of which later children count as first ones."""
    pair: Any = {"target": table(6, vocab_size=7, depth=2), "draft": table(7, vocab_size=7, depth=2)}
    costs = Costs(draft_s=0.3, passes={1: 1.0, 32: 1.0})
    with unchecked():
        session = Request(**pair, max_tokens=80, costs=costs).session(CostAwareTree(), TokenVerification(), streams(0))
        steps = finish(session)
    account = session._memory.chain.up_to_date()
    counted = [now for before, now in pairwise([steps[0], *steps]) if before.num_drafted and now.num_drafted]
    gain = sum(now.num_tokens - now.num_accepted + sum(map(float, now.overlaps)) - now.expected_s for now in counted)
    assert max(now.num_drafted for now in counted) > 8
    assert account.gains[1].mean(costs) == pytest.approx(gain / len(counted))
    assert account.num_tested == sum(not tried.rank for now in steps if now.num_drafted for tried in now.extra.tried)


# Dice, and mistakes


@pytest.mark.parametrize("shape", ["two-by-two", "by-tokens", "cost-aware"])
def test_sampled_trees_follow_the_distribution(shape: str) -> None:
    """Catches a uniform that siblings or streams share: chi-square, 1500 seeds, false alarm for 1 choice of them in 10^5."""
    request, policy = replace(SITUATIONS["three-tokens-left"], max_tokens=2), SHAPES[shape]()
    counts: dict[Any, int] = {}
    with unchecked():
        for seed in range(1500):
            session = request.session(policy, TokenVerification(), streams(seed))
            outcome = answer(session, finish(session))
            counts[outcome] = counts.get(outcome, 0) + 1
    assert counts.keys() <= request.own_distribution().keys()
    assert chi_square_tail(counts, request.own_distribution()) > 1e-5
