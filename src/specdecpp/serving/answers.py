"""Replies made of steps, in the two shapes of OpenAI's API: whole, or streamed in chunks of the steps that came together.

Both carry the block `speculative`: the metrics of the request under vLLM's names, its rates and times.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import attrgetter
from time import monotonic, time
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from specdecpp.metrics import Metrics
from specdecpp.serving import schema
from specdecpp.serving.engine import End, Job, StepEvent
from specdecpp.serving.errors import ApiError
from specdecpp.serving.evidence import ScoredToken
from specdecpp.serving.metrics import ServerMetrics
from specdecpp.serving.schema import Chunk
from specdecpp.serving.tools import Call, CallReader
from specdecpp.serving.validation import RequestPlan
from specdecpp.session import Step
from specdecpp.verify import at, is_lossless

Json = dict[str, Any]
CLIENT_GONE = 499
PAUSE_S = 1 / 30
"""Steps that come sooner after others are sent together: as often as a reader sees."""
DONE = b"data: [DONE]\n\n"


@dataclass
class AnswerState:
    """One answer as far as it is known."""

    index: int
    num_prompt_tokens: int
    reader: CallReader | None = None
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    finish_reason: schema.FinishedBy = "length"
    steps: list[Step] = field(default_factory=list)
    scores: list[ScoredToken] = field(default_factory=list)
    details: list[schema.StepDetails] = field(default_factory=list)
    prefill_s: float = 0.0
    num_cached_tokens: int = 0

    def add(self, event: StepEvent) -> None:
        reason, text, calls = _finish_reason(event.step), event.step.text, list[Call]()
        if self.reader is not None:
            text, calls = self.reader.push(text, is_last=reason is not None)
        self.text += text
        self.calls += calls
        self.steps.append(event.step)
        self.prefill_s, self.num_cached_tokens = event.prefill_s, event.num_cached_tokens
        self.finish_reason = "tool_calls" if reason == "stop" and self.calls else reason or self.finish_reason
        if event.evidence is not None:
            self.scores += event.evidence.scores
            if event.evidence.details is not None:
                self.details.append(event.evidence.details.model_copy(update={"at_s": event.at_s}))

    @property
    def metrics(self) -> Metrics:
        return Metrics.of(
            self.steps,
            prefill_s=self.prefill_s,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
        )


class Answer:
    """The reply to one request, updated with every event."""

    def __init__(self, plan: RequestPlan, *, is_chat: bool, name: str, model: str, includes_usage: bool = False):
        self._plan, self._is_chat, self._includes_usage = plan, is_chat, includes_usage
        prefix = "chatcmpl-" if is_chat else "cmpl-"
        self._head: Json = {"id": prefix + name, "created": int(time()), "model": model}
        self.choices = [
            AnswerState(i, len(part.prompt), CallReader(plan.functions) if plan.functions else None)
            for i, part in enumerate(plan.parts)
        ]
        self.first_text_s: float | None = None

    def add(self, event: StepEvent) -> None:
        self.choices[event.index].add(event)
        if self.first_text_s is None and event.step.text:
            self.first_text_s = event.at_s

    @property
    def metrics(self) -> Metrics:
        """Metrics of all answers together."""
        return sum((choice.metrics for choice in self.choices[1:]), self.choices[0].metrics)

    @property
    def usage(self) -> schema.Usage:
        """Tokens of the request. A prompt counts once, however many answers it gets; so do its cached tokens."""
        completion = sum(len(step.pieces) for choice in self.choices for step in choice.steps)
        cached: dict[tuple[int, ...], int] = {}
        for choice, part in zip(self.choices, self._plan.parts, strict=True):
            cached.setdefault(tuple(part.prompt), choice.num_cached_tokens)
        prompt = self._plan.num_prompt_tokens
        return schema.Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=schema.PromptTokens(cached_tokens=sum(cached.values())),
        )

    def whole(self, queue_s: float | None) -> schema.Completion | schema.ChatCompletion:
        """The body of an answer that is not streamed."""
        speculative = self._speculative(queue_s)
        if self._plan.details:
            speculative["steps"] = [choice.details for choice in self.choices]
        choices: Any = [self._choice(c, c.text, c.calls, c.scores, c.finish_reason) for c in self.choices]
        fields = {**self._head, "choices": choices, "usage": self.usage}
        block = schema.SpeculativeBlock(**speculative)
        if self._is_chat:
            return schema.ChatCompletion(**fields, object="chat.completion", speculative=block)
        return schema.Completion(**fields, object="text_completion", speculative=block)

    def chunks(self, events: Sequence[StepEvent], queue_s: float | None) -> list[Chunk]:
        """Chunks of steps that came together: one for each answer, or for each step where details are asked for; none for
        steps that show nothing."""
        key = id if self._plan.details else attrgetter("index")
        groups = [list(group) for _, group in groupby(events, key)]
        return [chunk for group in groups for chunk in self._chunks_of(group, queue_s)]

    def closing(self) -> Chunk | None:
        """The usage, where the request asks for it."""
        return self._chunk([], usage=self.usage) if self._includes_usage else None

    def _chunks_of(self, events: Sequence[StepEvent], queue_s: float | None) -> Iterator[Chunk]:
        """A chunk with steps of one answer; calls never come in the first one of an answer, where clients take no call."""
        choice, last = self.choices[events[-1].index], events[-1]
        is_first, offset = not choice.steps, sum(scored.num_shown for scored in choice.scores)
        num_before, num_calls = len(choice.text), len(choice.calls)
        for event in events:
            self.add(event)
        text, calls = choice.text[num_before:], choice.calls[num_calls:]
        scores = [scored for event in events if event.evidence for scored in event.evidence.scores]
        if not (text or calls or scores or last.step.finish_reason or self._plan.details or is_first):
            return
        if is_first and calls:
            yield self._chunk([self._choice(choice, "", (), (), None, delta={"role": "assistant", "content": ""})])
        speculative: Json = {"step": choice.details[-1]} if self._plan.details else {}
        if last.step.finish_reason is not None and last.index == len(self.choices) - 1:
            speculative |= self._speculative(queue_s)
        delta: Json = {"role": "assistant"} if is_first and not calls else {}
        delta |= {"content": text} if text or not calls else {}
        if calls:
            delta["tool_calls"] = [schema.ToolCallDelta(index=i, **_call(call)) for i, call in enumerate(calls, num_calls)]
        reason = choice.finish_reason if last.step.finish_reason else None
        part = self._choice(choice, text, calls, scores, reason, offset=offset, delta=delta)
        yield self._chunk([part], speculative=speculative)

    def _choice(
        self,
        of: AnswerState,
        text: str,
        calls: Sequence[Call],
        scores: Sequence[ScoredToken],
        finish_reason: schema.FinishedBy | None,
        *,
        offset: int = 0,
        delta: Json | None = None,
    ) -> schema.Choice:
        fields: Json = {"index": of.index, "logprobs": self._logprobs(scores, offset), "finish_reason": finish_reason}
        if not self._is_chat:
            return schema.TextChoice(text=text, **fields)
        if delta is None:
            made = [schema.ToolCall(**_call(call)) for call in calls] or None
            message = schema.AssistantMessage(content=None if made and not text else text, tool_calls=made)
            return schema.ChatChoice(message=message, **fields)
        return schema.DeltaChoice(delta=delta, **fields)

    def _chunk(
        self, choices: list[schema.Choice], *, usage: schema.Usage | None = None, speculative: Json | None = None
    ) -> Chunk:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        extra: Json = {"usage": usage} if self._includes_usage else {}
        extra |= {"speculative": speculative} if speculative else {}
        return Chunk(**self._head, object=kind, choices=choices, **extra)

    def _speculative(self, queue_s: float | None) -> Json:
        plan, metrics = self._plan, self.metrics
        return {
            "policy": plan.policy,
            "verification": plan.verification,
            "lossless": is_lossless(at(plan.sampling, plan.decoder.verification)),
            "sampling": asdict(plan.sampling),
            **metrics.to_dict(),
            "time_shares": metrics.time_shares,
            "queue_s": queue_s,
            "time_to_first_token_s": self.first_text_s,
        }

    def _logprobs(self, scores: Sequence[ScoredToken], offset: int = 0) -> Json | None:
        """Log-probabilities in the shape of the endpoint; None where they are not asked for."""
        if self._plan.num_top is None:
            return None
        if self._is_chat:
            content = [_token(s.text, s.logprob) | {"top_logprobs": [_token(*other) for other in s.top]} for s in scores]
            return {"content": content, "refusal": None}
        offsets = []
        for scored in scores:
            offsets.append(offset)
            offset += scored.num_shown
        return {
            "tokens": [scored.text for scored in scores],
            "token_logprobs": [scored.logprob for scored in scores],
            "top_logprobs": [dict(reversed(scored.top)) for scored in scores],  # of tokens that read alike the first counts
            "text_offset": offsets,
        }


def _call(call: Call) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _token(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def _finish_reason(step: Step) -> schema.FinishedBy | None:
    """OpenAI's word for why an answer ended: an end of text and a stop string are both "stop"."""
    return "stop" if step.finish_reason in ("eos", "grammar") else step.finish_reason


