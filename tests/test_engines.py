"""Engines give what the host gives, by the same uniforms, alone and in batches; and what is left to the host."""

import ctypes
import gc
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from distributions import finish, unchecked
from engine_cases import BATCHES, CASES, ENGINES, HEADS, MANNERS, RULES, Models, models_of
from kinds import needs_compiler

from specdecpp import Decoder, Pair, Sampling
from specdecpp.backends import LeanModel, native
from specdecpp.backends.graphs.engine import Device
from specdecpp.backends.native.library import Filters, library
from specdecpp.cli.common import kind_of
from specdecpp.metrics import Step
from specdecpp.policies import CumulativeConfidence, Fixed, MaxConfidence, SpecDecPP
from specdecpp.policy_spec import VERIFICATION_NAMES
from specdecpp.sampling import probabilities
from specdecpp.scheduler import step
from specdecpp.serving.schema import Speculative
from specdecpp.session import Session
from specdecpp.step import Host, Result
from specdecpp.testing import Enumerator, tiny_model, tiny_tokenizer
from specdecpp.verify import (
    BlockVerification,
    CompareVerification,
    GreedyVerification,
    TokenVerification,
    Verdict,
    verifications,
)


def marked(kind: str, *case: str) -> Any:
    return pytest.param(kind, *case, marks=needs_compiler if kind == "native" else ())


KINDS = [marked("native"), "device"]


@pytest.fixture(scope="module", params=KINDS)
def models(request: pytest.FixtureRequest) -> Models:
    return models_of(request.param)


# --- the same as the host --------------------------------------------------------------------------------------------------


def same(own: list[Session], hosts: list[Session]) -> list[Step]:
    """Decode requests together to their ends, and each alone by the host; they must agree in everything but seconds."""
    steps = []
    while running := [(a, b) for a, b in zip(own, hosts, strict=True) if a.finish_reason is None]:
        for (session, host), a in zip(running, step([session for session, _ in running]), strict=True):
            if isinstance(a, Exception):
                raise a
            if not isinstance(a, Step):
                host.prefill()
                continue
            b = host.step()
            assert a.pieces == b.pieces
            assert (a.num_drafted, a.num_accepted, a.finish_reason) == (b.num_drafted, b.num_accepted, b.finish_reason)
            assert (a.stop.words, a.stop.evidence) == (b.stop.words, b.stop.evidence)
            assert a.stop.threshold == pytest.approx(b.stop.threshold, rel=1e-4)
            assert a.stop.value == pytest.approx(b.stop.value, abs=1e-5)
            assert a.judged == pytest.approx(b.judged, abs=1e-5)
            assert a.tv == pytest.approx(b.tv, abs=1e-4)
            assert a.overlaps == pytest.approx(b.overlaps, abs=1e-5)
            assert a.draft_s >= 0
            assert a.verify_s > 0
            assert session.target.length == host.target.length
            in_vain = session.draft.length - host.draft.length
            assert 0 <= in_vain <= isinstance(session.engine, Device)
            steps.append(a)
    assert [session.tokens for session in own] == [host.tokens for host in hosts]
    assert [session.finish_reason for session in own] == [host.finish_reason for host in hosts]
    return steps


@pytest.mark.parametrize(("kind", "policy", "manner"), [marked(*case) for case in CASES])
def test_steps_are_those_of_the_host(kind: str, policy: str, manner: str) -> None:
    """Catches another token, stop, estimate, verdict or cache length than the host's, and what is another request's."""
    models, rule, (sampling, verification) = models_of(kind), RULES[policy], MANNERS[manner]
    drafted, ended = set(), set()
    with unchecked():
        for seeds in BATCHES[kind]:
            more = {} if kind == "native" else {"max_tokens": 24}
            pairs = [twins(models, rule, sampling, verification, seed=seed, **more) for seed in seeds]
            own, hosts = map(list, zip(*pairs, strict=True))
            assert {type(session.engine) for session in own} == {ENGINES[kind]}
            if 1 in seeds:
                own[seeds.index(1)].watch = lambda plan, result: None
            drafted |= {r.num_drafted for r in same(own, hosts)}
            ended |= {session.finish_reason for session in own}
    if kind == "native" and manner in ("plain", "block"):
        assert policy in ("none", "fixed") or len(drafted) > 1
        assert "eos" in ended


