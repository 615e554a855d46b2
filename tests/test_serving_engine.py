"""The engine and the recorder without HTTP: turns, places, what is freed, and what a step was decided on."""

import asyncio
import gc
import math
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kinds import needs_compiler
from served import PATIENCE_S, Listener

import specdecpp as sd
from specdecpp.decoder import Decoder
from specdecpp.errors import MissingExtraError
from specdecpp.loading.pair import Pair
from specdecpp.policies import MaxConfidence
from specdecpp.sampling import Sampling, probabilities, streams
from specdecpp.scheduler import outcome_of
from specdecpp.serving import exchange
from specdecpp.serving.engine import End, EngineThread, Job, Part, StepEvent
from specdecpp.serving.errors import ApiError
from specdecpp.serving.evidence import LEAST, Recorder
from specdecpp.serving.exchange import EventQueue
from specdecpp.serving.schema import CompletionRequest
from specdecpp.serving.settings import ServerSettings
from specdecpp.serving.validation import RequestValidator
from specdecpp.session import Session
from specdecpp.testing import TableModel, save_tiny_pair, tiny_tokenizer
from specdecpp.verify import GreedyVerification, TokenVerification


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    target, draft = save_tiny_pair(tmp_path_factory.mktemp("pair"))
    return Decoder(sd.load_pair(target, draft=draft), policy=sd.Fixed(k=2))


def job(decoder: Decoder, listener: Listener, *, max_tokens: int, timeout_s: float = math.inf, **more) -> Job:
    options = {"max_tokens": max_tokens, "temperature": 0.0, "seed": 0, "ignore_eos": True, **more}
    part = Part(prompt=[3, 4, 5], options=options)  # pyright: ignore[reportArgumentType]
    return Job(decoder=decoder, parts=[part], listener=listener, timeout_s=timeout_s)


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    """An engine with one place."""
    thread = EngineThread(ServerSettings(max_running=1))
    thread.start()
    yield thread
    thread.stop()


def test_a_request_that_is_called_off_is_gone_before_the_next_turn(decoder: Decoder, engine: EngineThread) -> None:
    """Catches a cache that lives on: the session must be freed, and no step of it run, once it is called off."""
    listener, other = Listener(), Listener()
    listener.may_go_on.clear()
    off = job(decoder, listener, max_tokens=200)
    engine.submit(off)
    assert listener.is_held.wait(PATIENCE_S)
    assert off.session is not None
    session = weakref.ref(off.session)
    engine.submit(job(decoder, other, max_tokens=20))
    off.cancel()
    listener.may_go_on.set()
    assert (listener.end.error, len(listener.events)) == (None, 1)
    assert session() is None, "somebody still holds the session and its caches"
    assert other.end.error is None


def test_what_takes_too_long_ends_also_while_it_waits(decoder: Decoder, engine: EngineThread) -> None:
    """Catches a deadline that only counts once a request has had its turn."""
    first, late = Listener(), Listener()
    first.may_go_on.clear()
    engine.submit(job(decoder, first, max_tokens=2))
    assert first.is_held.wait(PATIENCE_S)
    engine.submit(job(decoder, late, max_tokens=2, timeout_s=1e-9))
    first.may_go_on.set()
    error = late.end.error
    assert error is not None
    assert (error.status_code, error.code, late.events) == (504, "timeout", [])


@needs_compiler
def test_a_rule_that_raises_ends_its_own_request_alone(pair: Pair, engine: EngineThread) -> None:
    """Catches a server that answers nobody any more once a rule has raised while a long prompt was looked at."""

    class Broken(sd.Fixed):
        def rule(self, memory: Any, costs: Any) -> Any:
            raise OverflowError("of a rule")

    bad, good = Listener(), Listener()
    asked = job(Decoder(pair, policy=Broken(k=2)), bad, max_tokens=2)
    asked.parts[0].prompt[:] = [3] * 300
    engine.submit(asked)
    engine.submit(job(Decoder(pair, policy=sd.Fixed(k=2)), good, max_tokens=2))
    assert bad.end.error is not None
    assert (bad.end.error.status_code, good.end.error, engine.status) == (500, None, "ok")


