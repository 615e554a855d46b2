"""Schema of requests: the bodies of OpenAI's API, the sampling fields that vLLM adds, and `speculative`.

A field that is not supported is refused by name. One of OpenAI's own is let through where its value asks for nothing, as
`frequency_penalty: 0` or `tools: null`, because clients send such values unasked.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specdecpp.policy_spec import VERIFICATION_NAMES
from specdecpp.serving.refusals import Refusal

# name: the value that asks for nothing, beside null
_UNSUPPORTED: dict[str, Any] = {
    "audio": None,
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "function_call": "none",
    "functions": [],
    "logit_bias": {},
    "metadata": {},
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "prediction": None,
    "presence_penalty": 0,
    "prompt_cache_key": None,
    "reasoning_effort": "none",
    "response_format": {"type": "text"},
    "safety_identifier": None,
    "service_tier": "auto",
    "store": False,
    "suffix": "",
    "tool_choice": "none",
    "tools": [],
    "verbosity": None,
    "web_search_options": None,
}
_IN_MESSAGES = ("annotations", "audio", "function_call", "name", "reasoning", "refusal", "tool_call_id", "tool_calls")

if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal[VERIFICATION_NAMES]

Stop = Annotated[str, Field(min_length=1, max_length=256)]
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Speculative(_Body):
    """How the answer is made; what it says does not depend on it, unless `lossless` is false."""

    policy: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None,
        description="When to stop drafting, as on the command line: cost-aware, cumulative:0.2, fixed:4, none, ...",
    )
    verification: Kind | None = Field(default=None, description="How draft tokens are tested.")
    lossless: bool = Field(default=True, description="false: the distribution may be another than the target's, as fuzzy has.")
    details: bool = Field(default=False, description="Tell of every step: draft tokens, p, q, estimates, times.")


class StreamOptions(_Body):
    include_usage: bool = Field(default=False, description="A last chunk with the usage of the whole request.")


class Asked(_Body):
    """Fields of both endpoints."""

    model: str | None = Field(default=None, description="The name in /v1/models; there is one, so it may be left out.")
    temperature: float | None = Field(default=None, ge=0, le=2, description="0 is greedy; left out, the model's own or 1.")
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=2**31, description="Keep this many of the likeliest tokens; 0: all.")
    min_p: float | None = Field(default=None, ge=0, le=1, description="Drop tokens below this times the likeliest.")
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100, description="Above 1: fewer repeats.")
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    seed: int | None = Field(
        default=None, ge=0, lt=2**63, description="Same seed, same answer; answer i of several has seed + i."
    )
    n: int = Field(default=1, ge=1, le=128)
    max_tokens: int | None = Field(default=None, ge=1, le=2**31)
    ignore_eos: bool = Field(default=False, description="Go on after the token that ends a text.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    speculative: bool | Speculative | None = Field(default=None, description="false: the target alone.")
    user: str | None = Field(default=None, max_length=256, description="Goes to the log.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {k: v for k, v in _supported(given, _UNSUPPORTED).items() if v is not None or k not in cls.model_fields}

    @model_validator(mode="after")
    def _check_together(self) -> "Asked":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true; leave it out, or stream.")
        if 0 < (self.temperature or 0.0) < 1e-3:
            raise ValueError(f"temperature must be 0 or at least 0.001, got {self.temperature}; 0 is greedy.")
        return self

    @property
    def how(self) -> Speculative:
        """`speculative` written out: false is the target alone, true and nothing are the server's own."""
        if isinstance(self.speculative, Speculative):
            return self.speculative
        return Speculative(policy="none" if self.speculative is False else None)

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Asked):
    """The body of /v1/completions: text, or token ids, or several of either."""

    prompt: str | Annotated[list[str], Field(min_length=1)] | Ids | Annotated[list[Ids], Field(min_length=1)]
    logprobs: int | None = Field(
        default=None, ge=0, le=20, description="Log-probabilities of this many of the likeliest tokens."
    )

    @property
    def prompts(self) -> list[Any]:
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else list(self.prompt)

    @property
    def num_top(self) -> int | None:
        """How many alternatives a token comes with; None where no log-probabilities are asked for."""
        return self.logprobs

    @property
    def num_new(self) -> int | None:
        return self.max_tokens

    @property
    def num_new_unasked(self) -> int | None:
        """How long an answer may get where nobody says: 16 tokens, as with OpenAI."""
        return 16


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    """One message of a conversation. Only text is understood."""

    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, given: Any) -> Any:
        return _supported(given, dict.fromkeys(_IN_MESSAGES), of="messages.") if isinstance(given, dict) else given

    @property
    def as_dict(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class ChatRequest(Asked):
    """The body of /v1/chat/completions: messages, put through the tokenizer's chat template."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31, description="The newer name of max_tokens.")
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @model_validator(mode="after")
    def _check_names(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true; leave it out, or set that.")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens mean the same and differ; send one of them.")
        return self

    @property
    def prompts(self) -> list[Any]:
        return [[message.as_dict for message in self.messages]]

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_new(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def num_new_unasked(self) -> int | None:
        """Limit by the room that there is."""
        return None


def _supported(given: dict[str, Any], unsupported: dict[str, Any], *, of: str = "") -> dict[str, Any]:
    """A body without the values that ask for nothing. Raises `Refusal` for one that asks for what is not there."""
    for name, neutral in unsupported.items():
        if given.get(name) is not None and given[name] != neutral:
            raise Refusal(f"{of}{name} is not supported. Leave it out.", param=f"{of}{name}", code="unsupported_parameter")
    return {name: value for name, value in given.items() if name not in unsupported}