@pytest.mark.parametrize("manner", ["greedy", "plain", "block", "all"])
@pytest.mark.parametrize("policy", ["none", "cumulative", "cost-aware", "specdecpp-deep"])
def test_watching_changes_nothing_and_sees_what_the_host_sees(policy: str, manner: str, models: Models) -> None:
    """Catches logprobs or details that change the answer of a seed, and rows of another step, draft token or model."""
    rule, (sampling, verification) = RULES[policy], MANNERS[manner]
    plain, own, hosts = (models.session(rule, sampling, verification, seed=5) for _ in range(3))
    hosts.engine = Host()
    seen: dict[str, list[Result]] = {"own": [], "hosts": []}
    own.watch = lambda plan, result: seen["own"].append(result)
    hosts.watch = lambda plan, result: seen["hosts"].append(result)
    with unchecked():
        texts = [[r.tokens for r in finish(session)] for session in (plain, own, hosts)]
        assert texts[0] == texts[1] == texts[2]
        for a, b in zip(seen["own"], seen["hosts"], strict=True):
            assert a.rows is not None
            assert b.rows is not None
            for name in ("q", "p", "logits"):
                one, other = getattr(a.rows, name), getattr(b.rows, name)
                torch.testing.assert_close(one, other.to(one.dtype), atol=1e-4, rtol=1e-4)
            drawn = a.rows.q[range(a.num_drafted), a.tokens].tolist()
            assert list(a.q) == pytest.approx(drawn if a.q else [], abs=1e-5)


def twins(models: Models, *how: Any, **more: Any) -> tuple[Session, Session]:
    """Two sessions alike, the second decoded by the host."""
    return models.session(*how, **more), models.session(*how, by_host=True, **more)


def test_evidence_that_equals_its_threshold_is_enough(models: Models) -> None:
    """Catches a stop where q is as large as the rule asks for, here or on the host: so cold that every q is 1."""
    both = twins(models, MaxConfidence(threshold=1.0, max_tokens=4), Sampling(temperature=1e-4), seed=2, ends=())
    assert [max(r.num_drafted for r in finish(session)) for session in both] == [4, 4]


def test_a_rule_that_drops_its_last_draft_token(models: Models) -> None:
    """Catches a draft token that is kept although the rule removes it, or that stays in a cache."""
    rule = MaxConfidence(threshold=0.3, drop=True, max_tokens=6)
    drafted = set()
    with unchecked():
        for seed, (sampling, verification) in itertools.product(range(3), [MANNERS["greedy"], MANNERS["compare"]]):
            own, hosts = twins(models, rule, sampling, verification, seed=seed, ends=())
            drafted |= {r.num_drafted for r in same([own], [hosts])}
    assert {0, 1} <= drafted


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_draft_has_read_is_not_read_again(kind: str) -> None:
    """Catches a draft that is taken to have read less than it has, which no token shows: steps accepted whole."""
    own, hosts = twins(models_of(kind, noise=0.02), Fixed(k=2), Sampling(), seed=2, ends=())
    with unchecked():
        steps = same([own], [hosts])
    assert any(a.num_accepted == b.num_accepted == 2 for a, b in itertools.pairwise(steps))


def test_engines_may_take_turns(models: Models) -> None:
    """Catches tokens that one of the two has not read when the other goes on, and streams that part."""
    own, mixed = (models.session(CumulativeConfidence(), Sampling(), seed=3, ends=()) for _ in range(2))
    own.prefill()
    mixed.prefill()
    ours = own.engine
    for i in range(8):
        mixed.engine = ours if i % 3 else Host()
        assert own.step().pieces == mixed.step().pieces


