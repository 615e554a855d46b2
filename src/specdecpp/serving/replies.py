"""Schema of replies: OpenAI's, with the block `speculative` and the figures of other servers."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from specdecpp.serving.figures import RequestMetrics, Timings


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
    at_s: float = 0.0


class SpeculativeBlock(BaseModel):
    """Timings of an answer; seconds end in `_s`. The first names are those of vLLM's block of a request."""

    mean_acceptance_length: float = Field(description="1 + accepted draft tokens per step.")
    draft_acceptance_rate: float
    acceptance_histogram: dict[str, int] = Field(description="How many steps accepted 0, 1, 2, ... draft tokens.")
    drafted_histogram: dict[str, int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int = Field(description="The most draft tokens of a step.")
    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int = Field(description="Of the prompt, those that were in a cache.")
    policy: str
    verification: str
    lossless: bool = Field(description="True where the answer has the target's own distribution.")
    sampling: dict[str, Any]
    tv: float = Field(description="Total variation from it, summed over tokens.")
    mean_tv: float
    tokens_per_second: float = Field(description="Tokens over the time that this request's own steps took.")
    discard_rate: float
    verification_rate: float
    prefill_s: float
    draft_s: float
    head_s: float
    verify_s: float
    other_s: float
    forward_s: float
    elapsed_s: float
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


FinishedBy = Literal["stop", "length"]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, list[Any]] | None
    finish_reason: FinishedBy | None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: FinishedBy


class DeltaChoice(BaseModel):
    index: int
    delta: dict[str, str]
    logprobs: dict[str, Any] | None
    finish_reason: FinishedBy | None


Choice = TextChoice | ChatChoice | DeltaChoice


class Reply(BaseModel):
    """Fields of both replies and of chunks; in a chunk `speculative` is a step or comes with the last one, as figures do."""

    id: str
    object: str
    created: int
    model: str


class Completion(Reply):
    choices: list[TextChoice]
    usage: Usage
    speculative: SpeculativeBlock
    timings: Timings
    metrics: RequestMetrics


class ChatCompletion(Reply):
    choices: list[ChatChoice]
    usage: Usage
    speculative: SpeculativeBlock
    timings: Timings
    metrics: RequestMetrics


class Chunk(Reply):
    choices: list[Choice]
    usage: Usage | None = None
    speculative: dict[str, Any] | None = None
    timings: Timings | None = None
    metrics: RequestMetrics | None = None


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
