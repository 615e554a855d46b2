"""What outcomes teach a rule without a threshold: the score of its estimates, when not to draft, and what is carried on."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributions import outcome, unchecked

from specdecpp import Decoder, Pair, cache_dir
from specdecpp.costs import LONG_WARM_UP
from specdecpp.lab import AutoOff, Bandit, FrontierLength
from specdecpp.lab.trees import CostAwareTree
from specdecpp.policies import CostAware, Costs, Fixed, cost_aware
from specdecpp.policies.cost_aware import TRIAL
from specdecpp.policies.learning import Account, Belief, Experience, Gains, PastRequests
from specdecpp.policies.protocol import Given
from specdecpp.policies.score import Score, by_q, logit
from specdecpp.sampling import Sampling
from specdecpp.testing import TableModel, tiny_tokenizer

FLAT = Costs.relative(0.2)
DEAR = Costs.relative(0.6)


def pair(*, draft: int = 7) -> Pair:
    models = [TableModel.random(vocab_size=8, depth=2, seed=seed, sparsity=0.0) for seed in (6, draft)]
    return Pair(target=models[0], draft=models[1], tokenizer=tiny_tokenizer(8))


def steps(policy: CostAware, accept: float, num: int, *, seed: int, costs: Costs = DEAR, memory: Any = None) -> Any:
    """(memory, tokens, seconds, draft tokens) of steps in which each draft token has the same q and the same chance."""
    generator = np.random.default_rng(seed)
    memory, tokens, seconds, drafted = memory or policy.start(), 0, 0.0, 0
    for _ in range(num):
        rule = policy.rule(memory, costs)
        length, survival, estimate = 0, 1.0, by_q(0.5)
        while length < 8 and survival >= rule.threshold(length):
            length, survival = length + 1, survival * (rule.score or Score())(estimate)
        accepted = next((i for i in range(length) if generator.random() >= accept), length)
        memory = policy.learn(memory, outcome(length, accepted, costs, judged=(estimate,) * length))
        tokens, seconds, drafted = tokens + accepted + 1, seconds + costs.step_s(length), drafted + length
    return memory, tokens, seconds, drafted


def test_a_coin_moves_a_belief_by_one_step_of_newton() -> None:
    """Catches a slip in the update, by precisions instead of covariances."""
    belief = Belief(Score(0.3, 0.8), 0.4, -0.05, 0.1)
    for estimate, is_accepted in ((0.7, True), (0.97, False), (0.2, False), (1.0, True)):
        x = np.array([1.0, logit(estimate)])
        p = belief.score(estimate)
        covariance = np.array([[belief.var_bias, belief.cov], [belief.cov, belief.var_slope]])
        after = np.linalg.inv(np.linalg.inv(covariance) + p * (1 - p) * np.outer(x, x))
        mean = np.array([belief.score.bias, belief.score.slope]) + after @ x * (is_accepted - p)
        belief = belief.after((estimate,), int(is_accepted))
        assert (belief.score.bias, belief.score.slope) == pytest.approx(tuple(mean))
        assert (belief.var_bias, belief.cov, belief.var_slope) == pytest.approx((after[0, 0], after[0, 1], after[1, 1]))


def test_a_score_is_found_though_rejections_hide_what_came_after() -> None:
    """Catches learning from draft tokens that nobody tested: those behind a rejection would count as rejected."""
    true, generator, belief = Score(-0.8, 0.6), np.random.default_rng(3), Belief()
    with unchecked():
        for _ in range(4000):
            for estimate in generator.uniform(0.3, 0.99, 6).tolist():
                is_accepted = bool(generator.random() < true(estimate))
                belief = belief.after((estimate,), int(is_accepted))
                if not is_accepted:
                    break
    assert (belief.score.bias, belief.score.slope) == pytest.approx((-0.8, 0.6), abs=0.12)


@pytest.mark.parametrize("estimate", [0.0, 1.0, 1e-12, 0.5])
def test_no_estimate_is_sure(estimate: float) -> None:
    """Catches a logarithm of 0, and one draft token that was thought certain and turned everything step."""
    for is_accepted in (True, False):
        after = Belief().after((estimate,), int(is_accepted))
        assert np.isfinite([after.score.bias, after.score.slope, after.var_bias]).all()
        assert after.score.slope >= 0
    assert 0 < by_q(1.0) < 1


def test_only_what_was_tested_is_learned_from() -> None:
    """Catches an account that learns from draft tokens behind a rejection, or not from the rejected one."""
    account = Account().with_step(outcome(4, 1, DEAR, judged=(0.9, 0.8, 0.7, 0.6)))
    assert account.belief == Belief().after((0.9,), 1).after((0.8,), 0)
    assert (account.gains, account.num_unread) == ({1: Gains().after(outcome(4, 1, DEAR))}, 0)
    account = account.with_step(outcome(0, 0, DEAR))
    assert (account.gains[1].num, account.num_unread) == (1, 1)
    assert account.with_step(outcome(1, 1, DEAR, judged=(0.9,))).gains[1].num == 1, "a step that begins with a switch"


# Zero is a length


@pytest.mark.parametrize("seed", range(4))
def test_a_pair_that_does_not_pay_costs_little(seed: int) -> None:
    """Catches a rule that goes on drafting at a loss, or that looks again more often than it may lose."""
    with unchecked():
        _, tokens, seconds, drafted = steps(CostAware(), 0.35, 1500, seed=seed)
    assert seconds <= 1.02 * tokens * DEAR.verify_s(1)
    assert drafted > 10, "it looks again"


def test_drafting_comes_back_when_it_pays() -> None:
    """Catches a rule that gives up for good."""
    policy = CostAware()
    with unchecked():
        memory, _, _, drafted = steps(policy, 0.2, 300, seed=1)
        assert drafted < 60
        _, tokens, seconds, drafted = steps(policy, 0.97, 3000, seed=2, memory=memory)
    assert drafted > 2000
    assert seconds < 0.9 * tokens * DEAR.verify_s(1)


def test_a_draft_that_is_off_reads_nothing_and_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a prompt that a draft reads for nothing, and draft tokens from a draft that has missed a part of the context."""
    monkeypatch.setattr(cost_aware, "CREDIT", 1)  # else it may look at once
    costs = Costs.relative(0.9)
    alone = Decoder(pair(), policy=Fixed(k=0)).generate([1, 2, 3, 4], max_tokens=60, temperature=0, ignore_eos=True)
    session = Decoder(pair(), policy=CostAware(prior=0.3, regret=0.5), costs=costs).start(
        [1, 2, 3, 4], max_tokens=60, temperature=0, ignore_eos=True, seed=1
    )
    session.prefill()
    assert session.draft.length == 0
    drafted = []
    while session.finish_reason is None:
        drafted.append(session.step().num_drafted)
        assert session.draft.length in (0, len(session.tokens) - 1, len(session.tokens) - 2) or not drafted[-1]
    assert tuple(session.tokens[4:]) == alone.tokens
    assert drafted[0] == 0
    assert any(drafted), "it has tried"


