"""What a pair is taught before its first request, and what the first and later requests then get."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributions import outcome, unchecked

from specdecpp import Decoder, Pair, load_pair
from specdecpp.costs import measuring
from specdecpp.costs.practice import PROMPTS, Practice, Practised, texts
from specdecpp.policies import CostAware, Costs, Fixed
from specdecpp.policies.learning import Experience
from specdecpp.policies.protocol import Given, decide
from specdecpp.policies.score import Score
from specdecpp.testing import save_tiny_pair

COSTS = Costs(draft_s=0.43, passes={1: 1.0, 2: 1.03, 3: 1.21, 5: 1.47, 9: 2.3})
PROMPT, ANSWER = 40, 96


class Text:
    """Endless draft tokens: each with its chance of acceptance and what q says of that, in the mean an acceptance."""

    def __init__(self, acceptance: float, rng: np.random.Generator):
        scatter, levels = rng.normal(0, 1.6, 2000), np.linspace(-8, 8, 200)
        means = [(1 / (1 + np.exp(-(level + scatter)))).mean() for level in levels]
        self.rng, self.level = rng, float(np.interp(acceptance, means, levels))

    def draw(self) -> tuple[float, float]:
        z = self.rng.normal(self.level, 1.6)
        x = min(max(z + 0.2 + self.rng.normal(0, 0.7), 0.02), 4.6)
        return 1 / (1 + math.exp(-z)), 1 / (1 + math.exp(-x))

    def accepted(self, chances: list[float]) -> int:
        return next((i for i, chance in enumerate(chances) if self.rng.random() >= chance), len(chances))


def practised(acceptance: float, rng: np.random.Generator) -> Mapping[str, Any] | None:
    """Two prompts of practice of a slow pair, whose acceptance scatters about that of the pair."""
    steps = []
    for _ in range(2):
        text = Text(min(max(acceptance + rng.uniform(-0.15, 0.15), 0.05), 0.97), rng)
        for k in filter(None, measuring.SLOW_PRACTICE):
            chances, judged = zip(*(text.draw() for _ in range(k)), strict=True)
            steps.append(Practised(text.accepted(list(chances)), judged))
    return Practice(greedy=tuple(steps), judge="q").past(CostAware(), COSTS, is_greedy=True)


def answered(experience: Experience, text: Text) -> float:
    """Tokens in a pass of the target alone of one greedy request, the draft's reading included."""
    policy, made, seconds, unread = CostAware(), 0, 0.0, PROMPT
    memory = experience.begin(Given(num_unread=PROMPT, is_greedy=True))
    while made < ANSWER:
        decision = decide(policy, memory, COSTS, ANSWER - made - 1)
        assert decision.rule is not None
        chances, judged, survival, score = [], [], 1.0, decision.rule.score or Score()
        while len(judged) < decision.limit and survival >= decision.rule.threshold(len(judged)):
            chance, estimate = text.draw()
            chances.append(chance)
            judged.append(estimate)
            survival *= score(estimate)
        num, accepted = len(judged), text.accepted(chances)
        memory = policy.learn(memory, outcome(num, accepted, COSTS, judged=tuple(judged)))
        seconds += COSTS.step_s(num) + (COSTS.draft_pass_s(unread) if num and unread > 1 else 0.0)
        unread, made = 0 if num else unread + 1, made + accepted + 1
    experience.add(memory)
    return made / seconds


@pytest.mark.parametrize("acceptance", [0.9, 0.7, 0.5, 0.2])
def test_first_requests_get_what_the_best_fixed_length_would(acceptance: float) -> None:
    """Catches a prior that knows nothing of the pair: first requests drafted on where it did not pay (.91 of the target alone
    at an acceptance of .2), or not at all where it did.

    Of 24 runs the mean has a standard error of 1 to 2 % in the first request and of .7 % over later ones. The true means keep
    the bounds by 3 and 1.5 %: fewer than one seed in fifty misses one of them by chance.
    """
    fixed = {}
    for k in (0, 1, 2, 3, 5):
        tokens = sum(acceptance**i for i in range(k + 1))
        fixed[k] = ANSWER / (ANSWER / tokens * COSTS.step_s(k) + (COSTS.draft_pass_s(PROMPT) if k else 0.0))
    took = np.zeros((24, 6))
    with unchecked():
        for run in range(len(took)):
            rng = np.random.default_rng([run, round(100 * acceptance)])
            experience = Experience(CostAware(), practised(acceptance, rng))
            took[run] = [1 / answered(experience, Text(acceptance, rng)) for _ in range(took.shape[1])]
    rates = 1 / took.mean(0)
    assert rates[0] > 0.93 * max(fixed.values())
    later = 1 / took[:, 1:].mean()
    assert later > 0.97 * max(fixed.values())
    assert later > 0.97, "and of the target alone"


