"""The promise of the library, computed: a session's output has the target's own distribution, whatever stops the draft.

Distributions are enumerated, not sampled, so these tests have no false alarms. Every situation below meets every policy and
every verification, and every policy meets every verification; the third factor rotates, as in a Latin square.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from distributions import Request, distribution_of, largest_difference, total_variation
from distributions import drafted as host_draft
from hypothesis import given, settings
from hypothesis import strategies as st
from policies_list import EXAMPLES, VERIFICATIONS, heads_for, policies

from specdecpp.decoder import Decoder
from specdecpp.errors import UnsoundError
from specdecpp.lab import AutoOff, Bandit, TreePolicy
from specdecpp.loading.pair import Pair
from specdecpp.policies import Fixed, MaxConfidence, Policy, named
from specdecpp.sampling import Sampling
from specdecpp.testing import TableModel, enumerate_distribution, tiny_tokenizer
from specdecpp.verify import CompareVerification, GreedyVerification, TokenVerification


@cache
def policies_of(vocab_size: int) -> dict[str, Policy]:
    """Every policy, with heads for tables of this vocabulary."""
    return policies(heads_for(vocab_size, vocab_size), 5)


POLICIES = policies_of(3)
LAB = [name for name, policy in POLICIES.items() if type(policy).__module__.startswith("specdecpp.lab")]
ADAPTIVE = [name for name, example in EXAMPLES.items() if example.looks]
REMEMBERING = [name for name, example in EXAMPLES.items() if example.learns]


def table(seed: int, *, vocab_size: int = 3, depth: int = 3, sparsity: float = 0.2, **more: Any) -> TableModel:
    return TableModel.random(vocab_size=vocab_size, depth=depth, seed=seed, sparsity=sparsity, **more)


def restricted(model: TableModel, allowed: tuple[int, ...]) -> TableModel:
    """The same distribution given that only some tokens may come; uniform over them where it gave them nothing."""

    def row(p: torch.Tensor) -> list[float]:
        kept = [float(x) if i in allowed else 0.0 for i, x in enumerate(p)]
        total = sum(kept)
        return [x / total if total else (i in allowed) / len(allowed) for i, x in enumerate(kept)]

    return TableModel({c: row(p) for c, p in model.table.items()}, depth=model.depth)


PLAIN = Request(target=table(10, sparsity=0.25), draft=table(111, sparsity=0.25))
DENSE = Request(target=table(1, sparsity=0.0), draft=table(101, sparsity=0.0), max_tokens=3)
SAMPLINGS = {
    "cooler": Sampling(temperature=0.7),
    "top-k-1": Sampling(top_k=1),
    "top-k-2": Sampling(top_k=2),
    "top-p": Sampling(top_p=0.8),
    "min-p": Sampling(min_p=0.4),
    "penalty": Sampling(repetition_penalty=1.7),
    "all-processors": Sampling(temperature=1.4, top_k=2, top_p=0.95, min_p=0.1, repetition_penalty=1.3),
}
SITUATIONS = {
    "plain": PLAIN,
    "end-of-text": replace(PLAIN, ends=(2,)),
    "two-ends": replace(PLAIN, ends=(0, 2)),
    "one-token-left": replace(DENSE, max_tokens=1),
    "two-tokens-left": replace(DENSE, max_tokens=2),
    "three-tokens-left": DENSE,
    "five-tokens": Request(target=table(10, sparsity=0.4), draft=table(111, sparsity=0.4), ends=(2,), max_tokens=5),
    "four-symbols": Request(
        target=table(2, vocab_size=4, depth=4, sparsity=0.4),
        draft=table(102, vocab_size=4, depth=4, sparsity=0.4),
        ends=(3,),
        max_tokens=3,
    ),
    "many-zeros": Request(target=table(3, sparsity=0.5), draft=table(103, sparsity=0.5), ends=(2,)),
    "disjoint-supports": Request(
        target=restricted(table(4, vocab_size=4), (0, 1)), draft=restricted(table(104, vocab_size=4), (2, 3)), max_tokens=3
    ),
    "target-within-draft": Request(target=restricted(table(5), (0, 2)), draft=table(105), ends=(2,)),
    "draft-within-target": Request(target=table(5), draft=restricted(table(105), (0, 2)), ends=(2,)),
    "draft-is-target": replace(PLAIN, draft=PLAIN.target, ends=(2,)),
    "target-context-ends": replace(PLAIN, target=table(10, sparsity=0.25, max_length=5), max_tokens=5),
    "draft-context-ends": replace(PLAIN, draft=table(111, sparsity=0.25, max_length=3)),
    "draft-context-too-short": replace(PLAIN, draft=table(111, sparsity=0.25, max_length=1)),
    "both-contexts-end": replace(
        PLAIN,
        target=table(10, sparsity=0.25, max_length=6),
        draft=table(111, sparsity=0.25, max_length=4),
        ends=(2,),
        max_tokens=5,
    ),
    "one-token-prompt": replace(PLAIN, prompt=(1,), ends=(2,)),
    **{name: replace(DENSE, sampling=sampling) for name, sampling in SAMPLINGS.items()},
}


def cases() -> Iterator[Any]:
    """Situation, policy and verification. Comparison, which has the most outcomes by far, is for the rules without memory, but
    at the end of a text; over five tokens, up to five steps, these meet both others."""
    for (i, situation), (j, policy) in product(enumerate(SITUATIONS), enumerate(POLICIES)):
        names = list(VERIFICATIONS)[: 2 if policy in REMEMBERING and situation != "end-of-text" else 3]
        if situation != "end-of-text" and not (situation == "five-tokens" and policy in REMEMBERING):
            names = [names[(i + j) % len(names)]]
        marks = [pytest.mark.slow] * (situation != "end-of-text" and (i - j) % 3 == 2) + [pytest.mark.lab] * (policy in LAB)
        yield from (pytest.param(situation, policy, name, marks=marks) for name in names)


@pytest.mark.parametrize(("situation", "policy", "verification"), list(cases()))
def test_session_keeps_the_targets_distribution(situation, policy, verification):
    """Catches any bias: in the ratio test, the residual, rollbacks, ends, limits, a distribution warped on one side only, a
    length that depends on the draft tokens, or memory that leaks the verdict."""
    request = SITUATIONS[situation]
    distribution = request.distribution(policies_of(request.target.vocab_size)[policy], VERIFICATIONS[verification])
    assert largest_difference(distribution, request.own_distribution()) < 1e-12


@settings(max_examples=250)
@given(
    seed=st.integers(0, 999),
    policy=st.sampled_from(list(POLICIES)),
    verification=st.sampled_from(list(VERIFICATIONS)),
    sampling=st.sampled_from([Sampling(), *SAMPLINGS.values()]),
    max_tokens=st.integers(1, 4),
    ends=st.sampled_from([(), (2,), (0, 2)]),
    target_length=st.one_of(st.none(), st.integers(3, 6)),
    draft_length=st.one_of(st.none(), st.integers(1, 6)),
)
def test_any_combination_keeps_the_targets_distribution(
    seed, policy, verification, sampling, max_tokens, ends, target_length, draft_length
):
    """Catches what only a combination shows: a limit together with a penalty, an end together with a memory."""
    request = Request(
        target=table(seed, sparsity=0.35, max_length=target_length),
        draft=table(seed + 1000, sparsity=0.35, max_length=draft_length),
        sampling=sampling,
        max_tokens=max_tokens,
        ends=ends,
    )
    distribution = request.distribution(POLICIES[policy], VERIFICATIONS[verification])
    assert largest_difference(distribution, request.own_distribution()) < 1e-12


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_greedy_session_gives_the_targets_greedy_answer(situation, policy):
    """Catches a greedy answer other than the target's: a wrong row compared, a penalty on one side, a late end."""
    request = SITUATIONS[situation]
    request = replace(request, sampling=replace(request.sampling, temperature=0.0))
    distribution = request.distribution(policies_of(request.target.vocab_size)[policy], GreedyVerification())
    assert distribution == request.own_distribution()
    assert len(distribution) == 1


