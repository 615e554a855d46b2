"""Rounds on a device, by the same code on a CPU: their law as a function of uniforms, integrated exactly; the stops and
records of the host's loop; what is not drafted there."""

import gc
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from laws import chi_square_tail, finish, largest_difference, random_head, unchecked
from torch import Tensor

from specdecpp import Decoder, LeanRunner, Pair
from specdecpp.drafting import Room, propose
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
from specdecpp.policies.cost_aware import Ledger
from specdecpp.runners import GraphRunner
from specdecpp.runners.acceptance import block_verdict, greedy_verdict, pick, token_verdict
from specdecpp.runners.device_round import DeviceRound, device_round
from specdecpp.sampling import Sampling, probabilities, streams
from specdecpp.session import Session
from specdecpp.testing import Enumerator, tiny_draft, tiny_model, tiny_tokenizer
from specdecpp.verification import (
    BlockVerification,
    CompareVerification,
    GreedyVerification,
    TokenVerification,
    Verification,
    block_acceptance,
    residual,
    token_acceptance,
)

Law = dict[tuple[int, ...], float]
COSTS = Costs(draft_s=0.25, passes={1: 1.0, 2: 1.1, 5: 1.4, 9: 2.0})
EDGE = 1e-6  # how near the ends of an interval of uniforms the outcome is looked up


def intervals(chances: Sequence[float]) -> Iterator[tuple[int, float, tuple[float, float]]]:
    """(outcome, its chance, two uniforms near the ends of its interval) of an inverted running sum."""
    start, total = 0.0, sum(chances)
    for i, chance in enumerate(c / total for c in chances):
        if chance > 0:
            margin = min(EDGE, chance / 4)
            yield i, chance, (start + margin, start + chance - margin)
        start += chance


def outcomes(p: Tensor, q: Tensor, tokens: Tensor, kind: str) -> Iterator[tuple[tuple[int, int], float, list[list[float]]]]:
    """What the host's functions say of K candidates: (verdict, chance, uniforms [final, coin 1..K] that should give it)."""
    num = len(tokens)
    h, carry = token_acceptance(p[:num], q, tokens), torch.ones(num + 1, dtype=p.dtype)
    if kind == "block" and num:
        h, carry = block_acceptance(p, q, tokens)
    for coins in itertools.product((True, False), repeat=num):
        chance = 1.0
        ends = []
        for heads, x in zip(coins, h.tolist(), strict=True):
            chance *= x if heads else 1 - x
            margin = min(EDGE, x / 4 if heads else (1 - x) / 4)
            ends.append((margin, x - margin) if heads else (x + margin, 1 - margin))
        if chance == 0:
            continue
        until_tails = (i for i, heads in enumerate(coins) if not heads)
        count = next(until_tails, num) if kind == "token" else max((i + 1 for i, heads in enumerate(coins) if heads), default=0)
        law = p[num] if count == num else residual(p[count], q[count], carry[count])
        for token, share, (low, high) in intervals(law.tolist()):
            yield (count, token), chance * share, [[low, *(e[0] for e in ends)], [high, *(e[1] for e in ends)]]


# --- the verdicts ----------------------------------------------------------------------------------------------------------


