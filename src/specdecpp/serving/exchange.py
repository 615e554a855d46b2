"""Exchanges over HTTP: the events of a request, from the engine's thread to a response, whole or streamed."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from time import monotonic
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from specdecpp.serving.answers import Answer
from specdecpp.serving.engine import End, EngineThread, Job, StepEvent
from specdecpp.serving.errors import ApiError
from specdecpp.serving.metrics import ServerMetrics

CLIENT_GONE = 499
PAUSE_S = 1 / 30
"""Steps that come sooner after others are sent together: as often as a reader sees."""


class EventQueue:
    """Events of one request, from the engine's thread to the event loop.

    The first event and the end wake the loop. All others wait for the next tick, which is the same for all requests: each time
    that the loop wakes takes a core from the models.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[StepEvent | End] = deque()
        self._is_urgent = asyncio.Event()
        self._has_begun = False

    def put(self, event: StepEvent | End) -> None:
        """Add an event, from any thread."""
        self._events.append(event)
        if isinstance(event, End) or not self._has_begun:
            self._has_begun = True
            with suppress(RuntimeError):  # the loop has been closed, and its listeners with it
                self._loop.call_soon_threadsafe(self._is_urgent.set)

    async def batches(self) -> AsyncIterator[list[StepEvent]]:
        """Steps that came since the last tick, perhaps none. Raises `ApiError` when the request ended before it was done."""
        end: End | None = None
        while end is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_S - self._loop.time() % PAUSE_S):
                    await self._is_urgent.wait()
            self._is_urgent.clear()
            steps: list[StepEvent] = []
            while self._events and end is None:
                event = self._events.popleft()
                if isinstance(event, End):
                    end = event
                else:
                    steps.append(event)
            yield steps
        if end.error is not None:
            raise end.error


class Exchange:
    """One request and its answer, until it is counted and logged. `submit` it before anything else."""

    def __init__(self, answer: Answer, *, timeout_s: float, metrics: ServerMetrics, facts: dict[str, Any]):
        self._answer, self._metrics, self._facts = answer, metrics, facts
        self._queue, self._outcome = EventQueue(), "cancelled"
        plan, listener = answer.plan, self._queue.put
        self._job = Job(decoder=plan.decoder, parts=plan.parts, listener=listener, timeout_s=timeout_s, recorder=plan.recorder)

    def submit(self, engine: EngineThread) -> None:
        """Have the request answered. Raises `ApiError` where there is no place, or no engine, for it."""
        try:
            engine.submit(self._job)
        except ApiError as error:
            self._metrics.add_request(error.code or "refused")
            raise

    async def whole(self, request: Request) -> Response | BaseModel:
        """All of the answer at once; nothing where the client has gone away."""
        try:
            async for events in self._queue.batches():
                for event in events:
                    self._answer.add(event)
                if await request.is_disconnected():
                    return Response(status_code=CLIENT_GONE)
            self._outcome = "finished"
            return self._answer.whole(self._job.queue_s)
        except ApiError as error:
            self._outcome = error.code or "refused"
            raise
        finally:
            self.close()

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events. An error on the way is the last of them."""
        try:
            async for events in self._queue.batches():
                if chunks := self._answer.chunks(events, self._job.queue_s):
                    yield b"".join(map(_event, chunks))
            if closing := self._answer.closing():
                yield _event(closing)
            self._outcome = "finished"
            if self._answer.done:
                yield self._answer.done
        except ApiError as error:
            self._outcome = error.code or "refused"
            yield b"data: " + error.response().body + b"\n\n"

    def close(self) -> None:
        """End the job if it still runs; count the request, and add its facts to the log line."""
        job, answer, plan, metrics = self._job, self._answer, self._answer.plan, self._answer.metrics
        job.cancel()
        latency_s = monotonic() - job.submitted
        self._metrics.add_request(self._outcome, metrics, latency_s=latency_s, first_s=answer.first_text_s)
        self._facts |= {
            "outcome": self._outcome,
            "policy": plan.policy,
            "answers": len(plan.parts),
            "prompt_tokens": plan.num_prompt_tokens,
            "completion_tokens": job.num_tokens,
            "mean_acceptance_length": round(metrics.mean_acceptance_length, 4),
            "queue_s": job.queue_s,
            "first_text_s": answer.first_text_s,
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


def _event(chunk: Any) -> bytes:
    return b"data: " + to_json(chunk, inf_nan_mode="null") + b"\n\n"