def test_every_exported_policy_is_among_these_cases():
    """Catches a new rule that was never shown to be exact."""
    assert set(map(type, POLICIES.values())) >= {kind for kind in named() if kind is not TreePolicy}


@pytest.mark.parametrize("policy", ADAPTIVE)
def test_adaptive_policies_stop_at_several_depths(policy):
    """Catches distributions that hold vacuously: each rule must stop plain steps by itself, and not always at one length."""
    rule = POLICIES[policy]

    def depth(coins):
        draft = host_draft(
            PLAIN.draft.new_cache(),
            list(PLAIN.prompt),
            policy=rule,
            memory=rule.start(),
            sampling=PLAIN.sampling,
            randomness=coins,
            room=5,
            costs=PLAIN.costs,
        )
        return draft.num_tokens if str(draft.stop) != "tokens left" else None

    assert len(distribution_of(depth).keys() - {None}) >= 2


@pytest.mark.parametrize("policy", REMEMBERING)
def test_memory_changes_later_steps(policy):
    """Catches distributions that hold vacuously: forgetting every outcome must change the lengths of later steps."""
    rule = POLICIES[policy]
    kind = type(rule)
    forgetful: Policy = object.__new__(type(kind.__name__, (kind,), {"learn": lambda self, memory, outcome: memory}))
    forgetful.__dict__.update(rule.__dict__)

    def lengths(policy: Policy, most: int) -> Any:
        request = replace(SITUATIONS["five-tokens"], max_tokens=most)
        return request.distribution(policy, TokenVerification(), lambda _, steps: tuple(r.num_drafted for r in steps))

    assert any(total_variation(lengths(rule, most), lengths(forgetful, most)) > 0.01 for most in (4, 5))