def tables(num_tokens: int, depth: int, seed: int) -> dict[tuple[int, ...], Tensor]:
    """A law after each prefix, some with zeros."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for length in range(depth + 1):
        for prefix in itertools.product(range(num_tokens), repeat=length):
            row = torch.rand(num_tokens, generator=generator, dtype=torch.float64) ** 3
            row[torch.rand(num_tokens, generator=generator) < 0.2] = 0
            made[prefix] = row / row.sum() if row.sum() > 0 else torch.full((num_tokens,), 1 / num_tokens).double()
    return made


def completed(law: Law, p: Callable[[tuple[int, ...]], Tensor], length: int) -> Law:
    """Answers cut or filled up by the target to one length: then a round's law must be the target's own."""
    out: Law = defaultdict(float)
    for answer, chance in law.items():
        if len(answer) >= length:
            out[answer[:length]] += chance
            continue
        for token, share in enumerate(p(answer).tolist()):
            for whole, c in completed({(*answer, token): chance * share}, p, length).items():
                out[whole] += c
    return out


@pytest.mark.parametrize(("width", "num"), [(w, n) for w in (1, 2, 3, 5) for n in range(min(w, 3))])
@pytest.mark.parametrize("kind", ["token", "block"])
def test_the_law_of_a_verdict_is_the_targets(kind: str, width: int, num: int) -> None:
    """Catches a wrong coin, row, residual or bonus, and padding that is read: integrated over the uniforms, within 1e-12."""
    judge = {"token": token_verdict, "block": block_verdict}[kind]
    p, q = tables(4, 3, seed=1), tables(4, 2, seed=2)
    law: Law = defaultdict(float)
    for path in itertools.product(range(4), repeat=num):
        drawn = float(torch.stack([q[path[:i]][path[i]] for i in range(num)]).prod()) if num else 1.0
        if drawn == 0:
            continue
        p_rows = torch.stack([p[path[:i]] for i in range(num + 1)])
        q_rows = torch.stack([q[path[:i]] for i in range(num)]) if num else p_rows[:0]
        padding = torch.rand(width, 4, generator=torch.Generator().manual_seed(0)).double()
        padded = torch.cat((p_rows, padding))[:width], torch.cat((q_rows, padding))[:width]
        line, extra = torch.tensor([*path, 2, 0, 1, 2])[: width - 1], torch.full((width,), 1e-9).double()
        for verdict, chance, uniforms in outcomes(p_rows, q_rows, torch.tensor(path, dtype=torch.long), kind):
            for u in uniforms:  # both ends of the piece: the breakpoint is where the formula says
                coins = torch.cat((torch.tensor(u).double(), extra))[:width]
                assert tuple(judge(*padded, line, torch.tensor([num]), coins).tolist()) == verdict
            law[(*path[: verdict[0]], verdict[1])] += drawn * chance
    own: Law = {(): 1.0}
    assert largest_difference(completed(law, p.__getitem__, 3), completed(own, p.__getitem__, 3)) < 1e-12


def test_a_residual_without_mass_falls_back_to_p() -> None:
    """Catches a division by zero where rounding has left p = q and a coin came up tails nevertheless."""
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).double()
    for u, token in ((0.1, 0), (0.9, 1)):
        coins = torch.tensor([u, 1.0]).double()
        assert token_verdict(p, p.clone(), torch.tensor([0]), torch.tensor([1]), coins).tolist() == [0, token]


def test_greedy_verdicts() -> None:
    """Catches a candidate behind the last one that counts, and the wrong row of the next token."""
    logits = torch.eye(5)[[3, 1, 4, 2, 0]]
    for num, line, expected in (
        (0, [3, 1, 4, 2], [0, 3]),
        (2, [3, 1, 4, 2], [2, 4]),
        (4, [3, 1, 4, 2], [4, 0]),
        (4, [3, 0, 4, 2], [1, 1]),
    ):
        assert greedy_verdict(logits, torch.tensor(line), torch.tensor([num])).tolist() == expected


def test_a_token_without_probability_is_never_picked() -> None:
    """Catches an inverse on the wrong side of a step, at the ends of the range too."""
    law = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    for u, token in ((0.0, 1), (0.4999, 1), (0.5, 3), (1 - 2**-53, 3)):
        assert pick(law, torch.tensor([u], dtype=torch.float64)).tolist() == [token]


# --- whole rounds ----------------------------------------------------------------------------------------------------------


class Given(DeviceRound):
    """With uniforms of the test's choice."""

    uniforms: Sequence[float] = ()
    coins: Sequence[float] = ()

    def _shake(self, uniforms: Tensor, stream: int) -> None:
        values = self.coins if stream else self.uniforms
        uniforms.fill_(0.5)
        uniforms[: len(values)] = torch.tensor(values).double()