def test_what_it_takes_to_switch_is_part_of_a_trial() -> None:
    """Catches trials of one draft token each, next to which every plain pass is slow, and losses beyond the regret."""
    costs = Costs(draft_s=0.6e-3, passes={1: 1e-3}, switch_s=2e-3)
    policy, generator = CostAware(prior=0.1), np.random.default_rng(0)
    memory, drafted, seconds, tokens = policy.start(), [], 0.0, 0
    with unchecked():
        for _ in range(4000):
            length = 1 if policy.rule(memory, costs).least[0] <= 1 else 0
            accepted = int(length and generator.random() < 0.2)
            is_switch = bool(length and drafted and not drafted[-1])
            took_s = costs.step_s(length) + costs.switch_s * is_switch
            made = replace(outcome(length, accepted, costs, judged=(0.5,) * length), expected_s=took_s)
            memory = policy.learn(memory, made)
            drafted.append(length)
            seconds, tokens = seconds + made.expected_s, tokens + accepted + 1
    runs = "".join(map(str, drafted)).strip("0").split("0")
    trials = [len(run) for run in runs[1:] if run]
    assert trials, "it looks again"
    assert 1 not in drafted[:LONG_WARM_UP], "the clock would learn nothing there"
    assert min(trials) >= TRIAL
    assert seconds <= (1 + 2 * policy.regret) * tokens * 1e-3


WRAPS = [lambda rule: rule, lambda rule: AutoOff(policy=rule), lambda rule: Bandit(arms=(rule, rule))]


