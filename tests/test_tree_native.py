"""The round of a tree around compiled code decides what the host decides, whose law is enumerated (test_tree_law.py)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from laws import unchecked
from test_rounds import MANNERS, models_of
from test_tree_law import ByChance, ByTokens

from specdecpp import NativeRunner
from specdecpp.policies import Costs, Fixed
from specdecpp.policies.trees import C2T, CostAwareTree, DynamicDepth, Eagle2, TreePolicy, Widths, cost_aware
from specdecpp.rounds import Native
from specdecpp.rounds.host import Host
from specdecpp.rounds.verification import GreedyVerification
from specdecpp.runners import native
from specdecpp.sampling import Sampling, streams
from specdecpp.session import Round, Session
from specdecpp.testing import tiny_draft, tiny_model

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")
FLAT = Costs(draft_s=0.15, passes={1: 1.0, 32: 1.1})
SHAPES: dict[str, Callable[[], TreePolicy]] = {
    "cost-aware": lambda: CostAwareTree(),
    "wide": lambda: Widths(widths=(3, 2, 1)),
    "chain": lambda: Widths(widths=(1, 1, 1, 1)),
    "more than are known in order": lambda: Widths(widths=(20, 1), max_nodes=40),
    "likeliest": lambda: Widths(widths=(2, 2, 1), children="likeliest"),
    "by tokens": lambda: ByTokens(max_tokens=4, max_nodes=9),
    "by chance": lambda: ByChance(max_tokens=3, max_nodes=9),
    "removing": lambda: Eagle2(max_tokens=3, width=2, branch=3, verified=5, children="likeliest"),
    "deepening": lambda: DynamicDepth(width=2, branch=2),
    "by entropy": lambda: C2T(branch=2),
}
TREE_MANNERS = [name for name, (_, verification) in MANNERS.items() if verification != "block"]


def same(own: Session, hosts: Session) -> list[Round]:
    """Decode both to their ends; they must agree in every tree and token."""
    rounds = []
    own.prefill()
    hosts.prefill()
    while own.finish_reason is None:
        a, b = own.step(), hosts.step()
        assert (a.pieces, a.num_drafted, a.stop.words) == (b.pieces, b.num_drafted, b.stop.words)
        assert (a.grown is None) == (b.grown is None)
        if a.grown is not None and b.grown is not None:
            assert a.grown._replace(tried=()) == b.grown._replace(tried=())
            for x, y in zip(a.grown.tried, b.grown.tried, strict=True):
                assert (x.depth, x.rank, x.is_accepted) == (y.depth, y.rank, y.is_accepted)
                assert (x.chance, x.share) == (pytest.approx(y.chance, abs=1e-5), pytest.approx(y.share, abs=1e-5))
        rounds.append(a)
    assert (own.target.length, own.draft.length) == (hosts.target.length, hosts.draft.length)
    return rounds


@pytest.mark.parametrize("manner", TREE_MANNERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_trees_are_those_of_the_host(shape: str, manner: str) -> None:
    """Catches another child, shape or verdict than the host's, a uniform that is used twice or not at all, a distribution that
    a sibling's draw has changed, a penalty on another branch, and a cache of another branch: watched and unwatched."""
    models, (sampling, verification), policy = models_of("native"), MANNERS[manner], SHAPES[shape]()
    grown = set()
    with unchecked():
        for seed in range(2):
            how: Any = {"seed": seed, "costs": FLAT, "max_tokens": 24}
            own, hosts = (models.session(policy, sampling, verification, **how) for _ in range(2))
            assert isinstance(own.engine, Native)
            hosts.engine, seen = Host(), ([], [])
            if seed == 1:
                own.watch = lambda plan, result, to=seen[0]: to.append(result.rows)
                hosts.watch = lambda plan, result, to=seen[1]: to.append(result.rows)
            rounds = same(own, hosts)
            grown |= {r.grown.parents for r in rounds if r.grown is not None}
            for a, b in zip(*seen, strict=True):
                torch.testing.assert_close(a.p, b.p, atol=1e-5, rtol=1e-3)
                torch.testing.assert_close(a.q, b.q, atol=1e-5, rtol=1e-3)
    assert any(len(parents) > 1 for parents in grown)


def test_a_draft_that_is_sure_has_further_children() -> None:
    """Catches a share of what the likeliest token leaves that is worked out as 1 - 1, where the draft is sure of it."""
    target = tiny_model("llama", seed=1, head_dim=16, vocab_size=64)
    draft = tiny_draft(target, noise=0.4)
    with torch.no_grad():
        draft.get_output_embeddings().weight *= 40
    of = [NativeRunner(model, num_threads=1, probe=False) for model in (target, draft)]
    how: Any = {"prompt": [3, 5, 2], "max_tokens": 12, "sampling": Sampling(temperature=0.0)}
    with unchecked():
        tokens = []
        for policy in (Widths(widths=(3, 2)), Fixed(k=0)):
            runners: Any = {"target": of[0].fresh(), "draft": of[1].fresh()}
            made = Session(**runners, **how, policy=policy, verification=GreedyVerification(), randomness=streams(3))
            made.prefill()
            while made.finish_reason is None:
                made.step()
            tokens.append(made.tokens)
    assert tokens[0] == tokens[1]


def test_rounds_take_turns_between_trees_and_chains() -> None:
    """Catches open rows that a chain's round finds, and a chain of a tree rule that is decided otherwise than on the host."""
    costs = Costs(draft_s=0.15, passes={1: 1.0, 32: 1.0 + 31 * 0.13})
    forms = set()
    with unchecked():
        for seed in range(4):
            own, hosts = (models_of("native").session(CostAwareTree(), Sampling(), seed=seed, costs=costs) for _ in range(2))
            hosts.engine = Host()
            forms |= {r.grown is None for r in same(own, hosts) if r.num_drafted}
    assert forms == {True, False}


@pytest.mark.parametrize("max_children", [1, 8])
@pytest.mark.parametrize("max_nodes", [0, 1, 4])
def test_no_round_has_more_nodes_than_the_rule_allows(max_nodes: int, max_children: int) -> None:
    """Catches a round that becomes a chain, and is bounded by its depth only."""
    rule = CostAwareTree(max_nodes=max_nodes, max_children=max_children)
    made = models_of("native").session(rule, Sampling(), seed=0, costs=Costs(draft_s=0.01, passes={1: 1.0, 32: 1.01}))
    made.prefill()
    drafted = []
    while made.finish_reason is None:
        drafted.append(made.step().num_drafted)
    assert max(drafted) == max_nodes


def test_a_row_costs_what_the_curve_of_passes_says() -> None:
    """Catches free rows that are charged, or given away where the round goes on, and a step that nobody pays."""
    passes = {1: 1.0, 2: 1.3, 8: 1.3, 9: 1.7, 16: 1.7, 17: 3.0}
    costs = Costs(draft_s=0.15, passes=passes, start_s=0.5, node_s=0.01)

    def row_s(num: int, counted: int) -> float:
        return cost_aware._row_s(costs, num, 15, counted=counted) - costs.node_s

    assert row_s(0, 15) == pytest.approx(0.3 / 7), "a step is spread over the rows up to the next"
    assert row_s(0, 0) == pytest.approx(0.3), "and paid in full where nobody has counted with it"
    assert row_s(3, 15) == row_s(3, 0) == pytest.approx(cost_aware.REACHED * 0.3 / 7), "free for now"
    assert (row_s(7, 15), row_s(7, 7)) == (pytest.approx(0.4 / 8), pytest.approx(0.4))