@dataclass
class Two:
    """A tiny target and draft in float64, in graphs and lean."""

    vocab_size: int
    noise: float = 0.4

    def __post_init__(self) -> None:
        target = tiny_model("llama", vocab_size=self.vocab_size, seed=1)
        draft = tiny_draft(target, noise=self.noise)
        self.target, self.draft = (GraphRunner(m.double()) for m in (target, draft))
        self.lean_target, self.lean_draft = (LeanRunner(m) for m in (target, draft))

    def law(self, runner: LeanRunner, context: Sequence[int], sampling: Sampling) -> Tensor:
        logits, _ = runner.fresh().extend(list(context), rows=1)
        return probabilities(logits, sampling)[0]

    def laws(self, runner: LeanRunner, context: list[int], sampling: Sampling, depth: int) -> dict[tuple[int, ...], Tensor]:
        """After each answer of at most `depth` tokens."""
        answers = [a for n in range(depth + 1) for a in itertools.product(range(self.vocab_size), repeat=n)]
        return {answer: self.law(runner, [*context, *answer], sampling) for answer in answers}

    def round(self, policy: Policy, verification: Verification, sampling: Sampling) -> Given:
        target, draft = self.target.fresh(), self.draft.fresh()
        made = device_round(
            target=target,
            draft=draft,
            policy=policy,
            verification=verification,
            sampling=sampling,
            coins=streams(0, "cpu"),
        )
        assert made is not None
        made.__class__ = Given
        return made  # pyright: ignore[reportReturnType]

    def session(self, policy: Policy, verification: Verification, sampling: Sampling, seed: int = 0, **more: Any) -> Session:
        options = {"prompt": [3, 5, 2], "max_tokens": 20, "costs": COSTS} | more
        return Session(
            target=self.target.fresh(),
            draft=self.draft.fresh(),
            policy=policy,
            verification=GreedyVerification() if sampling.is_greedy else verification,
            sampling=sampling,
            coins=streams(seed, "cpu"),
            **options,
        )


@pytest.fixture(scope="module")
def two() -> Two:
    return Two(64)


@pytest.fixture(scope="module")
def three() -> Two:
    return Two(3)


RULES: dict[str, Callable[[], Policy]] = {
    "fixed": lambda: Fixed(k=2),
    "cumulative q": lambda: CumulativeConfidence(threshold=0.3, max_tokens=3),
    "lagged head": lambda: specdecpp(random_head(32, seed=1, scale=1.0), min_tokens=0, max_tokens=3),
    "look-ahead head": lambda: specdecpp(
        random_head(32, seed=1, scale=1.0, form="look_ahead", vocab_size=3), min_tokens=0, max_tokens=3
    ),
}


def specdecpp(head: Any, **bounds: Any) -> SpecDecPP:
    return SpecDecPP(head=head, threshold=0.6, **bounds)


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("rule", RULES)
def test_the_law_of_a_round_is_the_targets(rule: str, verification: str, three: Two) -> None:
    """Catches a stop that depends on the candidate drawn after it, one uniform used twice, and rows that are mixed up. The
    round is run at an end of every piece of its uniforms, the lower and the upper in turn; within 1e-9."""
    sampling, context = Sampling(temperature=1.3), [2, 0, 1]
    made = three.round(RULES[rule](), {"token": TokenVerification(), "block": BlockVerification()}[verification], sampling)
    law: Law = defaultdict(float)
    nums, sides = set(), itertools.cycle((0, 1, 1, 0, 1))
    with unchecked():
        p, q = (three.laws(runner, context, sampling, depth=3) for runner in (three.lean_target, three.lean_draft))
        for path in itertools.product(range(3), repeat=3):
            drawn = [list(intervals(q[path[:i]].tolist()))[path[i]] for i in range(3)]
            made.uniforms = [sum(ends) / 2 for _, _, ends in drawn]
            num = one_round(made, context)[0]
            nums.add(num)
            p_rows = torch.stack([p[path[:i]] for i in range(num + 1)])
            q_rows = torch.stack([q[path[:i]] for i in range(num)])
            share = math.prod(chance for _, chance, _ in drawn)
            for verdict, chance, coins in outcomes(p_rows, q_rows, torch.tensor(path[:num]), verification):
                end = next(sides)
                made.uniforms, made.coins = [ends[end] for _, _, ends in drawn], coins[end]
                assert one_round(made, context) == (num, list(path[:num]), *verdict)
                law[(*path[: verdict[0]], verdict[1])] += share * chance
    assert largest_difference(completed(law, p.__getitem__, 3), completed({(): 1.0}, p.__getitem__, 3)) < 1e-9
    assert nums == {2} if rule == "fixed" else len(nums) > 1