@pytest.mark.parametrize("wrap", WRAPS, ids=["alone", "auto-off", "bandit"])
def test_greedy_requests_begin_with_a_steeper_score(wrap: Any) -> None:
    """Catches one prior for all temperatures, one that overrides lessons or a head, and a wrapped rule that is not told."""
    costs = Costs.relative(0.1)

    def slope(*, is_greedy: bool) -> float:
        rule = wrap(CostAware())
        return rule.rule(rule.start(Given(is_greedy=is_greedy)), costs).score.slope

    assert slope(is_greedy=True) > slope(is_greedy=False)
    head: Any = object.__new__(CostAware)
    head.__dict__.update(CostAware().__dict__, head=object())
    assert head.start(Given(is_greedy=True)).belief == Account().belief
    past = CostAware().carry(None, CostAware().start())
    assert CostAware().start(Given(past=past, is_greedy=True)).belief == CostAware().start(Given(past=past)).belief


def test_gains_are_moments_of_steps() -> None:
    """Catches a slip in the sums, steps in seconds of another price than that of the pass they are compared with, and gains by
    costs of a busy minute that are a verdict."""
    found = [(1, 2.0, 1.0), (3, 2.5, 1.0), (2, 22.5, 10.0), (5, 0.04, 0.01)]
    gains = Gains()
    for num, seconds, target_s in found:
        costs = Costs(draft_s=0.1, passes={1: target_s})
        gains = gains.after(replace(outcome(num, num - 1, DEAR), expected_s=seconds, costs=costs))
    of = [num - seconds / target_s for num, seconds, target_s in found]
    assert gains.variance == pytest.approx(np.var(of))
    for costs in (DEAR, FLAT):
        assert gains.mean(costs) == pytest.approx(np.mean([num - costs.step_s(num) for num, *_ in found]))
    assert (Gains().mean(DEAR), Gains().variance) == (0.0, 0.0)


def test_what_pays_alone_need_not_pay_among_many() -> None:
    """Catches lessons of one request that count for many at once, and the reverse."""
    costs, policy = Costs(draft_s=0.1, passes={1: 1.0, 4: 1.1, 8: 2.0, 32: 8.0}), CostAware()
    alone = many = policy.start()
    for _ in range(40):
        alone = policy.learn(alone, outcome(3, 2, costs, judged=(0.8,) * 3))
        many = policy.learn(many, outcome(3, 0, costs.shared(8), judged=(0.8,) * 3))
    past = policy.carry(policy.carry(None, alone), many)
    resumed = policy.start(Given(past=past, num_unread=10))
    assert policy.gain(resumed, costs)[1] > 0 > policy.gain(resumed, costs.shared(7))[1]
    assert policy.rule(resumed, costs).least[0] <= 1 < policy.rule(resumed, costs.shared(8)).least[0]


def test_what_has_faded_is_tried_again() -> None:
    """Catches a pair that did not pay for a while and is never drafted for again, whatever it has become."""
    memory, policy = CostAware().start(), CostAware()
    for _ in range(40):
        memory = policy.learn(memory, outcome(1, 0, DEAR, judged=(0.8,)))
    past, num_off = policy.carry(None, memory), 0
    while policy.rule(policy.start(Given(past=past, num_unread=10)), DEAR).least[0] > 1:
        past, num_off = policy.carry(past, policy.start(Given(past=past))), num_off + 1
    assert 10 < num_off < 100
    assert policy.gain(policy.start(Given(past=policy.carry(None, memory))), Costs.relative(0.0))[1] > 0, "costs have healed"


def test_long_steps_are_no_verdict_on_short_ones() -> None:
    """Catches a rule that gives up because its long steps, made when draft tokens were free, would not pay any more."""
    policy, free = CostAware(), Costs.relative(0.0)
    memory = policy.start()
    for _ in range(40):
        memory = policy.learn(memory, outcome(9, 1, free, judged=(0.6,) * 9))
    past = policy.carry(None, memory)
    assert PastRequests.parse(past).gains[1].mean(FLAT) < 0 < policy.gain(policy.start(Given(past=past)), FLAT)[0]


# What is carried on


