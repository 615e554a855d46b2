"""From logits to tokens: `probabilities` against transformers' own processors, and the dice."""

import math

import pytest
import torch
from distributions import chi_square_tail, unchecked
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdecpp.sampling import Sampling, Uniforms, _sorted_nucleus, probabilities, seen_rows, streams
from specdecpp.testing import tiny_model

OFF = Sampling()


def marked(tokens, vocab_size):
    seen = torch.zeros(vocab_size, dtype=torch.bool)
    seen[tokens] = True
    return seen


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_a_nucleus_needs_no_sorted_vocabulary(spread, top_p):
    """Catches a nucleus that ends where the first few tokens do, and equal tokens that are all taken or all left."""
    generator = torch.Generator().manual_seed(0)
    logits = (spread * torch.randn(5, 3001, generator=generator, dtype=torch.float64)).mul(8).round().div(8)
    logits[1, ::2] = -torch.inf
    logits[2] = 0.0
    wanted = _sorted_nucleus(logits, top_p) & logits.isfinite()  # the one of a GPU
    assert torch.equal(probabilities(logits, Sampling(top_p=top_p)) > 0, wanted)
    for share, kept in ((0.25, 1), (0.5, 2), (0.51, 3), (0.75, 3)):
        p = probabilities(torch.zeros(4), Sampling(top_p=share))
        assert p.tolist() == pytest.approx([1 / kept] * kept + [0] * (4 - kept)), "no larger than it must be"


@st.composite
def samplings(draw):
    """Any sampling that is not greedy; each processor is off in part of the examples."""
    return Sampling(
        temperature=draw(st.one_of(st.just(1.0), st.floats(0.1, 3.0))),
        top_k=draw(st.one_of(st.none(), st.integers(1, 14))),
        top_p=draw(st.one_of(st.just(1.0), st.floats(0.05, 0.999))),
        min_p=draw(st.one_of(st.just(0.0), st.floats(0.01, 1.0))),
        repetition_penalty=draw(st.one_of(st.just(1.0), st.floats(0.5, 2.0))),
    )


def by_transformers(logits, context, sampling):
    """The processors of transformers, each on its own, in the order in which `generate` applies them."""
    steps = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature != 1:
        steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k is not None:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        steps.append(MinPLogitsWarper(sampling.min_p))
    ids = torch.tensor([context], dtype=torch.long)
    penalised = steps[0](ids, logits[None]) if sampling.repetition_penalty != 1 else logits[None]
    # Both break ties at the edge of a nucleus, each in its own way; such logits say nothing.
    assume(bool((penalised[0].sort().values.diff() > 1e-6).all()))
    return steps(ids, logits[None])[0].softmax(-1)


@given(
    logits=st.lists(st.integers(-90, 90), min_size=2, max_size=12, unique=True),
    context=st.lists(st.integers(0, 1), min_size=1, max_size=4),
    sampling=samplings(),
)
def test_probabilities_are_those_of_transformers(logits, context, sampling):
    """Catches a processor with another meaning or in another place than transformers users know."""
    values = torch.tensor(logits, dtype=torch.float64) / 10
    ours = probabilities(values, sampling, marked(context, len(logits)))
    torch.testing.assert_close(ours, by_transformers(values, context, sampling), atol=1e-12, rtol=0)


def test_probabilities_are_what_generate_samples_from():
    """Catches an order of processors that is no longer the one of transformers' `generate`."""
    options = {"temperature": 1.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.4}
    prompt = [5, 9, 9, 30]
    torch.manual_seed(0)
    out = tiny_model("llama", seed=3).generate(
        torch.tensor([prompt]),
        do_sample=True,
        max_new_tokens=6,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
        **options,
    )
    for i, (logits, scores) in enumerate(zip(out.logits, out.scores, strict=True)):
        seen = marked(out.sequences[0, : len(prompt) + i], logits.shape[-1])
        ours = probabilities(logits[0], Sampling(**options), seen)
        torch.testing.assert_close(ours, scores[0].softmax(-1), atol=1e-6, rtol=0)
        assert 1 < int((ours > 0).sum()) < 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_narrow_logits_are_widened_first(dtype):
    """Catches a softmax in bfloat16, whose rows do not sum to 1, and float64 that is narrowed."""
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    for sampling in (OFF, Sampling(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01), Sampling(temperature=0.0)):
        p = probabilities(logits, sampling)
        assert p.dtype == wide
        torch.testing.assert_close(p.sum(-1), torch.ones(3, dtype=wide), atol=1e-5, rtol=0)
        assert torch.equal(p, probabilities(logits.to(wide), sampling))


def test_greedy_rows_are_one_hot():
    """Catches a greedy row that is not one-hot at the (penalised) maximum, or feels top-k and friends."""
    logits = torch.tensor([[1.0, 3.0, 2.0], [4.0, 4.0, -1.0]])
    greedy = Sampling(temperature=0.0, top_k=1, top_p=0.1, min_p=1.0)
    assert probabilities(logits, greedy).tolist() == [[0, 1, 0], [1, 0, 0]]
    punished = Sampling(temperature=0.0, repetition_penalty=2.0)
    assert probabilities(logits[0], punished, marked([1], 3)).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("name", "values", "advice"),
    [
        ("temperature", (-0.5, math.inf, math.nan), "use 0 for greedy"),
        ("top_k", (0,), r"use None \(0 in a request\) to keep every token"),
        ("top_p", (0.0, 1.5, math.nan), r"use 1\.0 to keep every token"),
        ("min_p", (-0.1, 1.1), r"use 0\.0 to keep every token"),
        ("repetition_penalty", (0.0, math.inf, math.nan), r"use 1\.0 for none"),
    ],
)
def test_bad_sampling_is_refused_with_advice(name, values, advice):
    """Catches a value that would give nan distributions later, and a message without the value or the way out."""
    for value in values:
        with pytest.raises(ValueError, match=f"{name} .*{value}.*{advice}"):
            Sampling(**{name: value})


