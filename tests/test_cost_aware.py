"""The rule without a threshold: whether it finds the best one by itself, and follows costs without losing a seed's answer."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from distributions import Request, outcome, random_head
from distributions import drafted as host_draft
from policies_list import constant_head

from specdecpp import Decoder, Pair
from specdecpp.costs import measuring
from specdecpp.head import AcceptanceHead, Calibration
from specdecpp.lab import ArgmaxLength, AutoOff
from specdecpp.policies import CostAware, Costs, Fixed, Policy
from specdecpp.policies.cost_aware import CREDIT, HORIZON, expected_gain
from specdecpp.policies.learning import (
    PLAIN_INTERVAL,
    SHORT_INTERVAL,
    SHORT_S,
    STEADY,
    STEADY_INTERVAL,
    Account,
    Gains,
    PastRequests,
)
from specdecpp.policies.protocol import Given
from specdecpp.sampling import Sampling, streams
from specdecpp.session import Step
from specdecpp.step import Draft
from specdecpp.testing import TableModel, tiny_tokenizer
from specdecpp.verify import BlockVerification, TokenVerification

C, MEAN = 0.22, 0.725
FLAT = Costs.relative(C)


def says(logit: float, form: str = "look_ahead") -> AcceptanceHead:
    """A calibrated head that says the same of every draft token."""
    vocab_size = 4 if form == "look_ahead" else None
    return constant_head(logit, form=form, vocab_size=vocab_size, calibration=Calibration(num_labels=1))


def seen(costs: Costs = FLAT, *, judged: tuple[float, ...] = (), num_unjudged: int = 0) -> Draft:
    """A step with some judged draft tokens and some that a lagged head has not read yet."""
    draft = Draft(costs=costs, judged=list(judged))
    for _ in range(len(judged) + num_unjudged):
        draft.append(0, q=torch.ones(1, dtype=torch.float64))
    return draft


def known(num_tokens: int, seconds: float, num_tested: int, num_accepted: int) -> Account:
    """A request that has taught so much."""
    return Account(num_tokens=num_tokens, seconds=seconds, num_tested=num_tested, num_accepted=float(num_accepted))


def rule(form: str = "look_ahead", **options) -> CostAware:
    return CostAware(head=says(0.0, form=form), **options)


# The threshold it finds


@pytest.mark.parametrize("rate", [1.0, 1.8, 2.5])
def test_once_the_rate_is_known_it_is_the_threshold_of_the_theory(rate: float):
    """Catches a slip in the rule: with flat costs and constant m it must stop just where 1 - S reaches h* = 1 - c rho/m."""
    ledger = known(int(rate * 1e9), 1e9, 10**9, int(MEAN * 1e9))
    threshold = 1 - C * rate / MEAN
    for judged in ((1 - threshold - 1e-4,), (1 - threshold + 1e-4,), (0.9, (1 - threshold - 1e-4) / 0.9)):
        is_over = 1 - np.prod(judged) > threshold
        assert (rule().stop(seen(judged=judged), ledger) is not None) == is_over


@pytest.mark.parametrize("form", ["look_ahead", "lagged"])
@pytest.mark.parametrize(("c", "bounds", "expected"), [(0.001, {}, 20), (0.001, {"max_tokens": 7}, 7), (2.0, {}, 0)])
def test_cheap_drafts_go_on_and_dear_ones_stop(c: float, bounds: dict, expected: int, form: str):
    """Catches a price on the wrong side, and bounds that are not kept."""
    for least in (None, 0, 3):
        options = bounds if least is None else bounds | {"min_tokens": least}
        policy = CostAware(head=says(3.0, form=form), **options)
        draft = host_draft(
            TableModel.random(vocab_size=4, depth=1, seed=5, sparsity=0.0),
            [0, 1],
            policy=policy,
            memory=policy.start(),
            sampling=Sampling(),
            randomness=streams(0)[0],
            room=30,
            costs=Costs.relative(c),
        )
        assert draft.num_tokens == (expected if c < 1 or least is None else least)


def test_a_plan_is_worth_what_its_draft_tokens_are_each_after_the_other():
    """Catches later draft tokens of a plan that count as if those before them were certain, or as much as the first, plans that
    go on beyond the limit, and costs of which only the draft's part is weighed."""
    stepped = Costs(draft_s=0.001, passes={1: 1.0, 3: 1.0, 4: 1.9, 30: 1.9})
    memory = known(10**9, 1e9, 10**9, 6 * 10**8)
    plans = range(1, HORIZON + 1)
    least = min((0.001 * j + 0.9) / sum(0.6**i for i in range(1, j + 1)) for j in plans)
    for survival, is_going in ((1.001 * least, True), (0.999 * least, False)):
        assert (rule().stop(seen(stepped, judged=(1.0, survival)), memory) is None) == is_going
    assert rule(max_tokens=3).stop(seen(stepped, judged=(1.0, 1.001 * least)), memory) is not None
    steep = Costs(draft_s=0.01, passes={1: 1.0, 21: 21.0})
    assert rule().stop(seen(judged=(0.9,)), Account()) is None
    assert rule().stop(seen(steep, judged=(0.9,)), Account()) is not None


