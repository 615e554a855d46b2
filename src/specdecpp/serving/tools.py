"""Functions that an answer may call: told to the model, enforced by a grammar where the request says so, read from the answer.

    tools -> prompt (the chat template's way, or a system message) -> answer -> content and calls

A call reads <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes and Qwen models write it. A model whose
template has another form, or none, is told of this one.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from specdecpp.detokenize import CALL_TAGS
from specdecpp.grammar import BLANKS, Grammar
from specdecpp.serving.schema import CalledFunction, ToolCall, ToolUse

OPEN, CLOSE = CALL_TAGS
_TOLD = (
    "You may call functions. Their signatures:\n%s\nTo call one, answer with a JSON object that has its name and arguments, "
    f'between tags:\n{OPEN}\n{{"name": <function name>, "arguments": <JSON object>}}\n{CLOSE}'
)
_ANY = {"type": "object"}
_JOINING, _BRANCHING = {"allOf", "not", "if", "then", "else", "dependentSchemas"}, {"anyOf", "oneOf", "$ref"}
_SAID = {"additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"}
MOST = 16
"""Calls of an answer that has to call something: some models go on for ever."""
Json = dict[str, Any]


def _call_schema(use: ToolUse) -> Json:
    """The JSON schema of a call."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": closed(function.get("parameters") or _ANY)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in use.functions
        if use.must in (None, "", function["name"])
    ]
    return {"anyOf": calls, "x-guidance": {"whitespace_pattern": BLANKS}}


def closed(schema: Json) -> Json:
    """Schema whose objects have no properties but those that it names: small models go on with arguments that no function has.
    Objects that say otherwise stay as they are, and schemas that join objects."""
    is_joined = False

    def close(found: Json) -> Json:
        nonlocal is_joined
        is_joined |= not _JOINING.isdisjoint(found) or ("properties" in found and not _BRANCHING.isdisjoint(found))
        names, needed = found.get("properties"), found.get("required", [])
        if not isinstance(names, dict) or not isinstance(needed, list) or not _SAID.isdisjoint(found):
            return found
        return {**found, "additionalProperties": False} if all(one in list(names) for one in needed) else found

    found = json.loads(json.dumps(schema), object_hook=close)
    return schema if is_joined else found


def answer_grammar(use: ToolUse | None, schema: Any, tokenizer: Any) -> Grammar | None:
    """The grammar of an answer that has calls, or JSON that fits a schema, or either; None where any text will do."""
    if use is None:
        return None if schema is None else Grammar.json(schema)
    if use.must is None and schema is None and not use.is_strict:
        return None
    opening, closing = (tag if _is_token(tag, tokenizer) else json.dumps(tag) for tag in (OPEN, CLOSE))
    rules = [f'call: {opening} body {closing}\nbody: "\\n"? object "\\n"?\nobject: %json {json.dumps(_call_schema(use))}']
    calls = f'call ("\\n" call){{0,{MOST - 1}}}' if use.has_many else "call"
    if use.must is not None:
        rules.append(f"start: {calls}")
    elif schema is not None:
        told = json.dumps({"allOf": [schema], "x-guidance": {"whitespace_pattern": BLANKS}})
        rules.append(f"start: {calls} | answer\nanswer: %json {told}")
    else:  # calls somewhere in a text
        rules[0] = rules[0].replace(f"call: {opening}", "call: TEXT " + opening if opening == OPEN else "call: head")
        rules += [] if opening == OPEN else [f"head[lazy]: TEXT {opening}"]
        rules.append("start: call* TEXT" if use.has_many else "start: call | TEXT")
        rules.append("TEXT: /(.|\\n)*/")
    return Grammar("lark", "\n".join(rules))


def _is_token(tag: str, tokenizer: Any) -> bool:
    return len(tokenizer(tag, add_special_tokens=False).input_ids) == 1


def told(messages: Sequence[Json], use: ToolUse | None, tokenizer: Any) -> tuple[list[Json], list[Json] | None]:
    """Messages, and tools for the chat template where that has the form of calls which is read here; elsewhere a system message
    tells the model of them."""
    template = str(getattr(tokenizer, "chat_template", ""))
    if use is None:
        return [*(messages if "tool_call" in template else map(_plain, messages))], None
    tools = [{"type": "function", "function": function} for function in use.functions]
    if OPEN in template:
        return list(messages), tools
    text = _TOLD % "\n".join(map(json.dumps, tools))
    plain = [_plain(message) for message in messages]
    if plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]], None
    return [{"role": "system", "content": text}, *plain], None


def _plain(message: Json) -> Json:
    """A message whose calls and results are text: for templates that know neither."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [json.dumps(call["function"]) for call in message["tool_calls"]]
    content = "\n".join([message["content"] or "", *(f"{OPEN}\n{call}\n{CLOSE}" for call in calls)]).strip()
    return {"role": message["role"], "content": content}


def read_call(text: str, names: Sequence[str]) -> ToolCall | None:
    """The call between two tags; None where there is none that could be made."""
    try:
        found = json.loads(text)
        name, arguments = found["name"], found.get("arguments", {})
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()  # half a surrogate cannot be sent either
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if name not in names or not isinstance(arguments, dict):
        return None
    return ToolCall(id=f"call_{uuid4().hex[:24]}", function=CalledFunction(name=name, arguments=written))


class CallReader:
    """Content and the first `most` calls of a growing answer. What cannot be called stays content; blanks around calls go."""

    def __init__(self, names: Sequence[str], *, most: int = sys.maxsize):
        self._names, self._held, self._most = names, "", most
        self._is_behind, self._tried = False, 0  # `_tried`: length of the held call in which no closing tag ends it

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, list[ToolCall]]:
        """The content and the calls that more text releases; with the last of it all that was held back."""
        self._held += text
        content, calls = "", list[ToolCall]()
        while (start := self._held.find(OPEN)) >= 0 and (first := self._held.find(CLOSE, start)) >= 0:
            end = self._held.find(CLOSE, start + self._tried)
            while end >= 0 and _is_open(self._held[start + len(OPEN) : end]):
                self._tried = end + 1 - start
                end = self._held.find(CLOSE, end + 1)
            if end < 0 and not is_last:
                break
            self._tried = 0
            call = read_call(self._held[start + len(OPEN) : end], self._names) if end >= 0 else None
            content += self._taken(first + len(CLOSE)) if call is None else self._taken(start).rstrip()
            if call is not None:
                if len(calls) < self._most:
                    calls.append(call)
                self._held, self._is_behind = self._held[end + len(CLOSE) - start :], True
        if not is_last:
            start = self._held.find(OPEN) if OPEN in self._held else len(self._held) - begun(self._held, OPEN)
        self._most -= len(calls)
        return content + self._taken(len(self._held) if is_last else len(self._held[:start].rstrip())), calls

    def _taken(self, num: int) -> str:
        """The first characters of what is held, but for blanks right behind a call."""
        found, self._held = self._held[:num], self._held[num:]
        if self._is_behind:
            found = found.lstrip()
            self._is_behind = not found
        return found


def _is_open(text: str) -> bool:
    """Tell whether JSON ends within a string: a tag that follows is part of that."""
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        return str(error).startswith("Unterminated string")
    return False


def begun(text: str, tag: str) -> int:
    """Length of the longest tail of a text that begins a tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)
