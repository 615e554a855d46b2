"""Schema of requests: OpenAI's API, the sampling fields that vLLM adds, and `speculative`.

A request's field that is not supported is refused by name. One of OpenAI's own is let through where its value asks for nothing,
as `frequency_penalty: 0` or `tools: null`, because clients send such values unasked.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from specdecpp.policy_spec import VERIFICATION_NAMES
from specdecpp.serving.errors import ApiError

Neutral = dict[str, tuple[Any, ...] | None]
"""Fields that are not supported, each with the values that ask for nothing beside null (None: all of them do)."""
UNSUPPORTED: Neutral = {
    **dict.fromkeys(("audio", "prediction", "verbosity", "web_search_options"), ()),
    **dict.fromkeys(("function_call", "reasoning_effort"), ("none",)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0,)),
    "functions": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
}

if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal[VERIFICATION_NAMES]


def _several(value: Any) -> Any:
    """A list of one for a text, or for the ids of one."""
    is_one = isinstance(value, str) or (isinstance(value, list) and bool(value) and isinstance(value[0], int))
    return [value] if is_one else value


class Body(BaseModel):
    """A part of a request: a field that it does not have is refused by name, and null is as good as leaving one out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    unsupported: ClassVar[Neutral] = {}
    prefix: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        found = {}
        for name, value in given.items():
            if name in cls.model_fields or name not in cls.unsupported:
                if value is not None or name not in cls.model_fields:
                    found[name] = value
            elif value is not None and (neutral := cls.unsupported[name]) is not None and value not in neutral:
                shown = cls.prefix + name
                raise ApiError(f"{shown} is not supported. Leave it out.", param=shown, code="unsupported_parameter")
        return found


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
JsonSchema = dict[str, Any]


class Function(Body):
    name: Name
    description: str | None = None
    parameters: JsonSchema | None = Field(default=None, description="The JSON schema of its arguments; left out: any object.")
    strict: bool | None = Field(default=None, description="Calls fit the schema although tool_choice is auto.")


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: Name


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class NamedSchema(Body):
    name: Name
    json_schema: JsonSchema = Field(default_factory=dict, alias="schema")
    description: str | None = None
    strict: bool | None = Field(default=None, description="Answers always fit the schema.")


class ResponseFormat(Body):
    """Text, any JSON object, or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and no other type has one.")
        return self

    @property
    def answer_schema(self) -> JsonSchema | None:
        """The JSON schema of an answer; None where any text will do."""
        if self.json_schema is not None:
            return self.json_schema.json_schema
        return {"type": "object"} if self.type == "json_object" else None


class CalledFunction(Body):
    name: Name
    arguments: str = Field(description="A JSON object, as text.")

    @field_validator("arguments")
    @classmethod
    def _check(cls, given: str) -> str:
        with suppress(RecursionError):
            if isinstance(json.loads(given or "{}"), dict):
                return given or "{}"
        raise ValueError("arguments must be a JSON object, as text")


class ToolCall(Body):
    """A call, in a message of the assistant and in a reply."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """Functions of a request, as OpenAI's API has them. `must` names the one that the answer has to call, "" any of them; with
    None it may call one. With `has_many` it may call several."""

    functions: tuple[JsonSchema, ...]
    must: str | None = None
    has_many: bool = True

    @property
    def is_strict(self) -> bool:
        """True where calls have to fit their schemas although the answer need not have one."""
        return any(function.get("strict") for function in self.functions)


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
    include_usage: bool = Field(default=False, description="A last chunk with the usage of the whole request, and its figures.")
    include_obfuscation: Literal[False] | None = Field(default=None, description="Only false: chunks are not padded.")


def _how(value: Any) -> Any:
    """`speculative` written out: false is the target alone, true the server's own."""
    return ({} if value else {"policy": "none"}) if isinstance(value, bool) else value


Stop = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Field(max_length=16), BeforeValidator(_several, json_schema_input_type=Stop | list[Stop])]
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)]
HowToSpeculate = Annotated[Speculative, BeforeValidator(_how, json_schema_input_type=bool | Speculative)]


