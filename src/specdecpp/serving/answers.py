"""Replies made of steps, in the two shapes of OpenAI's API: whole, or streamed in chunks of the steps that came together.

Both carry the block `speculative`, with the metrics of the request, and the figures of other servers. In a stream the block is
a step, or comes with the last chunk as the figures do.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, groupby
from operator import attrgetter
from time import time
from typing import Any

from specdecpp.metrics import Metrics
from specdecpp.serving import replies
from specdecpp.serving.engine import StepEvent
from specdecpp.serving.evidence import ScoredToken
from specdecpp.serving.replies import Timings, speculative_decoding, timings_of
from specdecpp.serving.schema import ChatRequest, ToolCall
from specdecpp.serving.tools import CallReader
from specdecpp.serving.validation import RequestPlan, longest_draft
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
    calls: list[ToolCall] = field(default_factory=list)
    finish_reason: replies.FinishedBy = "length"
    steps: list[Step] = field(default_factory=list)
    scores: list[ScoredToken] = field(default_factory=list)
    details: list[replies.StepDetails] = field(default_factory=list)
    prefill_s: float = 0.0
    num_cached_tokens: int = 0
    reading_s: float = 0.0
    writing_s: float = 0.0

    def add(self, event: StepEvent) -> None:
        reason, text, calls = _finish_reason(event.step), event.step.text, list[ToolCall]()
        if self.reader is not None:
            text, calls = self.reader.push(text, is_last=reason is not None)
        self.text += text
        self.calls += calls
        self.steps.append(event.step)
        self.scores += event.evidence.scores
        if event.evidence.details is not None:
            self.details.append(event.evidence.details)
        self.prefill_s, self.num_cached_tokens = event.prefill_s, event.num_cached_tokens
        self.reading_s, self.writing_s = event.reading_s, event.writing_s
        self.finish_reason = "tool_calls" if reason == "stop" and self.calls else reason or self.finish_reason

    @property
    def metrics(self) -> Metrics:
        about = {name: getattr(self, name) for name in ("prefill_s", "num_prompt_tokens", "num_cached_tokens")}
        return Metrics.of(self.steps, **about)


def timings(choices: Sequence[AnswerState]) -> Timings:
    """llama.cpp's figures of answers together."""
    prompt_s, predicted_s = (sum(getattr(choice, name) for choice in choices) for name in ("reading_s", "writing_s"))
    metrics = sum((choice.metrics for choice in choices), Metrics())
    return timings_of(metrics, prompt_s=prompt_s, predicted_s=predicted_s)


