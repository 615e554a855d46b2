"""The shapes of replies, for the OpenAPI document: OpenAI's, and our block `speculative`."""

from typing import Any, Literal

from pydantic import BaseModel, Field


class SpeculativeBlock(BaseModel):
    """Timings of an answer; seconds end in `_s`. The first names are those of vLLM's block of a request."""

    mean_acceptance_length: float = Field(description="1 + accepted draft tokens per step.")
    draft_acceptance_rate: float
    acceptance_histogram: dict[str, int] = Field(description="How many steps accepted 0, 1, 2, ... draft tokens.")
    drafted_histogram: dict[str, int]
    num_spec_steps: int = Field(description="Rounds.")
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int = Field(description="The most draft tokens of a step.")
    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int = Field(description="Of the prompt, those that were in a cache.")
    policy: str
    verification: str
    lossless: bool = Field(description="Whether the answer has the target's own distribution.")
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
    elapsed_s: float
    time_shares: dict[str, float]
    queue_s: float | None
    time_to_first_token_s: float | None
    steps: list[list[dict[str, Any]]] | None = Field(default=None, description="With details: the steps of every answer.")


class PromptTokens(BaseModel):
    cached_tokens: int = Field(description="Of the prompt, those that did not have to be read again.")


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, list[Any]] | None
    finish_reason: Literal["stop", "length"]


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class _Reply(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage
    speculative: SpeculativeBlock


class Completion(_Reply):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class ChatCompletion(_Reply):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = Field(description="What the target's context holds, prompt and answer together.")


class Models(BaseModel):
    object: Literal["list"]
    data: list[Model]


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