def one_round(made: Given, context: list[int]) -> tuple[int, list[int], int, int]:
    """One round after a context that both models have read but for its last token: (K, candidates, accepted, next)."""
    for runner in (made.target, made.draft):
        runner.rollback(min(runner.length, len(context) - 1))
        if runner.length < len(context) - 1:
            runner.extend(context[runner.length : -1], rows=1)
    draft = made.propose(context, memory=None, room=Room(num_tokens=5))
    assert draft is not None
    verdict = made.verify(context, draft)
    return draft.num_tokens, draft.tokens, verdict.num_accepted, verdict.next_token


HEADS: dict[str, Callable[[], Any]] = {
    "lagged": lambda: random_head(32, seed=3, scale=0.5),
    "lagged with scalars": lambda: random_head(32, seed=3, scale=0.4, width=8, scalars=("log_q", "entropy", "gap", "depth")),
    "look-ahead": lambda: random_head(
        32, seed=4, scale=0.4, form="look_ahead", vocab_size=64, scalars=("depth", "log_q", "gap", "entropy")
    ),
}
POLICIES: dict[str, Callable[[], Policy]] = {
    "fixed": lambda: Fixed(k=5),
    "none": lambda: Fixed(k=0),
    "heuristic": lambda: Heuristic(),
    "max confidence": lambda: MaxConfidence(),
    "at least two": lambda: MaxConfidence(min_tokens=2, max_tokens=6),
    "cumulative q": lambda: CumulativeConfidence(),
    **{
        f"specdecpp, {name}": lambda make=make: SpecDecPP(head=make(), threshold=0.6, min_tokens=1)
        for name, make in HEADS.items()
    },
    "never stops": lambda: SpecDecPP(head=HEADS["look-ahead"](), threshold=1.0, max_tokens=7),
    **{f"costs, {name}": lambda make=make: cost_aware(make()) for name, make in HEADS.items()},
    "auto-off costs": lambda: AutoOff(policy=cost_aware(HEADS["look-ahead"]()), patience=2, probe_every=3),
    "costs, from none": lambda: replace(cost_aware(HEADS["look-ahead"]()), min_tokens=0, prior=0.2),
}
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "plain": Sampling(),
    "cut": Sampling(temperature=0.8, top_k=20, top_p=0.9),
    "min_p": Sampling(temperature=1.5, min_p=0.05),
}


def cost_aware(head: Any) -> CostAware:
    sampled = replace(head.card.calibration, num_labels=9, bias=0.7, temperature=1.3)
    return CostAware(head=head.with_card(calibration=sampled, greedy=replace(sampled, bias=0.3)))


class Replayed:
    """The host's coins, by the uniforms of a device."""

    def __init__(self, uniforms: Tensor):
        self._uniforms = iter(uniforms.tolist())

    def categorical(self, p: Tensor) -> int:
        cdf = p.double().cumsum(-1)
        return min(int(torch.searchsorted(cdf, next(self._uniforms) * cdf[-1], right=True)), len(p) - 1)

    def bernoulli(self, h: Tensor) -> Tensor:
        raise AssertionError("a draft has no coins")


CASES = [
    *((policy, sampling) for policy in POLICIES for sampling in ("greedy", "plain")),
    *((policy, sampling) for policy in ("fixed", "specdecpp, lagged with scalars") for sampling in ("cut", "min_p")),
]


