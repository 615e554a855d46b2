"""Errors in OpenAI's words and shape, and FastAPI's own turned into them."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
TAG = "|"
"""Begins the tags of union members in `schema`; pydantic puts them between the names of fields."""


class ApiError(HTTPException):
    """An error for the client: an HTTP status, a message, a code, and the field that it is about."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status, message, headers)
        self.code, self.param = code, param

    @property
    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        kind = _TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The error as plain ASCII, so that nothing a client sent can break it."""
        return Response(json.dumps(self.body), self.status_code, self.headers, "application/json")


def add_handlers(app: FastAPI) -> None:
    """Answer every exception in OpenAI's shape, and put its message in the log line of the request."""

    async def answered(request: Request, error: Exception) -> Response:
        found = api_error(error)
        facts: dict[str, Any] = getattr(request.state, "facts", {})
        facts["error"] = found.detail
        return found.response()

    for kind in (HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, answered)


def api_error(error: Exception) -> ApiError:
    """Any exception as an error for the client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _validation_error(error.errors()[0])
    if isinstance(error, HTTPException):
        if error.status_code == 400:  # FastAPI's only one
            return ApiError("the body is not JSON that can be read: it is not UTF-8, or too deep, or has a number too long.")
        message = f"{str(error.detail).rstrip('.').lower()}."
        return ApiError(message, status=error.status_code, headers=error.headers)
    return ApiError("the server failed on this request; its log says how.", status=500, code="failed")


def _validation_error(first: Mapping[str, Any]) -> ApiError:
    """The first fault that pydantic found in a body, by the name of its field."""
    kind, message = first["type"], str(first["msg"]).removeprefix("Value error, ")
    if kind == "json_invalid":
        return ApiError(f"the body is not JSON ({first.get('ctx', {}).get('error', 'cannot be read')}).")
    path = [str(part) for part in first["loc"][1:]]
    if not path and kind == "value_error":  # of several fields together; it begins with the name of one
        return ApiError(message, param=message.split()[0])
    if not path:
        return ApiError("the body must be a JSON object, sent with the header Content-Type: application/json.")
    name = ".".join([path[0], *(part for part in path[1:] if not part.startswith(TAG))])
    if kind == "extra_forbidden":
        message = f"there is no field {name} here. Leave it out; /openapi.json lists the fields."
        return ApiError(message, param=name, code="unknown_parameter")
    return ApiError(f"{name}: {message}", param=name, code="missing" if kind == "missing" else None)
