"""Rules made of rules: the bandit finds the better arm, auto-off finds out that drafting does not pay, and neither bends
what it is made of."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
from distributions import Request, finish, outcome, random_head

from specdecpp import AcceptanceHead, Decoder, HeadError, Pair
from specdecpp.head import Calibration
from specdecpp.lab import ArgmaxLength, AutoOff, Bandit, Heuristic
from specdecpp.lab.meta import Gain
from specdecpp.policies import CostAware, Costs, CumulativeConfidence, Fixed, MaxConfidence, Policy, SpecDecPP
from specdecpp.policies.head import heads
from specdecpp.sampling import streams
from specdecpp.step import Draft
from specdecpp.testing import TableModel, tiny_tokenizer
from specdecpp.verify import TokenVerification

pytestmark = pytest.mark.lab

COSTS = Costs.relative(0.2)
GOOD = Request(
    target=TableModel.random(vocab_size=4, depth=2, seed=1, sparsity=0.0),
    draft=TableModel.random(vocab_size=4, depth=2, seed=1, sparsity=0.0),
    max_tokens=200,
    costs=COSTS,
)
HOPELESS = Request(
    target=TableModel({(): [0.0, 0.0, 0.5, 0.5]}, depth=0),
    draft=TableModel({(): [0.5, 0.5, 0.0, 0.0]}, depth=0),
    max_tokens=200,
    costs=COSTS,
)


@dataclass(frozen=True, kw_only=True)
class Diary(Policy):
    """Remembers the steps it learned from, and drafts one draft token."""

    max_tokens: int = 1

    def start(self, given: Any = None) -> tuple:
        return ()

    def learn(self, memory: tuple, outcome: Any) -> tuple:
        return (*memory, (outcome.num_drafted, outcome.num_accepted))


def calibrated_head(seed: int = 0, **card: Any) -> AcceptanceHead:
    return random_head(4, seed=seed, scale=1.0, calibration=Calibration(num_labels=1), **card)


def lengths(request: Request, policy: Policy, seed: int = 0) -> list[int]:
    return [r.num_drafted for r in finish(request.session(policy, TokenVerification(), streams(seed)))]


# The bandit


def test_the_bandit_tries_every_arm_and_then_the_one_with_the_largest_bound():
    """Catches a bound without exploration, with the logarithm of the arm's own steps, or from a mean of ratios."""
    policy = Bandit(arms=(Fixed(k=1), Fixed(k=2), Fixed(k=3)), exploration=0.5)
    memory = policy.start()
    sums, steps = [[0, 0.0], [0, 0.0], [0, 0.0]], [0, 0, 0]
    for step in range(60):
        if step < 3:
            best = step
        else:
            rate = sum(t for t, _ in sums) / sum(s for _, s in sums)
            bounds = [t / s + 0.5 * rate * math.sqrt(2 * math.log(step) / n) for (t, s), n in zip(sums, steps, strict=True)]
            best = bounds.index(max(bounds))
        assert memory.chosen == best
        k = policy.limit(memory)
        assert k == best + 1
        accepted = (step * 7) % (k + 1)
        memory = policy.learn(memory, outcome(k, accepted, COSTS))
        sums[best][0] += accepted + 1
        sums[best][1] += COSTS.round_s(k)
        steps[best] += 1
    assert min(steps) > 3


