"""A request that is not answered, in the words and the shape of OpenAI's errors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """Why a request gets no answer, or no more of it: an HTTP status, a message, and the field that it is about."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.message, self.status, self.code, self.param = message, status, code, param
        retry = {} if retry_after_s is None else {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
        self.headers = {**(headers or {}), **retry}

    @property
    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def of_validation(errors: Sequence[Mapping[str, Any]], body: Any = None) -> Refusal:
    """The first fault of a body, by the name of its field: the first such thing, and where a field may be of several types,
    what stands against the one that the value comes closest to."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return Refusal(f"the body is not JSON ({first.get('ctx', {}).get('error', 'cannot be read')}).")
    path = [part for part in first["loc"] if part != "body"]
    if not path and first["type"] == "value_error":  # of several fields together; it begins with the name of one
        message = str(first["msg"]).removeprefix("Value error, ")
        return Refusal(message, param=message.split()[0])
    if not path:
        return Refusal("the body must be a JSON object, sent with the header Content-Type: application/json.")
    found = _closest([error for error in errors if error["loc"][:2] == first["loc"][:2]], body)
    name, kind = found.name, found.error["type"]
    if kind == "extra_forbidden":
        message = f"there is no field {name} here. Leave it out; /openapi.json lists the fields."
        return Refusal(message, param=name, code="unknown_parameter")
    return Refusal(found.message, param=name, code="missing" if kind == "missing" else None)


@dataclass(frozen=True)
class _Fault:
    """An error of pydantic's at its place in the body. In `loc` there are names of types between those of fields."""

    error: Mapping[str, Any]
    path: tuple[str | int, ...]
    kind: tuple[str | int, ...]
    """Which of several types it is about: the names of types on the way."""
    others: tuple[str, ...] = ()
    """Types that would have been taken at the same place."""

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def closeness(self) -> tuple[bool, int, int, bool]:
        """Tell whether it is but a field too many; how deep it is, and how far into a list; whether the type at least is
        right."""
        kind, index = self.error["type"], self.path[-1]
        return kind == "extra_forbidden", len(self.path), index if isinstance(index, int) else 0, kind not in _NOUNS

    @property
    def message(self) -> str:
        if (noun := _NOUNS.get(self.error["type"])) is None:
            return f"{self.name}: {str(self.error['msg']).removeprefix('Value error, ')}"
        *nouns, last = dict.fromkeys((noun, *self.others))
        return f"{self.name} must be {', '.join(nouns)}{' or ' if nouns else ''}{last}."


_NOUNS = {
    "bool_type": "true or false",
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "list_type": "a list",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dict_type": "an object",
}


def _closest(errors: Sequence[Mapping[str, Any]], body: Any) -> _Fault:
    """The first error of the type that the value comes closest to."""
    firsts: dict[tuple[str | int, ...], _Fault] = {}
    for error in errors:
        fault = _placed(error, body)
        firsts.setdefault(fault.kind, fault)
    best = max(firsts.values(), key=lambda fault: fault.closeness)
    beside = (f.error["type"] for f in firsts.values() if f.path == best.path and f is not best)
    return replace(best, others=tuple(_NOUNS[kind] for kind in beside if kind in _NOUNS))


def _placed(error: Mapping[str, Any], body: Any) -> _Fault:
    """An error with the names of types taken out of its place: what the body itself does not have there."""
    path: list[str | int] = []
    kind: list[str | int] = []
    loc, at = [part for part in error["loc"] if part != "body"], body
    for i, part in enumerate(loc):
        is_missing = error["type"] == "missing" and i == len(loc) - 1
        is_there = part in at if isinstance(at, dict) else isinstance(at, list) and isinstance(part, int) and part < len(at)
        if i == 0 or is_missing or is_there:
            path.append(part)
            at = at[part] if is_there and at is not None else None
        else:
            kind.append(part)
    return _Fault(error, tuple(path), tuple(kind))
