"""Draft tokens copied from the text: what is copied, that the distribution stays, and that a missing match is no verdict."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributions import Request, answer, finish, largest_difference, outcome
from engine_cases import VOCAB, models_of
from kinds import needs_compiler
from test_law import table

from specdecpp.backends.engines import engine_for
from specdecpp.backends.native.steps import Native
from specdecpp.decoder import Decoder
from specdecpp.drafters import SuffixDrafter
from specdecpp.drafters.copying import FEW, NO_MATCH, UNWORTHY, Copying, propose
from specdecpp.drafters.suffix import LONGEST, ORDERS, Match
from specdecpp.loading.pair import Pair
from specdecpp.policies import CostAware, Costs, CumulativeConfidence, Entropy, Fixed, MaxConfidence, Policy
from specdecpp.policies.cost_aware import Account
from specdecpp.policies.learning import Belief
from specdecpp.policies.protocol import END_OF_TEXT, TOKENS_LEFT, decide
from specdecpp.policies.score import Score
from specdecpp.sampling import Sampling, streams
from specdecpp.scheduler import step
from specdecpp.session import Session
from specdecpp.step import Plan
from specdecpp.testing import tiny_tokenizer
from specdecpp.verify import GreedyVerification, TokenVerification, is_lossless, verifications


def over(**changes) -> Request:
    """A request over a table whose draft is the text."""
    return Request(target=table(3, vocab_size=3, depth=2), draft=SuffixDrafter(3), prompt=(0, 1, 2, 0, 1), **changes)


POLICIES: dict[str, Policy] = {
    "alone": Fixed(k=0),
    "one": Fixed(k=1),
    "three": Fixed(k=3),
    "q": MaxConfidence(threshold=0.4),
    "product": CumulativeConfidence(threshold=0.2),
    "entropy": Entropy(threshold=0.3),
    "costs": CostAware(prior_steps=1),
    "dropping": MaxConfidence(threshold=0.4, drop=True),
}


def read(tokens: list[int]) -> SuffixDrafter:
    drafter = SuffixDrafter(100)
    drafter.extend(tokens, rows=1)
    return drafter


@pytest.mark.parametrize(
    "situation", [{}, {"ends": (2,)}, {"sampling": Sampling(temperature=0.7, top_k=2, repetition_penalty=1.3)}]
)
@pytest.mark.parametrize("verification", ["token", "block", "compare"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_distribution_is_that_of_the_target(policy: str, verification: str, situation: dict):
    """Catches a draft token that is accepted too often, a residual that still holds it, and one that follows an end."""
    request = over(**situation)
    distribution = request.distribution(POLICIES[policy], verifications()[verification])
    assert largest_difference(distribution, request.own_distribution()) < 1e-12


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_answers_are_those_of_the_target(policy: str):
    """Catches a copy that is kept although the target wants another token."""
    request = over(sampling=Sampling(temperature=0.0), max_tokens=12)
    session = request.session(POLICIES[policy], GreedyVerification(), streams(0))
    distribution = request.own_distribution()
    assert {answer(session, finish(session)): 1.0} == distribution


def test_distributions_do_not_hold_for_want_of_draft_tokens():
    """Catches a drafter that never has any, under which every distribution holds."""
    request = over(max_tokens=6)
    distribution = request.distribution(Fixed(k=3), TokenVerification(), lambda _, steps: sum(r.num_accepted for r in steps))
    assert sum(p for num, p in distribution.items() if num > 0) > 0.3


def test_the_longest_match_is_copied_from_its_latest_place():
    """Catches the first place, a shorter match, and a copy that is off by one."""
    drafter = read([1, 2, 3, 9, 1, 2, 4, 9, 5, 2, 3, 8, 1, 2])
    assert drafter.copied(3) == Match([4, 9, 5], 2, 1)
    assert read([7, 2, 5, 2, 6, 2]).copied(2) == Match([6, 2], 1, 1)
    assert read([1, 2, 3]).copied(4) == Match([])
    assert SuffixDrafter(9).copied(4) == Match([])


def test_the_end_of_the_text_is_copied_in_a_circle():
    """Catches an index behind the text, and a copy that is cut there."""
    assert read([5, 1, 2, 1, 2]).copied(5).tokens == [1, 2, 1, 2, 1]


def test_evidence_is_length_and_count():
    """Catches a count that does not begin anew, a length that ends with the index, and evidence that shrinks."""
    assert read([1, 2, 3, 1, 2, 3, 1, 2, 3, 1]).copied(1) == Match([2], 7, 2)
    assert read([1, 2, 1, 2, 1, 3, 1]).copied(1) == Match([3], 1, 1)
    assert read([*range(60), *range(50)]).copied(1).length == LONGEST > ORDERS
    match = Match([1, 2], 3, 2)
    assert [match.confidence(0), match.confidence(1)] == pytest.approx([1 - 1 / (1 + 3 * 2**1.5 / 4), 1 - 1 / (1 + 2**1.5)])


def test_rolling_back_leaves_what_reading_afresh_gives():
    """Catches an index that remembers what was taken back, and memory that grows faster than the text."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, (80,), generator=generator).tolist()
    for length in (0, 1, 17, 79, 80):
        drafter = read(tokens)
        drafter.rollback(length)
        assert drafter.length == length
        assert vars(drafter) == vars(read(tokens[:length]))
        assert len(drafter._places) <= ORDERS * length
        drafter.extend(tokens[length:], rows=1)
        assert vars(drafter) == vars(read(tokens))
        assert drafter.new_cache().length == 0
    with pytest.raises(ValueError, match=r"81 tokens, 80 have been read"):
        read(tokens).rollback(81)


