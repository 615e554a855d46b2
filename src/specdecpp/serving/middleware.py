"""Middleware of every HTTP request: a name, the host that it asks for, the length of its body, a line in the log."""

import ipaddress
import re
import uuid
from collections.abc import Collection
from fnmatch import fnmatchcase
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdecpp.serving.errors import ApiError
from specdecpp.serving.logs import log_event

_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


class RequestMiddleware:
    """Name, check and log requests. A client may bring a name in X-Request-Id; HEAD is answered as GET, without a body."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, hosts: Collection[str]):
        self._app, self._max_body_bytes, self._hosts = app, max_body_bytes, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if _NAME.fullmatch(given) else uuid.uuid4().hex
        facts: dict[str, Any] = {"id": name, "method": scope["method"], "path": scope["path"]}
        scope.setdefault("state", {}).update(name=name, facts=facts)
        started, num_bytes = monotonic(), 0

        async def bounded() -> Message:  # the length of a body need not have been announced
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise HTTPException(413, f"the body is longer than {self._max_body_bytes} bytes, the most that is read.")
            return message

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                facts["status"] = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        try:
            host = headers.get("host", "localhost")  # HTTP/1.0 has none
            if not is_known_host(host, self._hosts):
                message = (
                    f"this server is not known as {host[:256]!r}, only as localhost, by its addresses, and by the names of "
                    "--allowed-hosts. Use one of those, or start it with --allowed-hosts NAME."
                )
                error = ApiError(message, status=421, code="unknown_host")
                facts["error"] = message
                await error.response()(scope, receive, named)
                return
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            await self._app({**scope, "method": method}, bounded, named)
        finally:
            log_event("request", **facts, seconds=round(monotonic() - started, 6))


def is_known_host(header: str, patterns: Collection[str]) -> bool:
    """True for a host that is asked for by a known name, and for every address: a page that has its own name point here (DNS
    rebinding) sends its name.

    >>> [is_known_host(host, ["box.lan"]) for host in ("Box.lan:8000", "192.168.1.7:80", "[::1]:80", "evil.example")]
    [True, True, True, False]
    """
    try:
        name = (urlsplit(f"//{header}").hostname or "").rstrip(".")
        if any(fnmatchcase(name, pattern.lower()) for pattern in patterns):
            return True
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False