def test_seen_rows_grow_by_one_draft_token_each():
    """Catches a penalty on a draft token in its own row, or forgotten in the rows after it."""
    seen = marked([3], 5)
    rows = seen_rows(seen, torch.tensor([1, 3, 0]))
    assert [row.nonzero().flatten().tolist() for row in rows] == [[3], [1, 3], [1, 3], [0, 1, 3]]
    assert seen.tolist() == marked([3], 5).tolist()
    assert torch.equal(seen_rows(seen, torch.tensor([], dtype=torch.long)), seen[None])


def dice(seed=0):
    return Uniforms(torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("u", [0.0, 0.3, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize(
    "p",
    [
        *([0.0, 0.3, 0.2, 0.0, 0.5, 0.0], [0.0, 0.7, 0.0], [3.0, 0.0], [0.0, 0.1, 0.1, 0.1, 0.0]),
        [0.0] * 64 + [0.5, 0.0, 0.5] + [0.0] * 64,
    ],
)
def test_dice_never_give_an_impossible_token(monkeypatch, u, p):
    """Catches the edges of inversion: u = 0 with leading zeros, u next to 1 with trailing zeros, u on a boundary."""
    monkeypatch.setattr(torch, "rand", lambda shape, dtype, **_: torch.full(shape, u, dtype=dtype))
    for dtype in (torch.float32, torch.float64):
        assert p[dice().categorical(torch.tensor(p, dtype=dtype))] > 0


@pytest.mark.parametrize("size", [63, 64, 65, 200, 4096])
def test_dice_invert_the_running_sum(monkeypatch, size):
    """Catches blocks that are added up wrongly: every index is drawn for the points of its own share, and only those."""
    p = torch.rand(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p[::7] = 0
    cdf = p.cumsum(0) / p.sum()
    for at in range(size):
        if p[at] > 0:
            middle = float(cdf[at] - p[at] / p.sum() / 2)
            monkeypatch.setattr(torch, "rand", lambda shape, dtype, u=middle, **_: torch.full(shape, u, dtype=dtype))
            assert dice().categorical(p) == at
    last = int(p.nonzero()[-1])
    monkeypatch.setattr(torch, "rand", lambda shape, dtype, **_: torch.full(shape, 1.0, dtype=dtype))
    assert dice().categorical(p) == last, "a point that rounding carried to the end"


def test_dice_follow_their_probabilities():
    """Catches a biased draw, and coins that come up with 1 - h: chi-square, false alarm for 1 choice of seed in 10^5."""
    weights = {0: 0.02, 2: 0.5, 3: 1.48, 5: 2.0}
    heads = {(0, 0): 0.1 * 0.3, (0, 1): 0.1 * 0.7, (1, 0): 0.9 * 0.3, (1, 1): 0.9 * 0.7}
    p, h = torch.tensor([weights.get(i, 0.0) for i in range(7)]), torch.tensor([0.9, 0.7])
    one, tokens, coins = dice(1), {}, {}
    with unchecked():
        for _ in range(20000):
            token, coin = one.categorical(p), tuple(one.bernoulli(h).int().tolist())
            tokens[token], coins[coin] = tokens.get(token, 0) + 1, coins.get(coin, 0) + 1
    assert tokens.keys() == weights.keys()
    assert chi_square_tail(tokens, {i: w / 4 for i, w in weights.items()}) > 5e-6
    assert chi_square_tail(coins, heads) > 5e-6


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-24])
def test_certain_coins_are_certain(monkeypatch, u):
    """Catches u <= h: a draft token of acceptance 0 that passes when u = 0."""
    monkeypatch.setattr(torch, "rand", lambda shape, dtype, **_: torch.full(shape, u, dtype=dtype))
    assert dice().bernoulli(torch.tensor([0.0, 1.0])).tolist() == [False, True]


def draws(one):
    return one.bernoulli(torch.full((2000,), 0.5, dtype=torch.float64))


def test_streams_are_reproducible_and_apart():
    """Catches a seed that decides nothing, and one stream used twice: 5.2 standard deviations, 1 false alarm in 10^6 seeds."""
    first, again, other = (streams(seed) for seed in (7, 7, 8))
    sequences = [draws(one) for one in (*first, *other)]
    assert torch.equal(sequences[1], draws(again[1])), "the first has not been drawn from yet"
    assert torch.equal(sequences[0], draws(again[0]))
    for i, j in [(0, 1), (0, 2), (1, 3), (2, 3)]:
        agreement = float((sequences[i] == sequences[j]).sum())
        assert abs(agreement - 1000) < 5.2 * (2000 / 4) ** 0.5


def test_streams_without_a_seed_differ():
    """Catches a default seed: two requests without one would give the same answer (2^-63 false alarms)."""
    with pytest.raises(ValueError, match="seed must be at least 0, got -3"):
        streams(-3)
    assert not torch.equal(draws(streams(None)[0]), draws(streams(None)[0]))