def test_a_failed_start_is_raised() -> None:
    """Catches a server that waits for ever for an engine whose preparation failed."""
    with pytest.raises(ZeroDivisionError):
        EngineThread(ServerSettings()).start(lambda: 1 // 0)  # pyright: ignore[reportArgumentType]


def distribution(model: TableModel, context: list[int], sampling: Sampling) -> torch.Tensor:
    return probabilities(model.distribution(context).log(), sampling)


TARGET, DRAFT = (TableModel.random(vocab_size=6, depth=2, seed=s) for s in (1, 2))
WARPED = Sampling(temperature=0.6, top_k=4)


def watched(sampling: Sampling, *, seed: int, policy: sd.Policy, **asked) -> list:
    """(step, evidence, context before it) of one answer from tables."""
    verification = GreedyVerification() if sampling.is_greedy else TokenVerification()
    session = Session(
        target=TARGET.new_cache(),
        draft=DRAFT.new_cache(),
        policy=policy,
        verification=verification,
        sampling=sampling,
        prompt=[0],
        max_tokens=12,
        randomness=streams(seed),
        ends=(5,),
    )
    session.watch = recorder = Recorder(session, tiny_tokenizer(6), **asked)
    found = []
    while session.finish_reason is None:
        context = list(session.tokens)
        outcome = session.step()
        found.append((outcome, recorder.evidence(outcome), context))
    return found


@pytest.mark.parametrize("sampling", [Sampling(), WARPED, Sampling(temperature=0.0)], ids=["plain", "warped", "greedy"])
def test_the_evidence_of_a_step_is_what_happened(sampling: Sampling) -> None:
    """Catches scores, p and q of another place or distribution, fates that do not fit the counts, and a survival that is not
    their product. Scores are the target's raw ones, and the end of the text has none."""
    fates: set[str] = set()
    believed = Sampling() if sampling.is_greedy else sampling
    for seed in range(20):
        for outcome, evidence, context in watched(sampling, seed=seed, policy=sd.Fixed(k=3), num_top=2, details=True):
            tokens = [t for t in outcome.tokens if t != 5]
            for i, (token, scored) in enumerate(zip(tokens, evidence.scores, strict=True)):
                raw = TARGET.distribution([*context, *tokens[:i]])
                assert scored.logprob == pytest.approx(float(raw[token].log()))
                best = [max(float(v.log()), LEAST) for v in raw.topk(2).values]
                assert [value for _, value in scored.top] == pytest.approx(best)
            details = evidence.details
            assert details is not None
            drafted = [c.token for c in details.draft_tokens]
            found = [c.outcome for c in details.draft_tokens]
            assert (len(drafted), found.count("accepted")) == (outcome.num_drafted, outcome.num_accepted)
            assert [p.token for p in details.pieces] == outcome.tokens
            assert found.count("rejected") == (outcome.pieces[-1].origin == "correction")
            fates |= set(found)
            for i, draft_token in enumerate(details.draft_tokens):
                p, q = (distribution(model, [*context, *drafted[:i]], believed)[draft_token.token] for model in (TARGET, DRAFT))
                assert draft_token.p == pytest.approx(float(p), abs=1e-12)
                assert draft_token.q == pytest.approx(float(q))
            last = details.pieces[-1]
            p = distribution(TARGET, [*context, *outcome.tokens[:-1]], believed)[last.token]
            assert last.p == pytest.approx(float(p), abs=1e-12)
            assert (last.q is None) == (last.outcome == "bonus")
            survival = [draft_token.q for draft_token in details.draft_tokens]
            assert details.survival == pytest.approx(torch.tensor(survival).cumprod(0).tolist())
            assert details.survival_of == "q"
    assert fates == {"accepted", "rejected", "unused"}


def test_thresholds_are_where_a_rule_goes_on() -> None:
    """Catches thresholds of another draft token or of the next step, of other evidence, and one that holds below min_tokens."""
    asked = sd.CumulativeConfidence(threshold=0.3, min_tokens=2, max_tokens=4)
    num_stopped = 0
    for seed in range(20):
        for _, evidence, _ in watched(Sampling(), seed=seed, policy=asked, details=True):
            details = evidence.details
            assert details is not None
            assert details.thresholds == [0.0, 0.3, 0.3, 0.3][: len(details.survival)]
            is_over = [survival >= least for survival, least in zip(details.survival, details.thresholds, strict=True)]
            assert all(is_over[:-1])
            assert not details.stop_reason.startswith("product") or not is_over[-1]
            num_stopped += details.stop_reason.startswith("product")
    assert num_stopped > 10
    for rule in (sd.Fixed(k=3), MaxConfidence(threshold=0.3)):
        found = [evidence.details for _, evidence, _ in watched(Sampling(), seed=1, policy=rule, details=True)]
        assert [details.thresholds for details in found if details] == [None] * len(found)


def test_limits_that_admit_nothing_are_refused() -> None:
    """Catches a server that starts and then answers nobody."""
    seconds = ({"timeout_s": 0.0}, {"timeout_s": math.nan}, {"grace_s": -1.0}, {"grace_s": math.nan})
    for bad in ({"max_running": 0}, {"max_waiting": -1}, *seconds):
        with pytest.raises(ValueError, match=next(iter(bad))):
            ServerSettings(**bad)
    for empty in ("", " "):
        with pytest.raises(ValueError, match="api_key is empty"):
            ServerSettings(api_key=empty)
    ServerSettings(max_waiting=0, grace_s=0.0, timeout_s=0.5)


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a bare ImportError of a package nobody asked for."""
    from specdecpp import serving

    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    with pytest.raises(MissingExtraError, match=r"uvicorn.*specdecpp\[serve\]"):
        serving.check_extra()


@pytest.mark.parametrize("asked", [{}, {"logprobs": 1}, {"speculative": {"details": True}}], ids=["", "scored", "detailed"])
def test_a_request_that_has_ended_holds_no_cache(decoder: Decoder, asked: dict[str, Any]) -> None:
    """Catches caches that wait for the garbage collector, as those of requests whose steps were watched did: the server's
    memory grew with every one of them."""
    body = CompletionRequest(prompt="abc", max_tokens=4, **asked)
    plan = RequestValidator(decoder.pair, ServerSettings(policy=decoder.policy)).plan(body)
    given = Job(decoder=plan.decoder, parts=plan.parts, listener=[].append, timeout_s=math.inf, recorder=plan.recorder)
    held = []
    gc.disable()
    try:
        while not given.is_done:
            given.begin()
            assert given.session is not None
            held.append(weakref.ref(given.session.target))
            if (outcome := outcome_of(given.session)) is not None:
                given.record(outcome, time.monotonic())
        assert [cache for cache in held if cache() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("pause_s", [0.0, 0.0005])
def test_every_event_arrives_in_order(pause_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an event that is put between a tick and its end, and waits for ever; and events of another request."""
    monkeypatch.setattr(exchange, "PAUSE_S", 0.002)

    def put(queue: EventQueue, num: int) -> None:
        for i in range(num):
            queue.put(event(i))
            time.sleep(pause_s)
        queue.put(End())

    async def received(num: int) -> list[int]:
        queue = EventQueue()
        threading.Thread(target=put, args=(queue, num)).start()
        return [event.index async for batch in queue.batches() for event in batch]

    async def all_of_them() -> list[list[int]]:
        return await asyncio.wait_for(asyncio.gather(*map(received, range(100, 104))), PATIENCE_S)

    assert asyncio.run(all_of_them()) == [list(range(num)) for num in range(100, 104)]


def test_the_first_event_and_the_end_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a first text or an error that waits for others, events sent one by one, and a put that fails without a loop."""
    monkeypatch.setattr(exchange, "PAUSE_S", 1e9)

    async def one() -> EventQueue:
        queue = EventQueue()
        batches = aiter(queue.batches())
        queue.put(event(0))
        assert [e.index for e in await asyncio.wait_for(anext(batches), PATIENCE_S)] == [0]
        for what in (event(1), event(2), End(error=ApiError("no more", status=504))):
            queue.put(what)
        assert [e.index for e in await asyncio.wait_for(anext(batches), PATIENCE_S)] == [1, 2]
        with pytest.raises(ApiError, match="no more"):
            await anext(batches)
        return queue

    asyncio.run(one()).put(End())


def event(index: int) -> StepEvent:
    """An event of which nobody reads more than its index."""
    made = object.__new__(StepEvent)
    object.__setattr__(made, "index", index)
    return made
