"""Schema of requests: OpenAI's API, the sampling fields that vLLM adds, and `speculative`.

A field that is not supported is refused by name. One of OpenAI's own is let through where its value asks for nothing, as
`frequency_penalty: 0` or `tools: null`, because clients send such values unasked.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from specdecpp.policy_spec import VERIFICATION_NAMES
from specdecpp.serving.errors import ApiError

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
_IN_MESSAGES = ("annotations", "audio", "function_call", "name", "reasoning", "refusal", "tool_call_id", "tool_calls")

if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal[VERIFICATION_NAMES]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Speculative(_Body):
    """How the answer is made; its distribution does not depend on it, unless `lossless` is false."""

    policy: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None,
        description="When to stop drafting, as on the command line: cost-aware, cumulative:0.2, fixed:4, none, ...",
    )
    verification: Kind | None = Field(default=None, description="How draft tokens are tested.")
    lossless: bool = Field(default=True, description="false: the distribution may be another than the target's, as fuzzy has.")
    details: bool = Field(default=False, description="Add every step: draft tokens, p, q, estimates, times.")


def _as_speculative(given: Any) -> Any:
    """`false` written out: the target alone; true is the server's own choice."""
    if not isinstance(given, bool):
        return given
    return {} if given else {"policy": "none"}


def _as_stops(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


def _as_prompts(given: Any) -> Any:
    is_ids = isinstance(given, list) and given and isinstance(given[0], int)
    return [given] if is_ids or isinstance(given, str) else given


def _as_parts(given: Any) -> Any:
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


class StreamOptions(_Body):
    include_usage: bool = Field(default=False, description="A last chunk with the usage of the whole request.")


Stop = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Field(max_length=16), BeforeValidator(_as_stops, json_schema_input_type=Stop | list[Stop])]
HowToSpeculate = Annotated[Speculative, BeforeValidator(_as_speculative, json_schema_input_type=bool | Speculative | None)]
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
OnePrompt = Annotated[
    Annotated[str, Tag("|text")] | Annotated[Ids, Tag("|ids")],
    Discriminator(lambda given: "|ids" if isinstance(given, list) else "|text"),
]
Prompts = Annotated[
    list[OnePrompt],
    Field(min_length=1, max_length=16),
    BeforeValidator(_as_prompts, json_schema_input_type=str | Ids | list[str] | list[Ids]),
]


class BaseRequest(_Body):
    """Fields of both endpoints."""

    model: str | None = Field(default=None, description="The name in /v1/models; there is one, so it may be left out.")
    temperature: float | None = Field(default=None, ge=0, le=2, description="0 is greedy; left out, the model's own or 1.")
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(
        default=None, ge=0, le=2**31, description="Draw from this many tokens of most probability; 0: all."
    )
    min_p: float | None = Field(default=None, ge=0, le=1, description="Drop tokens below this times the largest probability.")
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100, description="Above 1: fewer repeats.")
    stop: Stops | None = None
    seed: int | None = Field(
        default=None, ge=0, lt=2**63, description="Same seed, same answer; answer i of several has seed + i."
    )
    n: int = Field(default=1, ge=1, le=16)
    max_tokens: int | None = Field(default=None, ge=1, le=2**31)
    ignore_eos: bool = Field(default=False, description="Go on after the token that ends a text.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculative: HowToSpeculate = Field(default=Speculative(), description="false: the target alone.")
    user: str | None = Field(default=None, max_length=256, description="Goes to the log.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {k: v for k, v in _supported(given, _UNSUPPORTED).items() if v is not None or k not in cls.model_fields}

    @model_validator(mode="after")
    def _check_together(self) -> "BaseRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true; leave it out, or stream.")
        if 0 < (self.temperature or 0.0) < 1e-3:
            raise ValueError(f"temperature must be 0 or at least 0.001, got {self.temperature}; 0 is greedy.")
        return self


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


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    """One message of a conversation. Only text is understood."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart])]

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, given: Any) -> Any:
        return _supported(given, dict.fromkeys(_IN_MESSAGES), of="messages.") if isinstance(given, dict) else given


class ChatRequest(BaseRequest):
    """The body of /v1/chat/completions: messages, put through the tokenizer's chat template."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31, description="The newer name of max_tokens.")
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @model_validator(mode="after")
    def _check_names(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true; leave it out, or set that.")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens mean the same and differ; send one of them.")
        self.max_tokens = self.max_tokens or self.max_completion_tokens
        return self

    @property
    def prompts(self) -> list[Any]:
        return [[{"role": m.role, "content": "".join(part.text for part in m.content)} for m in self.messages]]

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def _supported(given: dict[str, Any], unsupported: dict[str, Any], *, of: str = "") -> dict[str, Any]:
    """A body without the values that ask for nothing. Raises `ApiError` for one that asks for what is not there."""
    for name, neutral in unsupported.items():
        if given.get(name) is not None and given[name] != neutral:
            raise ApiError(f"{of}{name} is not supported. Leave it out.", param=f"{of}{name}", code="unsupported_parameter")
    return {name: value for name, value in given.items() if name not in unsupported}
