"""Verifications that do not keep the target's distribution: each keeps the one it states, none is had unasked."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from distributions import Distribution, Request, finish, largest_difference
from hypothesis import given, settings
from hypothesis import strategies as st
from served import served
from typer.testing import CliRunner, Result

from specdecpp import cli
from specdecpp.decoder import Decoder
from specdecpp.errors import UnsoundError
from specdecpp.lab import lossy
from specdecpp.loading.pair import Pair, load_pair
from specdecpp.policies import Fixed
from specdecpp.sampling import Sampling, streams
from specdecpp.serving.app import build
from specdecpp.serving.settings import ServerSettings
from specdecpp.testing import Enumerator, TableModel, enumerate_distribution, tiny_tokenizer
from specdecpp.verify import GreedyVerification, TokenVerification, verification_for, verifications

pytestmark = pytest.mark.lab

Table = list[float]


# The distributions again, token by token in plain Python, from the papers' words.


def tv(p: Table, q: Table) -> float:
    return sum(max(0.0, a - b) for a, b in zip(p, q, strict=True))


def kl(p: Table, q: Table) -> float:
    return sum((a * math.log(a / b) if b else math.inf) for a, b in zip(p, q, strict=True) if a)


def js(p: Table, q: Table) -> float:
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return (kl(p, middle) + kl(q, middle)) / 2


def deferred(p: Table, q: Table, defers: list[bool]) -> Table:
    """A token of the draft's stays where it is not deferred; else the target draws."""
    lost = sum(b for b, is_deferred in zip(q, defers, strict=True) if is_deferred)
    return [(0.0 if is_deferred else b) + lost * a for a, b, is_deferred in zip(p, q, defers, strict=True)]


def entropy(p: Table) -> float:
    return -sum(a * math.log(a) for a in p if a)


LAWS: dict[str, tuple[lossy.Lossy, Any]] = {
    "fuzzy-js": (lossy.Fuzzy(0.1), lambda p, q: q if js(p, q) <= 0.1 else p),
    "fuzzy-kl": (lossy.Fuzzy(0.2, "kl"), lambda p, q: q if kl(p, q) <= 0.2 else p),
    "fuzzy-tv": (lossy.Fuzzy(0.3, "tv"), lambda p, q: q if tv(p, q) <= 0.3 else p),
    "chow": (lossy.Chow(0.4), lambda p, q: p if max(q) < 0.6 else q),
    "opt": (lossy.OptimalDeferral(0.3), lambda p, q: p if max(q) < max(p) - 0.3 * tv(p, q) else q),
    "token-cascade": (lossy.TokenCascade(0.3), lambda p, q: deferred(p, q, [a < 0.7 * max(p) for a in p])),
    "typical": (lossy.Typical(0.3), lambda p, q: deferred(p, q, [a <= min(0.3, 0.3**0.5 * math.exp(-entropy(p))) for a in p])),
    "typical-delta": (
        lossy.Typical(0.3, 0.6),
        lambda p, q: deferred(p, q, [a <= min(0.3, 0.6 * math.exp(-entropy(p))) for a in p]),
    ),
    "tv": (
        lossy.TVBudget(0.15),
        lambda p, q: [a + min(1.0, 0.15 / (tv(p, q) or 1.0)) * (b - a) for a, b in zip(p, q, strict=True)],
    ),
}


def pair_of(seed: int, vocab_size: int = 3) -> tuple[TableModel, TableModel]:
    """A target and a draft whose rows are near each other in some contexts, far in others, with zeros."""
    target = TableModel.random(vocab_size=vocab_size, depth=2, seed=seed, sparsity=0.2)
    other = TableModel.random(vocab_size=vocab_size, depth=2, seed=seed + 100, sparsity=0.2)
    rows = {}
    for i, (context, row) in enumerate(target.table.items()):
        share = (0.0, 0.2, 0.6, 1.0)[i % 4]
        rows[context] = ((1 - share) * row + share * other.table[context]).tolist()
    return target, TableModel(rows, depth=2)


