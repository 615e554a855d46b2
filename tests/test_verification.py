"""One block at a time: draft tokens from rows q, accepted against rows p, enumerated for random rows."""

from itertools import pairwise, product

import pytest
import torch
from distributions import distribution_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from policies_list import VERIFICATIONS

from specdecpp.testing import Enumerator
from specdecpp.verify import GreedyVerification, block_acceptance, residual, token_acceptance

MOST_CANDIDATES = {2: 3, 3: 3, 4: 2, 5: 2, 6: 2}  # what an enumeration can walk in a moment, by vocabulary


def tensor(rows):
    return torch.tensor(rows, dtype=torch.float64)


@st.composite
def rows(draw, vocab_size):
    """One distribution. Small whole weights make zeros and ties likely; floats make everything else."""
    weight = st.one_of(st.integers(0, 3), st.floats(1e-3, 1.0))
    weights = draw(st.lists(weight, min_size=vocab_size, max_size=vocab_size).filter(any))
    return [w / sum(weights) for w in weights]


@st.composite
def blocks(draw, num_candidates=None):
    """(p [K+1, V], q [K, V]); a row of q may equal that of p, or share no token with it."""
    vocab_size = draw(st.integers(2, 6))
    num = num_candidates or draw(st.integers(1, MOST_CANDIDATES[vocab_size]))
    p = [draw(rows(vocab_size)) for _ in range(num + 1)]
    q = [draw(st.one_of(rows(vocab_size), st.just(row))) for row in p[:num]]
    return tensor(p), tensor(q)


DISJOINT = (tensor([[0.5, 0.5, 0, 0]] * 3), tensor([[0, 0, 0.3, 0.7]] * 2))
EQUAL = (tensor([[0.2, 0.3, 0.5]] * 4), tensor([[0.2, 0.3, 0.5]] * 3))
DENSE = (tensor([[0.2, 0.3, 0.5], [0.5, 0.3, 0.2], [0.1, 0.5, 0.4]]), tensor([[0.3, 0.3, 0.4], [0.2, 0.2, 0.6]]))
"""Here a residual of several tokens follows a prefix that is not certain."""


def block_distribution(p, q, verification):
    """{(emitted tokens, number accepted): probability} of one block."""

    def run(coins):
        tokens = [coins.categorical(row) for row in q]
        verdict = verification(p, q, torch.tensor(tokens, dtype=torch.long), coins)
        return (*tokens[: verdict.num_accepted], verdict.next_token), verdict.num_accepted

    return distribution_of(run)


def mean_accepted(p, q, name):
    return sum(count * chance for (_, count), chance in block_distribution(p, q, VERIFICATIONS[name]).items())


def completed(distribution, p):
    """The joint distribution [V, ..., V] of K + 1 tokens when a block that ends early is continued from p."""
    joint = torch.zeros([p.shape[1]] * len(p), dtype=p.dtype)
    for (tokens, _), probability in distribution.items():
        rest = torch.ones((), dtype=p.dtype)
        for row in p[len(tokens) :]:
            rest = rest[..., None] * row
        joint[tokens] += probability * rest
    return joint


@pytest.mark.parametrize("verification", VERIFICATIONS)
@settings(max_examples=40)
@given(block=blocks())
@example(block=DISJOINT)
@example(block=EQUAL)
@example(block=DENSE)
def test_one_block_emits_the_targets_joint_distribution(verification, block):
    """Catches an error that is exact for one draft token but not for several: block verification's carry and coins."""
    p, q = block
    distribution = block_distribution(p, q, VERIFICATIONS[verification])
    torch.testing.assert_close(completed(distribution, p), completed({((), 0): 1.0}, p), atol=1e-12, rtol=0)


@settings(max_examples=40)
@given(block=blocks())
@example(block=DISJOINT)
@example(block=EQUAL)
def test_block_accepts_at_least_as_many_as_token_and_token_as_compare(block):
    """Catches a block rule that is exact but wastes draft tokens: the reason to have it is that it never does."""
    p, q = block
    means = [mean_accepted(p, q, verification) for verification in ("compare", "token", "block")]
    assert all(less <= more + 1e-12 for less, more in pairwise(means))


def test_block_accepts_more_than_token_where_it_should():
    """Catches block verification that quietly is token verification (the example of Sun et al. 2024, section 2)."""
    p, q = tensor([[1 / 3, 2 / 3]] * 3), tensor([[2 / 3, 1 / 3]] * 2)
    assert mean_accepted(p, q, "token") == pytest.approx(10 / 9)
    assert mean_accepted(p, q, "block") == pytest.approx(11 / 9)


@settings(max_examples=40)
@given(block=blocks())
@example(block=EQUAL)
@example(block=(tensor([[0, 1], [1 / 3, 2 / 3], [0, 1]]), tensor([[0, 1], [0, 1]])))
def test_acceptance_probabilities_are_probabilities(block):
    """Catches nan from 0/0 (p = q) and values outside [0, 1], for everything that q can propose."""
    p, q = block
    for tokens in map(torch.tensor, product(*(row.nonzero().flatten().tolist() for row in q))):
        h, carry = block_acceptance(p, q, tokens)
        for values in (h, carry, token_acceptance(p[: len(tokens)], q, tokens)):
            assert bool(((values >= 0) & (values <= 1)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_block_coin_survives_rounding(dtype):
    """Catches h = inf or far below 1 where p and q differ by one rounding after a certain prefix (h is 1 there)."""
    for steps in (0.25, 0.75, 1.0):
        gap = steps * torch.finfo(dtype).eps
        p = torch.tensor([[0.25, 0.75]] * 3, dtype=dtype)
        q = torch.tensor([[0.25, 0.75], [0.25 - gap, 0.75]], dtype=dtype)
        h, _ = block_acceptance(p, q, torch.tensor([0, 1]))
        assert h[0] == 1


@pytest.mark.parametrize("carry", [1.0, 0.5, 0.0])
@given(block=blocks(num_candidates=1))
@example(block=(EQUAL[0][:2], EQUAL[1][:1]))
def test_residual_is_a_distribution(carry, block):
    """Catches nan where no mass is left (p = q), and a residual that keeps what the draft has covered."""
    p, q = block[0][0], block[1][0]
    distribution = residual(p, q, carry)
    assert distribution.sum() == pytest.approx(1)
    excess = carry * p - q
    if bool((excess > 0).any()):
        assert bool((distribution[excess <= 0] == 0).all())
    else:
        assert torch.equal(distribution, p)


def one_hot(best, vocab_size=4):
    return torch.eye(vocab_size)[torch.tensor(best)]


@pytest.mark.parametrize(
    ("best", "tokens", "num_accepted", "next_token"),
    [
        ([1, 2, 3], [1, 2], 2, 3),
        ([1, 2, 3], [1, 0], 1, 2),
        ([1, 2, 3], [0, 2], 0, 1),  # the second match must not count
        ([1], [], 0, 1),
    ],
)
def test_greedy_verification(best, tokens, num_accepted, next_token):
    """Catches counting matches instead of the matching prefix, and a correction taken from the wrong row."""
    verdict = GreedyVerification()(one_hot(best), None, torch.tensor(tokens, dtype=torch.long), Enumerator([]))
    assert (verdict.num_accepted, verdict.next_token) == (num_accepted, next_token)