def test_requests_without_a_seed_teach_each_other() -> None:
    """Catches a lesson that is lost, and a seed whose answer depends on what other requests have taught."""
    decoder = Decoder(pair(), costs=Costs.relative(0.1))
    first = decoder.start([1, 2], max_tokens=60, ignore_eos=True, seed=5)
    fresh = first._memory
    for _ in range(3):
        decoder.generate([1, 2], max_tokens=60, ignore_eos=True)
    later, seeded = (decoder.start([1, 2], max_tokens=60, ignore_eos=True, seed=seed) for seed in (None, 5))
    assert seeded._memory == fresh
    assert later._memory != fresh
    assert later._memory.past.num_requests
    other = decoder.start([1, 2], max_tokens=60, ignore_eos=True, temperature=0.5)
    assert other._memory == fresh, "another way of sampling has its own"


def test_a_later_process_begins_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches lessons that end with the process, that another pair is taught, or that a damaged file turns into nonsense."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known = replace(pair(), target_fingerprint="a", draft_fingerprint="b")
    costs = Costs.relative(0.1)
    Decoder(known, costs=costs).generate([1, 2], max_tokens=60, ignore_eos=True)
    begun = Decoder(known, costs=costs).start([1, 2], ignore_eos=True)._memory
    assert begun.past.num_requests
    other = replace(known, draft_fingerprint="c")
    assert not Decoder(other, costs=costs).start([1, 2], ignore_eos=True)._memory.past.num_requests
    (file,) = cache_dir.folder().glob("experience-*")
    negative = file.read_text().replace('"num_tested": ', '"num_tested": -')
    for content in ("{}", '{"past": {"num_tested": 1}}', '{"past": {"bias": NaN}}', '{"past": "x"}', "[]", negative):
        file.write_text(content)
        session = Decoder(known, costs=costs).start([1, 2], max_tokens=9, ignore_eos=True)
        assert not session._memory.past.num_requests
        while session.finish_reason is None:
            session.step()
    for _ in range(2):  # whose memory is made of what it kept, and of nothing else
        Decoder(known, policy=FrontierLength(), costs=costs).generate([1, 2], max_tokens=20, ignore_eos=True)


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a server whose clients each name a temperature of their own: one more lesson and file for every request."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache_dir, "MOST_OF_A_KIND", 4)
    monkeypatch.setattr("specdecpp.memory.SAMPLINGS", 3)
    taught = Decoder(replace(pair(), target_fingerprint="a", draft_fingerprint="b"), costs=Costs.relative(0.1))
    for i in range(6):
        taught.generate([1, 2], max_tokens=8, ignore_eos=True, temperature=1 + i / 10)
        assert len(taught.memory.experiences) == min(i + 1, 3)
    kept = [json.loads(file.read_text())["of"]["sampling"]["temperature"] for file in cache_dir.folder().glob("experience-*")]
    assert sorted(kept) == [1.2, 1.3, 1.4, 1.5]


def test_rules_of_one_class_have_lessons_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a key that is the name of a class."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known = replace(pair(), target_fingerprint="a", draft_fingerprint="b")
    for prior in (0.2, 0.6):
        policy = CostAwareTree(prior=prior, max_nodes=6)
        Decoder(known, policy=policy, costs=Costs.relative(0.1)).generate([1, 2], max_tokens=20, ignore_eos=True)
    assert len(list(cache_dir.folder().glob("experience-*"))) == 2


def test_a_decoder_that_does_not_remember_learns_nothing_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches lessons of an earlier request, or files of them, where they were switched off."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known = replace(pair(), target_fingerprint="a", draft_fingerprint="b")
    taught, untaught = (Decoder(known, costs=Costs.relative(0.1), remember=kept) for kept in (True, False))
    for decoder in (untaught, taught):
        for _ in range(2):
            decoder.generate([1, 2], max_tokens=20, ignore_eos=True, temperature=1.1)
        assert len(list(cache_dir.folder().glob("experience-*"))) == (decoder is taught)
    sampling = Sampling(temperature=1.1)
    assert untaught.memory.experience(sampling).begin() == CostAware().start()
    assert taught.memory.experience(sampling).begin() != CostAware().start()


def test_lessons_fade() -> None:
    """Catches a running mean that the first requests rule for ever, and one that forgets everything at once."""
    policy = CostAware()
    experience = Experience(policy)
    for accepted in [0] * 40 + [1] * 40:
        experience.add(policy.start().with_step(outcome(1, accepted, DEAR, judged=(0.6,))))
    past = experience.begin().past
    share = past.num_accepted / past.num_tested
    assert 0.85 < share < 0.97