def test_a_look_is_paid_once_in_the_life_of_a_pair() -> None:
    """Catches trials that each request may begin anew, and a first request that may not look."""
    dear, policy = Costs(draft_s=0.9, passes={1: 1.0}), CostAware(prior=0.3)
    experience, looked = Experience(policy), []
    for _ in range(40):
        memory = experience.begin(Given(num_unread=1, is_greedy=True))
        for _ in range(96):
            num = 1 if policy.rule(memory, dear).least[0] <= 1 else 0
            memory = policy.learn(memory, outcome(num, 0, dear, judged=(0.6,) * num))
        experience.add(memory)
        looked.append(memory.lost)
    assert looked[0] > 0
    assert sum(looked) < 5 + 2 * policy.regret * 40 * 96


def test_practice_stops_as_the_rule_does() -> None:
    """Catches a least number of draft tokens that practice does not know of."""
    practice = Practice(greedy=(Practised(4, (0.5,) * 6),) * 12, judge="q")
    learned = [practice.past(CostAware(min_tokens=num), COSTS, is_greedy=True) for num in (0, 4)]
    assert [past["num_tested"] for past in learned if past] == [12 * 1, 12 * 4]


def test_a_shorter_step_is_what_the_rule_would_have_had() -> None:
    """Catches accepted tokens beyond the stop, and chances of tokens that would not have been tested."""
    whole = Practised(2, (0.9, 0.8, 0.7, 0.6), (0.9, 0.8, 0.4))
    for num, accepted, tested in ((1, 1, 1), (2, 2, 2), (3, 2, 3), (4, 2, 3)):
        cut = whole.cut(num, COSTS)
        assert (cut.num_drafted, cut.num_accepted, cut.judged) == (num, accepted, whole.judged[:num])
        assert cut.overlaps == whole.overlaps[:tested]
        assert (cut.num_tokens, cut.expected_s) == (accepted + 1, COSTS.step_s(num))


def test_practice_is_kept_as_it_was() -> None:
    """Catches a file that loses steps, and one of somebody else that ends a load."""
    steps = tuple(Practised(1, (0.8,) * k, (0.5, 0.4)) for k in (2, 4))
    practice = Practice(greedy=steps, sampled=steps[:1], judge="q")
    assert Practice.parse(json.loads(json.dumps(practice.to_json()))) == practice
    for bad in (None, {}, {"greedy": [], "sampled": [[2, [0.5], []]], "judge": "q"}, {"greedy": 3, "sampled": [], "judge": ""}):
        with pytest.raises((ValueError, KeyError, TypeError)):
            Practice.parse(bad)
    assert practice.past(CostAware(), COSTS, is_greedy=True) is not None
    assert replace(practice, judge="head").past(CostAware(), COSTS, is_greedy=True) is None
    assert practice.past(Fixed(k=2), COSTS, is_greedy=True) is None
    past = practice.past(CostAware(), COSTS, is_greedy=False)
    assert past is not None
    assert past["num_tested"] >= 3, "few steps of one way are joined by those of the other"
    assert past["lost"] == 0


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "LENGTHS", (0, 1, 2, 4))
    monkeypatch.setattr(measuring, "CYCLES", 1)
    target, draft = save_tiny_pair(tmp_path / "pair")
    return replace(load_pair(target, draft=draft, backend="eager"), ends=())  # else practice may end with its first token


def test_a_pair_practises_in_both_ways_while_it_is_measured(loaded: Pair) -> None:
    """Catches first requests that know nothing, practice of one way of sampling only, a seed that repeats nothing later."""
    assert len(texts(loaded)) == len(PROMPTS)
    assert len(PROMPTS) % 2 == 1
    decoder = Decoder(loaded)
    practice = measuring.known(loaded).practice
    assert practice.greedy
    assert practice.sampled
    assert practice.judge == "q"
    assert all(r.overlaps for r in practice.sampled)
    for seed in (None, 3):
        for temperature in (0.0, 1.0):
            memory = decoder.start("ab", temperature=temperature, seed=seed)._memory
            assert memory.past.num_requests
    seeded = Decoder(replace(loaded)).start("ab", temperature=1.0, seed=3)._memory
    assert seeded == decoder.start("ab", temperature=1.0, seed=3)._memory
    assert texts(replace(loaded, tokenizer=None)) == []
