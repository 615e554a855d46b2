"""The whole decoder on real (tiny, random) transformers models, against `generate` and against exact distributions.

Greedy comparisons are in float32, where a draft token is read in a pass of several tokens and `generate` reads it alone.
The two differ by about 1e-6, and the two best logits of the 660 contexts compared are at least 5e-4 apart (measured),
so that rounding on another machine does not decide a test.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from distributions import random_head, unchecked
from kinds import KINDS, model_of
from scipy.stats import chisquare

from specdecpp import CumulativeConfidence, Decoder, Fixed, Pair, Policy, SpecDecPP
from specdecpp.backends import EagerModel
from specdecpp.lab import Heuristic
from specdecpp.policies import Entropy, MaxConfidence
from specdecpp.testing import tiny_draft, tiny_model, tiny_tokenizer
from specdecpp.verify import BlockVerification, GreedyVerification, TokenVerification

NUM_TOKENS = 20
PROMPTS = ((5,), (20, 21, 22, 23, 24, 25, 26, 27, 28, 29), (60, 3, 60, 3, 60))


POLICIES: dict[str, Policy] = {
    "Fixed": Fixed(k=4),
    "Heuristic": Heuristic(),
    "MaxConfidence": MaxConfidence(threshold=0.3),
    "MaxConfidence, dropping": MaxConfidence(threshold=0.3, drop=True),
    "CumulativeConfidence": CumulativeConfidence(threshold=0.1),
    "Entropy": Entropy(threshold=0.5),
    "SpecDecPP": SpecDecPP(head=random_head(32, seed=0, scale=0.6)),
}


@cache
def pair_of(kind: str, dtype: torch.dtype = torch.float32) -> Pair:
    """A target of one kind and its noisy copy."""
    target = model_of(kind, dtype)
    return Pair(target=EagerModel(target), draft=EagerModel(tiny_draft(target)), tokenizer=tiny_tokenizer())


def decoder_of(kind: str, policy: str, ends: tuple[int, ...]) -> Decoder:
    verification = GreedyVerification() if POLICIES[policy].drops_last else TokenVerification()
    return Decoder(replace(pair_of(kind), ends=ends), policy=POLICIES[policy], verification=verification)


@cache
def own_greedy(kind: str, prompt: tuple[int, ...], ends: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The target's greedy continuation by transformers' generate."""
    inputs = torch.tensor([prompt])
    out = model_of(kind).generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=list(ends) or None,
        pad_token_id=0,
    )
    return tuple(out[0, len(prompt) :].tolist())


def end_within(tokens: tuple[int, ...]) -> int:
    """A token that first occurs in the middle of an answer, or as late as there is one."""
    first = {token: tokens.index(token) for token in tokens}
    return min(first, key=lambda token: abs(first[token] - NUM_TOKENS // 2))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_equals_generate(kind: str, policy: str) -> None:
    """Catches any token that differs from the target's own greedy decoding, with end ids that occur and without."""
    num_drafted = num_accepted = 0
    for prompt in PROMPTS:
        for ends, reason in (((), "length"), ((1, end_within(own_greedy(kind, prompt))), "eos")):
            out = decoder_of(kind, policy, ends).generate(prompt, temperature=0.0, max_tokens=NUM_TOKENS)
            assert (out.tokens, out.finish_reason) == (own_greedy(kind, prompt, ends), reason)
            num_drafted += out.metrics.num_draft_tokens
            num_accepted += out.metrics.num_accepted_draft_tokens
    assert 0 < num_accepted < num_drafted, "the comparison is vacuous"


@pytest.mark.parametrize("verification", [TokenVerification(), BlockVerification()])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])
def test_a_draft_that_equals_the_target_is_always_accepted(kind: str, verification: Any) -> None:
    """Catches p and q of different positions, processors or dtypes; in float64, where rounding rejects once in 1e13."""
    backend = pair_of(kind, torch.float64).target
    pair = Pair(target=backend, draft=backend, tokenizer=tiny_tokenizer())
    decoder = Decoder(pair, policy=Fixed(k=5), verification=verification)
    requests: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1},
        {"seed": 2, "temperature": 0.6, "top_k": 20, "top_p": 0.9},
        {"seed": 3, "min_p": 0.1, "repetition_penalty": 1.3},
    ]
    for options in requests:
        out = decoder.generate((9, 8, 7), max_tokens=36, **options)
        assert out.metrics.draft_acceptance_rate == 1
        assert [r.num_accepted for r in out.steps] == [5] * 6


@torch.inference_mode()
def exact_distribution(model: Any, prompt: Sequence[int], num_tokens: int) -> np.ndarray:
    """P(x_1..x_n | prompt) of a model at temperature 1 [V, ..., V], from its logits in float64."""
    distribution = np.ones(())
    for _ in range(num_tokens):
        contexts = torch.tensor([[*prompt, *context] for context in np.ndindex(distribution.shape)])
        following = model(input_ids=contexts, use_cache=False).logits[:, -1].double().softmax(-1).numpy()
        distribution = distribution[..., None] * following.reshape(*distribution.shape, -1)
    return distribution


def chi_square(counts: np.ndarray, distribution: np.ndarray) -> float:
    """The p-value of counts under a distribution; cells that expect fewer than 5 are pooled."""
    expected = counts.sum() * distribution / distribution.sum()
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    return float(chisquare(observed, np.append(expected[~small], expected[small].sum())).pvalue)


@pytest.mark.parametrize("verification", [pytest.param(TokenVerification(), marks=pytest.mark.slow), BlockVerification()])
def test_sampled_answers_follow_the_distribution_of_the_target(verification: Any) -> None:
    """Catches a biased output distribution of the whole decoder: 2000 answers of 3 tokens against 125 exact probabilities.

    Two draft tokens fit into the first step, so that the two verifications differ. Seeded; over all seeds a correct
    decoder fails this with probability 1e-4 (5e-5 for each verification). The same counts must refute the draft's distribution.
    """
    target, num = tiny_model("opt", vocab_size=5, hidden_size=16, layers=1, seed=3), 2000
    draft = tiny_draft(target, noise=0.4)
    pair = Pair(target=EagerModel(target), draft=EagerModel(draft), tokenizer=tiny_tokenizer(5))
    decoder = Decoder(pair, policy=Fixed(k=2), verification=verification)
    counts = np.zeros((5, 5, 5))
    with unchecked():
        for seed in range(num):
            counts[decoder.generate((3,), max_tokens=3, seed=seed).tokens] += 1
    assert chi_square(counts, exact_distribution(target, (3,), 3)) > 5e-5
    assert chi_square(counts, exact_distribution(draft, (3,), 3)) < 1e-12