# Over HTTP


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


@dataclass(kw_only=True)
class Exchange:
    """One request and its answer, until it is counted and logged."""

    answer: Answer
    job: Job
    queue: EventQueue
    plan: RequestPlan
    metrics: ServerMetrics
    facts: dict[str, Any]
    outcome: str = "cancelled"

    async def whole(self, request: Request) -> Response | BaseModel:
        """All of the answer at once; nothing where the client has gone away."""
        try:
            async for events in self.queue.batches():
                for event in events:
                    self.answer.add(event)
                if await request.is_disconnected():
                    return Response(status_code=CLIENT_GONE)
            self.outcome = "finished"
            return self.answer.whole(self.job.queue_s)
        except ApiError as error:
            self.outcome = error.code or "refused"
            raise
        finally:
            self.close()

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events. An error on the way is the last of them."""
        try:
            async for events in self.queue.batches():
                if chunks := self.answer.chunks(events, self.job.queue_s):
                    yield b"".join(map(_event, chunks))
            if closing := self.answer.closing():
                yield _event(closing)
            self.outcome = "finished"
            yield DONE
        except ApiError as error:
            self.outcome = error.code or "refused"
            yield b"data: " + error.response().body + b"\n\n"

    def close(self) -> None:
        """End the job if it still runs; count the request, and add its facts to the log line."""
        self.job.cancel()
        metrics = self.answer.metrics
        self.metrics.add_request(
            self.outcome,
            latency_s=monotonic() - self.job.submitted,
            num_prompt_tokens=metrics.num_prompt_tokens,
            first_s=self.answer.first_text_s,
            prefill_s=metrics.prefill_s,
        )
        self.facts |= {
            "outcome": self.outcome,
            "policy": self.plan.policy,
            "answers": len(self.plan.parts),
            "prompt_tokens": self.plan.num_prompt_tokens,
            "completion_tokens": self.job.num_tokens,
            "mean_acceptance_length": round(metrics.mean_acceptance_length, 4),
            "queue_s": self.job.queue_s,
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


def _event(chunk: BaseModel) -> bytes:
    return b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"