class BaseRequest(Body):
    """Fields of all endpoints, and what differs between these: the field of the prompt, the names that are not supported, and
    the length of an answer that names none (None: what there is room for) or more than there is room for (`is_cut`)."""

    prompt_field: ClassVar[str] = "prompt"
    unsupported: ClassVar[Neutral] = UNSUPPORTED
    default_new: ClassVar[int | None] = None
    is_cut: ClassVar[bool] = False

    model: str | None = Field(default=None, description="The name in /v1/models; there is one, so it may be left out.")
    temperature: float | None = Field(default=None, ge=0, le=2, description="0 is greedy; left out, the model's own or 1.")
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=2**31, description="Draw from this many most probable tokens; 0: all.")
    min_p: float | None = Field(default=None, ge=0, le=1, description="Drop tokens below this times the largest probability.")
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100, description="Above 1: fewer repeats.")
    stop: Stops = Field(default=[])
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, description="Same seed, same answer; answer i has seed + i.")
    n: int = Field(default=1, ge=1, le=16)
    max_tokens: int | None = Field(default=None, ge=1, le=2**31)
    ignore_eos: bool = Field(default=False, description="Go on after the token that ends a text.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    speculative: HowToSpeculate = Field(default=Speculative(), description="false: the target alone.")
    user: str | None = Field(default=None, max_length=256, description="Goes to the log.")
    safety_identifier: str | None = Field(default=None, max_length=256, description="The newer name of user.")
    prompt_cache_key: str | None = Field(default=None, max_length=256, description="Not needed: caches are found by text.")
    metadata: Metadata | None = Field(default=None, description="Labels of stored answers; they are neither kept nor logged.")

    @model_validator(mode="after")
    def _check_together(self) -> "BaseRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true; leave it out, or stream.")
        if 0 < (self.temperature or 0.0) < 1e-3:
            raise ValueError(f"temperature must be 0 or at least 0.001, got {self.temperature}; 0 is greedy.")
        return self

    @property
    def prompts(self) -> list[Any]:
        """Texts, ids or conversations."""
        raise NotImplementedError

    @property
    def num_top(self) -> int | None:
        """Alternatives for each token; None where no log-probabilities are asked for."""
        return None

    @property
    def num_new(self) -> int | None:
        """Tokens of an answer; None where that is left open."""
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


class TextRequest(BaseRequest):
    """A body with text, or token ids, or several of either."""

    prompt: Prompts

    @property
    def prompts(self) -> list[Any]:
        return self.prompt


class CompletionRequest(TextRequest):
    """The body of /v1/completions."""

    default_new = 16

    logprobs: int | None = Field(default=None, ge=0, le=20, description="Log-probabilities of this many tokens a place.")

    @property
    def num_top(self) -> int | None:
        return self.logprobs


class TextPart(Body):
    type: Literal["text"]
    text: str


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Message(Body):
    """A message of a conversation: text, calls of the assistant, or a call's result. The role developer stands for system."""

    unsupported: ClassVar[Neutral] = {"annotations": ([],), "audio": (), "function_call": (), "reasoning": (), "refusal": ()}
    prefix = "messages."

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = Field(default=None, max_length=64, description="Goes to the chat template, which may use it.")
    content: Annotated[list[TextPart], BeforeValidator(_parts, json_schema_input_type=str | list[TextPart])] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

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
        """The message as chat templates have it."""
        role = "system" if self.role == "developer" else self.role
        found: dict[str, Any] = {"role": role, "content": "".join(part.text for part in self.content or ())}
        if self.name is not None:
            found["name"] = self.name
        if self.tool_calls:
            found["tool_calls"] = [call.model_dump() for call in self.tool_calls]
            for call in found["tool_calls"]:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return found


class ChatRequest(BaseRequest):
    """The body of /v1/chat/completions: messages, put through the tokenizer's chat template."""

    prompt_field = "messages"

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
        names, named = [tool.function.name for tool in self.tools], self._named_tool
        if len(names) > len(set(names)):
            raise ValueError("two tools have the same name; leave one of them out.")
        if named is not None and named not in names:
            raise ValueError(f"tool_choice names {named!r}, and the tools are {names}; name one of them.")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice is required, and there are no tools; send some, or leave it out.")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens mean the same and differ; send one of them.")
        return self

    @property
    def prompts(self) -> list[Any]:
        return [[message.as_dict for message in self.messages]]

    @property
    def _named_tool(self) -> str | None:
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def tool_use(self) -> ToolUse | None:
        if not self.tools or self.tool_choice == "none":
            return None
        return ToolUse(
            functions=tuple(tool.function.model_dump(exclude_none=True) for tool in self.tools),
            must="" if self.tool_choice == "required" else self._named_tool,
            has_many=self.parallel_tool_calls,
        )

    @property
    def answer_schema(self) -> JsonSchema | None:
        return self.response_format.answer_schema if self.response_format else None

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_new(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens
