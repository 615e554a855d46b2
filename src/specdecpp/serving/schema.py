"""Schema of requests and replies: OpenAI's API, the sampling fields that vLLM adds, and `speculative`.

A request's field that is not supported is refused by name. One of OpenAI's own is let through where its value asks for nothing,
as `frequency_penalty: 0` or `tools: null`, because clients send such values unasked.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator

from specdecpp.policy_spec import VERIFICATION_NAMES
from specdecpp.serving.errors import ApiError
from specdecpp.serving.tool_schema import (
    AskedCall,
    Body,
    JsonSchema,
    NamedTool,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoice,
    schema_of,
)
from specdecpp.serving.tool_schema import (
    ToolCallDelta as ToolCallDelta,
)
from specdecpp.serving.tools import ToolUse

# name: the value that asks for nothing, beside null
_UNSUPPORTED: dict[str, Any] = {
    **dict.fromkeys(("audio", "prediction", "prompt_cache_key", "safety_identifier", "verbosity", "web_search_options")),
    **dict.fromkeys(("function_call", "reasoning_effort", "tool_choice"), "none"),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), 0),
    "functions": [],
    "tools": [],
    "logit_bias": {},
    "metadata": {},
    "best_of": 1,
    "echo": False,
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "store": False,
    "suffix": "",
}
_IN_MESSAGES = ("annotations", "audio", "function_call", "name", "reasoning", "refusal")

if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal[VERIFICATION_NAMES]


def _several(value: Any) -> Any:
    """A list of one for a text, or for the ids of one."""
    is_one = isinstance(value, str) or (isinstance(value, list) and bool(value) and isinstance(value[0], int))
    return [value] if is_one else value


class Speculative(Body):
    """How the answer is made; its distribution does not depend on it, unless `lossless` is false."""

    policy: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None,
        description="When to stop drafting, as on the command line: cost-aware, cumulative:0.2, fixed:4, none, ...",
    )
    verification: Kind | None = Field(default=None, description="How draft tokens are tested.")
    lossless: bool = Field(default=True, description="false: the distribution may be another than the target's, as fuzzy has.")
    details: bool = Field(default=False, description="Add every step: draft tokens, p, q, estimates, times.")


class StreamOptions(Body):
    include_usage: bool = Field(default=False, description="A last chunk with the usage of the whole request.")


def _how(value: Any) -> Any:
    """`speculative` written out: false is the target alone, true the server's own."""
    return ({} if value else {"policy": "none"}) if isinstance(value, bool) else value


Stop = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Field(max_length=16), BeforeValidator(_several, json_schema_input_type=Stop | list[Stop])]
HowToSpeculate = Annotated[Speculative, BeforeValidator(_how, json_schema_input_type=bool | Speculative)]


