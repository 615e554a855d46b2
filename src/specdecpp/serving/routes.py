"""The endpoints. Each takes what `app.build` has put on the application: an intake, an engine, gauges."""

import asyncio
import math
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from specdecpp.serving import gauges, playground, replies
from specdecpp.serving.answers import DONE, Answer, ChatStyle, Style, TextStyle, event
from specdecpp.serving.engine import EngineThread
from specdecpp.serving.intake import Intake, RequestPlan
from specdecpp.serving.refusals import Refusal
from specdecpp.serving.requests import ChatRequest, CompletionRequest
from specdecpp.serving.work import End, Event, Work

CLIENT_GONE = 499
PAUSE_S = 1 / 30
"""Steps that come sooner after others are sent together: as often as a reader sees."""
EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
STREAM = {"text/event-stream": {"itemSchema": EVENT}}  # as FastAPI writes streams of its own
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": replies.ErrorReply, "description": "What is wrong with the request; 429 when all places are taken."},
    503: {"model": replies.ErrorReply, "description": "The server is shutting down, or has failed."},
    504: {"model": replies.ErrorReply, "description": "The request took too long."},
}
router = APIRouter()


@dataclass(frozen=True, kw_only=True)
class House:
    """Shared state of the endpoints."""

    intake: Intake
    engine: EngineThread
    gauges: gauges.Gauges
    created: int
    posts: "MutableMapping[asyncio.AbstractEventLoop, Post]" = field(default_factory=weakref.WeakKeyDictionary)


class Post:
    """From the engine's thread to the event loop. Steps of all requests are delivered together, every `PAUSE_S` at most, and
    the first and the end of a request at once: each delivery wakes tasks that write to
    sockets, which takes a core from the models."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._letters: deque[tuple[Channel, Event | End]] = deque()
        self._is_due = False
        self._delivered = -math.inf

    def put(self, channel: "Channel", what: Event | End, *, is_urgent: bool) -> None:
        """From any thread. What is put while a delivery is due goes with it: `_deliver` resets `_is_due` before it reads."""
        self._letters.append((channel, what))
        if (loop := self._loop()) is None or not (is_urgent or not self._is_due):
            return
        self._is_due = True
        with suppress(RuntimeError):  # the event loop has been closed, and its listeners with it
            loop.call_soon_threadsafe(self._deliver if is_urgent else self._plan)

    def _plan(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() >= self._delivered + PAUSE_S:
            return self._deliver()
        loop.call_at(self._delivered + PAUSE_S, self._deliver)

    def _deliver(self) -> None:
        self._is_due, self._delivered = False, asyncio.get_running_loop().time()
        while self._letters:
            channel, what = self._letters.popleft()
            channel.receive(what)


class Channel:
    """Events of an exchange's work."""

    def __init__(self, posts: MutableMapping[asyncio.AbstractEventLoop, Post]) -> None:
        loop = asyncio.get_running_loop()
        self._post = posts.setdefault(loop, Post(loop))
        self._has_begun = False
        self._heard: list[Event | End] = []
        self._has_heard = asyncio.Event()

    def put(self, what: Event | End) -> None:
        """From any thread."""
        self._post.put(self, what, is_urgent=isinstance(what, End) or not self._has_begun)
        self._has_begun = True

    def receive(self, what: Event | End) -> None:
        """On the loop."""
        self._heard.append(what)
        self._has_heard.set()

    async def events(self) -> AsyncIterator[list[Event]]:
        """Steps as they come, those that came meanwhile together.

        Raises `Refusal` when the engine ended the work before it was done.
        """
        end: End | None = None
        while end is None:
            await self._has_heard.wait()
            self._has_heard.clear()
            heard, self._heard = self._heard, []
            end = next((what for what in heard if isinstance(what, End)), None)
            if events := [what for what in heard if isinstance(what, Event)]:
                yield events
        if end.refusal is not None:
            raise end.refusal


@router.get("/", include_in_schema=False)
async def page() -> HTMLResponse:
    return HTMLResponse(playground.page())


@router.get("/health", responses={200: {"model": replies.Health}, 503: {"model": replies.Health}})
async def health(request: Request) -> JSONResponse:
    """200 while requests are taken on; 503 from the signal to stop, and once the engine has failed."""
    engine = _house(request).engine
    body = {"status": engine.status, "running": engine.num_running, "waiting": engine.num_waiting}
    return JSONResponse(body, status_code=200 if body["status"] == "ok" else 503)


@router.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}, response_class=Response)
async def metrics(request: Request) -> Response:
    """Counters and histograms for Prometheus."""
    return Response(_house(request).gauges.text(), media_type=gauges.CONTENT_TYPE)


@router.get("/v1/models", responses={200: {"model": replies.Models}, "4XX": ERRORS["4XX"]})
async def models(request: Request) -> JSONResponse:
    """The one model that is served."""
    return JSONResponse({"object": "list", "data": [_model(_house(request))]})


