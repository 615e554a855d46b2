"""Steps on a device, by the same code on a CPU: their distribution as a function of uniforms, integrated exactly; the stops and
records of the host's loop; what is not drafted there."""

import gc
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from distributions import chi_square_tail, finish, largest_difference, random_head, unchecked
from integration import Distribution, Given, completed, outcomes
from torch import Tensor

from specdecpp import Decoder, Pair
from specdecpp.backends import GraphModel, LeanModel
from specdecpp.backends.graphs.cache import StaticCache
from specdecpp.backends.graphs.engine import Device, steps_ahead
from specdecpp.backends.graphs.verdicts import block_verdict, greedy_verdict, pick, token_verdict
from specdecpp.lab import AutoOff, Heuristic
from specdecpp.policies import CostAware, Costs, CumulativeConfidence, Fixed, MaxConfidence, Policy, SpecDecPP
from specdecpp.policies.protocol import decide
from specdecpp.sampling import Sampling, probabilities, streams
from specdecpp.session import Session
from specdecpp.step import Plan, Request, Result
from specdecpp.testing import tiny_draft, tiny_model, tiny_tokenizer
from specdecpp.verify import BlockVerification, GreedyVerification, TokenVerification, Verification

ENGINE = Device()
COSTS = Costs(draft_s=0.25, passes={1: 1.0, 2: 1.1, 5: 1.4, 9: 2.0})


# --- the verdicts ----------------------------------------------------------------------------------------------------------


