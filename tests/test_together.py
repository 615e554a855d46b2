"""Replay of many answers at once, and the distribution of a selection over a batch. Enumerated or computed: no false alarms."""

import itertools
import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from distributions import Request, distribution_of, largest_difference
from integration import completed
from tables import COSTS, Recording, greedy_trace

from specdecpp.lab import AutoOff, Heuristic
from specdecpp.lab.together import Tetris, replay_together, seconds_of
from specdecpp.policies import CostAware, Costs, CumulativeConfidence, Fixed, Policy
from specdecpp.replay.replay import replay
from specdecpp.replay.replayed import ReplayedStep
from specdecpp.replay.trace import Trace
from specdecpp.sampling import Sampling
from specdecpp.testing import TableModel
from specdecpp.verify import BlockVerification, TokenVerification

pytestmark = pytest.mark.lab

STEEP = Costs(draft_s=0.2, passes={1: 1.0, 2: 1.05, 4: 1.5, 9: 4.0}, start_s=0.1, switch_s=0.3)
POLICIES: dict[str, Policy] = {
    "none": Fixed(k=0),
    "fixed": Fixed(k=2),
    "heuristic": Heuristic(start_tokens=1, max_tokens=2),
    "cumulative": CumulativeConfidence(threshold=0.4, max_tokens=2),
    "auto-off": AutoOff(policy=CumulativeConfidence(threshold=0.4, max_tokens=2), patience=1, probe_every=2),
    "cost-aware": CostAware(max_tokens=2),
}


