"""Checks on every HTTP request: its name, the host it asks for, its key, the length of its body and when that is here;
and its line in the log."""

import asyncio
import hmac
import ipaddress
import json
import re
import uuid
from collections.abc import Mapping
from time import monotonic
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdecpp.serving import logs
from specdecpp.serving.limits import Limits
from specdecpp.serving.refusals import Refusal

GUARDED = "/v1/"
_NAME = re.compile(rb"[\w.-]{1,64}")
_PORT = re.compile(r":\d*$")


class Hosts:
    """The names in the header Host that are answered: localhost, those given ("*" for any, "*.lan" for all that end so), and
    every address, since a page that had its own name point here (DNS rebinding) sends its name.

    >>> hosts = Hosts("box.lan")
    >>> [name in hosts for name in ("box.lan:8000", "LOCALHOST", "192.168.1.7:80", "[::1]:80", "evil.example")]
    [True, True, True, True, False]
    """

    def __init__(self, *names: str):
        self._names = {_bare(name) for name in ("localhost", *names)}

    def __contains__(self, header: str) -> bool:
        name = _bare(header)
        if self._names & {"*", name} or any(name.endswith(known[1:]) for known in self._names if known.startswith("*.")):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class Gate:
    """ASGI middleware. A request may bring its name in X-Request-Id; it asks for one of the hosts (in HTTP/1.0 for none, too),
    and paths under /v1/ need the key, where there is one. HEAD is answered as GET is, without a body (RFC 9110, 9.3.2).
    """

    def __init__(self, app: ASGIApp, *, limits: Limits, api_key: str | None = None, hosts: Hosts | None = None):
        self._app, self._limits, self._hosts = app, limits, hosts or Hosts()
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        name = given.decode() if _NAME.fullmatch(given) else uuid.uuid4().hex
        facts: dict[str, Any] = {"id": name, "method": scope["method"], "path": scope["path"]}
        scope.setdefault("state", {}).update(name=name, facts=facts)
        started, is_head = monotonic(), scope["method"] == "HEAD"

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                facts["status"] = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", name.encode())]}
            await send({**message, "body": b""} if is_head and message["type"] == "http.response.body" else message)

        try:
            if refusal := self._refusal(scope["path"], headers):
                facts["error"] = refusal.message
                await _send(refusal, named)
            else:
                await self._app({**scope, "method": "GET"} if is_head else scope, self._bounded(receive), named)
        finally:
            logs.told("request", **facts, seconds=round(monotonic() - started, 6))

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> Refusal | None:
        """The reason to refuse a request before its body is read."""
        if (host := headers.get(b"host", b"localhost").decode("latin-1")) not in self._hosts:
            message = (
                f"this server is not known as {host[:256]!r}, only as localhost, by its addresses, and by names that it was "
                "told. Use one of those, or start it with --allowed-hosts NAME."
            )
            return Refusal(message, status=421, code="unknown_host")
        if path.startswith(GUARDED) and not self._has_key(headers):
            message = "this server needs its key, as the header Authorization: Bearer KEY."
            return Refusal(message, status=401, code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        return Refusal(self._too_long, status=413) if length.isdigit() and int(length) > self._limits.max_body_bytes else None

    def _has_key(self, headers: Mapping[bytes, bytes]) -> bool:
        """Tell whether the key is there, after a scheme whose letters may be of either case (RFC 9110, 11.1)."""
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        return self._key is None or (scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(b" "), self._key))

    def _bounded(self, receive: Receive) -> Receive:
        """`receive`, which raises when more of the body comes than is allowed (its length need not have been told), and when
        it is late. After the body there is no limit: that the client goes away may be waited for."""
        num_bytes, until = 0, asyncio.get_running_loop().time() + self._limits.arrival_s
        is_whole = False

        async def bounded() -> Message:
            nonlocal num_bytes, is_whole
            try:
                async with asyncio.timeout_at(None if is_whole else until):
                    message = await receive()
            except TimeoutError:
                late = f"the body was not here within {self._limits.arrival_s:g} s; send it again, all of it at once."
                raise HTTPException(408, late, headers={"connection": "close"}) from None
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._limits.max_body_bytes:
                raise HTTPException(413, self._too_long)
            is_whole = not message.get("more_body", False)
            return message

        return bounded

    @property
    def _too_long(self) -> str:
        return f"the body is longer than {self._limits.max_body_bytes} bytes, the most that is read."


def _bare(host: str) -> str:
    """A host without its port, its brackets and a last dot, in small letters."""
    name = host if host.count(":") > 1 and not host.startswith("[") else _PORT.sub("", host)
    return name.strip("[]").rstrip(".").lower()


async def _send(refusal: Refusal, send: Send) -> None:
    body = json.dumps(refusal.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