def tables(num_tokens: int, depth: int, seed: int) -> dict[tuple[int, ...], Tensor]:
    """A distribution after each prefix, some with zeros."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for length in range(depth + 1):
        for prefix in itertools.product(range(num_tokens), repeat=length):
            row = torch.rand(num_tokens, generator=generator, dtype=torch.float64) ** 3
            row[torch.rand(num_tokens, generator=generator) < 0.2] = 0
            made[prefix] = row / row.sum() if row.sum() > 0 else torch.full((num_tokens,), 1 / num_tokens).double()
    return made


@pytest.mark.parametrize(("width", "num"), [(w, n) for w in (1, 2, 3, 5) for n in range(min(w, 3))])
@pytest.mark.parametrize("kind", ["token", "block"])
def test_the_law_of_a_verdict_is_the_targets(kind: str, width: int, num: int) -> None:
    """Catches a wrong coin, row, residual or bonus, and padding that is read: integrated over the uniforms, within 1e-12."""
    judge = {"token": token_verdict, "block": block_verdict}[kind]
    p, q = tables(4, 3, seed=1), tables(4, 2, seed=2)
    distribution: Distribution = defaultdict(float)
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
            for u in zip(*uniforms, strict=True):  # both ends of the piece: the breakpoint is where the formula says
                coins = torch.cat((torch.tensor([u[-1], *u[:-1]]).double(), extra))[:width]
                assert tuple(judge(*padded, line, torch.tensor([num]), coins).tolist()) == verdict
            distribution[(*path[: verdict[0]], verdict[1])] += drawn * chance
    own: Distribution = {(): 1.0}
    assert largest_difference(completed(distribution, p.__getitem__, 3), completed(own, p.__getitem__, 3)) < 1e-12


def test_a_residual_without_mass_falls_back_to_p() -> None:
    """Catches a division by zero where rounding has left p = q and a coin came up tails nevertheless."""
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).double()
    for u, token in ((0.1, 0), (0.9, 1)):
        coins = torch.tensor([u, 1.0]).double()
        assert token_verdict(p, p.clone(), torch.tensor([0]), torch.tensor([1]), coins).tolist() == [0, token]


def test_greedy_verdicts() -> None:
    """Catches a draft token behind the last one that counts, and the wrong row of the next token."""
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
    distribution = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    for u, token in ((0.0, 1), (0.4999, 1), (0.5, 3), (1 - 2**-53, 3)):
        assert pick(distribution, torch.tensor([u], dtype=torch.float64)).tolist() == [token]


# --- whole steps ----------------------------------------------------------------------------------------------------------


@dataclass
class Two:
    """A tiny target and draft in float64, in graphs and lean."""

    vocab_size: int
    noise: float = 0.4

    def __post_init__(self) -> None:
        target = tiny_model("llama", vocab_size=self.vocab_size, seed=1)
        draft = tiny_draft(target, noise=self.noise)
        self.target, self.draft = (GraphModel(m.double()) for m in (target, draft))
        self.lean_target, self.lean_draft = (LeanModel(m) for m in (target, draft))

    @staticmethod
    def record_of(request: Request) -> Any:
        draft: Any = request.draft
        return draft.static.record

    def distribution(self, backend: LeanModel, context: Sequence[int], sampling: Sampling) -> Tensor:
        logits, _ = backend.new_cache().extend(list(context), rows=1)
        return probabilities(logits, sampling)[0]

    def request(self, policy: Policy, verification: Verification, sampling: Sampling, randomness: Any) -> Request:
        target, draft = self.target.new_cache(), self.draft.new_cache()
        options = {"policy": policy, "verification": verification, "sampling": sampling, "randomness": randomness}
        return Request(target=target, draft=draft, **options)

    def session(self, policy: Policy, verification: Verification, sampling: Sampling, seed: int = 0, **more: Any) -> Session:
        options = {"prompt": [3, 5, 2], "max_tokens": 20, "costs": COSTS} | more
        return Session(
            target=self.target.new_cache(),
            draft=self.draft.new_cache(),
            policy=policy,
            verification=GreedyVerification() if sampling.is_greedy else verification,
            sampling=sampling,
            randomness=streams(seed),
            **options,
        )


@pytest.fixture(scope="module")
def two() -> Two:
    return Two(64)


def specdecpp(head: Any, **bounds: Any) -> SpecDecPP:
    return SpecDecPP(head=head, threshold=0.6, **bounds)


def one_round(request: Request, context: list[int]) -> Result:
    """One step after a context that both models have read but for its last token."""
    for backend in (request.target, request.draft):
        backend.rollback(min(backend.length, len(context) - 1))
        if backend.length < len(context) - 1:
            backend.extend(context[backend.length : -1], rows=1)
    (result,) = ENGINE.run([Plan(request, context, decide(request.policy, request.policy.start(), COSTS, 5))])
    return result


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


@pytest.mark.parametrize("policy", ["fixed", "cumulative q", "specdecpp, lagged", "specdecpp, look-ahead"])
def test_steps_queued_behind_a_stop_leave_no_trace(policy: str, two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a step that draws, counts or moves on after a stop, a host that does not see one, and a decision that looks at
    what was not drawn: by 0, 1, 2 or all steps ahead, and other uniforms behind the last draft token, everything is the
    same."""
    streams = Given(), Given()
    request = two.request(POLICIES[policy](), TokenVerification(), Sampling(), streams)
    generator = torch.Generator().manual_seed(0)
    context, in_vain = [3, 5, 2, 40], set()
    for _ in range(15):
        uniforms = torch.rand(20, generator=generator, dtype=torch.float64).tolist()
        tests = torch.rand(21, generator=generator, dtype=torch.float64).tolist()
        told, first = [], None
        for ahead in (0, 1, 2, 40, 1):
            monkeypatch.setattr("specdecpp.backends.device.steps_ahead", lambda least, limit, num=ahead: num)
            drawn = uniforms if first is None else uniforms[: first.num_drafted] + uniforms[::-1]
            streams[0].points, streams[1].points = drawn, list(tests)
            made = one_round(request, context)
            record, cache = two.record_of(request), request.draft.static  # pyright: ignore[reportAttributeAccessIssue]
            k = made.num_drafted
            left = [record.order, record.evidence, record.line[: k + 1], record.records[:k], record.rows[:k], cache.inputs[:2]]
            said = made.tokens, made.num_accepted, made.next_token, made.stop, made.q, made.judged
            told.append((said, [tensor.tolist() for tensor in left]))
            read = request.draft.length - len(context) + 1
            in_vain.add((ahead, read - k))
            first = made
        assert all(one == told[0] for one in told)
        assert record.order.tolist()[::2] == [k, 1]
    assert in_vain <= {(ahead, extra) for ahead in (0, 1, 2, 40) for extra in ((0,) if ahead == 0 else (0, 1))}
    assert ((1, 1) in in_vain) == (policy != "fixed")


