"""Structured answers and tool calls over HTTP, as OpenAI's own client asks for them, with the pair that ships."""

import json
import random
from dataclasses import replace
from typing import Any, Literal

import llguidance
import openai
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from specdecpp.decoder import Decoder
from specdecpp.loading.pair import Pair
from specdecpp.serving.schema import CalledFunction
from specdecpp.serving.tools import CLOSE, OPEN, CallReader, ToolUse, answer_grammar, told

MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "name": "weather",
    "description": "The weather of a town.",
    "parameters": {
        "type": "object",
        "properties": {"town": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["town", "days"],
    },
}
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}}}
TOOLS: list[Any] = [{"type": "function", "function": function} for function in (WEATHER, CLOCK)]
SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "grey"]}, "degrees": {"type": "integer", "minimum": -50, "maximum": 50}},
    "required": ["sky", "degrees"],
    "additionalProperties": False,
}
LISTED = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": "[]"}}
FORM = {"type": "json_schema", "json_schema": {"name": "sky", "schema": SCHEMA, "strict": True}}


def chat(client: openai.OpenAI, **asked: Any) -> Any:
    return client.chat.completions.create(**({"model": "reference", "messages": MESSAGES, "max_tokens": 300} | asked))


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_fits_its_schema(client: openai.OpenAI, pair: Pair, temperature: float) -> None:
    """It is the decoder's own under that schema."""
    choice = chat(client, response_format=FORM, temperature=temperature, seed=0).choices[0]
    assert choice.finish_reason == "stop"
    Draft202012Validator(SCHEMA).validate(json.loads(choice.message.content))
    decoder = Decoder(pair)
    own = decoder.generate(MESSAGES, json_schema=SCHEMA, temperature=temperature, seed=0, max_tokens=300)
    assert choice.message.content == own.text


def test_any_json_object(client: openai.OpenAI) -> None:
    replies = [chat(client, response_format={"type": "json_object"}, seed=seed).choices[0] for seed in range(5)]
    ended = [one for one in replies if one.finish_reason == "stop"]
    assert all(isinstance(json.loads(one.message.content), dict) for one in ended)
    assert all(one.message.content.startswith("{") for one in replies)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_has_to_be_made_is_made(client: openai.OpenAI, choice: Any) -> None:
    for seed in range(5):
        choice_of = chat(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, seed=seed).choices[0]
        (call,) = choice_of.message.tool_calls
        assert choice_of.finish_reason == "tool_calls"
        assert choice_of.message.content is None
        assert call.function.name == "weather" or choice == "required"
        function = WEATHER if call.function.name == "weather" else CLOCK
        Draft202012Validator(function["parameters"]).validate(json.loads(call.function.arguments))


def test_a_streamed_call_is_the_whole_one(client: openai.OpenAI) -> None:
    asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    whole = chat(client, **asked).choices[0]
    chunks = [chunk.choices[0] for chunk in chat(client, stream=True, **asked)]
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (i, call.function.name, call.function.arguments) for i, call in enumerate(whole.message.tool_calls)
    ]
    assert not "".join(chunk.delta.content or "" for chunk in chunks)
    assert chunks[-1].finish_reason == whole.finish_reason == "tool_calls"


def test_openais_own_helpers(client: openai.OpenAI) -> None:
    class Sky(BaseModel):
        colour: Literal["blue", "grey"]
        degrees: int = Field(ge=-9, le=9)

    class Weather(BaseModel):
        town: Literal["Paris", "Rome"]

    parsed = client.chat.completions.parse(model="reference", messages=MESSAGES, response_format=Sky, max_tokens=300)
    assert isinstance(parsed.choices[0].message.parsed, Sky)
    reply = client.chat.completions.parse(
        model="reference",
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
    )
    assert isinstance(reply.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)