@router.get("/v1/models/{name:path}", responses={200: {"model": replies.Model}, "4XX": ERRORS["4XX"]})
async def model(name: str, request: Request) -> JSONResponse:
    """The model of that name."""
    house = _house(request)
    if name != house.intake.name:
        raise Refusal(f"there is no model {name!r} here; this server has {house.intake.name!r}.", status=404, param="model")
    return JSONResponse(_model(house))


@router.post("/v1/completions", responses={200: {"model": replies.Completion, "content": STREAM}, **ERRORS})
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue a text."""
    return await _answer(body, request, TextStyle())


@router.post("/v1/chat/completions", responses={200: {"model": replies.ChatCompletion, "content": STREAM}, **ERRORS})
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    return await _answer(body, request, ChatStyle())


async def _answer(body: CompletionRequest | ChatRequest, request: Request, style: Style) -> Response:
    house = _house(request)
    request.state.facts["user"] = body.user
    plan = await house.intake.plan(body)
    channel = Channel(house.posts)
    work = plan.work(channel.put, timeout_s=house.intake.limits.timeout_s)
    try:
        house.engine.submit(work)
    except Refusal as refusal:
        house.gauges.ended(refusal.code or "refused", latency_s=0.0)
        raise
    answer = Answer(plan, style, name=request.state.name, model=house.intake.name, includes_usage=body.includes_usage)
    exchange = Exchange(house=house, answer=answer, work=work, channel=channel, plan=plan, facts=request.state.facts)
    return EventStream(exchange) if body.stream else await exchange.whole(request.receive)


@dataclass(kw_only=True)
class Exchange:
    """One request and its answer, from the first step to the log."""

    house: House
    answer: Answer
    work: Work
    channel: Channel
    plan: RequestPlan
    facts: dict[str, Any]
    outcome: str = "cancelled"

    async def whole(self, receive: Callable[[], Any]) -> Response:
        """All of the answer at once; nothing where the client has gone away."""
        collecting, leaving = asyncio.create_task(self._collect()), asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(await collecting) if collecting.done() else Response(status_code=CLIENT_GONE)
        except Refusal as refusal:
            self.outcome = refusal.code or "refused"
            raise
        finally:
            for task in (collecting, leaving):
                task.cancel()
            self.close()

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as a stream of events. A problem on the way is the last of them."""
        try:
            if opening := self.answer.opening():
                yield event(opening)
            async for events in self.channel.events():
                if chunks := self.answer.chunks(events, self.work):
                    yield b"".join(map(event, chunks))
            if closing := self.answer.closing():
                yield event(closing)
            self.outcome = "finished"
            yield DONE
        except Refusal as refusal:
            self.outcome = refusal.code or "refused"
            yield event(refusal.body)

    async def _collect(self) -> dict[str, Any]:
        async for events in self.channel.events():
            for one in events:
                self.answer.add(one)
        self.outcome = "finished"
        return self.answer.whole(self.work)

    def close(self) -> None:
        """End the work if it still runs, and write down what became of it."""
        self.work.stop()
        metrics, latency_s = self.answer.metrics, monotonic() - self.work.submitted
        self.house.gauges.ended(
            self.outcome,
            latency_s=latency_s,
            num_prompt_tokens=metrics.num_prompt_tokens,
            first_s=self.answer.first_text_s,
            prefill_s=metrics.prefill_s,
        )
        self.facts |= {
            "outcome": self.outcome,
            "policy": self.plan.policy,
            "answers": len(self.plan.parts),
            "prompt_tokens": self.plan.num_prompt_tokens,
            "completion_tokens": self.work.num_tokens,
            "mean_acceptance_length": round(metrics.mean_acceptance_length, 4),
            "queue_s": self.work.queue_s,
            "first_text_s": self.answer.first_text_s,
            "models_s": round(metrics.elapsed_s, 6),
        }


class EventStream(StreamingResponse):
    """The events of an exchange, closed however the response ends: a generator that never began would not notice."""

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange):
        super().__init__(exchange.events(), headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._exchange.close()


async def _gone(receive: Callable[[], Any]) -> None:
    """Returns when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _house(request: Request) -> House:
    return request.app.state.house


def _model(house: House) -> dict[str, Any]:
    length = house.intake.pair.target.max_length
    shape = {"id": house.intake.name, "object": "model", "created": house.created, "owned_by": "specdecpp"}
    return shape | {"max_model_len": length}


def built_house(intake: Intake) -> House:
    """An engine with gauges for an intake."""
    counted = gauges.Gauges()
    engine = EngineThread(intake.limits, on_turn=counted.turn)
    counted.watch(engine)
    return House(intake=intake, engine=engine, gauges=counted, created=int(time()))