class Answer:
    """The reply to one request, updated with every event; `done` ends it where it is streamed."""

    done = b"data: [DONE]\n\n"

    def __init__(self, plan: RequestPlan, *, name: str, model: str):
        self.plan, self._body = plan, plan.body
        self._is_chat, self._details = isinstance(plan.body, ChatRequest), plan.body.speculative.details
        prefix = "chatcmpl-" if self._is_chat else "cmpl-"
        self._head: Json = {"id": prefix + name, "created": int(time()), "model": model}
        use = plan.body.tool_use
        names = [function["name"] for function in use.functions] if use else []
        most = 1 if use and not use.has_many else sys.maxsize
        readers = [CallReader(names, most=most) if names else None for _ in plan.parts]
        self.choices = [AnswerState(i, len(p.prompt), r) for i, (p, r) in enumerate(zip(plan.parts, readers, strict=True))]
        self.first_text_s: float | None = None

    def add(self, event: StepEvent) -> None:
        self.choices[event.index].add(event)
        if self.first_text_s is None and event.step.text:
            self.first_text_s = event.at_s

    @property
    def metrics(self) -> Metrics:
        """Metrics of all answers together."""
        return sum((choice.metrics for choice in self.choices), Metrics())

    @property
    def usage(self) -> replies.Usage:
        """Tokens of the request. A prompt counts once, however many answers it gets; so do its cached tokens."""
        prompt, completion = self.plan.num_prompt_tokens, self.metrics.num_tokens
        cached = sum(choice.num_cached_tokens for choice in self.choices[:: self._body.n])
        return replies.Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=replies.PromptTokens(cached_tokens=cached),
        )

    @property
    def figures(self) -> Json:
        """The blocks `timings` and `metrics`."""
        num, (choice, *others) = longest_draft(self.plan.decoder.policy), self.choices
        block = None if others or not num else speculative_decoding(choice.steps, num)
        return {"timings": timings(self.choices), "metrics": replies.RequestMetrics(speculative_decoding=block)}

    def whole(self, queue_s: float | None) -> Any:
        """The body of an answer that is not streamed."""
        block = self._speculative(queue_s)
        if self._details:
            block["steps"] = [choice.details for choice in self.choices]
        choices = []
        for choice in self.choices:
            text, calls = choice.text, choice.calls
            message = {"content": text or (None if calls else ""), "tool_calls": calls or None}
            content = {"message": message} if self._is_chat else {"text": text}
            choices.append(self._choice(choice, choice.scores, choice.finish_reason) | content)
        fields = {**self._head, "choices": choices, "usage": self.usage, "speculative": block, **self.figures}
        if self._is_chat:
            return replies.ChatCompletion(**fields, object="chat.completion")
        return replies.Completion(**fields, object="text_completion")

    def chunks(self, events: Sequence[StepEvent], queue_s: float | None) -> list[Any]:
        """Chunks of steps that came together: one for each answer, or with details for each step; none that show nothing."""
        key = id if self._details else attrgetter("index")
        groups = [list(group) for _, group in groupby(events, key)]
        return [chunk for group in groups for chunk in self._chunks_of(group, queue_s)]

    def closing(self) -> Json | None:
        """The usage and the figures, where the request asks for them."""
        return self._chunk([], usage=self.usage, **self.figures) if self._body.includes_usage else None

    def _chunks_of(self, events: Sequence[StepEvent], queue_s: float | None) -> Iterator[Json]:
        """A chunk with steps of one answer; calls never come in the first one of an answer, where clients take no call."""
        choice, last = self.choices[events[-1].index], events[-1]
        is_first, offset = not choice.steps, sum(scored.num_shown for scored in choice.scores)
        num_before, num_calls, num_scores = len(choice.text), len(choice.calls), len(choice.scores)
        for event in events:
            self.add(event)
        text, calls, scores = choice.text[num_before:], choice.calls[num_calls:], choice.scores[num_scores:]
        if not (text or calls or scores or last.step.finish_reason or self._details or is_first):
            return
        if is_first and calls:
            yield self._chunk([{**self._choice(choice, (), None), "delta": {"role": "assistant", "content": ""}}])
        speculative: Json = {"step": choice.details[-1]} if self._details else {}
        extra: Json = {}
        if last.step.finish_reason is not None and last.index == len(self.choices) - 1:
            speculative |= self._speculative(queue_s)
            if not self._body.includes_usage:  # llama.cpp's are in the last chunk, vLLM's in that of the usage alone
                extra["timings"] = timings(self.choices)
        if speculative:
            extra["speculative"] = speculative
        reason = choice.finish_reason if last.step.finish_reason else None
        delta: Json = {"role": "assistant"} if is_first and not calls else {}
        if text or not calls:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [{"index": i, **call.model_dump()} for i, call in enumerate(calls, num_calls)]
        content = {"delta": delta} if self._is_chat else {"text": text}
        yield self._chunk([self._choice(choice, scores, reason, offset) | content], **extra)

    def _choice(
        self, of: AnswerState, scores: Sequence[ScoredToken], reason: replies.FinishedBy | None, offset: int = 0
    ) -> Json:
        return {"index": of.index, "logprobs": self._logprobs(scores, offset), "finish_reason": reason}

    def _chunk(self, choices: list[Json], **extra: Any) -> Json:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        usage: Json = {"usage": None} if self._body.includes_usage else {}
        return {**self._head, "object": kind, "choices": choices, **usage, **extra}

    def _speculative(self, queue_s: float | None) -> Json:
        plan, metrics = self.plan, self.metrics
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
        if self._body.num_top is None:
            return None
        if self._is_chat:
            content = [_token(s.text, s.logprob) | {"top_logprobs": [_token(*other) for other in s.top]} for s in scores]
            return {"content": content, "refusal": None}
        return {
            "tokens": [scored.text for scored in scores],
            "token_logprobs": [scored.logprob for scored in scores],
            "top_logprobs": [dict(reversed(scored.top)) for scored in scores],  # of tokens that read alike the first counts
            "text_offset": list(accumulate((scored.num_shown for scored in scores), initial=offset))[:-1],
        }


def _token(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def _finish_reason(step: Step) -> replies.FinishedBy | None:
    """OpenAI's word for why an answer ended: an end of text and a stop string are both "stop"."""
    return "stop" if step.finish_reason in ("eos", "grammar") else step.finish_reason