# What it goes by


def test_an_unjudged_draft_token_counts_as_a_mean_one():
    """Catches a lagged form that takes the free draft token for accepted: S m then has one factor too few."""
    memory = known(1800, 1000.0, 10**7, 7 * 10**6)
    price = 1.8 * C
    for form, num_unjudged, chance in (("look_ahead", 0, 0.7), ("lagged", 1, 0.49)):
        for survival, is_going in ((price / chance + 0.01, True), (price / chance - 0.01, False)):
            reason = rule(form).stop(seen(judged=(survival,), num_unjudged=num_unjudged), memory)
            assert (reason is None) == is_going


@pytest.mark.parametrize("form", ["lagged", "look_ahead"])
def test_an_empty_step_says_whether_to_draft_at_all(form: str):
    """Catches a lagged head that has missed a token before there is one, a token worth no more than its cost, 0/0."""
    policy = rule(form, min_tokens=0, prior=0.5, prior_steps=10**9, regret=0.0)
    rules = [policy.rule(Account(), Costs(draft_s=tenths / 10 + 1e-3, passes={1: 1.0})) for tenths in range(1, 10)]
    assert [found.least[0] <= 1 for found in rules] == [True] * 4 + [False] * 5
    assert replace(policy, prior=0.0).rule(Account(), FLAT).least == (np.inf,)
    free = Costs.relative(0.0)
    assert rule(form, prior=0.0).stop(seen(free, judged=(0.5,)), Account()) is not None, "of which none is ever accepted"


def test_the_prior_gives_way_to_what_is_seen():
    """Catches a prior that rules for ever, or not at all; before the first step rho is that of its best fixed length."""
    policy = rule(prior=0.8, prior_steps=4)
    tokens, seconds = sum(0.8**k for k in range(5)), 1 + 4 * C
    assert policy.rate(Account(), FLAT) == pytest.approx(tokens / seconds)
    assert policy.mean_acceptance(Account()) == pytest.approx(0.8)
    assert rule(prior=0.8, max_tokens=1).rate(Account(), FLAT) == pytest.approx((1 + 0.8) / (1 + C)), "its best is one"
    memory = policy.learn(policy.learn(Account(), outcome(4, 1, FLAT)), outcome(2, 2, FLAT))
    assert (memory.num_tokens, memory.num_tested, memory.num_accepted) == (5, 4, 3.0)
    assert memory.seconds == (1 + 4 * C) + (1 + 2 * C)
    assert policy.rate(memory, FLAT) == pytest.approx((4 * tokens + 5) / (4 * seconds + 2 + 6 * C))
    assert policy.mean_acceptance(memory) == pytest.approx((8 * 0.8 + 3) / 12)


def test_it_learns_from_the_cost_model_and_not_from_the_clock():
    """Catches stops that depend on how busy the machine is."""
    slow = outcome(3, 2, FLAT, draft_s=1e6, head_s=1e6, verify_s=1e6, other_s=1e6)
    assert rule().learn(Account(), slow) == rule().learn(Account(), outcome(3, 2, FLAT))


