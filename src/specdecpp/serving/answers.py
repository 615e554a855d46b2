"""Replies made of steps, in the two shapes of OpenAI's API: whole, or streamed in chunks of the steps that came together.

Both carry the block `speculative`, with the metrics of the request, and the figures of other servers (`figures`).
"""

from collections.abc import Sequence
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
from specdecpp.serving.validation import RequestPlan
from specdecpp.session import Step
from specdecpp.verify import at, is_lossless

Json = dict[str, Any]


@dataclass
class AnswerState:
    """One answer as far as it is known."""

    index: int
    num_prompt_tokens: int
    text: str = ""
    finish_reason: replies.FinishedBy = "length"
    steps: list[Step] = field(default_factory=list)
    scores: list[ScoredToken] = field(default_factory=list)
    details: list[replies.StepDetails] = field(default_factory=list)
    prefill_s: float = 0.0
    num_cached_tokens: int = 0
    reading_s: float = 0.0
    writing_s: float = 0.0

    def add(self, event: StepEvent) -> None:
        self.text += event.step.text
        self.steps.append(event.step)
        self.prefill_s, self.num_cached_tokens = event.prefill_s, event.num_cached_tokens
        self.reading_s, self.writing_s = event.reading_s, event.writing_s
        self.finish_reason = _finish_reason(event.step) or self.finish_reason
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
        self.choices = [AnswerState(index=i, num_prompt_tokens=len(part.prompt)) for i, part in enumerate(plan.parts)]
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
        choices: Any = [self._choice(c.index, c.text, c.scores, c.finish_reason) for c in self.choices]
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
        return [chunk for group in groups if (chunk := self._chunk_of(group, queue_s))]

    def closing(self) -> Chunk | None:
        """The usage and the figures, where the request asks for them."""
        return self._chunk([], usage=self.usage, **self.figures) if self._includes_usage else None

    def _chunk_of(self, events: Sequence[StepEvent], queue_s: float | None) -> Chunk | None:
        """A chunk with steps of one answer."""
        choice, last = self.choices[events[-1].index], events[-1]
        is_first, offset = not choice.steps, sum(scored.num_shown for scored in choice.scores)
        for event in events:
            self.add(event)
        text = "".join(event.step.text for event in events)
        scores = [scored for event in events if event.evidence for scored in event.evidence.scores]
        if not (text or scores or last.step.finish_reason or self._plan.details or is_first):
            return None
        speculative: Json = {"step": choice.details[-1]} if self._plan.details else {}
        extra: Json = {}
        if last.step.finish_reason is not None and last.index == len(self.choices) - 1:
            speculative |= self._speculative(queue_s)
            if not self._includes_usage:  # llama.cpp's are in the last chunk, vLLM's in that of the usage alone
                extra["timings"] = self.timings
        delta = {"role": "assistant", "content": text} if is_first else {"content": text}
        part = self._choice(last.index, text, scores, _finish_reason(last.step), offset=offset, delta=delta)
        return self._chunk([part], **extra, **({"speculative": speculative} if speculative else {}))

    def _choice(
        self,
        index: int,
        text: str,
        scores: Sequence[ScoredToken],
        finish_reason: replies.FinishedBy | None,
        *,
        offset: int = 0,
        delta: dict[str, str] | None = None,
    ) -> replies.Choice:
        fields: Json = {"index": index, "logprobs": self._logprobs(scores, offset), "finish_reason": finish_reason}
        if not self._is_chat:
            return replies.TextChoice(text=text, **fields)
        if delta is None:
            return replies.ChatChoice(message=replies.AssistantMessage(content=text), **fields)
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


def _token(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def _finish_reason(step: Step) -> replies.FinishedBy | None:
    """OpenAI's word for why an answer ended: an end of text and a stop string are both "stop"."""
    return "stop" if step.finish_reason == "eos" else step.finish_reason
