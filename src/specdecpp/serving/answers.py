"""Replies made of steps, in the two shapes of OpenAI's API: whole, or in chunks of the steps that came together.

Both carry the block `speculative`: the metrics of the request under vLLM's names, its rates and times.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

from specdecpp.metrics import Metrics
from specdecpp.policy_spec import spec_of
from specdecpp.serving.evidence import ScoredToken
from specdecpp.serving.jobs import RequestPlan, StepEvent
from specdecpp.serving.schema import BaseRequest, ChatRequest
from specdecpp.session import Step
from specdecpp.verify import at, is_lossless

Json = dict[str, Any]
FinishedBy = Literal["stop", "length"]


@dataclass
class AnswerState:
    """One answer as far as it is known."""

    index: int
    num_prompt_tokens: int
    steps: list[Step] = field(default_factory=list)
    scores: list[ScoredToken] = field(default_factory=list)
    details: list[Json | None] = field(default_factory=list)
    prefill_s: float = 0.0
    num_cached_tokens: int = 0

    def add(self, event: StepEvent) -> None:
        self.steps.append(event.step)
        self.scores += event.scores
        self.details.append(event.details)
        self.prefill_s, self.num_cached_tokens = event.prefill_s, event.num_cached_tokens

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

    def __init__(self, plan: RequestPlan, body: BaseRequest, *, name: str, model: str):
        self._plan, self._is_chat = plan, isinstance(body, ChatRequest)
        self._includes_usage = body.stream_options is not None and body.stream_options.include_usage
        self._head: Json = {"id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{name}", "created": int(time.time())}
        self._head["model"] = model
        self.choices = [AnswerState(i, len(part.prompt)) for i, part in enumerate(plan.parts)]
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
    def usage(self) -> Json:
        """Tokens of the request. A prompt counts once, however many answers it gets; so do its cached tokens."""
        completion = sum(len(step.pieces) for choice in self.choices for step in choice.steps)
        cached: dict[tuple[int, ...], int] = {}
        for choice, part in zip(self.choices, self._plan.parts, strict=True):
            cached.setdefault(tuple(part.prompt), choice.num_cached_tokens)
        prompt = self._plan.num_prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        }

    def whole(self, queue_s: float | None) -> Json:
        """The body of an answer that is not streamed."""
        choices = []
        for choice in self.choices:
            text = "".join(step.text for step in choice.steps)
            shown = {"message": {"role": "assistant", "content": text, "refusal": None}} if self._is_chat else {"text": text}
            reason = _finish_reason(choice.steps[-1]) if choice.steps else "length"
            choices.append(self._choice(choice.index, shown, choice.scores, reason))
        speculative = self._speculative(queue_s)
        if self._plan.details:
            speculative["steps"] = [choice.details for choice in self.choices]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self.usage, "speculative": speculative}

    def chunks(self, events: Sequence[StepEvent], queue_s: float | None) -> list[Json]:
        """Chunks of steps that came together: one for each answer, or for each step where details are asked for; none for
        steps that show nothing."""
        key = id if self._plan.details else attrgetter("index")
        groups = [list(group) for _, group in groupby(events, key)]
        return [chunk for group in groups if (chunk := self._chunk_of(group, queue_s))]

    def closing(self) -> Json | None:
        """The usage, where the request asks for it."""
        return self._chunk([], usage=self.usage) if self._includes_usage else None

    def _chunk_of(self, events: Sequence[StepEvent], queue_s: float | None) -> Json | None:
        """A chunk with steps of one answer."""
        last = events[-1]
        choice = self.choices[last.index]
        is_first, offset = not choice.steps, sum(scored.num_shown for scored in choice.scores)
        for event in events:
            self.add(event)
        text = "".join(event.step.text for event in events)
        scores = [scored for event in events for scored in event.scores]
        reason = _finish_reason(last.step)
        if not (text or scores or reason or self._plan.details or is_first):
            return None
        shown: Json = {"text": text}
        if self._is_chat:
            shown = {"delta": {"role": "assistant", "content": text} if is_first else {"content": text}}
        speculative: Json = {"step": last.details} if self._plan.details else {}
        if reason and last.index == len(self.choices) - 1:
            speculative |= self._speculative(queue_s)
        extra = {"speculative": speculative} if speculative else {}
        return self._chunk([self._choice(last.index, shown, scores, reason, offset)], **extra)

    def _choice(
        self, index: int, shown: Json, scores: Sequence[ScoredToken], reason: FinishedBy | None, offset: int = 0
    ) -> Json:
        return {"index": index, **shown, "logprobs": self._logprobs(scores, offset), "finish_reason": reason}

    def _chunk(self, choices: list[Json], **extra: Any) -> Json:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        usage = {"usage": None} if self._includes_usage else {}
        return {**self._head, "object": kind, "choices": choices, **usage, **extra}

    def _speculative(self, queue_s: float | None) -> Json:
        decoder, metrics = self._plan.decoder, self.metrics
        return {
            "policy": spec_of(decoder.policy),
            "verification": self._plan.verification,
            "lossless": is_lossless(at(self._plan.sampling, decoder.verification)),
            "sampling": asdict(self._plan.sampling),
            **metrics.to_dict(),
            "time_shares": metrics.time_shares,
            "queue_s": queue_s,
            "time_to_first_token_s": self.first_text_s,
        }

    def _logprobs(self, scores: Sequence[ScoredToken], offset: int) -> Json | None:
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


def _token(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def _finish_reason(step: Step) -> FinishedBy | None:
    """OpenAI's word for why an answer ended: an end of text and a stop string are both "stop"."""
    return "stop" if step.finish_reason == "eos" else step.finish_reason