class BaseRequest(Body):
    """Fields of both endpoints."""

    model: str | None = Field(default=None, description="The name in /v1/models; there is one, so it may be left out.")
    temperature: float | None = Field(default=None, ge=0, le=2, description="0 is greedy; left out, the model's own or 1.")
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(
        default=None, ge=0, le=2**31, description="Draw from this many tokens of most probability; 0: all."
    )
    min_p: float | None = Field(default=None, ge=0, le=1, description="Drop tokens below this times the largest probability.")
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100, description="Above 1: fewer repeats.")
    stop: Stops = Field(default=[])
    seed: int | None = Field(
        default=None, ge=0, lt=2**63, description="Same seed, same answer; answer i of several has seed + i."
    )
    n: int = Field(default=1, ge=1, le=16)
    max_tokens: int | None = Field(default=None, ge=1, le=2**31)
    ignore_eos: bool = Field(default=False, description="Go on after the token that ends a text.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    speculative: HowToSpeculate = Field(default=Speculative(), description="false: the target alone.")
    user: str | None = Field(default=None, max_length=256, description="Goes to the log.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        unsupported = {name: neutral for name, neutral in _UNSUPPORTED.items() if name not in cls.model_fields}
        return {k: v for k, v in _supported(given, unsupported).items() if v is not None or k not in cls.model_fields}

    @model_validator(mode="after")
    def _check_together(self) -> "BaseRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true; leave it out, or stream.")
        if 0 < (self.temperature or 0.0) < 1e-3:
            raise ValueError(f"temperature must be 0 or at least 0.001, got {self.temperature}; 0 is greedy.")
        return self

    @property
    def num_new(self) -> int | None:
        return self.max_tokens

    @property
    def tool_use(self) -> ToolUse | None:
        """The tools that the answer may or must call; None without any."""
        return None

    @property
    def answer_schema(self) -> JsonSchema | None:
        """The JSON schema that the answer fits; None for any text."""
        return None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
Prompt = Annotated[
    Annotated[str, Tag("|text")] | Annotated[Ids, Tag("|ids")],
    Discriminator(lambda value: "|ids" if isinstance(value, list) else "|text"),
]
Prompts = Annotated[
    list[Prompt],
    Field(min_length=1, max_length=16),
    BeforeValidator(_several, json_schema_input_type=str | list[str] | Ids | list[Ids]),
]


class CompletionRequest(BaseRequest):
    """The body of /v1/completions: text, or token ids, or several of either."""

    prompt: Prompts
    logprobs: int | None = Field(default=None, ge=0, le=20, description="Log-probabilities of this many tokens a place.")

    @property
    def prompts(self) -> list[Any]:
        return self.prompt

    @property
    def num_top(self) -> int | None:
        """Alternatives for each token; None where no log-probabilities are asked for."""
        return self.logprobs


class TextPart(Body):
    type: Literal["text"]
    text: str


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Message(Body):
    """One message of a conversation: text, calls of the assistant, or the result of one."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[list[TextPart], BeforeValidator(_parts, json_schema_input_type=str | list[TextPart])] | None = None
    tool_calls: list[AskedCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, given: Any) -> Any:
        return _supported(given, dict.fromkeys(_IN_MESSAGES), of="messages.") if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _check_role(self) -> "Message":
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError("tool_calls go with the role assistant; leave them out.")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("the role tool goes with tool_call_id, which says whose result this is; no other role has it.")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing; only a message with tool_calls may go without.")
        return self

    @property
    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"role": self.role, "content": "".join(part.text for part in self.content or ())}
        return found | ({"tool_calls": [call.as_dict for call in self.tool_calls]} if self.tool_calls else {})


class ChatRequest(BaseRequest):
    """The body of /v1/chat/completions: messages, put through the tokenizer's chat template."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31, description="The newer name of max_tokens.")
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[Tool] = Field(default=[], max_length=128)
    tool_choice: ToolChoice | None = Field(default=None, description="Left out: auto where there are tools.")
    parallel_tool_calls: bool = Field(default=True, description="false: an answer has one call at most.")
    response_format: ResponseFormat | None = Field(default=None, description="JSON, or JSON that fits a schema.")

    @model_validator(mode="after")
    def _check_names(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true; leave it out, or set that.")
        names = [tool.function.name for tool in self.tools]
        if len(names) > len(set(names)):
            raise ValueError("two tools have the same name; leave one of them out.")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(
                f"tool_choice names {self.tool_choice.function.name!r}, and the tools are {names}; name one of them."
            )
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice is required, and there are no tools; send some, or leave it out.")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens mean the same and differ; send one of them.")
        return self

    @property
    def prompts(self) -> list[Any]:
        return [[message.as_dict for message in self.messages]]

    @property
    def tool_use(self) -> ToolUse | None:
        if not self.tools or self.tool_choice == "none":
            return None
        must = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        return ToolUse(
            functions=tuple(tool.function.model_dump(exclude_none=True) for tool in self.tools),
            must="" if self.tool_choice == "required" else must,
            has_many=self.parallel_tool_calls,
        )

    @property
    def answer_schema(self) -> JsonSchema | None:
        return schema_of(self.response_format)

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_new(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens


def _supported(given: dict[str, Any], unsupported: dict[str, Any], *, of: str = "") -> dict[str, Any]:
    """A body without the values that ask for nothing. Raises `ApiError` for one that asks for what is not there."""
    for name, neutral in unsupported.items():
        if given.get(name) is not None and given[name] != neutral:
            raise ApiError(f"{of}{name} is not supported. Leave it out.", param=f"{of}{name}", code="unsupported_parameter")
    return {name: value for name, value in given.items() if name not in unsupported}


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


FinishedBy = Literal["stop", "length", "tool_calls"]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, list[Any]] | None
    finish_reason: FinishedBy | None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: FinishedBy


class DeltaChoice(BaseModel):
    index: int
    delta: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: FinishedBy | None


Choice = TextChoice | ChatChoice | DeltaChoice


class Reply(BaseModel):
    """Fields of both replies and of chunks; in a chunk `speculative` is a step, or comes with the last one."""

    id: str
    object: str
    created: int
    model: str


class Completion(Reply):
    choices: list[TextChoice]
    usage: Usage
    speculative: SpeculativeBlock


class ChatCompletion(Reply):
    choices: list[ChatChoice]
    usage: Usage
    speculative: SpeculativeBlock


class Chunk(Reply):
    choices: list[Choice]
    usage: Usage | None = None
    speculative: dict[str, Any] | None = None


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