def table(seed: int) -> TableModel:
    return TableModel.random(vocab_size=3, depth=2, seed=seed, sparsity=0.1)


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    """Answers of a pair of tables, whose rejections are yet to be thrown."""
    made = Recording(request=Request(target=table(10), draft=table(111), max_tokens=5), length=2).traces
    return [replace(trace, odds=np.where(trace.odds < 1, 0.5, 1.0)) for _, _, trace in made[:: len(made) // 12]]


@pytest.mark.parametrize("name", POLICIES)
def test_one_at_a_time_is_replay(name: str, traces: list[Trace]) -> None:
    """Catches another number, price or switch than that of an answer alone."""
    costs = replace(STEEP, switch_s=0.0)
    one, alone = replay_together(traces, POLICIES[name], costs, at_once=1), replay(traces, POLICIES[name], costs)
    found = (one.num_tokens, one.num_turns, one.num_drafted, one.num_accepted, one.num_dropped)
    assert found == (alone.num_tokens, alone.num_passes, alone.num_drafted, alone.num_accepted, 0)
    assert one.seconds == pytest.approx(alone.seconds.sum())
    one, alone = replay_together(traces[:1], POLICIES[name], STEEP, at_once=1), replay(traces[:1], POLICIES[name], STEEP)
    assert one.seconds == pytest.approx(alone.seconds.sum())


@pytest.mark.parametrize("at_once", [2, 5, 99])
@pytest.mark.parametrize("name", ["fixed", "cumulative", "heuristic"])
def test_what_an_answer_does_is_its_own(name: str, at_once: int, traces: list[Trace]) -> None:
    """Catches answers that are lost or begun twice, and a memory or a coin that two of them share."""
    alone = replay(traces, POLICIES[name], COSTS)
    found = replay_together(traces, POLICIES[name], COSTS, at_once=at_once)
    assert (found.num_tokens, found.num_drafted, found.num_accepted) == (
        alone.num_tokens,
        alone.num_drafted,
        alone.num_accepted,
    )
    assert math.ceil(alone.num_passes / at_once) <= found.num_turns < alone.num_passes
    free = replay_together(traces, POLICIES[name], Costs(draft_s=0.0, passes={1: 1.0}), at_once=at_once)
    assert free.seconds == found.num_turns


def test_seconds_of_a_turn() -> None:
    """Catches rows that are priced one by one, a draft that pays for requests that have stopped, and one that is dropped and
    not paid for."""
    costs = Costs(draft_s=0.2, passes={1: 1.0, 2: 1.5, 3: 2.0}, start_s=0.1)
    turn = [ReplayedStep(1, num, 0, 0.0, 0.0, 0.0, num_dropped=dropped) for num, dropped in ((2, 0), (0, 1), (0, 0))]
    assert seconds_of(turn, costs) == pytest.approx(0.2 * 1.5 + 0.2 + (1.0 + 0.5 * 4) + 0.1)
    assert seconds_of(turn[2:], costs) == 1.0


def test_rules_that_weigh_costs_see_their_share(traces: list[Trace]) -> None:
    """Catches a rule that drafts for many as it does for one, where rows are no longer free."""
    costs = Costs(draft_s=0.01, passes={1: 1.0, 4: 1.0, 5: 3.0, 6: 5.0})
    drafted = [replay_together(traces, CostAware(max_tokens=2), costs, at_once=n).num_drafted for n in (1, 4)]
    assert drafted[0] > 2 * drafted[1]


# --- TETRIS ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", range(8))
@pytest.mark.parametrize("own", [True, False])
def test_the_best_products_are_chosen(slots: int, own: bool) -> None:
    """Catches a choice that is not the best of all with so many slots, and one that is no start of each draft."""
    rng = np.random.default_rng(slots)
    for num in (1, 2, 3):
        products = np.cumprod(rng.choice([0.0, 0.3, 0.5, 1.0], (num, 2)), axis=1)
        survivals = [[1.0, *row] for row in products.tolist()]
        chosen = Tetris(slots=slots, own=own).lengths(survivals)
        assert sum(chosen) == min(slots, 2 * num)

        def worth(lengths: Any, survivals: Any = survivals) -> float:
            return sum(sum(s[own : own + n]) for s, n in zip(survivals, lengths, strict=True))

        best = max(worth(c) for c in itertools.product(range(3), repeat=num) if sum(c) <= slots)
        assert worth(chosen) == pytest.approx(best)


@pytest.mark.parametrize("verification", [TokenVerification(), BlockVerification()], ids=["token", "block"])
@pytest.mark.parametrize("own", [False, True])
def test_the_joint_law_of_a_selection(own: bool, verification: Any) -> None:
    """Catches a score that knows what it chooses: with it the distribution is another one, without it jointly the targets' own.
    Two requests of two draft tokens each, two slots."""
    target, draft, contexts, k = table(10), table(111), ((0, 1), (2, 0)), 2

    def run(coins: Any) -> Any:
        drawn: list[list[int]] = []
        survivals: list[list[float]] = []
        for context in contexts:
            tokens, products = [], [1.0]
            for _ in range(k):
                q = draft.distribution((*context, *tokens))
                tokens.append(coins.categorical(q))
                products.append(products[-1] * float(q[tokens[-1]]))
            drawn.append(tokens)
            survivals.append(products)
        answers = []
        for context, tokens, num in zip(contexts, drawn, Tetris(slots=2, own=own).lengths(survivals), strict=True):
            rows = [[of.distribution((*context, *tokens[:i])) for i in range(num + 1)] for of in (target, draft)]
            p, q = torch.stack(rows[0]), torch.stack(rows[1])[:num]
            verdict = verification(p, q, torch.tensor(tokens[:num], dtype=torch.long), coins)
            answers.append((*tokens[: verdict.num_accepted], verdict.next_token))
        return tuple(answers)

    after = [lambda text, context=context: target.distribution((*context, *text)) for context in contexts]
    distribution: dict[Any, float] = defaultdict(float)
    for answers, chance in distribution_of(run).items():
        filled = [completed({a: 1.0}, p, k + 1) for a, p in zip(answers, after, strict=True)]
        for (a, x), (b, y) in itertools.product(*(one.items() for one in filled)):
            distribution[a, b] += chance * x * y
    both = [completed({(): 1.0}, p, k + 1) for p in after]
    product = {(a, b): x * y for (a, x), (b, y) in itertools.product(*(one.items() for one in both))}
    difference = largest_difference(distribution, product)
    assert difference > 1e-3 if own else difference < 1e-12


def test_all_slots_are_a_fixed_length(traces: list[Trace]) -> None:
    """Catches draft tokens that are chosen and not verified, and others that are paid for twice."""
    for at_once in (1, 3):
        fixed = replay_together(traces, Fixed(k=2), STEEP, at_once=at_once)
        assert replay_together(traces, Tetris(slots=99, k=2), STEEP, at_once=at_once) == fixed
        none = replay_together(traces, Tetris(slots=0, k=2), STEEP, at_once=at_once)
        assert (none.num_drafted, none.num_dropped > 0) == (0, True)


def test_what_is_chosen_by_its_own_draw_is_refused(traces: list[Trace]) -> None:
    """Catches a biased rule in a table of rules, a refusal where drafts are deterministic, and settings that say nothing."""
    request = Request(target=table(10), draft=table(111), max_tokens=3, sampling=Sampling(temperature=0.0))
    greedy = [greedy_trace(request, text, length=2) for text in ((0, 1, 2), (2, 2, 1))]
    assert replay_together(greedy, Tetris(slots=2, k=2, own=True), COSTS, at_once=2).num_tokens == 6
    with pytest.raises(ValueError, match="only deterministic drafts"):
        replay_together(traces, Tetris(slots=2, k=2, own=True), COSTS, at_once=2)
    for slots, k in ((-1, 1), (1, 0)):
        with pytest.raises(ValueError, match="must be at least"):
            Tetris(slots=slots, k=k)
    with pytest.raises(ValueError, match="at_once"):
        replay_together(traces, Fixed(k=1), COSTS, at_once=0)
