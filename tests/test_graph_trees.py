"""Trees in passes over static caches: nodes see their ancestors, a branch is kept, steps are those of the specification."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from distributions import answer, distribution_of, finish, largest_difference, unchecked
from engine_cases import Models
from kinds import built
from test_tree_law import Asked, ByTokens

from specdecpp.backends import GraphModel, LeanModel
from specdecpp.backends.graphs import trees
from specdecpp.lab.trees import Eagle2, TreePolicy, Widths
from specdecpp.lab.trees.tree import ROOT, Tree
from specdecpp.policies import Costs, Fixed
from specdecpp.sampling import Sampling
from specdecpp.verify import CompareVerification, GreedyVerification, TokenVerification

pytestmark = pytest.mark.lab

PARENTS: dict[str, list[int]] = {
    "chain": [-1, 0, 1, 2],
    "wide": [-1, 0, 0, 0],
    "twigs": [-1, 0, 0, 1, 1, 2, 4, 0, 6],
    "two texts": [-1, -1, 0, 1, 3, 2],
    "full": [-1, *((i - 1) // 2 for i in range(1, 33))],
}


def text_of(length: int) -> list[int]:
    return [(7 * i + i // 11) % 60 for i in range(length)]


def masks_of(parents: Sequence[int]) -> list[int]:
    masks: list[int] = []
    for i, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << i)
    return masks


def path_of(parents: Sequence[int], node: int) -> list[int]:
    return ([] if parents[node] < 0 else path_of(parents, parents[node])) + [node]


def check_tree(cache: Any, plain: Any, parents: Sequence[int], length: int, cuts: Sequence[int], **close: Any) -> None:
    """Read a tree in passes that end at `cuts`, keep a branch and go on: rows are those of reading each branch alone."""
    text, tokens, masks = text_of(length), [(11 * i + 5) % 60 for i in range(len(parents))], masks_of(parents)
    cache.extend(text, rows=1)
    found = []
    for first, end in zip((0, *cuts), (*cuts, len(parents)), strict=True):
        found.append(cache.read_nodes(tokens[first:end], masks[first:end], first).clone())
        assert cache.length == length

    def alone(path: list[int], *more: int) -> torch.Tensor:
        return plain.new_cache().extend([*text, *(tokens[i] for i in path), *more], rows=1)[0][0]

    for node, row in enumerate(torch.cat(found)):
        torch.testing.assert_close(row, alone(path_of(parents, node)), **close)
    kept = path_of(parents, len(parents) - 1)
    cache.keep(kept)
    assert cache.length == length + len(kept)
    torch.testing.assert_close(cache.extend([9], rows=1)[0][0], alone(kept, 9), **close)
    cache.rollback(length + 1)
    torch.testing.assert_close(cache.extend([8, 9], rows=1)[0][0], alone(kept[:1], 8, 9), **close)


@pytest.mark.parametrize("length", [1, 20, 190, 223, 224, 480])
@pytest.mark.parametrize("shape", PARENTS)
def test_every_node_reads_as_its_branch_alone(shape: str, length: int) -> None:
    """Catches a cousin that is seen, an ancestor that is not, a wrong angle, a row lost as a branch moves or a cache grows."""
    model, parents = built("llama", max_position_embeddings=1024).double(), PARENTS[shape]
    backend, cuts = GraphModel(model), [1, 2, 5] if len(parents) > 5 else [1]
    close = {"atol": 1e-9, "rtol": 1e-9}
    check_tree(backend.new_cache(), LeanModel(model), parents, length, cuts, **close)
    check_tree(backend.new_cache(), LeanModel(model), parents, length, [], **close)


def test_more_nodes_than_a_pass_holds_and_windows_are_refused() -> None:
    """Catches places behind the room of a span, and a window counted by places."""
    cache = GraphModel(built("llama")).new_cache()
    with pytest.raises(ValueError, match="at most 33"):
        cache.read_nodes([1, 2], [1, 2], 32)
    assert cache.takes_nodes
    assert not GraphModel(built("mistral-window")).new_cache().takes_nodes


# --- steps -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Unsure(TreePolicy):
    """More children than are offered at once, also where q has no more; opens by the last token."""

    max_tokens: int = 3
    max_nodes: int = 14

    def open(self, tree: Tree, memory: Any) -> Sequence[int]:
        return [node for node in reversed(tree.frontier) if node == ROOT or tree.tokens[node] % 3]

    def wants_child(self, tree: Tree, node: int, memory: Any) -> bool:
        return len(tree.children(node)) < 1 + (6 if node == ROOT else sum(tree.tokens) % 3)


RULES: dict[str, TreePolicy] = {
    "widths": Widths(widths=(4, 2, 1)),
    "chain": Widths(widths=(1, 1, 1)),
    "none": Widths(widths=()),
    "cost-aware": Asked(max_nodes=16),
    "unsure": Unsure(),
    "likeliest": Widths(widths=(3, 2), children="likeliest"),
    "removing": Eagle2(max_nodes=30, verified=8, children="likeliest"),
}
SAMPLINGS = {"plain": Sampling(), "top-k": Sampling(temperature=0.8, top_k=3), "top-p": Sampling(top_p=0.7)}
SAMPLINGS |= {"greedy": Sampling(temperature=0.0)}


@pytest.fixture(scope="module")
def two() -> Models:
    return Models("device", max_position_embeddings=1024)


@pytest.mark.parametrize("verification", ["token", "compare"])
@pytest.mark.parametrize("sampling", [pytest.param(name, marks=[pytest.mark.slow] * (name == "top-k")) for name in SAMPLINGS])
@pytest.mark.parametrize("rule", RULES)
def test_steps_are_those_of_the_specification(
    rule: str, sampling: str, verification: str, two: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches another child or branch by the same uniforms, a uniform taken twice, and rows of another node."""
    kind = {"token": TokenVerification(), "compare": CompareVerification()}[verification]
    if SAMPLINGS[sampling].is_greedy and verification == "token":
        kind = GreedyVerification()
    costs = Costs(draft_s=0.05, passes={1: 1.0, 32: 1.02})

    def steps(length: int) -> list[Any]:
        options: Any = {"prompt": text_of(length), "max_tokens": 24, "costs": costs, "seed": length}
        session = two.session(RULES[rule], SAMPLINGS[sampling], kind, **options)
        seen: list[Any] = []
        session.watch = lambda plan, result: seen.append(result.rows.p if result.rows else None)
        found = [(r.tokens, r.extra, [round(x, 9) for x in r.overlaps]) for r in finish(session)]
        return [found, torch.cat(seen)]

    with unchecked():
        own = [steps(length) for length in (4, 215)]
        monkeypatch.setattr(trees, "takes", lambda request: False)
        for (found, p), length in zip(own, (4, 215), strict=True):
            expected, expected_p = steps(length)
            expected = [(tokens, grown[:5], overlaps) for tokens, grown, overlaps in expected]
            assert [(tokens, grown[:5], overlaps) for tokens, grown, overlaps in found] == expected
            torch.testing.assert_close(p, expected_p, atol=1e-9, rtol=1e-9)


def test_trees_by_whole_passes_keep_the_targets_distribution() -> None:
    """Catches any bias of the passes: enumerated over all coins, beside the target alone."""
    pair = Models("device", vocab_size=5)

    def run(policy: Any, coins: Any) -> Any:
        session = pair.session(policy, Sampling(), by_host=policy.engine() is None, prompt=[1, 2], max_tokens=2, ends=())
        session._request = replace(session._request, randomness=(coins, coins))
        return answer(session, finish(session))

    drafted, alone = (distribution_of(partial(run, policy)) for policy in (ByTokens(max_nodes=4), Fixed(k=0)))
    assert largest_difference(drafted, alone) < 1e-9


def test_what_passes_do_not_take_is_read_branch_by_branch(two: Models) -> None:
    """Catches a step that fails where trees are too large, or depend on what each branch has seen."""
    for policy, sampling in ((Eagle2(children="likeliest"), Sampling()), (Widths(), Sampling(repetition_penalty=1.3))):
        session = two.session(policy, sampling, max_tokens=8)
        assert not trees.takes(session._request)
        assert finish(session)