def test_bad_settings_are_refused_and_unchecked_heads_warned_of():
    """Catches a rule that divides by nothing before its first step, and raw scores of a fresh head that pass for chances."""
    for options, message in (
        ({"prior": 1.5}, r"CostAware\.prior must lie in \[0, 1\]"),
        ({"prior_steps": 0}, "prior_steps of at least 1, got 0"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5"),
    ):
        with pytest.raises(ValueError, match=message):
            rule(**options)
    with pytest.warns(UserWarning, match="not been calibrated"):
        CostAware(head=random_head(4, seed=1))


# In a decoder


def pair() -> Pair:
    target, draft = (TableModel.random(vocab_size=8, depth=2, seed=seed, sparsity=0.0) for seed in (6, 7))
    head = random_head(8, seed=3, scale=1.0, calibration=Calibration(num_labels=1))
    return Pair(target=target, draft=draft, tokenizer=tiny_tokenizer(8), head=head)


STEEP = Costs(draft_s=0.1, passes={1: 1.0, 9: 1.5})


@pytest.mark.parametrize("policy", [CostAware(), AutoOff(policy=Fixed(k=3))], ids=lambda policy: type(policy).__name__)
def test_a_bare_session_needs_costs_for_a_rule_that_weighs_them(policy: Policy):
    """Catches a rule that finds None where it looks for costs, steps later."""
    request = Request(target=pair().target, draft=pair().draft)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=rf"{type(policy).__name__} weighs what steps cost.*costs=Costs"):
        replace(request, costs=None).session(policy, TokenVerification(), streams(0))  # pyright: ignore
    replace(request, costs=STEEP).session(policy, TokenVerification(), streams(0))


@pytest.mark.parametrize("verification", [TokenVerification(), BlockVerification()])
def test_it_is_the_default_of_a_pair_with_a_calibrated_head(verification):
    """Catches a default that needs tuning, and a seed whose answer depends on the decoder that is asked or on the clock."""
    answers = []
    for _ in range(2):
        decoder = Decoder(pair(), verification=verification, costs=STEEP)
        assert isinstance(decoder.policy, CostAware)
        answers.append([decoder.generate([1, 2], max_tokens=40, seed=seed, ignore_eos=True) for seed in (0, 1)])
    for one, other in zip(*answers, strict=True):
        assert one.tokens == other.tokens
        assert [r.num_drafted for r in one.steps] == [r.num_drafted for r in other.steps]
        assert [r.expected_s for r in one.steps] == [STEEP.step_s(r.num_drafted) for r in one.steps]
    assert len({r.num_drafted for r in answers[0][0].steps}) > 1


def test_a_measured_head_is_paid_for_by_the_rules_that_ask_it(monkeypatch: pytest.MonkeyPatch):
    """Catches draft tokens whose judging is free, and rules that pay for a head they do not ask."""
    costs = Costs(draft_s=0.25, passes={1: 1.0}, head_s=0.125)
    monkeypatch.setattr(measuring, "known", lambda pair: measuring.Known(costs=costs, now=costs))
    assert Decoder(pair()).costs == Costs(draft_s=0.375, passes={1: 1.0})
    assert Decoder(pair(), policy=ArgmaxLength()).costs == costs
    assert Decoder(pair(), costs=costs).costs == Costs(draft_s=0.375, passes={1: 1.0}), "nor where they were given"


def test_chances_count_where_they_are_known():
    """Catches a rule that goes by the coins where it knows what their odds were: it takes several times as many steps."""
    known = outcome(2, 2, FLAT, overlaps=(0.5, 0.25))
    memory = rule().learn(Account(), known)
    assert memory.num_accepted == 0.75
    assert memory.gains[1].tokens == 1.75
    assert rule().learn(Account(), outcome(2, 2, FLAT)).gains[1].tokens == 3
    certain = rule().learn(Account(), outcome(1, 1, FLAT, overlaps=(1 + 1e-6,)))
    assert certain.num_accepted == 1, "rounding"


def steps_of(seed: int, num: int) -> list[Step]:
    """Steps with one to three draft tokens, as the sampled ones of a request are."""
    dice = np.random.default_rng(seed)
    found = []
    for _ in range(num):
        k = int(dice.integers(1, 4))
        accepted = int(dice.integers(0, k + 1))
        overlaps = tuple(dice.random(min(accepted + 1, k)).tolist())
        found.append(outcome(k, accepted, FLAT, judged=tuple(dice.uniform(0.3, 0.9, k).tolist()), overlaps=overlaps))
    return found


SHORT = Costs(draft_s=SHORT_S / 10, passes={1: SHORT_S / 2})
GAINED, LOST = ({1: Gains(9.0, 9.0, tokens, 9.0, 9.0)} for tokens in (18.0, 4.0))


