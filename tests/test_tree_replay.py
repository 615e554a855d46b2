"""Replay of trees against the session: the joint distribution of text and trees, enumerated."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributions import Distribution, Request, distribution_of, largest_difference, unchecked
from tables import COSTS
from test_law import SITUATIONS, pair_of_tables
from test_tree_law import SHAPES, Removing, small

from specdecpp.lab.trees import TreePolicy, Widths
from specdecpp.lab.trees.recorded import RecordedDistributions
from specdecpp.lab.trees.replay import played, replay_trees
from specdecpp.sampling import Sampling, probabilities
from specdecpp.verify import CompareVerification, GreedyVerification, TokenVerification, Verification

pytestmark = pytest.mark.lab


@dataclass(kw_only=True)
class TableLaws:
    """An answer of a request over tables."""

    request: Request
    tokens: tuple[int, ...]
    source: str = "table"

    @property
    def ends(self) -> tuple[int, ...]:
        return self.request.ends

    @property
    def is_greedy(self) -> bool:
        return self.request.sampling.is_greedy

    @property
    def num_places(self) -> int:
        r, num = self.request, len(self.request.prompt)
        longest = [r.max_tokens] + ([r.target.max_length - num] if r.target.max_length else [])
        places = [min(longest) - 1] + ([r.draft.max_length - num + 1] if r.draft.max_length else [])
        return max(0, min(places))

    def p(self, i: int) -> torch.Tensor:
        return self._distribution(self.request.target, self.tokens[:i])

    def q(self, i: int, branch: Any) -> torch.Tensor:
        return self._distribution(self.request.draft, (*self.tokens[:i], *branch))

    def _distribution(self, model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
        text = (*self.request.prompt, *tokens)
        if self.is_greedy:
            return model.distribution(text)
        seen = torch.tensor([t in text for t in range(model.vocab_size)])
        return probabilities(model.distribution(text).log(), self.request.sampling, seen)


def told(steps: list[Any]) -> Any:
    """All of every step's tree but seconds, which follow."""
    shape = [(r.extra.tokens, r.extra.parents, r.extra.path, r.extra.widths, r.extra.num_verified) for r in steps]
    rounded = [tuple((t[0], t[1], round(t[2], 9), round(t[3], 9), t[4]) for t in r.extra.tried) for r in steps]
    return tuple(shape), tuple(rounded), tuple((r.num_tokens, r.num_accepted, round(r.expected_s, 9)) for r in steps)


def session_distribution(request: Request, policy: TreePolicy, verification: Verification) -> Distribution:
    request = replace(request, costs=COSTS)
    return request.distribution(policy, verification, lambda s, steps: (tuple(s.tokens[s.num_prompt_tokens :]), told(steps)))


def replay_distribution(request: Request, policy: TreePolicy, *, compares: bool = False) -> Distribution:
    distribution: Distribution = {}
    for (text, _), probability in request.own_distribution().items():
        distributions = TableLaws(request=request, tokens=text)
        found = distribution_of(lambda coins, of=distributions: told(list(played(of, policy, COSTS, coins, compares=compares))))
        for key, chance in found.items():
            distribution[text, key] = distribution.get((text, key), 0.0) + probability * chance
    return distribution


CASES = [
    (situation, shape)
    for i, situation in enumerate(("plain", "end-of-text", "many-zeros", "draft-within-target", "top-p", "target-context-ends"))
    for j, shape in enumerate(SHAPES)
    if (i + j) % 2 == 0
]


@pytest.mark.parametrize(("situation", "shape"), [*CASES, ("draft-context-ends", "by-tokens"), ("two-ends", "narrowing")])
def test_replay_has_the_sessions_joint_distribution_of_text_and_trees(situation: str, shape: str) -> None:
    """Catches any difference: in the coupling of siblings, in what is drawn behind an accepted child or below a rejected one,
    in ends, places left, passes and what is told to the rule."""
    request, policy = small(situation, 2), SHAPES[shape]()
    expected = session_distribution(request, policy, TokenVerification())
    assert largest_difference(expected, replay_distribution(request, policy)) < 1e-12