def proposed(policy: Policy, limit: int, ends: tuple[int, ...] = (), *, costs=None, memory=None, tokens=(0, 1, 2, 0, 1)):
    session = over(ends=ends).session(policy, TokenVerification(), streams(0))
    costs, memory = costs or over().costs, memory or policy.start()
    assert isinstance(session.engine, Copying)
    draft = propose(Plan(session._request, list(tokens), decide(policy, memory, costs, limit), costs))
    return draft, draft.stop


def test_draft_tokens_end_where_they_should():
    """Catches a limit that is exceeded, draft tokens behind an end of the text, and a rule that is not asked."""
    assert proposed(Fixed(k=3), 2)[0].tokens == [2, 0]
    draft, stop = proposed(Fixed(k=3), 20, (0,))
    assert (draft.tokens, stop) == ([2, 0], END_OF_TEXT)
    assert proposed(MaxConfidence(threshold=0.4), 20)[0].tokens == [2]
    assert proposed(MaxConfidence(threshold=0.4, drop=True), 20)[0].tokens == []


def test_steps_without_copies_do_not_switch_copying_off():
    """Catches a rule that looks away for eight tokens because nothing was found to copy, or nothing that paid."""
    costs = Costs(draft_s=1e-6, passes={1: 1.0, 2: 1.0, 65: 1.1})
    policy = CostAware(max_tokens=64, prior=0.1)
    memory = policy.learn(policy.learn(policy.start(), outcome(0, 0, costs)), outcome(0, 0, costs))
    assert not decide(policy, memory, costs, 64).may_draft
    draft, stop = proposed(policy, 20, costs=costs, memory=memory)
    assert draft.num_tokens > 4
    assert stop is UNWORTHY


def test_why_there_are_no_more_copies():
    """Catches a match that does not pay told as none, and copies behind an end of the text."""
    flat, steep = Costs(draft_s=1e-6, passes={1: 1.0, 65: 1.1}), Costs(draft_s=1e-6, passes={1: 1.0, 65: 400.0})
    policy = CostAware(max_tokens=64)
    assert proposed(policy, 20, costs=steep)[1] is UNWORTHY
    assert proposed(policy, 20, costs=steep)[0].tokens == []
    assert proposed(policy, 20, costs=steep, tokens=(0, 1, 2))[1] is NO_MATCH
    assert proposed(policy, 20, (0,), costs=flat)[0].tokens == [2, 0]
    assert proposed(policy, 20, (0,), costs=flat)[1] is END_OF_TEXT
    draft, stop = proposed(policy, 0, costs=flat)
    assert (draft.tokens, stop) == ([], TOKENS_LEFT)
    assert proposed(CostAware(max_tokens=64, min_tokens=3), 20, costs=steep)[0].num_tokens == 3
    assert FEW < 20


def test_the_rule_learns_what_copies_are_worth():
    """Catches estimates that never reach the rule: copies that fail are given up, copies that hold are drafted longer."""
    costs = Costs(draft_s=1e-6, passes={1: 1.0, 2: 1.1, 65: 8.0})
    policy = CostAware(max_tokens=64)
    bad = good = policy.start()
    for _ in range(160):
        bad = policy.learn(bad, outcome(4, 0, costs, judged=(0.75,) * 4))
        good = policy.learn(good, outcome(4, 4, costs, judged=(0.75,) * 4))
    assert good.belief.score(0.75) > policy.start().belief.score(0.75) > bad.belief.score(0.75)
    assert policy.best_prefix(bad, [0.75] * 8, costs) == 0
    assert policy.best_prefix(good, [0.75] * 8, costs) == 8