def test_a_conversation_with_a_call_and_its_result_goes_on(client: openai.OpenAI) -> None:
    call = chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=1).choices[0].message
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "sunny"}
    reply = chat(client, messages=[*MESSAGES, call.model_dump(), result], tools=TOOLS, max_tokens=8)
    assert reply.choices[0].message.content is not None


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}])
def test_without_being_told_to_a_model_may_answer(client: openai.OpenAI, choice: dict[str, str]) -> None:
    reply = chat(client, tools=TOOLS, max_tokens=8, temperature=0, **choice).choices[0]
    assert (reply.message.tool_calls, reply.finish_reason) == (None, "length")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}}, "type must be"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"if": {}}}}}, "Unimplemented"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema goes with"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "name one of them"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "two tools have the same name"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        ({"messages": [{"role": "user"}]}, "content is missing"),
        ({"messages": [{"role": "assistant", "tool_calls": [LISTED]}]}, "arguments must be a JSON object"),
        ({"tools": TOOLS, "tool_choice": "required", "extra_body": {"speculative": {"policy": "tree:2x2"}}}, "no grammar"),
    ],
)
def test_what_cannot_be_done_is_refused(client: openai.OpenAI, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        chat(client, **asked)


CALL = OPEN + '\n{"name": "weather", "arguments": {"town": "Rome"}}\n' + CLOSE


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        ("plain  text ", "plain  text ", 0),
        (CALL, "", 1),
        (f"Let me see.\n{CALL}\n{CALL}\n", "Let me see.", 2),
        (f"x {CALL} y ", "xy ", 1),
        (f"{OPEN}bad{CLOSE} z", f"{OPEN}bad{CLOSE} z", 0),
        (f'open {OPEN}{{"na', f'open {OPEN}{{"na', 0),
        ("a < b <tool", "a < b <tool", 0),
        (CALL.replace("weather", "other"), CALL.replace("weather", "other"), 0),
    ],
)
def test_calls_are_read_however_the_text_comes(text: str, content: str, num_calls: int) -> None:
    for seed in range(100):
        cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=seed % 7))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        reader, found, calls = CallReader(["weather"]), "", []
        for i, piece in enumerate(pieces):
            more, made = reader.push(piece, is_last=i == len(pieces) - 1)
            found, calls = found + more, calls + made
        assert (found, len(calls)) == (content, num_calls)
        assert all(json.loads(call.function.arguments) == {"town": "Rome"} for call in calls)


def fits(grammar: Any, pair: Pair, text: str) -> bool:
    """True where the grammar allows the text and an end behind it."""
    matcher = grammar.matcher(pair.tokenizer, vocab_size=pair.target.vocab_size, ends=pair.ends)
    for token in pair.tokenizer(text, add_special_tokens=False).input_ids:
        if matcher.is_over or not matcher.allowed()[token]:
            return False
        matcher.push(token)
    return matcher.is_over or bool(matcher.allowed()[pair.ends[0]])


GOOD = OPEN + '{"name": "weather", "arguments": {"town": "Rome", "days": 2}}' + CLOSE
STRICT = {**WEATHER, "strict": True}
MORE = GOOD.replace("2}", '2, "sky": 1}')
JOINED = {**WEATHER, "parameters": {"allOf": [WEATHER["parameters"], {"properties": {"sky": {"type": "integer"}}}]}}


CLOCKED = f'{OPEN}{{"name": "clock", "arguments": {{}}}}{CLOSE}'
MAY, MUST, ONE = ToolUse(functions=(WEATHER,)), ToolUse(functions=(WEATHER,), must=""), {"has_many": False}