def test_a_draft_that_has_read_nothing_catches_up(models: Models) -> None:
    """Catches a long text that a model reads in front of its first draft token with the wrong position."""
    prompt = [3 + i % 60 for i in range(200)]
    own, hosts = twins(models, Fixed(k=3), Sampling(), seed=1, prompt=prompt, ends=())
    for session in (own, hosts):
        session.prefill()
        session.draft.rollback(0)
        session.target.rollback(10)
    assert [own.step().tokens for _ in range(4)] == [hosts.step().tokens for _ in range(4)]


def test_a_request_is_freed_with_its_session(models: Models) -> None:
    """Catches an engine that holds on to the caches of requests that are over."""
    session = models.session(Fixed(k=2), Sampling())
    finish(session)
    engine: Any = session.engine
    kept = engine._requests
    request = session._request
    assert request in kept
    num = len(kept)
    del session, request
    gc.collect()
    assert len(kept) < num


# --- the compiled pieces by themselves -------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("size", [1, 71, 6_000, 50_000])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_distributions_are_those_of_the_host(size: int, spread: float) -> None:
    """Catches a filter in another order, one that sees too few tokens, and ties that are taken by halves."""
    generator = torch.Generator().manual_seed(size)
    logits = (spread * torch.randn(size, generator=generator)).mul(16).round().div(16)  # with many that are equal
    logits[::5] = -torch.inf if size > 5 else logits[::5]
    seen = torch.rand(size, generator=generator) < 0.3
    for sampling in (
        *(Sampling(top_p=p, temperature=0.7) for p in (0.05, 0.503, 0.9003, 0.9991)),
        *(Sampling(top_k=k) for k in (1, 13, 4_000)),
        *(Sampling(min_p=p, temperature=1.3) for p in (0.03, 0.9, 1.0)),
        Sampling(repetition_penalty=1.3),
        Sampling(temperature=0.9, top_k=50, top_p=0.8003, min_p=0.02, repetition_penalty=0.8),
    ):
        found, x = torch.empty(size), logits.clone()
        marks = seen if sampling.needs_seen else None
        library().native_distribution(x.data_ptr(), size, ctypes.byref(Filters.of(sampling, marks)), found.data_ptr())
        expected = probabilities(logits, sampling, marks)
        differ = (found > 0) != (expected > 0)  # sums of thousands are rounded: a token at the edge of a nucleus, not more
        assert int(differ.sum()) <= size // 5_000
        assert len(set(logits[differ].tolist())) <= 1
        torch.testing.assert_close(found[~differ], expected[~differ], rtol=1e-3 if differ.any() else 1e-5, atol=0)


# --- what is the host's ----------------------------------------------------------------------------------------------------


class Stubborn(CumulativeConfidence):
    """A rule of somebody's own."""

    def stop(self, draft: Any, memory: Any) -> str | None:
        return "mine" if draft.num_tokens == 4 else None


class Mine(SpecDecPP):
    """A rule with a way to judge of its own, whose thresholds are inherited."""

    num_asked = 0

    def judge(self, draft: Any, hidden: Any) -> Any:
        Mine.num_asked += 1
        return super().judge(draft, hidden)


class Doubting(SpecDecPP):
    """A rule that makes something else of the estimates of its head."""

    num_asked = 0

    def estimator(self, *, is_greedy: bool) -> Any:
        estimate = super().estimator(is_greedy=is_greedy)

        def halved(*given: Any) -> float:
            Doubting.num_asked += 1
            return 0.5 * estimate(*given)

        return halved


class Picky(TokenVerification):
    """A verification of somebody's own."""

    num_calls = 0

    def __call__(self, *args: Any, **more: Any) -> Verdict:
        Picky.num_calls += 1
        return super().__call__(*args, **more)


class Alone:
    """One that inherits from nothing."""

    allows_dropping, greedy_only = False, False

    def __call__(self, *args: Any) -> Verdict:
        return Picky()(*args)