def stated_distribution(request: Request, distribution: Any, k: int) -> Distribution:
    """The distribution of answers under Fixed(k): places with a draft token by the rule's distribution, the one after k
    accepted by p. Whether the draft token was accepted decides which places have one, so it is walked: accepted with min(m, q),
    else (m - q)+."""
    found: Distribution = {}

    def walk(new: tuple[int, ...], drafted: int, chance: float) -> None:
        if len(new) == request.max_tokens:
            found[new, "length"] = found.get((new, "length"), 0.0) + chance
            return
        text = (*request.prompt, *new)
        p, q = request.target.distribution(text).tolist(), request.draft.distribution(text).tolist()
        if drafted == 0:  # the bonus, and a step anew
            for token, mass in enumerate(p):
                if mass:
                    begin((*new, token), chance * mass)
            return
        for token, (m, b) in enumerate(zip(distribution(p, q), q, strict=True)):
            if kept := min(m, b):
                walk((*new, token), drafted - 1, chance * kept)
            if m > b:
                begin((*new, token), chance * (m - b))

    def begin(new: tuple[int, ...], chance: float) -> None:
        walk(new, min(k, request.max_tokens - len(new) - 1) if len(new) < request.max_tokens else 0, chance)

    begin((), 1.0)
    return found


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LAWS)
def test_a_session_has_the_stated_distribution(name: str, seed: int, k: int):
    """Catches a lossy rule that keeps another distribution than its docstring states: in acceptance, correction or bonus."""
    rule, distribution = LAWS[name]
    target, draft = pair_of(seed)
    request = Request(target=target, draft=draft, max_tokens=4, lossless=False)
    found = request.distribution(Fixed(k=k), rule)
    assert largest_difference(found, stated_distribution(request, distribution, k)) < 1e-12
    assert largest_difference(found, request.own_distribution()) > 1e-3  # the tables can tell


@settings(max_examples=150)
@given(seed=st.integers(0, 10**6), name=st.sampled_from(list(LAWS)), sparsity=st.floats(0, 0.6))
def test_distributions_of_random_rows(seed: int, name: str, sparsity: float):
    """Catches a distribution that is right on the tables above only, and one draft token's distribution that is not it."""
    (p, q) = (row(seed, sparsity), row(seed + 10**6, sparsity))
    rule, distribution = LAWS[name]
    expected = torch.tensor(distribution(p.tolist(), q.tolist()), dtype=p.dtype)
    found = rule.distribution(p, q)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert found.min() >= 0
    assert float(found.sum()) == pytest.approx(1.0, abs=1e-12)

    def draw(coins: Any) -> int:
        token = coins.categorical(q)
        verdict = rule(torch.stack([p, p]), q[None], torch.tensor([token]), coins)
        assert verdict.tv[0] == pytest.approx(tv(p.tolist(), expected.tolist()), abs=1e-12)
        assert len(verdict.tv) == verdict.num_accepted + 1
        return token if verdict.num_accepted else verdict.next_token

    drawn = enumerate_distribution(draw)
    assert max(abs(drawn.get(i, 0.0) - x) for i, x in enumerate(expected.tolist())) < 1e-12


def row(seed: int, sparsity: float = 0.2, vocab_size: int = 5) -> torch.Tensor:
    model = TableModel.random(vocab_size=vocab_size, depth=0, seed=seed, sparsity=sparsity)
    return model.distribution(())