@pytest.mark.parametrize("policy", ["fixed", "none", "cumulative q", "specdecpp, lagged", "costs, look-ahead"])
def test_greedy_text_is_the_targets_own(policy: str) -> None:
    """Catches differences that only show in a decoded text, of a draft that agrees often; transformers decodes the target. In
    float32 a flip needs a tie closer than 1e-6: none of these texts has one."""
    model = tiny_model("llama", seed=1)
    same = tiny_model("llama", seed=1)
    pair = Pair(target=GraphModel(model), draft=GraphModel(tiny_draft(same)), tokenizer=tiny_tokenizer())
    decoder = Decoder(pair, policy=POLICIES[policy](), costs=COSTS)
    for start in range(4):
        prompt = [3 + start, 5, 9]
        with unchecked():
            out = decoder.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True, seed=0)
        ids = torch.tensor([prompt])
        own = same.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, min_new_tokens=40, eos_token_id=None
        )
        assert list(out.tokens) == own[0, 3:].tolist()
        assert out.metrics.num_accepted_draft_tokens > 0 or policy == "none"


def test_the_law_of_real_draws(two: Two) -> None:
    """Catches streams that are not independent, which given uniforms cannot show: 300 steps of one context against the
    target's distribution of the first token, in groups of tokens. Chi-square, false alarm 1e-4."""
    sampling, context = Sampling(temperature=1.2), [3, 5, 2, 40]
    request = two.request(CumulativeConfidence(max_tokens=3), BlockVerification(), sampling, streams(5))
    p = two.distribution(two.lean_target, context, sampling)
    group = {t: t if p[t] > 0.02 else -1 for t in range(64)}
    distribution, counts = defaultdict(float), defaultdict(int)
    for t in range(64):
        distribution[group[t]] += float(p[t])
    with unchecked():
        for _ in range(300):
            made = one_round(request, context)
            counts[group[[*made.tokens[: made.num_accepted], made.next_token][0]]] += 1
    assert len(distribution) > 3
    assert chi_square_tail(counts, dict(distribution)) > 1e-4


