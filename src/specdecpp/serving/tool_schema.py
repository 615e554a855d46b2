"""Schema of what a request says of tools and of the form of its answer, and of calls in messages and replies."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Body(BaseModel):
    """A part of a request: a field that it does not have is refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


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


class AnyText(Body):
    type: Literal["text"]


class JsonObject(Body):
    type: Literal["json_object"]


class NamedSchema(Body):
    name: Name
    json_schema: JsonSchema = Field(default_factory=dict, alias="schema")
    description: str | None = None
    strict: bool | None = Field(default=None, description="Answers always fit the schema.")


class FittingJson(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[AnyText | JsonObject | FittingJson, Field(discriminator="type")]


def schema_of(form: AnyText | JsonObject | FittingJson | None) -> JsonSchema | None:
    """The JSON schema of an answer; None where any text will do."""
    if isinstance(form, FittingJson):
        return form.json_schema.json_schema
    return {"type": "object"} if isinstance(form, JsonObject) else None


class AskedCall(Body):
    """A call in a message of the assistant; `arguments` is JSON."""

    class Named(Body):
        name: Name
        arguments: str

        @field_validator("arguments")
        @classmethod
        def _check(cls, given: str) -> str:
            if not isinstance(json.loads(given or "{}"), dict):
                raise ValueError("arguments must be a JSON object, as text")
            return given or "{}"

    id: str
    type: Literal["function"]
    function: Named

    @property
    def as_dict(self) -> dict[str, Any]:
        """The call as chat templates have it."""
        arguments = json.loads(self.function.arguments)
        return {"type": "function", "id": self.id, "function": {"name": self.function.name, "arguments": arguments}}


class CalledFunction(BaseModel):
    name: str
    arguments: str = Field(description="JSON.")


class ToolCall(BaseModel):
    """A call in a reply."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolCallDelta(ToolCall):
    """A call in a chunk, whole."""

    index: int