def test_single_precision_stays_within_the_budget():
    """Catches a budget that rounding overdraws on vocabularies of a real size."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn((4, 49152), generator=generator).mul(3).softmax(-1) for _ in "pq")
    assert float(lossy.variation(lossy.TVBudget(0.05).distribution(p, q), p).max()) <= 0.05 * (1 + 1e-4)


def test_temperature_zero_goes_by_the_distribution_at_one():
    """Catches a greedy step that reads one-hot rows, or tells of no deviation: it changed the token here."""
    p, q = torch.tensor([[0.45, 0.55], [0.3, 0.7]]).double(), torch.tensor([[0.55, 0.45]]).double()
    verdict = lossy.AtZero(lossy.Fuzzy(0.2))(p.log(), q, torch.tensor([0]), Enumerator([]))
    assert (verdict.num_accepted, verdict.next_token, verdict.tv) == (1, 1, (1.0, 0.0))
    verdict = lossy.AtZero(lossy.Fuzzy(0.001))(p.log(), q, torch.tensor([0]), Enumerator([]))
    assert (verdict.num_accepted, verdict.next_token, verdict.tv) == (0, 1, (0.0,))
    zero = Sampling(temperature=0.0)
    assert verification_for(zero, lossy.TVBudget()) == verification_for(zero, TokenVerification()) == GreedyVerification()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_session_tells_what_it_spent(temperature: float):
    """Catches a deviation that is lost on the way to `Step`, and greedy steps without rows of the draft."""
    target, draft = pair_of(1)
    exact_one = Request(target=target, draft=draft, sampling=Sampling(temperature=temperature), max_tokens=30)
    loose, exact = (
        request.session(Fixed(k=3), verification_for(request.sampling, rule), streams(0))
        for request, rule in ((replace(exact_one, lossless=False), lossy.Fuzzy(10.0)), (exact_one, TokenVerification()))
    )
    assert sum(r.tv for r in finish(loose)) > 0
    assert sum(r.tv for r in finish(exact)) == 0
    assert (loose.is_lossless, exact.is_lossless) == (False, True)


@pytest.mark.parametrize("name", lossy.LOSSY)
def test_refused_unless_it_is_asked_for(name: str):
    """Catches a decoder, a session, a loop of transformers or a bench that changes the distribution unasked."""
    from specdecpp.bench.contest import BenchPlan
    from specdecpp.integrations.transformers import custom_generate

    rule: Any = verifications()[name]
    target, draft = pair_of(1)
    request, pair = Request(target=target, draft=draft), Pair(target=target, draft=draft, tokenizer=tiny_tokenizer(3))
    with pytest.raises(UnsoundError, match="lossless=False"):
        request.distribution(Fixed(k=1), rule)
    with pytest.raises(UnsoundError, match="lossless=False"):
        Decoder(pair, policy=Fixed(k=1), verification=rule)
    with pytest.raises(UnsoundError, match="lossless=False"):
        custom_generate("nowhere", verification=rule)
    with pytest.raises(ValueError, match="a bench compares the verifications token, block"):
        BenchPlan(verifications=(name,))
    assert Decoder(pair, policy=Fixed(k=1), verification=rule, lossless=False).verification == rule


def call(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, list(arguments))


def test_the_verbs_refuse_and_say_what_to_do(folder: Path):
    """Catches a verb that changes the distribution unasked, and one that hides it when it was asked."""
    names = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    plain = ["generate", "aba", *names, "--policy", "fixed:3", "--verification", "fuzzy", "--max-tokens", "8"]
    refused = call(*plain)
    assert refused.exit_code == 2
    assert "--lossy" in refused.stderr
    told = json.loads(call(*plain, "--lossy", "--temperature", "1", "--seed", "0", "--json").stdout)
    assert told["lossless"] is False
    assert told["metrics"]["mean_tv"] > 0
    exact = json.loads(call(*plain[:-4], "--max-tokens", "8", "--seed", "0", "--json").stdout)
    assert (exact["lossless"], exact["metrics"]["mean_tv"]) == (True, 0)
    refused = call("bench", *names, "--verification", "tv")
    assert refused.exit_code == 2
    assert "got 'tv'" in refused.stderr
    refused = call("serve", *names, "--verification", "tv")
    assert refused.exit_code == 2
    assert "lossless" in refused.stderr


def test_a_server_refuses_and_says_so(folder: Path):
    """Catches a request that gets another distribution without asking, and a reply that does not tell of it."""
    pair = load_pair(folder / "target", draft=folder / "draft", backend="eager")
    with pytest.raises(UnsoundError, match="lossless"):
        build(pair, ServerSettings(policy=Fixed(k=3), verification="tv"))
    with served(pair, policy=Fixed(k=3)) as server, httpx2.Client(base_url=server.url, timeout=60) as client:

        def ask(temperature: float, **how: Any) -> Any:
            body = {"prompt": "aba", "max_tokens": 12, "seed": 0, "temperature": temperature, "ignore_eos": True}
            return client.post("/v1/completions", json=body | {"speculative": how})

        refused = ask(1.0, verification="fuzzy")
        assert refused.status_code == 400
        assert "lossless" in refused.json()["error"]["message"]
        for temperature in (0.0, 1.0):
            block = ask(temperature, verification="fuzzy", lossless=False).json()["speculative"]
            assert (block["verification"], block["lossless"]) == ("fuzzy", False)
        assert block["mean_tv"] > 0
        block = ask(0.0, verification="tv", lossless=False).json()["speculative"]
        assert (block["verification"], block["lossless"]) == ("greedy", True)
        block = ask(1.0).json()["speculative"]
        assert (block["verification"], block["lossless"], block["mean_tv"]) == ("token", True, 0)
