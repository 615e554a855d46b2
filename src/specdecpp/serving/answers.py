"""Replies made of steps, in the two shapes of OpenAI's API: whole, or streamed in chunks of the steps that came together.

Both carry the block `speculative`, with the metrics of the request, and the figures of other servers (`figures`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import attrgetter
from time import time
from typing import Any

from specdecpp.metrics import Metrics
from specdecpp.serving import replies
from specdecpp.serving.engine import StepEvent
from specdecpp.serving.evidence import ScoredToken
from specdecpp.serving.figures import RequestMetrics, Timings, speculative_decoding, timings_of
from specdecpp.serving.replies import Chunk
from specdecpp.serving.tool_schema import ToolCall, ToolCallDelta
from specdecpp.serving.tools import Call, CallReader
from specdecpp.serving.validation import RequestPlan
from specdecpp.session import Step
from specdecpp.verify import is_lossless, verification_for

Json = dict[str, Any]


@dataclass
class AnswerState:
    """One answer as far as it is known."""

    index: int
    num_prompt_tokens: int
    reader: CallReader | None = None
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    finish_reason: replies.FinishedBy = "length"
    steps: list[Step] = field(default_factory=list)
    scores: list[ScoredToken] = field(default_factory=list)
    details: list[replies.StepDetails] = field(default_factory=list)
    prefill_s: float = 0.0
    num_cached_tokens: int = 0
    reading_s: float = 0.0
    writing_s: float = 0.0

    def add(self, event: StepEvent) -> None:
        reason, text, calls = _finish_reason(event.step), event.step.text, list[Call]()
        if self.reader is not None:
            text, calls = self.reader.push(text, is_last=reason is not None)
        self.text += text
        self.calls += calls
        self.steps.append(event.step)
        self.prefill_s, self.num_cached_tokens = event.prefill_s, event.num_cached_tokens
        self.reading_s, self.writing_s = event.reading_s, event.writing_s
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

    @property
    def timings(self) -> Timings:
        """llama.cpp's figures of this answer."""
        return timings_of(self.metrics, prompt_s=self.reading_s, predicted_s=self.writing_s)


class Answer:
    """The reply to one request, updated with every event; `done` ends it where it is streamed."""

    done = b"data: [DONE]\n\n"

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
    def usage(self) -> replies.Usage:
        """Tokens of the request. A prompt counts once, however many answers it gets; so do its cached tokens."""
        completion = sum(len(step.pieces) for choice in self.choices for step in choice.steps)
        cached: dict[tuple[int, ...], int] = {}
        for choice, part in zip(self.choices, self._plan.parts, strict=True):
            cached.setdefault(tuple(part.prompt), choice.num_cached_tokens)
        prompt = self._plan.num_prompt_tokens
        return replies.Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=replies.PromptTokens(cached_tokens=sum(cached.values())),
        )

    @property
    def timings(self) -> Timings:
        """llama.cpp's figures of all answers together."""
        prompt_s, predicted_s = (sum(getattr(c, name) for c in self.choices) for name in ("reading_s", "writing_s"))
        return timings_of(self.metrics, prompt_s=prompt_s, predicted_s=predicted_s)

    @property
    def figures(self) -> Json:
        """The blocks `timings` and `metrics`."""
        num, (choice, *others) = self._plan.num_spec_tokens, self.choices
        block = None if others or not num else speculative_decoding(choice.steps, num)
        return {"timings": self.timings, "metrics": RequestMetrics(speculative_decoding=block)}

    def whole(self, queue_s: float | None) -> replies.Completion | replies.ChatCompletion:
        """The body of an answer that is not streamed."""
        speculative = self._speculative(queue_s)
        if self._plan.details:
            speculative["steps"] = [choice.details for choice in self.choices]
        choices: Any = [self._choice(c, c.text, c.calls, c.scores, c.finish_reason) for c in self.choices]
        fields = {**self._head, "choices": choices, "usage": self.usage, **self.figures}
        block = replies.SpeculativeBlock(**speculative)
        if self._is_chat:
            return replies.ChatCompletion(**fields, object="chat.completion", speculative=block)
        return replies.Completion(**fields, object="text_completion", speculative=block)

    def chunks(self, events: Sequence[StepEvent], queue_s: float | None) -> list[Chunk]:
        """Chunks of steps that came together: one for each answer, or for each step where details are asked for; none for
        steps that show nothing."""
        key = id if self._plan.details else attrgetter("index")
        groups = [list(group) for _, group in groupby(events, key)]
        return [chunk for group in groups for chunk in self._chunks_of(group, queue_s)]

    def closing(self) -> Chunk | None:
        """The usage and the figures, where the request asks for them."""
        return self._chunk([], usage=self.usage, **self.figures) if self._includes_usage else None

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
        extra: Json = {}
        if last.step.finish_reason is not None and last.index == len(self.choices) - 1:
            speculative |= self._speculative(queue_s)
            if not self._includes_usage:  # llama.cpp's are in the last chunk, vLLM's in that of the usage alone
                extra["timings"] = self.timings
        delta: Json = {"role": "assistant"} if is_first and not calls else {}
        delta |= {"content": text} if text or not calls else {}
        if calls:
            delta["tool_calls"] = [ToolCallDelta(index=i, **_call(call)) for i, call in enumerate(calls, num_calls)]
        reason = choice.finish_reason if last.step.finish_reason else None
        part = self._choice(choice, text, calls, scores, reason, offset=offset, delta=delta)
        yield self._chunk([part], **extra, **({"speculative": speculative} if speculative else {}))

    def _choice(
        self,
        of: AnswerState,
        text: str,
        calls: Sequence[Call],
        scores: Sequence[ScoredToken],
        finish_reason: replies.FinishedBy | None,
        *,
        offset: int = 0,
        delta: Json | None = None,
    ) -> replies.Choice:
        fields: Json = {"index": of.index, "logprobs": self._logprobs(scores, offset), "finish_reason": finish_reason}
        if not self._is_chat:
            return replies.TextChoice(text=text, **fields)
        if delta is None:
            made = [ToolCall(**_call(call)) for call in calls] or None
            message = replies.AssistantMessage(content=None if made and not text else text, tool_calls=made)
            return replies.ChatChoice(message=message, **fields)
        return replies.DeltaChoice(delta=delta, **fields)

    def _chunk(self, choices: list[replies.Choice], **extra: Any) -> Chunk:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        usage: Json = {"usage": None} if self._includes_usage else {}
        return Chunk(**self._head, object=kind, choices=choices, **(usage | extra))

    def _speculative(self, queue_s: float | None) -> Json:
        plan, metrics = self._plan, self.metrics
        return {
            "policy": plan.policy,
            "verification": plan.verification,
            "lossless": is_lossless(verification_for(plan.sampling, plan.decoder.verification)),
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


def _finish_reason(step: Step) -> replies.FinishedBy | None:
    """OpenAI's word for why an answer ended: an end of text and a stop string are both "stop"."""
    return "stop" if step.finish_reason in ("eos", "grammar") else step.finish_reason
