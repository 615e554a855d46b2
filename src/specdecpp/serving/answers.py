"""Steps become choices, in the two shapes of OpenAI's API: whole, or in chunks, each with the steps that came together.

Both carry our block `speculative`: the metrics of the request under vLLM's names, its rates and where its time went.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

from specdecpp.metrics import Metrics
from specdecpp.serving.evidence import Scored
from specdecpp.serving.intake import RequestPlan, threshold
from specdecpp.serving.work import Event, Work
from specdecpp.session import Step
from specdecpp.verify import at, is_lossless

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"
_JSON = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))


@dataclass
class Choice:
    """One answer as far as it is known."""

    index: int
    num_prompt_tokens: int
    text: str = ""
    finish_reason: str = "length"
    steps: list[Step] = field(default_factory=list)
    scores: list[Scored] = field(default_factory=list)
    stories: list[Json] = field(default_factory=list)
    prefill_s: float = 0.0
    num_cached_tokens: int = 0

    def add(self, event: Event) -> None:
        self.text += event.step.text
        self.steps.append(event.step)
        self.prefill_s, self.num_cached_tokens = event.prefill_s, event.num_cached_tokens
        self.finish_reason = finish_reason(event.step) or self.finish_reason
        if event.evidence is not None:
            self.scores += event.evidence.scores
            self.stories += [story_of(event)] if event.evidence.story else []

    @property
    def metrics(self) -> Metrics:
        return Metrics.of(
            self.steps,
            prefill_s=self.prefill_s,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
        )


def finish_reason(outcome: Step) -> str | None:
    """OpenAI's word for why an answer ended: an end of text and a stop string are both "stop"."""
    return "stop" if outcome.finish_reason == "eos" else outcome.finish_reason


def story_of(event: Event) -> Json:
    """A step with its details and the time it was decided at."""
    assert event.evidence is not None, "details were asked for"
    return {**(event.evidence.story or {}), "at_s": event.at_s}


class TextStyle:
    """/v1/completions."""

    prefix, whole, part = "cmpl-", "text_completion", "text_completion"

    def choice(self, choice: Choice, *, scored: bool) -> Json:
        logprobs = _text_logprobs(choice.scores, 0) if scored else None
        shape = {"index": choice.index, "text": choice.text, "logprobs": logprobs}
        return shape | {"finish_reason": choice.finish_reason}

    def delta(self, events: Sequence[Event], *, offset: int, scored: bool, is_first: bool) -> Json:
        logprobs = _text_logprobs(_scores(events), offset) if scored else None
        shape = {"index": events[-1].index, "text": _text(events), "logprobs": logprobs}
        return shape | {"finish_reason": finish_reason(events[-1].step)}


class ChatStyle:
    """/v1/chat/completions."""

    prefix, whole, part = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, choice: Choice, *, scored: bool) -> Json:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        shape = {"index": choice.index, "message": message, "logprobs": _chat_logprobs(choice.scores) if scored else None}
        return shape | {"finish_reason": choice.finish_reason}

    def delta(self, events: Sequence[Event], *, offset: int, scored: bool, is_first: bool) -> Json:
        delta = ({"role": "assistant"} if is_first else {}) | {"content": _text(events)}
        logprobs = _chat_logprobs(_scores(events)) if scored else None
        shape = {"index": events[-1].index, "delta": delta, "logprobs": logprobs}
        return shape | {"finish_reason": finish_reason(events[-1].step)}


Style = TextStyle | ChatStyle