@pytest.mark.parametrize(("policy", "sampling"), CASES)
def test_candidates_stops_and_records_are_those_of_the_hosts_loop(policy: str, sampling: str, two: Two) -> None:
    """Catches another stop, token, q, estimate or reason for the same uniforms, round by round to the end of a request, with
    texts that end inside a draft and a draft that lags behind."""
    rule, how, ends = POLICIES[policy](), SAMPLINGS[sampling], (7, 11, 30)
    session = two.session(rule, TokenVerification(), how, ends=ends)
    assert isinstance(session._whole, DeviceRound)
    session.prefill()
    reasons = set()
    with unchecked():
        while session.finish_reason is None:
            tokens, memory = list(session.tokens), session._memory
            left = session.num_tokens_left
            seen = []
            session._whole.verify = spy(session._whole, seen)
            outcome = session.step()
            (own,) = seen
            host = two.lean_draft.fresh()
            host.extend(tokens[:-1], rows=1)
            expected = propose(
                host,
                tokens[-1:],
                policy=rule,
                memory=memory,
                sampling=how,
                coins=Replayed(session._whole.desk.uniforms),
                room=Room(num_tokens=left - 1, ends=ends),
                costs=COSTS,
            )
            assert own.tokens == expected.tokens
            assert own.stop_reason == outcome.stop_reason == expected.stop_reason
            assert outcome.num_drafted == expected.num_tokens
            assert own.judged == pytest.approx(expected.judged, abs=1e-5)
            for i in range(own.num_tokens):
                assert (own.q[i] is None) == (expected.q[i] is None)
                torch.testing.assert_close(own.distribution(i), expected.distribution(i), atol=1e-9, rtol=1e-9)
                assert own.confidence(i) == pytest.approx(expected.confidence(i), rel=1e-9)
            reasons.add(own.stop_reason.split("=")[0])
    assert policy in ("fixed", "none", "heuristic", "never stops") or reasons - {"limit", "tokens left", "end of text"}


def spy(made: DeviceRound, seen: list[Any]) -> Callable[..., Any]:
    """`verify`, and a look at the draft it has filled in: its rows are the device's, for this round only."""

    def verify(tokens: list[int], draft: Any) -> Any:
        verdict = DeviceRound.verify(made, tokens, draft)
        seen.append(draft)
        return verdict

    return verify


@pytest.mark.parametrize("policy", ["fixed", "cumulative q", "specdecpp, lagged", "specdecpp, look-ahead"])
def test_at_most_one_step_is_drawn_in_vain_and_nothing_depends_on_it(policy: str, two: Two) -> None:
    """Catches a host that runs ahead, and a decision that looks at the discarded candidate: other uniforms for it, and for all
    after it, change nothing that is decided."""
    made = two.round(POLICIES[policy](), TokenVerification(), Sampling())
    generator = torch.Generator().manual_seed(0)
    context, in_vain = [3, 5, 2, 40], set()
    for _ in range(15):
        uniforms = torch.rand(20, generator=generator, dtype=torch.float64).tolist()
        made.coins = torch.rand(21, generator=generator, dtype=torch.float64).tolist()
        made.uniforms = uniforms
        first = one_round(made, context)
        in_vain.add(int(made.desk.count) - first[0])
        made.uniforms = uniforms[: first[0]] + torch.rand(20, generator=generator, dtype=torch.float64).tolist()
        assert one_round(made, context) == first
    assert in_vain <= {0, 1}
    assert (1 in in_vain) == (policy != "fixed")


@pytest.mark.parametrize("num_behind", [1, 2, 5])
def test_both_caches_hold_what_was_read(num_behind: int, two: Two) -> None:
    """Catches padding that is counted as text, and a draft that has caught up without reading all of it: it draws what one that
    was never behind does."""
    context, drawn = [3, 5, 2, 40, 7, 9, 21, 8], []
    for behind in (0, num_behind):
        made = two.round(Fixed(k=3), TokenVerification(), Sampling())
        made.draft.extend(context[: -1 - behind], rows=1)
        draft = made.propose(context, memory=None, room=Room(num_tokens=9))
        assert draft is not None
        made.verify(context, draft)
        assert made.target.length == len(context) + 3
        assert made.draft.length == len(context) + 2
        drawn.append([draft.confidence(i) for i in range(3)])
    assert drawn[0] == pytest.approx(drawn[1])


@pytest.mark.parametrize("policy", ["fixed", "none", "cumulative q", "specdecpp, lagged", "costs, look-ahead"])
def test_greedy_text_is_the_targets_own(policy: str) -> None:
    """Catches differences that only show in a decoded text, of a draft that agrees often; transformers decodes the target. In
    float32 a flip needs a tie closer than 1e-6: none of these texts has one."""
    model = tiny_model("llama", seed=1)
    same = tiny_model("llama", seed=1)
    pair = Pair(target=GraphRunner(model), draft=GraphRunner(tiny_draft(same)), tokenizer=tiny_tokenizer())
    decoder = Decoder(pair, policy=POLICIES[policy](), costs=COSTS)
    for start in range(4):
        prompt = [3 + start, 5, 9]
        with unchecked():
            out = decoder.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True)
        ids = torch.tensor([prompt])
        own = same.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, min_new_tokens=40, eos_token_id=None
        )
        assert list(out.tokens) == own[0, 3:].tolist()
        assert out.metrics.num_accepted_draft_tokens > 0 or policy == "none"


