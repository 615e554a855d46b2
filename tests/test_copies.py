"""Copies from the text beside a draft model: the distribution, and which of the two a step takes."""

from dataclasses import replace

import pytest
from distributions import Request, answer, finish, largest_difference, outcome
from test_law import table

from specdecpp.drafters import SuffixDrafter
from specdecpp.lab import AutoOff, Bandit, WithCopies
from specdecpp.lab.copies import COPIED, catch_up_s, copied_costs
from specdecpp.lab.trees import CostAwareTree
from specdecpp.policies import CostAware, Costs, CumulativeConfidence, Fixed, MaxConfidence
from specdecpp.policies.protocol import Given
from specdecpp.sampling import Sampling, streams
from specdecpp.session import Session
from specdecpp.verify import GreedyVerification, TokenVerification, verifications

pytestmark = pytest.mark.lab

FLAT = Costs(draft_s=0.3, passes={1: 1.0, 9: 1.1})
RISING = Costs(draft_s=0.05, passes={1: 1.0, 2: 1.22, 9: 2.8})
MODEL = {"fixed": Fixed(k=2), "product": CumulativeConfidence(threshold=0.4), "costs": CostAware(prior_steps=1)}


def over(**changes) -> Request:
    """There is always something to copy; of a single token it does not pay."""
    given = {"prompt": (0, 1, 2, 0, 1), "max_tokens": 4, "costs": RISING, **changes}
    return Request(target=table(3, vocab_size=3, depth=2), draft=table(111, vocab_size=3, depth=2), **given)


def copied(outcome):
    """The same outcome of a step of copies."""
    return replace(outcome, extra=COPIED)


def kinds(session: Session, steps: list) -> str:
    """Of each step with draft tokens: c for copies, m for the model's."""
    return "".join("cm"[r.extra != COPIED] for r in steps if r.num_drafted)


PENALTY = {"sampling": Sampling(temperature=0.7, top_k=2, repetition_penalty=1.3)}


@pytest.mark.parametrize(
    ("verification", "situation"),
    [("token", {}), ("block", {}), ("compare", {}), ("token", {"ends": (2,)}), ("token", PENALTY), ("block", PENALTY)],
)
@pytest.mark.parametrize("policy", MODEL)
def test_the_distribution_is_that_of_the_target(policy: str, verification: str, situation: dict):
    """Catches a model that has not read copies, copies tested with its q, and a choice that looks at this step's draws."""
    request = over(**situation)
    distribution = request.distribution(WithCopies(policy=MODEL[policy]), verifications()[verification])
    assert largest_difference(distribution, request.own_distribution()) < 1e-12


def test_distributions_do_not_hold_for_want_of_either():
    """Catches a rule that always takes the same, under which every distribution holds."""
    distribution = over().distribution(WithCopies(policy=Fixed(k=1)), TokenVerification(), kinds)
    assert sum(p for told, p in distribution.items() if "c" in told and "m" in told) > 0.1


@pytest.mark.parametrize("policy", MODEL)
def test_greedy_answers_are_those_of_the_target(policy: str):
    request = over(sampling=Sampling(temperature=0.0), max_tokens=24)
    session = request.session(WithCopies(policy=MODEL[policy]), GreedyVerification(), streams(0))
    steps = finish(session)
    assert {answer(session, steps): 1.0} == request.own_distribution()
    assert "c" in kinds(session, steps)


def test_a_dropping_rule_is_exact_under_comparison_only():
    """Catches a rule whose part drops what it has looked at, told as one that does not."""
    rule = WithCopies(policy=MaxConfidence(threshold=0.4, drop=True))
    assert rule.drops_last
    request = over()
    assert largest_difference(request.distribution(rule, verifications()["compare"]), request.own_distribution()) < 1e-12


def test_what_promises_more_is_taken():
    """Catches copies that are taken whatever the model brings, and never again once it has brought much."""
    rule, steep = WithCopies(policy=Fixed(k=4)), Costs(draft_s=0.2, passes={1: 1.0, 9: 2.6})
    new = rule.start(Given(num_unread=9, is_greedy=True))
    assert rule.prefers_copies(new, [0.9] * 4, FLAT)
    assert not rule.prefers_copies(new, [0.1], steep)
    good = bad = new
    for _ in range(20):
        good = rule.learn(good, outcome(4, 4, FLAT))
        bad = rule.learn(bad, outcome(4, 0, FLAT))
    assert not rule.prefers_copies(good, [0.6] * 4, FLAT)
    assert rule.prefers_copies(bad, [0.6] * 4, FLAT)


def test_each_learns_of_its_own_steps():
    """Catches a score of the model that copies teach, or the reverse, and a draft thought to have read what was copied."""
    rule, new = WithCopies(policy=CostAware()), WithCopies(policy=CostAware()).start()
    after = rule.learn(new, copied(outcome(3, 3, FLAT, judged=(0.6,) * 3)))
    drafted = rule.learn(new, outcome(3, 0, FLAT, judged=(0.6,) * 3))
    assert after.copies.belief != new.copies.belief
    assert after.memory == replace(new.memory, num_unread=new.memory.num_unread + 4)
    assert after.gains == new.gains
    assert drafted.copies == replace(new.copies, num_tokens=1, seconds=FLAT.step_s(3))
    assert drafted.memory.belief != new.memory.belief
    assert (drafted.gains.num, drafted.gains.tokens) == (1, 1)


def test_copies_between_two_steps_of_the_model_make_no_switch():
    """Catches a model that is charged a switch behind each copy, or nothing for reading what was copied."""
    costs = Costs(draft_s=0.1, start_s=0.2, passes={1: 1.0, 17: 1.1}, switch_s=50.0)
    told, before = 0, None
    for seed in range(6):
        models = {name: table(3, vocab_size=5, depth=1) for name in ("target", "draft")}
        request = Request(**models, costs=costs, max_tokens=60, prompt=(0, 1, 2) * 4)
        session = request.session(WithCopies(policy=Fixed(k=2)), TokenVerification(), streams(seed))
        session.prefill()
        while session.finish_reason is None:
            found = session.step()
            if found.extra == COPIED:
                assert found.expected_s == copied_costs(costs).step_s(found.num_drafted)
            elif found.num_drafted and before is not None and before.extra == COPIED:
                assert found.expected_s == costs.step_s(found.num_drafted) + catch_up_s(costs)
                told += 1
            before = found
    assert told > 2


def test_what_is_no_such_pair_or_rule_is_refused():
    """Catches rules that would be followed without their copies, and said nowhere."""
    request = over()
    for rule in (AutoOff(policy=WithCopies(policy=Fixed(k=1))), Bandit(arms=(Fixed(k=1), WithCopies(policy=Fixed(k=2))))):
        with pytest.raises(ValueError, match="WithCopies drafts otherwise"):
            request.session(rule, TokenVerification(), streams(0))
    with pytest.raises(ValueError, match="CostAwareTree drafts otherwise"):
        request.session(WithCopies(policy=CostAwareTree()), TokenVerification(), streams(0))
    with pytest.raises(ValueError, match="has but copies"):
        replace(request, draft=SuffixDrafter(3)).session(WithCopies(policy=Fixed(k=1)), TokenVerification(), streams(0))