def test_a_decoder_measures_and_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches costs of steps that had no draft tokens: widths that were never seen."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pair = Pair(target=table(3, vocab_size=8, depth=1), draft=SuffixDrafter(8), tokenizer=tiny_tokenizer(8))
    decoder = Decoder(pair)
    output = decoder.generate([1, 2, 3, 1, 2], max_tokens=20, seed=0, ignore_eos=True)
    assert len(output.tokens) == 20
    assert decoder.costs is not None
    assert 17 in decoder.costs.passes
    rows = []
    session = decoder.start([1, 2, 3, 1, 2], max_tokens=20, seed=0)
    assert engine_for(session._request).refusal(session._request) is None
    session.watch = lambda plan, result: rows.append((result.tokens, result.rows))
    finish(session)
    for tokens, kept in rows:
        assert kept is not None
        assert kept.q.argmax(-1).tolist() == tokens
        assert kept.q.sum().item() == len(tokens)


def test_copies_are_weighed_as_a_whole():
    """Catches a token drafted because looking is free, a step of the pass that hides what follows, and another rate."""
    policy = CostAware(max_tokens=64, prior=0.1)
    plain = Account(belief=Belief(Score(bias=0.0, slope=1.0)))  # estimates as they are, at the rate of the target alone
    step = Costs(draft_s=0.0, passes={1: 1.0, 2: 2.5, 9: 2.5})
    assert policy.rate(plain, step) == 1.0
    assert policy.best_prefix(plain, [0.6] * 8, step) == 0
    assert policy.best_prefix(plain, [0.9] * 8, step) == 8
    rising = Costs(draft_s=0.0, passes={1: 1.0, 2: 1.2, 5: 1.8})
    assert policy.best_prefix(plain, [0.9, 0.9, 0.1, 0.1], rising) == 2
    fast = replace(plain, num_tokens=6_000, seconds=1_000.0)
    assert policy.best_prefix(fast, [0.9, 0.9, 0.1, 0.1], rising) == 0


WARM = Sampling(temperature=0.7, top_k=20, repetition_penalty=1.2)


def start(policy: Policy, sampling: Sampling, verification: str, seed: int, **options: Any) -> Session:
    how = {"seed": seed, "prompt": [3, 5, 2, 9, 3, 5], "draft": SuffixDrafter(VOCAB)} | options
    return models_of("native").session(policy, sampling, verification, **how)


@needs_compiler
@pytest.mark.parametrize("is_watched", [False, True])
@pytest.mark.parametrize("policy", [Fixed(k=0), Fixed(k=5), CostAware(max_tokens=16)])
@pytest.mark.parametrize(
    ("sampling", "verification"), [(Sampling(temperature=0.0), "greedy"), (WARM, "token"), (WARM, "block"), (WARM, "compare")]
)
def test_a_compiled_target_gives_what_the_host_gives(policy: Policy, sampling: Sampling, verification: str, is_watched: bool):
    """Catches a draft token verified at another place, a uniform used twice, and a cache of another length."""
    for seed in range(4):
        own, hosts = (start(policy, sampling, verification, seed) for _ in range(2))
        assert type(own.engine) is Native
        hosts.engine = Copying()
        if is_watched:
            own.watch = lambda plan, result: None
        steps = [[(r.tokens, r.num_drafted, r.num_accepted) for r in finish(session)] for session in (own, hosts)]
        assert steps[0] == steps[1]
        assert own.tokens == hosts.tokens


@needs_compiler
@pytest.mark.parametrize("verification", [name for name, kind in verifications().items() if not is_lossless(kind)])
def test_copies_under_a_lossy_verification_are_the_hosts(verification: str):
    """Catches compiled steps, which compare copies with draws from p, taken for a distribution that weighs q too."""
    session = start(Fixed(k=5), WARM, verification, 0, lossless=False)
    assert type(session.engine) is Copying
    finish(session)
    assert session.finish_reason


@needs_compiler
def test_requests_together_are_what_they_are_alone():
    """Catches steps of a batch that share what they tell the target, and prompts read by a draft that has no passes."""
    alone, shared = ([start(Fixed(k=k), WARM, "token", k) for k in (0, 2, 5)] for _ in range(2))
    for session in alone:
        finish(session)
    for session in shared:
        session.prefill()
    while running := [s for s in shared if s.finish_reason is None]:
        step(running)
    assert [s.tokens for s in shared] == [s.tokens for s in alone]
