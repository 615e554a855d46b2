"""Steps on a device, by the same code on a CPU: steps that are queued behind a stop, recorded work that is used again."""

import gc
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from distributions import finish, random_head
from engine_cases import COSTS, RULES, Models
from integration import Given

from specdecpp import Decoder, Pair
from specdecpp.backends import GraphModel, LeanModel
from specdecpp.backends.graphs.cache import StaticCache
from specdecpp.backends.graphs.engine import Device
from specdecpp.backends.graphs.verdicts import pick, verdict
from specdecpp.policies import CumulativeConfidence, Fixed, MaxConfidence, SpecDecPP
from specdecpp.policies.protocol import decide
from specdecpp.sampling import Sampling
from specdecpp.session import Session
from specdecpp.step import Plan, Request, Result
from specdecpp.testing import tiny_draft, tiny_model, tiny_tokenizer
from specdecpp.verify import BlockVerification

ENGINE = Device()


# --- verdicts --------------------------------------------------------------------------------------------------------------


def test_a_residual_without_mass_falls_back_to_p() -> None:
    """Catches a division by zero where rounding has left p = q and a coin came up tails nevertheless."""
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).double()
    for u, token in ((0.1, 0), (0.9, 1)):
        coins = torch.tensor([u, 1.0]).double()
        assert verdict(p, p.clone(), torch.tensor([0]), torch.tensor([1]), coins).tolist() == [0, token]


def test_a_token_without_probability_is_never_picked() -> None:
    """Catches an inverse on the wrong side of a step, at the ends of the range too."""
    distribution = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    for u, token in ((0.0, 1), (0.4999, 1), (0.5, 3), (1 - 2**-53, 3)):
        assert pick(distribution, torch.tensor([u], dtype=torch.float64)).tolist() == [token]


# --- steps -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two() -> Models:
    return Models("device")


def one_step(request: Request, context: list[int]) -> Result:
    """One step after a context that both models have read but for its last token."""
    for cache in (request.target, request.draft):
        cache.rollback(min(cache.length, len(context) - 1))
        if cache.length < len(context) - 1:
            cache.extend(context[cache.length : -1], rows=1)
    (result,) = ENGINE.run([Plan(request, context, decide(request.policy, request.policy.start(), COSTS, 5))])
    return result


def told(session: Session) -> list[Any]:
    return [(r.tokens, r.num_drafted) for r in finish(session)]