@pytest.mark.parametrize(("request_", "better"), [(GOOD, 4), (HOPELESS, 0)])
@pytest.mark.parametrize("arms", [(Fixed(k=0), Fixed(k=4)), (Fixed(k=4), Fixed(k=0))])
def test_the_bandit_ends_up_with_the_better_arm(request_: Request, better: int, arms: tuple[Policy, ...]):
    """Catches an arm that is rewarded with another's steps, and a bandit that goes by tokens without their time."""
    steps = lengths(request_, Bandit(arms=arms))
    assert sum(k == better for k in steps[: -len(steps) // 3]) > 0.6 * len(steps[: -len(steps) // 3])
    assert {0, 4} <= set(steps), "each is tried"
    assert steps == lengths(request_, Bandit(arms=arms)), "nothing is drawn"


def test_the_first_of_equal_arms_is_followed():
    """Catches a tie that is settled by chance or by the last."""
    policy = Bandit(arms=(Fixed(k=2), Fixed(k=2)))
    memory = policy.start()
    for _ in range(2):
        memory = policy.learn(memory, outcome(2, 1, COSTS))
    assert memory.chosen == 0


def test_each_arm_learns_from_its_own_rounds():
    """Catches memories that are mixed up, or steps that all arms learn from."""
    policy = Bandit(arms=(Diary(), Diary(max_tokens=2), Heuristic(start_tokens=2)))
    memory = policy.start()
    own: list[list] = [[], [], []]
    for step in range(12):
        at, drafted = memory.chosen, policy.limit(memory)
        accepted = step % (drafted + 1)
        memory = policy.learn(memory, outcome(drafted, accepted, COSTS))
        own[at].append((drafted, accepted))
    assert [list(arm.memory) for arm in memory.arms[:2]] == own[:2]
    assert [arm.num_steps for arm in memory.arms] == [len(steps) for steps in own]
    assert memory.arms[2].memory != 2


def test_the_bandit_keeps_each_arms_bounds():
    """Catches an arm that is asked below its own min_tokens, or may go on to another arm's limit."""
    policy = Bandit(arms=(CumulativeConfidence(threshold=1.0, min_tokens=3), MaxConfidence(threshold=0.0, max_tokens=2)))
    assert (policy.min_tokens, policy.max_tokens) == (0, 20)
    assert set(lengths(GOOD, policy)[:-5]) == {2, 3}


def test_a_bandit_has_one_head_read_in_one_way():
    """Catches arms that would be shown another head's estimates, or raw scores where they ask for probabilities."""
    head, other = calibrated_head(), calibrated_head(seed=1)
    careful = SpecDecPP(head=head, calibrated=True)
    alike = Bandit(arms=(Fixed(k=1), careful, AutoOff(policy=CostAware(head=head))))
    assert heads(alike) == [head, head]
    for arms in (
        (careful, CostAware(head=other)),
        (SpecDecPP(head=head), CostAware(head=head)),
        (careful, AutoOff(policy=SpecDecPP(head=other, calibrated=True))),
    ):
        with pytest.raises(ValueError, match="different heads"):
            Bandit(arms=arms)


@pytest.mark.parametrize("form", ["lagged", "look_ahead"])
def test_the_head_judges_for_all_arms(form: str):
    """Catches a wrapper that asks no head, or asks it at the other of the two places."""
    head = calibrated_head(form=form, vocab_size=4 if form == "look_ahead" else None)
    sure = SpecDecPP(head=head, calibrated=True, threshold=1.0, max_tokens=3)
    for policy in (Bandit(arms=(Fixed(k=3), sure)), Bandit(arms=(sure, Fixed(k=3))), AutoOff(policy=sure)):
        assert policy.looks_ahead == (form == "look_ahead")
        steps = finish(GOOD.session(policy, TokenVerification(), streams(0)))[:4]
        plain = finish(GOOD.session(sure, TokenVerification(), streams(0)))[:4]
        assert [r.judged for r in steps] == [r.judged for r in plain]
        assert all(len(r.judged) == r.num_drafted - (form == "lagged") for r in steps)


def test_wrappers_of_free_rules_have_no_head():
    """Catches a judge that is found where there is none, and asked."""
    for policy in (Bandit(arms=(Fixed(k=1), CumulativeConfidence())), AutoOff(policy=CumulativeConfidence())):
        assert not policy.looks_ahead
        assert heads(policy) == []
        assert not any(r.judged for r in finish(GOOD.session(policy, TokenVerification(), streams(0))))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bandit(arms=(Fixed(k=1),)), "two or more arms"),
        (lambda: Bandit(arms=()), "two or more arms"),
        (lambda: Bandit(arms=(Fixed(k=1), Bandit(arms=(Fixed(k=1), Fixed(k=2))))), "none of them a bandit"),
        (lambda: Bandit(arms=(Fixed(k=1), AutoOff(policy=Bandit(arms=(Fixed(k=1), Fixed(k=2)))))), "none of them a bandit"),
        (lambda: Bandit(arms=(Fixed(k=1), MaxConfidence(drop=True))), "some arms drop"),
        (lambda: Bandit(arms=(Fixed(k=1), Fixed(k=2)), exploration=math.nan), "exploration of at least 0, got nan"),
        (lambda: AutoOff(policy=Fixed(k=1), patience=0), "at least 1, got 0 and 16"),
        (lambda: AutoOff(policy=Fixed(k=1), probe_every=0), "at least 1, got 8 and 0"),
        (lambda: AutoOff(policy=Fixed(k=1), fading=1.5), r"AutoOff\.fading must lie in \[0, 1\]"),
    ],
)
def test_bad_combinations_are_refused(make, message: str):
    """Catches a combination whose parts would undo each other, found at the first step instead of at once."""
    with pytest.raises(ValueError, match=message):
        make()