@pytest.mark.parametrize("shape", ["wide", "by-tokens", "by-chance"])
def test_of_several_steps(shape: str) -> None:
    """Catches a next step that begins at another place, over three tokens."""
    request, policy = small("end-of-text", 3), replace(SHAPES[shape](), max_nodes=3)
    expected = session_distribution(request, policy, TokenVerification())
    assert largest_difference(expected, replay_distribution(request, policy)) < 1e-12


@pytest.mark.parametrize("shape", ["wide", "narrowing", "by-chance"])
@pytest.mark.parametrize("children", ["drawn", "likeliest"])
def test_under_comparison(shape: str, children: Any) -> None:
    """Catches children that are coupled where nobody tests them by q."""
    request = small("end-of-text", 2)
    for policy in (replace(SHAPES[shape](), children=children), Removing(children=children)):
        expected = session_distribution(request, policy, CompareVerification())
        assert largest_difference(expected, replay_distribution(request, policy, compares=True)) < 1e-12


@pytest.mark.parametrize("shape", SHAPES)
def test_likeliest_children_and_greedy_answers(shape: str) -> None:
    """Catches a coin where nothing is random."""
    policy = replace(SHAPES[shape](), children="likeliest")
    request = small("end-of-text", 3)
    expected = session_distribution(request, policy, TokenVerification())
    assert largest_difference(expected, replay_distribution(request, policy)) < 1e-12
    greedy = replace(SITUATIONS["five-tokens"], sampling=Sampling(temperature=0.0))
    assert session_distribution(greedy, policy, GreedyVerification()) == replay_distribution(greedy, SHAPES[shape]())


def test_recorded_rows_are_those_of_a_fresh_pass() -> None:
    """Catches a cache of the draft that holds another branch, and rows that are shifted by one."""
    pair, tokens = pair_of_tables(), (2, 0, 1)
    record: Any = SimpleNamespace(source="s", prompt=torch.tensor([0, 1]), answer=torch.tensor(tokens))
    terms: Any = SimpleNamespace(ends=())
    answer = RecordedDistributions(record, pair, terms, Sampling())
    models: Any = pair
    for i, branch in ((0, ()), (1, (2,)), (1, (2, 1)), (2, ()), (0, (1,)), (1, (2,)), (3, ())):
        text = (0, 1, *tokens[:i], *branch)
        torch.testing.assert_close(answer.q(i, branch), models.draft.distribution(text))
        if not branch and i < 3:
            torch.testing.assert_close(answer.p(i), models.target.distribution(text))


def test_sums_are_those_of_the_steps() -> None:
    """Catches a pass that is not paid for, and luck that differs between two replays of a seed."""
    request = SITUATIONS["five-tokens"]
    answers = [TableLaws(request=request, tokens=text) for text, _ in list(request.own_distribution())[:5]]
    with unchecked():
        once, again = (replay_trees(answers, Widths(widths=(2, 1)), COSTS, seed=3, repeats=2) for _ in range(2))
        alone = replay_trees(answers, Widths(widths=()), COSTS, repeats=2)
    assert once.seconds.tolist() == again.seconds.tolist()
    assert once.tokens.tolist() == [2 * len(a.tokens) for a in answers]
    assert once.num_draft_passes <= 2 * once.passes.sum() < once.num_verified + once.passes.sum()
    dear = replace(COSTS, draft_s=1.0)
    assert once.at(dear).seconds.sum() - once.seconds.sum() == pytest.approx(
        0.8 * sum(n * sum(map(COSTS.pass_s, w)) for shapes in once.shapes for (w, _), n in shapes.items())
    )
    assert alone.speed_up == pytest.approx(1)
    assert once.gain(alone).value == pytest.approx(once.speed_up)
    with pytest.raises(ValueError, match="removes children"):
        replay_trees(answers, Removing(), COSTS)
    with pytest.raises(ValueError, match="at least one repeat"):
        replay_trees([], Widths(), COSTS)
    with pytest.raises(ValueError, match="no answers of gsm8k"):
        once.only("gsm8k")