@pytest.mark.parametrize("policy", ["fixed", "cumulative", "specdecpp-lagged", "specdecpp-ahead"])
def test_steps_queued_behind_a_stop_leave_no_trace(policy: str, two: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a step that draws, counts or moves on after a stop, and a decision that looks at what was not drawn."""
    streams = Given(), Given()
    request = replace(two.session(RULES[policy], Sampling())._request, randomness=streams, ends=())
    generator = torch.Generator().manual_seed(0)
    context, in_vain = [3, 5, 2, 40], set()
    for _ in range(15):
        uniforms = torch.rand(20, generator=generator, dtype=torch.float64).tolist()
        tests = torch.rand(21, generator=generator, dtype=torch.float64).tolist()
        found, first = [], None
        for ahead in (0, 1, 2, 40, 1):
            monkeypatch.setattr("specdecpp.backends.graphs.engine.steps_ahead", lambda least, limit, num=ahead: num)
            drawn = uniforms if first is None else uniforms[: first.num_drafted] + uniforms[::-1]
            streams[0].points, streams[1].points = drawn, list(tests)
            made = one_step(request, context)
            cache: Any = request.draft.static  # pyright: ignore[reportAttributeAccessIssue]
            record, k = cache.record.each[0], made.num_drafted
            left = [record.order, record.evidence, record.line[: k + 1], record.records[:k], record.rows[:k], cache.inputs[:2]]
            said = made.tokens, made.num_accepted, made.next_token, made.stop, made.q, made.judged
            found.append((said, [tensor.tolist() for tensor in left]))
            in_vain.add((ahead, request.draft.length - len(context) + 1 - k))
            first = made
        assert all(one == found[0] for one in found)
        assert record.order.tolist()[::2] == [k, 1]
    assert in_vain <= {(ahead, extra) for ahead in (0, 1, 2, 40) for extra in ((0,) if ahead == 0 else (0, 1))}
    assert ((1, 1) in in_vain) == (policy != "fixed")


def test_another_request_over_the_same_caches_is_decoded_as_it_asks(two: Models) -> None:
    """Catches recorded work that is found again for other sampling, another verification or other ends."""

    def steps(pair: Models, **asked: Any) -> Any:
        how = {"policy": Fixed(k=4), "sampling": Sampling(temperature=1.5), "ends": ()} | asked
        session = pair.session(**how)
        return told(session), session.finish_reason

    others = [{"sampling": Sampling(temperature=0.4)}, {"verification": BlockVerification()}, {"ends": tuple(range(32))}]
    alone = [steps(Models("device"), **asked) for asked in others]
    steps(two)
    for asked, expected in zip(others, alone, strict=True):
        gc.collect()
        assert steps(two, **asked) == expected


def test_what_is_recorded_once_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a clock that takes recording for the pass, and passes recorded anew: each takes a thousand seconds here."""
    made: list[Any] = []

    def program(self: StaticCache, key: Any, work: Any, **options: Any) -> Any:
        if key not in self._programs:
            made.append(work)
            self.recording_s += 1000.0
        return plain(self, key, work, **options)

    plain = StaticCache.program
    monkeypatch.setattr(StaticCache, "program", program)
    two, passes = Models("device"), []
    for sampling in (Sampling(), Sampling(temperature=0.5), Sampling(temperature=0.0)):
        made.clear()
        session = two.session(Fixed(k=2), sampling)
        session.prefill()  # what is recorded there takes no time of any step
        read, before = session.target.static._pass, len(made)  # pyright: ignore[reportAttributeAccessIssue]
        steps = finish(session)
        passes += [work.args for work in made if getattr(work, "func", None) == read]
        once_s = 1000.0 * (len(made) - before)
        assert once_s < session.prefill_s < once_s + 500
        assert -once_s <= sum(r.draft_s + r.verify_s for r in steps) < 500 - once_s
        del session, read
        gc.collect()
    assert 0 < len(passes) == len(set(passes))


def test_caches_come_back_and_may_serve_with_others() -> None:
    """Catches recorded work that holds on to its session, and a verification replayed with another request's draft."""
    two = Models("device")
    one, other = (two.session(Fixed(k=3), Sampling()) for _ in range(2))
    expected = [told(session) for session in (one, other)]
    target, draft = other.target.static, one.draft.static  # pyright: ignore[reportAttributeAccessIssue]
    late = one.draft
    del one, other
    gc.collect()
    del late
    gc.collect()
    again = two.session(Fixed(k=3), Sampling())
    assert [told(again)] * 2 == expected
    assert (again.target.static, again.draft.static) == (target, draft)  # pyright: ignore[reportAttributeAccessIssue]
    del again
    gc.collect()
    stores: Any = two.target.idle, two.draft.idle
    assert [len(store) for store in stores] == [2, 2]


def test_the_longest_step_leaves_room_for_a_rehearsal() -> None:
    """Catches work tried out behind the last of 32 draft tokens: the next step reads two at once for the first time."""
    two = Models("device", noise=0.0)
    session = two.session(Fixed(k=32), Sampling(temperature=0.0), max_tokens=80, ends=())
    assert [r.num_accepted for r in finish(session)] == [32, 32, 13]


def test_contexts_that_end() -> None:
    """Catches a draft or target that reads past its context, in steps that are cut short by it."""
    short = tiny_model("llama", seed=1, max_position_embeddings=24).double()
    for target, draft in ((short, tiny_draft(short)), (tiny_model("llama", seed=1).double(), short)):
        pair, lean = (Pair(target=r(target), draft=r(draft), tokenizer=tiny_tokenizer()) for r in (GraphModel, LeanModel))
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


def test_a_step_longer_than_there_are_places_is_the_hosts(two: Models) -> None:
    """Catches a step that is cut short, or written past the last place."""
    assert two.session(Longer(), Sampling(), max_tokens=50, ends=()).step().num_drafted == 40


def test_a_head_elsewhere_is_the_hosts(two: Models) -> None:
    """Catches a head whose weights would have to travel for every draft token, and models on two devices."""
    request = two.session(CumulativeConfidence(), Sampling())._request
    policy = SpecDecPP(head=random_head(32, seed=1), threshold=0.6)
    policy.head.to("meta")
    target: Any = two.target.new_cache()
    target.device = torch.device("meta")
    assert ENGINE.refusal(request) is None
    assert "head" in str(ENGINE.refusal(replace(request, policy=policy)))
    assert "one device" in str(ENGINE.refusal(replace(request, target=target)))
