"""Rounds in compiled code decide what the host's loop decides, with the same uniforms; what they cannot is left to it."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from laws import random_head

from specdecpp import NativeRunner, Round, Sampling
from specdecpp.drafting import Room
from specdecpp.policies import (
    AutoOff,
    CostAware,
    Costs,
    CumulativeConfidence,
    Entropy,
    Fixed,
    Heuristic,
    MaxConfidence,
    Policy,
    SpecDecPP,
)
from specdecpp.runners import native
from specdecpp.runners.acceptance import block_verdict, greedy_verdict, token_verdict
from specdecpp.runners.compiled_round import CompiledRound, _filters, compiled_round
from specdecpp.runners.native import Filters, Verifying
from specdecpp.runners.native.library import library
from specdecpp.sampling import probabilities, streams
from specdecpp.session import Session
from specdecpp.testing import Enumerator, tiny_draft, tiny_model
from specdecpp.verification import (
    BlockVerification,
    CompareVerification,
    GreedyVerification,
    TokenVerification,
    Verification,
)

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")

COSTS = Costs(draft_s=0.25, passes={1: 1.0, 2: 1.1, 5: 1.4, 9: 2.0})
VOCAB = 71  # not a multiple of a register


class Pair:
    def __init__(self, noise: float):
        target = tiny_model("llama", seed=1, head_dim=16, vocab_size=VOCAB)
        self.target, self.draft = (NativeRunner(m, num_threads=1) for m in (target, tiny_draft(target, noise=noise)))

    def session(
        self,
        policy: Policy,
        sampling: Sampling,
        *,
        seed: int,
        verification: Verification = TokenVerification(),  # noqa: B008 (frozen)
        **more: Any,
    ) -> Session:
        options = {"prompt": [3, 5, 2, 9], "max_tokens": 40, "costs": COSTS, "ends": (7, 11, 30)} | more
        return Session(
            target=self.target.fresh(),
            draft=self.draft.fresh(),
            policy=policy,
            verification=GreedyVerification() if sampling.is_greedy else verification,
            sampling=sampling,
            coins=streams(seed, "cpu", draw=self.draft.draw),
            **options,
        )


@pytest.fixture(scope="module", params=[0.05, 0.4])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


def head(**more: Any) -> Any:
    return random_head(32, seed=4, scale=0.4, form="look_ahead", vocab_size=VOCAB, **more)


def cost_aware(of: Any) -> CostAware:
    return CostAware(head=of.with_card(calibration=replace(of.card.calibration, num_labels=9, bias=0.7, temperature=1.3)))


POLICIES: dict[str, Callable[[], Policy]] = {
    "none": lambda: Fixed(k=0),
    "fixed": lambda: Fixed(k=5),
    "heuristic": lambda: Heuristic(),
    "max confidence": lambda: MaxConfidence(min_tokens=2, max_tokens=6),
    "cumulative q": lambda: CumulativeConfidence(),
    "specdecpp": lambda: SpecDecPP(head=head(scalars=("depth", "log_q")), threshold=0.6, min_tokens=1),
    "specdecpp, all scalars": lambda: SpecDecPP(head=head(scalars=("gap", "log_q", "depth", "entropy")), threshold=0.6),
    "costs": lambda: cost_aware(head(scalars=("log_q",), width=9)),
    "auto-off": lambda: AutoOff(policy=CumulativeConfidence(threshold=0.1, min_tokens=2), patience=1, probe_every=2),
    "auto-off costs": lambda: AutoOff(policy=cost_aware(head(scalars=("log_q",))), patience=2, probe_every=3),
    "costs, from none": lambda: replace(cost_aware(head()), min_tokens=0, prior=0.4),
}
MANNERS: dict[str, tuple[Sampling, Verification]] = {
    "greedy": (Sampling(temperature=0.0), TokenVerification()),
    "plain": (Sampling(), TokenVerification()),
    "warm": (Sampling(temperature=1.7), TokenVerification()),
    "block": (Sampling(temperature=1.3), BlockVerification()),
    "top-p": (Sampling(temperature=1.2, top_p=0.9), TokenVerification()),
    "top-p, block": (Sampling(top_p=0.8), BlockVerification()),
    "top-k": (Sampling(temperature=1.7, top_k=7), TokenVerification()),
    "min-p": (Sampling(temperature=1.4, min_p=0.05), TokenVerification()),
    "penalty": (Sampling(temperature=1.1, repetition_penalty=1.4), TokenVerification()),
    "penalty, greedy": (Sampling(temperature=0.0, repetition_penalty=1.4), TokenVerification()),
    "all": (
        Sampling(temperature=1.1, top_k=40, top_p=0.97, min_p=0.002, repetition_penalty=1.05),
        BlockVerification(),
    ),
}


def rounds_of(session: Session) -> list[Round]:
    session.prefill()
    rounds = []
    while session.finish_reason is None:
        rounds.append(session.step())
    return rounds


@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_rounds_are_those_of_the_host(policy: str, manner: str, pair: Pair) -> None:
    """Catches another token, stop, estimate or verdict than the host's, a uniform that is used twice or not at all, and a
    cache that holds one token more or less: answer by answer, for many seeds. The host's loop decodes where somebody watches.
    """
    rule, (sampling, verification) = POLICIES[policy](), MANNERS[manner]
    drafted, ended = set(), set()
    for seed in range(8):
        own, hosts = (pair.session(rule, sampling, seed=seed, verification=verification) for _ in range(2))
        assert isinstance(own._whole, CompiledRound)
        hosts.watch = lambda draft, logits, p: None
        ours, theirs = rounds_of(own), rounds_of(hosts)
        assert own.tokens == hosts.tokens
        assert own.finish_reason == hosts.finish_reason
        assert (own.target.length, own.draft.length) == (hosts.target.length, hosts.draft.length)
        for a, b in zip(ours, theirs, strict=True):
            assert (a.pieces, a.num_drafted, a.num_accepted, a.finish_reason) == (
                b.pieces,
                b.num_drafted,
                b.num_accepted,
                b.finish_reason,
            )
            assert a.stop_reason == b.stop_reason
            assert a.judged == pytest.approx(b.judged, abs=1e-5)
            assert 0 < a.forward_s <= a.draft_s + a.verify_s
        drafted |= {r.num_drafted for r in ours}
        ended.add(own.finish_reason)
    assert policy in ("none", "fixed") or sampling.needs_seen or len(drafted) > 1
    assert sampling.is_greedy or "eos" in ended


def test_evidence_that_equals_its_floor_is_enough(pair: Pair) -> None:
    """Catches a stop where q is as large as the rule asks for: so cold that every q is 1."""
    rule, sampling = MaxConfidence(threshold=1.0, max_tokens=4), Sampling(temperature=1e-4)
    own, hosts = (pair.session(rule, sampling, seed=2, ends=()) for _ in range(2))
    hosts.watch = lambda draft, logits, p: None
    drafted = [r.num_drafted for r in rounds_of(own)]
    assert drafted == [r.num_drafted for r in rounds_of(hosts)]
    assert max(drafted) == 4


def test_a_round_that_the_host_decodes_may_stand_between(pair: Pair) -> None:
    """Catches tokens that one of the two has not read when the other goes on, and streams that part."""
    rule, sampling = CumulativeConfidence(), Sampling()
    own, mixed = (pair.session(rule, sampling, seed=3, ends=()) for _ in range(2))
    own.prefill()
    mixed.prefill()
    for i in range(8):
        mixed.watch = None if i % 3 else lambda draft, logits, p: None
        assert own.step().pieces == mixed.step().pieces


def test_a_draft_that_has_read_nothing_catches_up(pair: Pair) -> None:
    """Catches a long text that the draft reads in front of its first candidate with the wrong position."""
    prompt = [3 + i % 60 for i in range(200)]
    own, hosts = (pair.session(Fixed(k=3), Sampling(), seed=1, prompt=prompt, ends=()) for _ in range(2))
    hosts.watch = lambda draft, logits, p: None
    for session in (own, hosts):
        session.prefill()
        session.draft.rollback(0)
        session.target.rollback(10)
    assert [own.step().tokens for _ in range(4)] == [hosts.step().tokens for _ in range(4)]


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
        library().native_distribution(x.data_ptr(), size, ctypes.byref(_filters(sampling, marks)), found.data_ptr())
        expected = probabilities(logits, sampling, marks)
        differ = (found > 0) != (expected > 0)  # sums of thousands are rounded: a token at the edge of a nucleus, not more
        assert int(differ.sum()) <= size // 5_000
        assert len(set(logits[differ].tolist())) <= 1
        torch.testing.assert_close(found[~differ], expected[~differ], rtol=1e-3 if differ.any() else 1e-5, atol=0)


def verdict(runner: NativeRunner, tokens: list[int], q: torch.Tensor, coins: torch.Tensor, **how: Any) -> Verifying:
    """Of the last token of a context and candidates."""
    filters = Filters(temperature=how.pop("temperature"), top_p=1.0, penalty=1.0)
    task = Verifying(num_tokens=len(tokens), num=len(tokens) - 1, sampling=filters, **how)
    line, logits, states = torch.tensor(tokens), torch.empty(len(tokens), VOCAB), torch.empty(len(tokens), 32)
    task.tokens, task.coins, task.q = line.data_ptr(), coins.data_ptr(), q.data_ptr()
    task.logits, task.states = logits.data_ptr(), states.data_ptr()
    runner.verify(task)
    return task


@pytest.mark.parametrize("num", [0, 1, 3])
def test_the_verdict_as_a_function_of_uniforms(num: int, pair: Pair) -> None:
    """Catches a wrong row, coin, residual or bonus, candidate by candidate: the functions it is compared with have their law
    integrated in test_device_drafting.py. Rows of q that are far from p, so that every outcome occurs."""
    generator = torch.Generator().manual_seed(num)
    context = [3, 5, 2, 9, 4]
    seen = set()
    for _ in range(150):
        q = torch.rand(num + 1, VOCAB, generator=generator) ** 4
        q /= q.sum(-1, keepdim=True)
        tokens = q[:num].multinomial(1, generator=generator).flatten() if num else torch.zeros(0, dtype=torch.long)
        coins = torch.rand(num + 1, generator=generator, dtype=torch.float64)
        logits, _ = pair.target.fresh().extend([*context, *tokens.tolist()], rows=num + 1)
        for temperature, is_block in ((0.0, 0), (1.3, 0), (1.3, 1)):
            runner = pair.target.fresh()
            runner.extend(context[:-1], rows=1)
            made = verdict(runner, [context[-1], *tokens.tolist()], q, coins, temperature=temperature, is_block=is_block)
            if temperature:
                p = (logits / temperature).softmax(-1)
                places = torch.cat((coins[num:], coins[:num]))  # there the token's uniform comes first
                judge = block_verdict if is_block else token_verdict
                expected = judge(p, q, tokens, torch.tensor([num]), places)
            else:
                expected = greedy_verdict(logits, tokens, torch.tensor([num]))
            assert [made.num_accepted, made.next] == expected.tolist()
            assert runner.length == len(context) + num
            seen.add((is_block, made.num_accepted))
    assert seen >= {(is_block, count) for is_block in (0, 1) for count in range(num + 1)}


def test_what_is_left_to_the_host(pair: Pair) -> None:
    """Catches a request that would lose its penalty, its verification or its stop rule."""

    class Other(CumulativeConfidence):
        def stop(self, draft: Any, memory: Any) -> str | None:
            return "mine"

    request: dict[str, Any] = {
        "target": pair.target.fresh(),
        "draft": pair.draft.fresh(),
        "policy": CumulativeConfidence(),
        "verification": TokenVerification(),
        "sampling": Sampling(temperature=0.7),
        "coins": streams(0, "cpu"),
    }
    assert compiled_round(**request) is not None
    lagged = SpecDecPP(head=random_head(32, seed=1))
    changes: dict[str, Any]
    for changes in (
        {"sampling": Sampling(repetition_penalty=1.2)},
        {"verification": CompareVerification()},
        {"policy": Entropy()},
        {"policy": Other()},
        {"policy": AutoOff(policy=Other())},
        {"policy": MaxConfidence(drop=True)},
        {"policy": lagged},
        {"coins": (Enumerator([]), Enumerator([]))},
    ):
        made = compiled_round(**(request | changes))
        left = made is None or made.propose([1, 2], memory=made.policy.start(), room=Room(num_tokens=4)) is None
        assert left, changes