@pytest.mark.parametrize(
    ("before", "costs", "first", "every"),
    [
        ({}, FLAT, STEADY, STEADY_INTERVAL),
        ({}, SHORT, STEADY, STEADY_INTERVAL),
        (LOST, SHORT, STEADY, STEADY_INTERVAL),
        (GAINED, SHORT, 1, SHORT_INTERVAL),
    ],
    ids=["long steps", "a first request or a seed", "drafting lost", "drafting paid"],
)
def test_what_is_put_off_is_learned_all_the_same(before: dict[int, Gains], costs: Costs, first: int, every: int):
    """Catches steps that are lost or counted twice where learning waits, and learning that waits without need."""
    policy, late = CostAware(), replace(CostAware().start(), past=PastRequests(gains=before))
    at_once = late
    for i, one in enumerate(steps_of(3, STEADY + 3 * SHORT_INTERVAL + 1)):
        one = replace(one, costs=costs)
        late, at_once = policy.learn(late, one), at_once.after(one)
        assert len(late.pending) == max(0, i - first + 1) % every
        assert late.up_to_date() == at_once
    assert policy.carry(None, late) == policy.carry(None, at_once)
    quiet = outcome(0, 0, costs)
    assert policy.learn(late, quiet) == at_once.after(quiet), "a step without draft tokens may change everything"
    for i in range(2 * PLAIN_INTERVAL):
        late, at_once = policy.learn(late, quiet), at_once.after(quiet)
        assert (len(late.pending), late.up_to_date()) == (i % PLAIN_INTERVAL, at_once)
        assert not late.pending or policy.rule(late, costs).threshold(0) > 1


def test_a_rule_is_kept_until_something_is_learned():
    """Catches the rule of another policy, of other costs or of another room, and one that outlives what it was made of."""
    policy, memory = CostAware(), CostAware().start()
    for one in steps_of(4, STEADY + 3 * STEADY_INTERVAL):
        memory = policy.learn(memory, one)
        assert policy.rule(memory, FLAT) == policy.rule(replace(memory), FLAT), "by itself it would be the same"
    first = policy.rule(memory, FLAT)
    assert policy.rule(memory, FLAT) is first
    assert policy.rule(policy.learn(memory, steps_of(5, 1)[0]), FLAT) is first
    assert policy.rule(memory, Costs.relative(0.5)) != first
    assert replace(policy, prior=0.1).rule(memory, FLAT) != first
    assert policy.rule(policy.start(Given(num_unread=9, is_greedy=True)), FLAT) is not first


def test_a_beginning_must_be_worth_what_has_to_be_read():
    """Catches a rule that has the draft read a long prompt, and switches, in each request of a kind that gains little."""
    costs = Costs(draft_s=C, passes={1: 1.0, 9: 1.0, 209: 21.0}, switch_s=0.5)
    poor, good = 8.0, 23.0  # of 50 draft tokens
    past = {"num_tested": 50.0, "num_requests": 9.0, "bias": 0.0, "slope": 1.0}
    past |= {"num_tokens": 900.0, "lost": 9.0 + CREDIT * CostAware.regret}  # all that may be lost by looking is lost
    policy = CostAware()

    def begun(accepted: float, num_unread: int) -> Account:
        gains = {"1": {"num": 50.0, "drafted": 50.0, "tokens": 50.0 + accepted, "squares": 10.0}}
        return policy.start(Given(past=past | {"gains": gains, "num_accepted": accepted}, num_unread=num_unread))

    def begins(accepted: float, num_unread: int) -> bool:
        return policy.rule(begun(accepted, num_unread), costs).least[0] <= 1

    assert [begins(good, num) for num in (1, 200, 2000)] == [True, True, False]
    assert [begins(poor, num) for num in (1, 200, 2000)] == [True, False, False]
    assert expected_gain(0.3, 0.0) == 0.3
    assert expected_gain(-0.1, 0.2) == pytest.approx(0.0396, abs=1e-3)
    assert begins(good, 400)
    past["num_tokens"] = 45.0
    assert not begins(good, 400), "answers end before it has paid"
    past["num_tokens"] = 900.0
    running = replace(begun(good, 200), num_running=9)
    assert policy.rule(running, costs).least[0] <= 1, "what was read is paid for"