def test_the_law_of_real_draws(two: Two) -> None:
    """Catches streams that are not independent, which given uniforms cannot show: 300 rounds of one context against the
    target's law of the first token, in groups of tokens. Chi-square, false alarm 1e-4."""
    sampling, context = Sampling(temperature=1.2), [3, 5, 2, 40]
    policy, coins = CumulativeConfidence(max_tokens=3), streams(5, "cpu")
    target, draft = two.target.fresh(), two.draft.fresh()
    made = device_round(
        target=target, draft=draft, policy=policy, verification=BlockVerification(), sampling=sampling, coins=coins
    )
    assert made is not None
    p = two.law(two.lean_target, context, sampling)
    group = {t: t if p[t] > 0.02 else -1 for t in range(64)}
    law, counts = defaultdict(float), defaultdict(int)
    for t in range(64):
        law[group[t]] += float(p[t])
    with unchecked():
        for _ in range(300):
            _, tokens, num_accepted, next_token = one_round(made, context)  # pyright: ignore[reportArgumentType]
            counts[group[[*tokens[:num_accepted], next_token][0]]] += 1
    assert len(law) > 3
    assert chi_square_tail(counts, dict(law)) > 1e-4


def test_one_seed_gives_one_output(two: Two) -> None:
    """Catches a stream that another request moves on, a cache that remembers, and seeds that are ignored."""
    pair = Pair(target=two.target, draft=two.draft, tokenizer=tiny_tokenizer())
    decoder = Decoder(pair, policy=CumulativeConfidence())
    first = decoder.generate([3, 5], max_tokens=30, seed=1)
    other = decoder.generate([9] * 230, max_tokens=20, seed=2)  # its caches are longer
    assert decoder.generate([3, 5], max_tokens=30, seed=1).tokens == first.tokens
    assert decoder.generate([9] * 230, max_tokens=20, seed=3).tokens != other.tokens
    sessions = [decoder.start([3, 5], max_tokens=30, seed=1), decoder.start([9, 9, 4], max_tokens=30, seed=2)]
    for session in sessions:
        session.prefill()
    while sessions[0].finish_reason is None:
        for session in sessions:
            if session.finish_reason is None:
                session.step()
    assert tuple(sessions[0].tokens[2:]) == first.tokens


def test_another_request_over_the_same_caches_is_decoded_as_it_asks(two: Two) -> None:
    """Catches recorded work that is found again for other sampling, another verification or other ends."""

    def rounds(pair: Two, **asked: Any) -> Any:
        request = {"policy": Fixed(k=4), "verification": TokenVerification(), "sampling": Sampling(temperature=1.5)}
        session = pair.session(**(request | asked))
        return [(r.tokens, r.num_drafted) for r in finish(session)], session.finish_reason

    others = [{"sampling": Sampling(temperature=0.4)}, {"verification": BlockVerification()}, {"ends": tuple(range(32))}]
    alone = [rounds(Two(64), **asked) for asked in others]
    rounds(two)
    for asked, expected in zip(others, alone, strict=True):
        gc.collect()
        assert rounds(two, **asked) == expected


def test_a_request_gives_its_caches_back_with_what_was_recorded() -> None:
    """Catches recorded work that holds on to the session it was first recorded for."""
    two = Two(64)
    for _ in range(3):
        session = two.session(CumulativeConfidence(), TokenVerification(), Sampling())
        session.prefill()
        session.step()
        del session
        gc.collect()
    assert len(two.target._idle) == len(two.draft._idle) == 1


def test_caches_that_come_back_may_serve_with_others() -> None:
    """Catches a verification that was recorded for the draft of one request and is replayed for that of another."""
    two = Two(64)
    request: Any = {"policy": Fixed(k=3), "verification": TokenVerification(), "sampling": Sampling()}
    one, other = (two.session(**request) for _ in range(2))
    expected = [[r.tokens for r in finish(session)] for session in (one, other)]
    target, draft = other.target.static, one.draft.static  # pyright: ignore[reportAttributeAccessIssue]
    late = one.draft
    del one, other
    gc.collect()
    del late
    gc.collect()
    again = two.session(**request)
    assert [[r.tokens for r in finish(again)]] * 2 == expected
    assert (again.target.static, again.draft.static) == (target, draft)  # pyright: ignore[reportAttributeAccessIssue]