@pytest.mark.parametrize("policy", ["cumulative q", "specdecpp, lagged", "costs, look-ahead", "fixed"])
def test_a_host_that_reads_every_flag_late_decodes_the_same(policy: str, two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a draft that then lacks its last draft token: whole texts, with and without steps in vain."""
    pair = Pair(target=two.target, draft=two.draft, tokenizer=tiny_tokenizer())
    decoder = Decoder(pair, policy=POLICIES[policy](), costs=COSTS)
    told = []
    for ahead in (steps_ahead, lambda least, limit: 1):
        monkeypatch.setattr("specdecpp.backends.device.steps_ahead", ahead)
        with unchecked():
            outs = [
                decoder.generate([3, 5], max_tokens=40, seed=1, temperature=temperature, ignore_eos=True)
                for temperature in (0.0, 0.8)
            ]
        told.append([(out.tokens, [(r.num_drafted, r.num_accepted) for r in out.steps]) for out in outs])
    assert told[0] == told[1]


def test_another_request_over_the_same_caches_is_decoded_as_it_asks(two: Two) -> None:
    """Catches recorded work that is found again for other sampling, another verification or other ends."""

    def steps(pair: Two, **asked: Any) -> Any:
        request = {"policy": Fixed(k=4), "verification": TokenVerification(), "sampling": Sampling(temperature=1.5)}
        session = pair.session(**(request | asked))
        return [(r.tokens, r.num_drafted) for r in finish(session)], session.finish_reason

    others = [{"sampling": Sampling(temperature=0.4)}, {"verification": BlockVerification()}, {"ends": tuple(range(32))}]
    alone = [steps(Two(64), **asked) for asked in others]
    steps(two)
    for asked, expected in zip(others, alone, strict=True):
        gc.collect()
        assert steps(two, **asked) == expected


def test_what_is_recorded_once_is_no_part_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a clock that takes the recording of a pass for the pass, and passes recorded anew for another sampling: as if
    each recording took a thousand seconds, which no step knows of."""
    made: list[Any] = []

    def program(self: StaticCache, key: Any, work: Any, **options: Any) -> Any:
        is_new = key not in self._programs
        if is_new:
            made.append(work)
            self.recording_s += 1000.0
        return plain(self, key, work, **options)

    plain = StaticCache.program
    monkeypatch.setattr(StaticCache, "program", program)
    two, passes = Two(64), []
    for sampling in (Sampling(), Sampling(temperature=0.5), Sampling(temperature=0.0)):
        made.clear()
        session = two.session(Fixed(k=2), TokenVerification(), sampling)
        session.prefill()  # what is recorded there takes no time of any step
        read, before = session.target.static._pass, len(made)  # pyright: ignore[reportAttributeAccessIssue]
        steps = finish(session)
        passes += [work.args for work in made if getattr(work, "func", None) == read]
        told = 1000.0 * (len(made) - before)
        assert told < session.prefill_s < told + 500
        assert -told <= sum(r.draft_s + r.verify_s for r in steps) < 500 - told
        del session, read
        gc.collect()
    assert 0 < len(passes) == len(set(passes))


def test_a_request_gives_its_caches_back_with_what_was_recorded() -> None:
    """Catches recorded work that holds on to the session it was first recorded for."""
    two = Two(64)
    for _ in range(3):
        session = two.session(CumulativeConfidence(), TokenVerification(), Sampling())
        session.prefill()
        session.step()
        del session
        gc.collect()
    assert len(two.target.idle) == len(two.draft.idle) == 1


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
    """Catches work that is tried out behind the last of 32 draft tokens: after a step that accepts all of them the next one
    reads two tokens at once, for the first time."""
    two = Two(64, noise=0.0)
    session = two.session(Fixed(k=32), TokenVerification(), Sampling(temperature=0.0), max_tokens=80)
    assert [r.num_accepted for r in finish(session)] == [32, 32, 13]


def test_contexts_that_end(two: Two) -> None:
    """Catches a draft or target that reads past its context, in steps that are cut short by it."""
    short = tiny_model("llama", seed=1, max_position_embeddings=24).double()
    for target, draft in ((short, tiny_draft(short)), (tiny_model("llama", seed=1).double(), short)):
        pair = Pair(target=GraphModel(target), draft=GraphModel(draft), tokenizer=tiny_tokenizer())
        lean = Pair(target=LeanModel(target), draft=LeanModel(draft), tokenizer=tiny_tokenizer())
        for policy in (Fixed(k=6), MaxConfidence(threshold=0.3)):
            own, expected = (
                Decoder(p, policy=policy).generate([3, 5, 9], max_tokens=40, temperature=0, ignore_eos=True)
                for p in (pair, lean)
            )
            assert own.tokens == expected.tokens
            assert [r.num_drafted for r in own.steps] == [r.num_drafted for r in expected.steps]


# --- what is decoded by the host -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Longer(Fixed):
    """A rule of one's own that wants more than it says."""

    def limit(self, memory: Any) -> int:
        return 40


def test_a_round_longer_than_there_are_places_is_the_hosts(two: Two) -> None:
    """Catches a step that is cut short, or written past the last place."""
    assert two.session(Longer(), TokenVerification(), Sampling(), max_tokens=50).step().num_drafted == 40


def test_a_head_elsewhere_is_the_hosts(two: Two) -> None:
    """Catches a head whose weights would have to travel for every draft token, and models on two devices."""
    request = two.request(CumulativeConfidence(), TokenVerification(), Sampling(), streams(0))
    policy = specdecpp(random_head(32, seed=1))
    policy.head.to("meta")
    target: Any = two.target.new_cache()
    target.device = torch.device("meta")
    assert ENGINE.refusal(request) is None
    assert "head" in str(ENGINE.refusal(replace(request, policy=policy)))
    assert "one device" in str(ENGINE.refusal(replace(request, target=target)))
