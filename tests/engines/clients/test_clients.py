"""A call and an answer that fits a schema, asked for by clients that were not made here, over HTTP on loopback."""

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from served import served

import specdecpp as sd


class Weather(BaseModel):
    """The weather of a town."""

    town: Literal["Paris", "Rome"]
    degrees: int = Field(ge=-50, le=50)


ASKED = "What is the weather in Paris?"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(sd.load_pair()) as server:
        yield f"{server.url}/v1"


@tool
def weather(town: Literal["Paris", "Rome"], days: Literal[1, 2]) -> str:
    """The weather of a town."""
    return "sunny"


@pytest.fixture
def langchain(url: str) -> ChatOpenAI:
    return ChatOpenAI(model="reference", base_url=url, api_key=SecretStr("none"), max_retries=0, temperature=0.7)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_langchain_calls(langchain: ChatOpenAI, is_streamed: bool) -> None:
    bound = langchain.bind_tools([weather], tool_choice="weather", parallel_tool_calls=False)
    if is_streamed:
        whole: Any = None
        for chunk in bound.stream(ASKED):
            whole = chunk if whole is None else whole + chunk
    else:
        whole = bound.invoke(ASKED)
    (call,) = whole.tool_calls
    assert weather.invoke(call).content == "sunny"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_answers_that_fit_a_schema(langchain: ChatOpenAI, method: Any) -> None:
    assert isinstance(langchain.with_structured_output(Weather, method=method).invoke(ASKED), Weather)


def test_pydantic_ai_answers_that_fit_a_schema(url: str) -> None:
    model = OpenAIChatModel("reference", provider=OpenAIProvider(base_url=url, api_key="none"))
    assert isinstance(Agent(model, output_type=Weather, retries=0).run_sync(ASKED).output, Weather)
