"""Schema of tools, of calls and of the form of an answer, as requests and replies have them."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from specdecpp.serving.errors import ApiError


class Body(BaseModel):
    """A part of a request: a field that it does not have is refused by name, and null is as good as leaving one out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields of others' servers, each with the values beside null that ask for nothing and are let through."""
    prefix: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        unsupported = {name: cls.prefix + name for name in cls.unsupported.keys() - cls.model_fields.keys()}
        for name, shown in unsupported.items():
            if given.get(name) is not None and given[name] not in cls.unsupported[name]:
                raise ApiError(f"{shown} is not supported. Leave it out.", param=shown, code="unsupported_parameter")
        given = {name: value for name, value in given.items() if name not in unsupported}
        return {name: value for name, value in given.items() if value is not None or name not in cls.model_fields}


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
        if not isinstance(json.loads(given or "{}"), dict):
            raise ValueError("arguments must be a JSON object, as text")
        return given or "{}"


class ToolCall(Body):
    """A call, in a message of the assistant and in a reply."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolCallDelta(ToolCall):
    """A call in a chunk, whole."""

    index: int
