"""Clients of a server that stream answers, as cheap as can be: they share the cores with what they measure.

    tokens_per_second(url, prompts, at_once=16, tokens=64)

Any server with OpenAI's API. Each client sends one request after another; what arrives is counted by its last line, not parsed.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

DONE = b"data: [DONE]"


class StreamError(RuntimeError):
    """A reply that is no stream, or ends before its end."""


def tokens_per_second(url: str, bodies: Sequence[dict[str, Any]], *, at_once: int, path: str = "/v1/completions") -> float:
    """Of all answers together; a body asks for exactly `max_tokens`. Raises `StreamError`."""
    return asyncio.run(_all(url, bodies, at_once, path))


async def _all(url: str, bodies: Sequence[dict[str, Any]], at_once: int, path: str) -> float:
    waiting = iter(bodies)
    started = perf_counter()
    await asyncio.gather(*(_client(url, waiting, path) for _ in range(at_once)))
    return sum(body["max_tokens"] for body in bodies) / (perf_counter() - started)


async def _client(url: str, waiting: Iterator[dict[str, Any]], path: str) -> None:
    for body in waiting:
        await _ask(url, body, path)


async def _ask(url: str, body: dict[str, Any], path: str) -> None:
    host = urlsplit(url)
    data = json.dumps({**body, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host.netloc}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection(host.hostname, host.port)
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    first, tail = await reader.readline(), b""
    while chunk := await reader.read(1 << 16):
        tail = (tail + chunk)[-200:]
    writer.close()
    if b" 200 " not in first or DONE not in tail:
        raise StreamError(f"no whole answer: {first!r} ... {tail!r}")
