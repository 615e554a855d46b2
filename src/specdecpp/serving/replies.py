"""Schema of replies: OpenAI's, with the block `speculative`, llama.cpp's `timings` and vLLM's `metrics`."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, create_model

from specdecpp.metrics import Metrics, Step
from specdecpp.serving.schema import ToolCall

FinishedBy = Literal["stop", "length", "tool_calls"]


class TokenDetails(BaseModel):
    """A draft token or a token of the answer; p and q under the request's sampling, at temperature 0 under temperature 1."""

    token: int
    text: str
    outcome: Literal["accepted", "rejected", "unused", "correction", "bonus"]
    p: float
    q: float | None = Field(description="null where the draft did not get that far.")
    estimate: float | None = Field(description="The head's, of the draft token's acceptance.")


class StepDetails(BaseModel):
    """One step; `at_s` seconds after the request came."""

    num_drafted: int
    num_accepted: int
    stop_reason: str
    survival: list[float] = Field(description="The product of estimates, or of q, after every draft token.")
    survival_of: Literal["head", "q"]
    thresholds: list[float] | None = Field(description="Where the rule goes on: at each survival that is not below.")
    draft_tokens: list[TokenDetails]
    pieces: list[TokenDetails]
    times: dict[str, float]
    at_s: float


_NUMBERS: dict[str, Any] = {name: (type(value), ...) for name, value in Metrics().to_dict().items()}
_Numbers: Any = create_model("Numbers", **_NUMBERS)


class SpeculativeBlock(_Numbers):
    """Settings of an answer, and the numbers of `Metrics.to_dict`: seconds end in `_s`, histograms are by 0, 1, 2, ..."""

    num_spec_tokens: int = Field(description="The most draft tokens of a step.")
    policy: str
    verification: str
    lossless: bool = Field(description="True where the answer has the target's own distribution.")
    sampling: dict[str, Any]
    time_shares: dict[str, float]
    queue_s: float | None
    time_to_first_token_s: float | None
    steps: list[list[StepDetails]] | None = Field(default=None, description="With details: the steps of every answer.")


class PromptTokens(BaseModel):
    cached_tokens: int = Field(description="Of the prompt, those that did not have to be read again.")


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class Timings(BaseModel):
    """llama.cpp's figures. Times are those of a clock on the wall, in milliseconds: together they reach from the end of the
    queue to the last token, the steps of other requests included. A rate over no time is null."""

    cache_n: int = Field(description="Tokens of the prompt that were in a cache.")
    prompt_n: int = Field(description="Tokens of the prompt that were read.")
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    draft_n: int
    draft_n_accepted: int


class SpeculativeDecoding(BaseModel):
    """vLLM's figures of one answer. As there, a step counts when it has draft tokens (`speculative` counts all steps)."""

    mean_acceptance_length: float = Field(description="1 + accepted draft tokens per step; 1 without steps.")
    draft_acceptance_rate: float
    acceptance_histogram: list[int] = Field(description="Item j: steps that accepted j of up to num_spec_tokens draft tokens.")
    acceptance_histogram_by_draft_length: dict[int, list[int]] = Field(
        description="Item j under k: steps that accepted j of exactly k draft tokens."
    )
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int = Field(description="The most draft tokens that the policy allows in a step.")


class RequestMetrics(BaseModel):
    """vLLM's `metrics` of a reply."""

    speculative_decoding: SpeculativeDecoding | None = Field(description="null for several answers, and without drafting.")


class Choice(BaseModel):
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: FinishedBy | None


class TextChoice(Choice):
    text: str


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Choice):
    message: AssistantMessage


class Reply(BaseModel):
    id: str
    object: str
    created: int
    model: str
    usage: Usage
    speculative: SpeculativeBlock
    timings: Timings
    metrics: RequestMetrics


class Completion(Reply):
    choices: list[TextChoice]


class ChatCompletion(Reply):
    choices: list[ChatChoice]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "specdecpp"
    max_model_len: int | None = Field(description="What the target's context holds, prompt and answer together.")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["ok", "stopping", "failed"]
    running: int
    waiting: int


class Problem(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    error: Problem


def timings_of(metrics: Metrics, *, prompt_s: float, predicted_s: float) -> Timings:
    """llama.cpp's figures of sums over steps, and of the seconds before and after the prompt had been read."""
    found: dict[str, Any] = {
        "cache_n": metrics.num_cached_tokens,
        "draft_n": metrics.num_draft_tokens,
        "draft_n_accepted": metrics.num_accepted_draft_tokens,
    }
    num_read = metrics.num_prompt_tokens - metrics.num_cached_tokens
    for name, num, seconds in (("prompt", num_read, prompt_s), ("predicted", metrics.num_tokens, predicted_s)):
        found |= {f"{name}_n": num, f"{name}_ms": 1e3 * seconds}
        found[f"{name}_per_token_ms"] = 1e3 * seconds / num if num else None
        found[f"{name}_per_second"] = num / seconds if seconds else None
    return Timings(**found)


def speculative_decoding(steps: Sequence[Step], num_spec_tokens: int) -> SpeculativeDecoding:
    """vLLM's figures of the steps of one answer under a policy with at most `num_spec_tokens` draft tokens a step."""
    drafting = [step for step in steps if step.num_drafted]
    sums, counts = Metrics.of(drafting), Counter((step.num_drafted, step.num_accepted) for step in drafting)
    names = ("draft_acceptance_rate", "num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens")
    return SpeculativeDecoding(
        mean_acceptance_length=sums.mean_acceptance_length or 1.0,
        acceptance_histogram=[sums.acceptance_histogram[j] for j in range(num_spec_tokens + 1)],
        acceptance_histogram_by_draft_length={k: [counts[k, j] for j in range(k + 1)] for k in sorted(sums.drafted_histogram)},
        num_spec_tokens=num_spec_tokens,
        **{name: getattr(sums, name) for name in names},
    )