class Answer:
    """The reply to one request, folded event by event."""

    def __init__(self, plan: RequestPlan, style: Style, *, name: str, model: str, includes_usage: bool = False):
        self._plan, self._style, self._includes_usage = plan, style, includes_usage
        self._head = {"id": style.prefix + name, "created": int(time.time()), "model": model}
        self.choices = [Choice(index=i, num_prompt_tokens=len(part.prompt)) for i, part in enumerate(plan.parts)]
        self.first_text_s: float | None = None

    @property
    def _scored(self) -> bool:
        return self._plan.num_top is not None

    def add(self, event: Event) -> None:
        self.choices[event.index].add(event)
        if self.first_text_s is None and event.step.text:
            self.first_text_s = event.at_s

    @property
    def metrics(self) -> Metrics:
        """Those of all answers together."""
        return sum((choice.metrics for choice in self.choices[1:]), self.choices[0].metrics)

    @property
    def usage(self) -> Json:
        """A prompt counts once, however many answers it gets; of the cached tokens those that its first answer found."""
        completion = sum(choice.metrics.num_tokens for choice in self.choices)
        prompt = self._plan.num_prompt_tokens
        told = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return told | {"prompt_tokens_details": {"cached_tokens": self._num_cached}}

    @property
    def _num_cached(self) -> int:
        firsts: dict[tuple[int, ...], int] = {}
        for choice, part in zip(self.choices, self._plan.parts, strict=True):
            firsts.setdefault(tuple(part.prompt), choice.num_cached_tokens)
        return sum(firsts.values())

    def speculative(self, work: Work) -> Json:
        """Timings of a request: names as in vLLM's block of a request, then rates and times."""
        metrics = self.metrics
        return {
            "policy": self._plan.policy,
            "verification": self._plan.verification,
            "lossless": is_lossless(at(self._plan.sampling, self._plan.decoder.verification)),
            "sampling": asdict(self._plan.sampling),
            **metrics.to_dict(),
            "time_shares": metrics.time_shares,
            "queue_s": work.queue_s,
            "time_to_first_token_s": self.first_text_s,
        }

    def whole(self, work: Work) -> Json:
        """The body of an answer that is not streamed."""
        choices = [self._style.choice(choice, scored=self._scored) for choice in self.choices]
        speculative = self.speculative(work)
        if self._plan.details:
            speculative |= self._setting | {"rounds": [choice.stories for choice in self.choices]}
        body = {**self._head, "object": self._style.whole, "choices": choices, "usage": self.usage}
        return body | {"speculative": speculative}

    def opening(self) -> Json | None:
        """A first chunk before any step, where details are asked for: the rule, its threshold, what steps cost."""
        return self._chunk([], {"speculative": self._setting}) if self._plan.details else None

    def chunks(self, events: Sequence[Event], work: Work) -> list[Json]:
        """Chunks of steps that came together: a chunk for each answer, or for each step where details are asked for; none
        for steps of which nobody would see anything. Adds them too."""
        groups = (
            [[event] for event in events] if self._plan.details else [list(g) for _, g in groupby(events, attrgetter("index"))]
        )
        return [chunk for group in groups if (chunk := self._chunk_of(group, work))]

    def _chunk_of(self, events: Sequence[Event], work: Work) -> Json | None:
        """A chunk with steps of one answer."""
        choice, last = self.choices[events[-1].index], events[-1]
        is_first, offset = not choice.steps, sum(scored.num_shown for scored in choice.scores)
        for event in events:
            self.add(event)
        is_shown = _text(events) or last.step.finish_reason or self._plan.details or is_first
        if not (is_shown or _scores(events)):
            return None
        extra = {"speculative": {"round": story_of(last)}} if self._plan.details else {}
        if last.step.finish_reason is not None and last.index == len(self.choices) - 1:
            extra = {"speculative": extra.get("speculative", {}) | self.speculative(work)}
        return self._chunk([self._style.delta(events, offset=offset, scored=self._scored, is_first=is_first)], extra)

    def closing(self) -> Json | None:
        """The usage, where the request asks for it."""
        return self._chunk([], {"usage": self.usage}) if self._includes_usage else None

    @property
    def _setting(self) -> Json:
        decoder = self._plan.decoder
        costs = decoder.costs
        return {
            "policy": self._plan.policy,
            "verification": self._plan.verification,
            "sampling": asdict(self._plan.sampling),
            "threshold": threshold(decoder.policy),
            "costs": costs and {"draft_s": costs.draft_s, "target_s": costs.verify_s(1)},
        }

    def _chunk(self, choices: list[Json], extra: Json) -> Json:
        usage = {"usage": None} if self._includes_usage else {}
        return {**self._head, "object": self._style.part, "choices": choices, **usage, **extra}


def event(data: Json) -> bytes:
    """One event of a stream."""
    return b"data: " + _JSON.encode(data).encode() + b"\n\n"


def _text(events: Sequence[Event]) -> str:
    return "".join(event.step.text for event in events)


def _scores(events: Sequence[Event]) -> list[Scored]:
    return [scored for event in events if event.evidence for scored in event.evidence.scores]


def _text_logprobs(scores: Sequence[Scored], offset: int) -> Json:
    offsets = []
    for scored in scores:
        offsets.append(offset)
        offset += scored.num_shown
    return {
        "tokens": [scored.text for scored in scores],
        "token_logprobs": [scored.logprob for scored in scores],
        "top_logprobs": [dict(reversed(scored.top)) for scored in scores],  # of tokens that read alike the likeliest counts
        "text_offset": offsets,
    }


def _chat_logprobs(scores: Sequence[Scored]) -> Json:
    def shape(text: str, logprob: float) -> Json:
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    content = [shape(s.text, s.logprob) | {"top_logprobs": [shape(*likely) for likely in s.top]} for s in scores]
    return {"content": content, "refusal": None}