@pytest.mark.parametrize("policy", ["cost-aware", "cost-aware-lagged", "cumulative"])
def test_overlaps_have_the_mean_of_what_is_accepted(policy):
    """Catches chances of draft tokens that were not tested, or of other rows: a rule would take drafting for better."""
    request = SITUATIONS["five-tokens"]

    def difference(_: Any, steps: Any) -> tuple[float, bool]:
        told = [min(r.num_accepted + 1, r.num_drafted) == len(r.overlaps) for r in steps]
        return sum(sum(r.overlaps) - r.num_accepted for r in steps), all(told)

    distribution: Any = request.distribution(POLICIES[policy], TokenVerification(), difference)
    assert all(are_those_tested for _, are_those_tested in distribution)
    assert len(distribution) > 2, "in single steps they differ"
    assert sum(chance * value for (value, _), chance in distribution.items()) == pytest.approx(0.0, abs=1e-6)  # rows of float32


@pytest.mark.parametrize("situation", ["end-of-text", "four-symbols", "many-zeros", "draft-within-target", "penalty"])
def test_dropping_is_exact_under_comparison(situation):
    """Catches a comparison that reads q, or a dropped draft token that stays in a cache."""
    request = SITUATIONS[situation]
    policy = MaxConfidence(threshold=0.5, drop=True)
    assert largest_difference(request.distribution(policy, CompareVerification()), request.own_distribution()) < 1e-12
    request = replace(request, sampling=replace(request.sampling, temperature=0.0))
    assert request.distribution(policy, GreedyVerification()) == request.own_distribution()


@pytest.mark.parametrize("verification", ["token", "block"])
def test_dropping_is_biased_under_the_ratio_test(verification):
    """Documents why the Decoder refuses this pair: a draft token removed for its own q leaves too little of it behind."""
    distribution = DENSE.distribution(MaxConfidence(threshold=0.5, drop=True), VERIFICATIONS[verification])
    assert total_variation(distribution, DENSE.own_distribution()) > 0.01


def pair_of_tables() -> Pair:
    return Pair(target=table(6, vocab_size=8, depth=1), draft=table(7, vocab_size=8, depth=1), tokenizer=tiny_tokenizer(8))


@pytest.mark.parametrize("verification", ["token", "block"])
def test_decoder_refuses_dropping_under_the_ratio_test(verification):
    """Catches a Decoder that runs the biased combination above, also hidden in another rule; comparing stays allowed."""
    pair, dropping = pair_of_tables(), MaxConfidence(drop=True)
    for policy in (
        dropping,
        AutoOff(policy=dropping),
        Bandit(arms=(dropping, MaxConfidence(threshold=0.2, drop=True))),
        AutoOff(policy=Bandit(arms=(dropping, AutoOff(policy=dropping)))),
    ):
        with pytest.raises(UnsoundError, match=r"drop=False.*CompareVerification"):
            Decoder(pair, policy=policy, verification=VERIFICATIONS[verification])
        Decoder(pair, policy=policy, verification=CompareVerification())
    Decoder(pair, policy=MaxConfidence(), verification=VERIFICATIONS[verification])
    Decoder(pair, policy=dropping, verification=GreedyVerification())


def test_decoder_refuses_to_sample_under_greedy_verification():
    """Catches sampling that silently becomes greedy; refused when the request starts, not at its first step."""
    decoder = Decoder(pair_of_tables(), policy=Fixed(k=2), verification=GreedyVerification())
    for entry in (decoder.start, decoder.stream, decoder.generate):
        with pytest.raises(UnsoundError, match=r"temperature 0.*got temperature 0\.5"):
            entry([1], temperature=0.5)
    assert len(decoder.generate([1], temperature=0.0, max_tokens=3).tokens) == 3


def test_enumerate_distribution_walks_every_path_once():
    """Catches an enumerator that skips or repeats outcomes, or walks those of probability zero."""
    third = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)

    def run(coins):
        first = coins.categorical(third)
        return first, tuple(coins.bernoulli(torch.tensor([0.25, 1.0], dtype=torch.float64)).tolist()) if first else ()

    distribution = enumerate_distribution(run)
    assert distribution == pytest.approx({(0, ()): 1 / 3, (2, (False, True)): 1 / 2, (2, (True, True)): 1 / 6})
