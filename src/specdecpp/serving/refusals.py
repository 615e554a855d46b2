"""A request that is not answered, in the words and the shape of OpenAI's errors."""

import math
from collections.abc import Sequence
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
    ):
        super().__init__(message)
        self.message, self.status, self.code, self.param = message, status, code, param
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


def of_validation(errors: Sequence[dict[str, Any]]) -> Refusal:
    """The first thing that is wrong with a body, by the name of its field."""
    first = errors[0]
    path = [str(part) for part in first.get("loc", ()) if part != "body"]
    if first.get("type") == "json_invalid":
        return Refusal(f"the body is not JSON ({first.get('ctx', {}).get('error', 'cannot be read')}).")
    if not path and first.get("type") == "value_error":  # of several fields together; it begins with the name of one
        message = str(first["msg"]).removeprefix("Value error, ")
        return Refusal(message, param=message.split()[0])
    if not path:
        return Refusal("the body must be a JSON object, sent with the header Content-Type: application/json.")
    name = ".".join(path)
    if first["type"] == "extra_forbidden":
        message = f"there is no field {name} here. Leave it out; /openapi.json lists the fields."
        return Refusal(message, param=name, code="unknown_parameter")
    message = str(first["msg"]).removeprefix("Value error, ")
    return Refusal(f"{name}: {message}", param=name, code="missing" if first["type"] == "missing" else None)