@pytest.mark.parametrize(
    ("use", "schema", "good", "bad"),
    [
        (MUST, None, [GOOD, f"{GOOD}\n{GOOD}"], ["", "text", CALL, f"x{GOOD}", MORE]),
        (ToolUse(functions=(JOINED,), must=""), None, [GOOD, MORE], [CALL]),
        (replace(MUST, **ONE), None, [GOOD], [f"{GOOD}\n{GOOD}"]),
        (ToolUse(functions=(WEATHER, CLOCK), must="clock"), None, [CLOCKED], [GOOD]),
        (MAY, SCHEMA, [GOOD, '{"sky": "blue", "degrees": 3}'], ["{}", "text", CALL]),
        (ToolUse(functions=(STRICT,)), None, ["text", GOOD, f"x{GOOD} y{GOOD}z", "a <tool b"], [CALL, f"x {CALL}"]),
        (ToolUse(functions=(STRICT,), **ONE), None, ["text", GOOD, f"x{GOOD}"], [CALL, f"{GOOD}{GOOD}"]),
        (None, SCHEMA, ['{"sky":"grey","degrees":0}', '{\n  "sky": "grey",\n  "degrees": -4\n}'], ["", GOOD]),
    ],
)
def test_what_answers_the_grammar_allows(pair: Pair, use: Any, schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = answer_grammar(use, schema, pair.tokenizer)
    assert [fits(grammar, pair, text) for text in good] == [True] * len(good)
    assert [fits(grammar, pair, text) for text in bad] == [False] * len(bad)
    assert answer_grammar(MAY, None, pair.tokenizer) is None, "any text will do"


def test_a_template_that_knows_calls_is_given_tools_and_another_model_is_told_of_them() -> None:
    class Tokenizer:
        chat_template = ""

    use, tokenizer = ToolUse(functions=(WEATHER,)), Tokenizer()
    call = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Rome"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    system, asked, result = told(messages, use, tokenizer)[0]
    assert told(messages, None, tokenizer)[0] == [messages[0], asked, result]
    assert system["content"].startswith("Be brief.\n\nYou may call functions.")
    assert '"name": "weather"' in system["content"]
    assert CallReader(["weather"]).push(asked["content"], is_last=True)[1][0].function.arguments == '{"town": "Rome"}'
    assert (result["role"], "sunny" in result["content"]) == ("user", True)
    tokenizer.chat_template = "... <tool_call> ..."
    assert told(messages, use, tokenizer) == (messages, [{"type": "function", "function": WEATHER}])
    assert told(messages, None, tokenizer) == (messages, None)


def test_a_grammar_that_takes_too_much_ends_its_request(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a 500, and a log that says the models failed, where llguidance gives up in the middle of an answer."""

    class Limited:
        grammar_from_json_schema = (make := llguidance.LLMatcher).grammar_from_json_schema

        def __new__(cls, *given: Any, make: Any = make, **more: Any) -> Any:
            return make(*given, limits=llguidance.LLParserLimits(max_lexer_states=60), **more)

    monkeypatch.setattr(llguidance, "LLMatcher", Limited)
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]*x[a-z]{9}$"}}, "required": ["a"]}
    with pytest.raises(openai.BadRequestError, match="too many states") as failed:
        chat(client, temperature=0, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert failed.value.code == "grammar_failed"


def test_a_tag_within_a_string_ends_no_call() -> None:
    """Catches a call that is cut at a tag which its arguments quote, and one without an end that takes the next with it."""
    arguments = {"text": f"a {CLOSE} b"}
    quoted = f"{OPEN}{json.dumps({'name': 'note', 'arguments': arguments})}{CLOSE}"
    reader = CallReader(["note"])
    found = [reader.push(character) for character in quoted] + [reader.push("", is_last=True)]
    assert "".join(text for text, _ in found) == ""
    assert [json.loads(call.function.arguments) for _, calls in found for call in calls] == [arguments]
    open_string = f'{OPEN}{{"name": "x{CLOSE}'
    text, calls = CallReader(["note"]).push(open_string + quoted, is_last=True)
    assert (text, len(calls)) == (open_string, 1)


def test_a_tag_within_a_string_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a string of closing tags that is parsed again from the first of them with each further one."""
    asked = []
    monkeypatch.setattr("specdecpp.serving.tools._is_open", lambda text: asked.append(text) or True)
    reader = CallReader(["note"])
    assert [reader.push(text) for text in (f'{OPEN}{{"name": "', *[CLOSE] * 20)] == [("", [])] * 21
    assert len(asked) == 20


@pytest.mark.parametrize("arguments", ["[" * 100_000, r'{"x": "\ud83d"}', '{"x": 1e999}', '{"x": NaN}'])
def test_arguments_that_cannot_be_read_or_sent_are_no_call(arguments: str) -> None:
    """Catches an answer or a request that ends with an error of Python's, and arguments that are no JSON."""
    deep = f'{OPEN}{{"name": "note", "arguments": {arguments}}}{CLOSE}'
    assert CallReader(["note"]).push(deep, is_last=True) == (deep, [])
    with pytest.raises(ValueError, match="must be a JSON object"):
        CalledFunction(name="note", arguments="[" * 100_000)


def test_no_more_calls_than_asked_for() -> None:
    """Catches `parallel_tool_calls: false` that holds only where a grammar does."""
    one = f'{OPEN}{{"name": "note"}}{CLOSE}'
    reader = CallReader(["note"], most=1)
    assert [len(reader.push(one, is_last=is_last)[1]) for is_last in (False, True)] == [1, 0]