def test_a_wrapped_head_must_fit_the_pair():
    """Catches a head of the wrong width that hides in another rule until the first draft token."""
    target = TableModel.random(vocab_size=8, depth=1, seed=6)
    pair = Pair(target=target, draft=TableModel.random(vocab_size=8, depth=1, seed=7), tokenizer=tiny_tokenizer(8))
    wrong = SpecDecPP(head=calibrated_head())
    for policy in (wrong, AutoOff(policy=wrong), Bandit(arms=(Fixed(k=1), wrong))):
        with pytest.raises(HeadError, match="width 4"):
            Decoder(pair, policy=policy)


# Auto-off


def test_a_hopeless_draft_is_switched_off_and_probed():
    """Catches a switch that never falls, probes that do not come or come too often, and a gain that counts idle steps."""
    steps = lengths(HOPELESS, AutoOff(policy=Fixed(k=3), patience=5, probe_every=10))
    assert steps[:5] == [3] * 5
    assert steps[5:-1] == (([0] * 10 + [3]) * 20)[: len(steps) - 6]


def test_a_good_draft_is_left_alone():
    """Catches a switch that falls by chance or by the wrong sign: here every draft token is accepted."""
    policy = CumulativeConfidence(threshold=0.1)
    assert lengths(GOOD, AutoOff(policy=policy)) == lengths(GOOD, policy)


def test_the_gain_is_tokens_over_seconds_against_the_target_alone():
    """Catches a gain without the target's own time, or sums that do not fade."""
    policy = AutoOff(policy=Fixed(k=4), patience=1, fading=0.5)
    memory = policy.start()
    for accepted in (4, 0, 0):
        memory = policy.learn(memory, outcome(4, accepted, Costs.relative(0.25)))
    assert memory == Gain(memory=None, num_tokens=5 / 4 + 1 / 2 + 1, seconds=2.0 * 1.75, num_steps=3)
    for target_s, is_off in ((1.27, True), (1.28, False)):  # 2.75 tokens in 3.5 s: as fast as one in 1.273 s
        assert policy.is_off(memory, target_s) == is_off
        reason = policy.stop(Draft(costs=Costs(draft_s=0.1, passes={1: target_s})), memory)
        assert str(reason) == ("gain 1.00 < 1" if is_off else "None")
    assert not policy.is_off(Gain(memory=None, num_tokens=2.0, seconds=2.0, num_steps=1), 1.0), "a gain of 1 is not below 1"


def test_a_better_text_switches_drafting_on_again():
    """Catches a switch that never comes back, or forgets what the probes have shown."""
    policy = AutoOff(policy=Fixed(k=2), patience=4, probe_every=3, fading=0.3)
    memory, drafted = policy.start(), []
    for step in range(60):
        k = 0 if policy.is_off(memory, 1.0) else 2
        memory = policy.learn(memory, outcome(k, k if step >= 20 else 0, COSTS))
        drafted.append(k)
    assert drafted[4:20] == ([0, 0, 0, 2] * 4)
    assert drafted[-20:] == [2] * 20


def test_the_inner_rule_is_asked_and_taught_only_while_it_is_followed():
    """Catches idle steps that an inner rule takes for its own, and its bounds being overruled."""
    policy = AutoOff(policy=Diary(), patience=2, probe_every=2)
    memory = policy.start()
    for step in range(8):
        k = 0 if policy.is_off(memory, 1.0) else 1
        memory = policy.learn(memory, outcome(k, 0, COSTS))
        assert memory.memory == ((1, 0),) * sum((1, 1, 0, 0, 1, 0, 0, 1)[: step + 1])
    eager = AutoOff(policy=CumulativeConfidence(threshold=1.0, min_tokens=3))
    assert set(lengths(GOOD, eager)[:-3]) == {3}


def test_an_inner_rule_that_drafts_nothing_by_itself_learns_so():
    """Catches empty steps that are all taken for idle ones."""
    policy = AutoOff(policy=Diary())
    assert policy.learn(policy.start(), outcome(0, 0, COSTS)).memory == ((0, 0),)
    gaining = Gain(memory=(), num_tokens=20.0, seconds=10.0, num_steps=20)
    assert policy.learn(gaining, outcome(0, 0, COSTS)).memory == ((0, 0),), "it was on, and drafted nothing"


def test_wrappers_take_drops_and_parts_from_what_they_are_made_of():
    """Catches a dropping rule that hides behind a keeping one."""
    dropping = MaxConfidence(drop=True)
    assert AutoOff(policy=dropping).drops_last
    assert Bandit(arms=(dropping, MaxConfidence(threshold=0.1, drop=True))).drops_last
    assert not AutoOff(policy=MaxConfidence()).drops_last
    assert AutoOff(policy=dropping).parts == (dropping,)
    assert Bandit(arms=(Fixed(k=1), ArgmaxLength())).parts == (Fixed(k=1), ArgmaxLength())
    assert Fixed(k=1).parts == ()