def test_the_longest_round_leaves_room_for_a_rehearsal() -> None:
    """Catches work that is tried out behind the last of 32 candidates: after a round that accepts all of them the next one
    reads two tokens at once, for the first time."""
    two = Two(64, noise=0.0)
    session = two.session(Fixed(k=32), TokenVerification(), Sampling(temperature=0.0), max_tokens=80)
    assert [r.num_accepted for r in finish(session)] == [32, 32, 13]


def test_contexts_that_end(two: Two) -> None:
    """Catches a draft or target that reads past its context, in rounds that are cut short by it."""
    short = tiny_model("llama", seed=1, max_position_embeddings=24).double()
    for target, draft in ((short, tiny_draft(short)), (tiny_model("llama", seed=1).double(), short)):
        pair = Pair(target=GraphRunner(target), draft=GraphRunner(draft), tokenizer=tiny_tokenizer())
        lean = Pair(target=LeanRunner(target), draft=LeanRunner(draft), tokenizer=tiny_tokenizer())
        for policy in (Fixed(k=6), MaxConfidence(threshold=0.3)):
            own, expected = (
                Decoder(p, policy=policy).generate([3, 5, 9], max_tokens=40, temperature=0, ignore_eos=True)
                for p in (pair, lean)
            )
            assert own.tokens == expected.tokens
            assert [r.num_drafted for r in own.rounds] == [r.num_drafted for r in expected.rounds]


# --- what is decoded by the host -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stubborn(CumulativeConfidence):
    """A rule of one's own, which says nothing of floors."""

    def stop(self, draft: Any, memory: Any) -> str | None:
        return "four" if draft.num_tokens == 4 else None


@dataclass(frozen=True, kw_only=True)
class Longer(Fixed):
    """A rule of one's own that wants more than it says."""

    def limit(self, memory: Any) -> int:
        return 40


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": Sampling(repetition_penalty=1.2)},
        {"verification": CompareVerification()},
        {"verification": GreedyVerification()},
        {"policy": Entropy(max_tokens=20)},
        {"policy": CumulativeConfidence(max_tokens=33)},
        {"policy": Stubborn()},
        {"coins": (Enumerator([]), Enumerator([]))},
        {"coins": (streams(0, "cpu")[0], Enumerator([]))},
        {"target": "lean"},
        {"target": "elsewhere"},
        {"policy": "its head elsewhere"},
    ],
    ids=["penalty", "compare", "greedy", "entropy", "long", "stubborn", "coins", "one stream", "lean", "elsewhere", "head"],
)
def test_what_cannot_be_drafted_on_the_device_is_decoded_by_the_host(changes: dict[str, Any], two: Two) -> None:
    """Catches a request that is decoded there as something it is not."""
    request: dict[str, Any] = {
        "target": two.target.fresh(),
        "draft": two.draft.fresh(),
        "policy": CumulativeConfidence(),
        "verification": TokenVerification(),
        "sampling": Sampling(),
        "coins": streams(0, "cpu"),
    }
    for policy in (CumulativeConfidence(), CumulativeConfidence(max_tokens=32)):
        admitted: dict[str, Any] = request | {"policy": policy}
        assert device_round(**admitted) is not None
    if changes.get("target") == "lean":
        changes = {"target": two.lean_target.fresh()}
    elif changes.get("target") == "elsewhere":
        changes = {"target": two.target.fresh()}
        changes["target"].device = torch.device("meta")
    elif changes.get("policy") == "its head elsewhere":
        changes = {"policy": specdecpp(random_head(32, seed=1))}
        changes["policy"].head.to("meta")
    assert device_round(**(request | changes)) is None