def test_a_rule_of_ones_own_is_asked(models: Models) -> None:
    """Catches thresholds of a base class that are followed although a subclass stops otherwise."""
    session = models.session(Stubborn(), Sampling(), ends=())
    session.prefill()
    outcome = session.step()
    assert (outcome.num_drafted, outcome.stop_reason) == (4, "mine")


@pytest.mark.parametrize("kind", [Mine, Doubting])
def test_a_judge_of_ones_own_is_honoured(kind: Any, models: Models) -> None:
    """Catches a judge, or what a rule makes of its head's estimate, that is lost on a fast path (it was, on two of three)."""
    kind.num_asked = 0
    session = models.session(kind(head=HEADS.ahead, threshold=1.0, max_tokens=3), Sampling(), ends=())
    assert type(session.engine) is Host
    session.prefill()
    assert (session.step().num_drafted, kind.num_asked) == (3, 3)


@pytest.mark.parametrize("verification", [Picky(), Alone()], ids=["subclass", "alone"])
def test_a_verification_of_ones_own_is_called(verification: Any, models: Models) -> None:
    """Catches a subclass that is taken for its base (it was, on the device), and one that has to inherit."""
    Picky.num_calls = 0
    session = models.session(Fixed(k=2), Sampling(), verification, max_tokens=9)
    num_steps = len(finish(session))
    assert Picky.num_calls == num_steps > 0


def test_what_is_left_to_the_host(models: Models) -> None:
    """Catches a request that an engine decodes as something it is not, and a refusal without a reason."""
    request = models.session(CumulativeConfidence(), Sampling())._request
    engine = ENGINES[models.kind]()
    assert engine.refusal(request) is None
    others: dict[str, dict[str, Any]] = {
        "models": {"target": LeanModel(tiny_model("llama", seed=1)).new_cache()},
        "randomness": {"randomness": (Enumerator([]), Enumerator([]))},
        "Picky": {"verification": Picky()},
        "GreedyVerification": {"verification": GreedyVerification()},
        "TokenVerification": {"sampling": Sampling(temperature=0.0)},
        "Mine": {"policy": Mine(head=HEADS.ahead)},
    }
    for word, change in others.items():
        assert word in engine.refusal(replace(request, **change))


def test_a_seed_means_the_same_answer_on_every_engine() -> None:
    """Catches engines that use the uniforms of a seed in other orders, on a pair without near ties among its draws."""
    kinds = ["native", "device"] if native.compiler() else ["device"]
    for policy, verification in itertools.product(("cumulative", "entropy", "specdecpp-lagged"), ("token", "block", "compare")):
        texts = []
        for kind in kinds:
            models = Models(kind)
            for engine in (ENGINES[kind](), Host()):
                session = models.session(RULES[policy], Sampling(temperature=0.8), verification, seed=11)
                session.engine = engine
                with unchecked():
                    finish(session)
                texts.append(session.tokens)
        assert all(text == texts[0] for text in texts)


def test_block_verification_after_a_wider_step() -> None:
    """Catches work for a new width that is rehearsed with what the step before it had (an IndexError on graphs)."""
    models = Models("device", noise=0.05)
    pair = Pair(target=models.target, draft=models.draft, tokenizer=tiny_tokenizer())
    widths = set()
    for seed in range(4):
        decoder = Decoder(pair, policy=CumulativeConfidence(threshold=0.2, max_tokens=16), verification=BlockVerification())
        with unchecked():
            answer = decoder.generate([3, 5, 9], max_tokens=40, seed=seed, ignore_eos=True)
        assert len(answer.tokens) == 40
        widths |= {r.num_drafted for r in answer.steps}
    assert len(widths) > 2


def test_one_list_names_the_verifications() -> None:
    """Catches a verification that can be typed in one place only, and one that a request may name though it is never chosen."""
    named = set(verifications()) - {"greedy"}
    served = Speculative.model_json_schema()["properties"]["verification"]["anyOf"][0]
    assert named == set(VERIFICATION_NAMES) == set(served["enum"]) == {kind_of(name) for name in named}
    assert {type(v) for v in verifications().values()} >= {BlockVerification, CompareVerification, GreedyVerification}