def test_a_rule_of_ones_own_decides(two: Two) -> None:
    """Catches floors of a base class that are followed although a subclass stops otherwise; a round that is longer than there
    are places on the device; and one round that is watched."""
    session = two.session(Stubborn(), TokenVerification(), Sampling())
    session.prefill()
    assert session.step().num_drafted == 4
    assert two.session(Longer(), TokenVerification(), Sampling(), max_tokens=50).step().num_drafted == 40
    session = two.session(Fixed(k=3), TokenVerification(), Sampling())
    session.prefill()
    session.step()
    seen = []
    session.watch = lambda draft, logits, p: seen.append(p.shape)
    session.step()
    session.watch = None
    session.step()
    assert seen == [(4, 64)]


def test_evidence_that_equals_its_floor_goes_on(two: Two) -> None:
    """Catches a stop at the threshold itself: with top-k 1 every q is 1."""
    session = two.session(MaxConfidence(threshold=1.0, max_tokens=4), TokenVerification(), Sampling(top_k=1))
    assert session.step().num_drafted == 4


def test_a_rule_without_floors_for_a_round_is_asked_by_the_host(two: Two) -> None:
    """Catches a round that stops the session because it is not drafted on the device, or is drafted by other coins."""
    head = random_head(32, seed=4, scale=0.4, form="look_ahead", vocab_size=64)
    session = two.session(replace(cost_aware(head), foresees=True), TokenVerification(), Sampling())
    assert session._whole is not None
    host = two.session(session.policy, TokenVerification(), Sampling())
    host._whole = None
    assert [r.num_drafted for r in finish(session)] == [r.num_drafted for r in finish(host)]
    assert session.tokens == host.tokens


def test_a_rule_that_drops_is_left_to_the_host() -> None:
    """Catches a candidate that is kept although the rule removes it."""
    assert MaxConfidence(drop=True).floors(None, None, 4) is None
    assert replace(cost_aware(HEADS["look-ahead"]()), foresees=True).floors(Ledger(), COSTS, 4) is None


@pytest.mark.parametrize("policy", [name for name in POLICIES if name.startswith(("costs", "specdecpp"))])
def test_floors_say_what_the_rule_says(policy: str) -> None:
    """Catches a floor that is off: just above it the rule goes on, just below it stops, after every number of candidates."""
    rule: Any = POLICIES[policy]()
    ledger = Ledger(num_tokens=60, seconds=40.0, num_tested=60, num_accepted=50)
    memory: Any = ledger if isinstance(rule, CostAware) else None
    floors = rule.floors(memory, COSTS, rule.max_tokens)
    assert floors is not None
    told = set()
    for num in range(rule.max_tokens):
        num_judged = num if rule.looks_ahead else max(0, num - 1)
        floor = floors.least[num]
        for survival in (floor * (1 - 1e-9), floor * (1 + 1e-9)):
            if 0 < survival <= 1 and (num_judged or survival == 1):
                judged = [survival] + [1.0] * (num_judged - 1)
                draft: Any = Seen(costs=COSTS, num_tokens=num, judged=judged)
                assert (rule.stop(draft, memory) is None) == (survival >= floor)
                told.add(survival >= floor)
    assert told == {True, False}


@pytest.mark.parametrize("head", ["lagged", "look-ahead"])
def test_the_floor_of_an_empty_round_says_whether_to_draft_at_all(head: str) -> None:
    """Catches a lagged head that is taken to have missed a candidate before there is one, a candidate that is worth no more
    than it costs (here at 0.5), and a division by zero where nothing is ever accepted."""
    rule, going = replace(cost_aware(HEADS[head]()), min_tokens=0, prior=0.5), []
    for tenths in range(1, 10):
        costs = Costs(draft_s=tenths / 10, passes={1: 1.0})
        empty: Any = Seen(costs=costs, num_tokens=0, judged=[])
        floors = rule.floors(Ledger(), costs, 4)
        assert floors is not None
        going.append(rule.stop(empty, Ledger()) is None)
        assert going[-1] == (floors.least[0] <= 1)
    assert going == [True] * 4 + [False] * 5
    hopeless = replace(rule, prior=0.0).floors(Ledger(), COSTS, 4)
    assert hopeless is not None
    assert hopeless.least == (math.inf,) * 5


@dataclass
class Seen:
    """As much of a draft as rules on survival look at."""

    costs: Costs
    num_tokens: int
    judged: list[float]
    next_acceptance: float | None = None

    @property
    def survival(self) -> float:
        out = 1.0
        for x in self.judged:
            out *= x
        return out
