"""Requests that come slowly or never, over real sockets: how long the server waits for a head and for a body."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from served import PATIENCE_S, Served, served

from specdecpp.loading.pair import Pair
from specdecpp.serving.limits import Limits
from specdecpp.testing import TableModel, tiny_tokenizer

SHORT_S = 0.5
BODY = json.dumps({"prompt": "abc", "max_tokens": 4, "ignore_eos": True}).encode()
ENDLESS = json.dumps({"prompt": "abc", "max_tokens": 10**9, "ignore_eos": True, "stream": True}).encode()


@pytest.fixture(scope="module")
def pair() -> Pair:
    target, draft = (TableModel.random(vocab_size=8, depth=1, seed=seed) for seed in (1, 2))
    return Pair(target=target, draft=draft, tokenizer=tiny_tokenizer(8))


@pytest.fixture(scope="module")
def hurried(pair: Pair) -> Iterator[Served]:
    with served(pair, limits=Limits(arrival_s=SHORT_S, max_new_tokens=10**9)) as running:
        yield running


def connected(server: Served) -> socket.socket:
    url = urlsplit(server.url)
    return socket.create_connection((url.hostname, url.port), timeout=PATIENCE_S)


def head(path: str = "/v1/completions", *, length: int = len(BODY), more: str = "") -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", f"content-length: {length}")
    return ("\r\n".join(lines) + f"\r\n{more}\r\n").encode()


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:  # closed while bytes of ours were still on the way
        pass
    return b"".join(parts)


def trickled(connection: socket.socket, data: Callable[[], bytes]) -> bytes:
    """What comes until the server closes the connection, while bytes are sent one after another for as long as it is open."""
    connection.settimeout(0.05)
    found = b""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        try:
            connection.sendall(data())
            part = connection.recv(65536)
        except TimeoutError:
            continue
        except (ConnectionResetError, BrokenPipeError):
            return found
        if not part:
            return found
        found += part
    pytest.fail("the server never closed the connection")


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nhost: loc"], ids=["nothing", "half a head"])
def test_a_head_that_does_not_come_is_not_waited_for(hurried: Served, sent: bytes) -> None:
    """Catches connections that stay open for as long as a client likes before a request has begun."""
    with connected(hurried) as connection:
        connection.sendall(sent)
        assert received(connection) == b""


def test_a_head_that_comes_byte_by_byte_for_ever_is_not_waited_for(hurried: Served) -> None:
    """Catches a limit that begins anew with every byte."""
    with connected(hurried) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx-long: ")
        assert trickled(connection, lambda: b"a") == b""


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_does_not_come_is_answered_with_408(hurried: Served, chunked: bool) -> None:
    """Catches half-sent bodies that stay open: they did for as long as the client's connection."""
    more = "transfer-encoding: chunked\r\n"
    begun = (
        head().replace(b"content-length: %d\r\n" % len(BODY), more.encode()) + b"5\r\nhello\r\n"
        if chunked
        else head() + BODY[:9]
    )
    with connected(hurried) as connection:
        connection.sendall(begun)
        reply = received(connection)
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in reply.lower()
    assert f"was not here within {SHORT_S:g} s" in json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_a_body_that_comes_byte_by_byte_for_ever_is_answered_with_408(hurried: Served) -> None:
    """Catches a limit for a body that begins anew with every byte."""
    with connected(hurried) as connection:
        connection.sendall(head(length=10**6))
        assert trickled(connection, lambda: b" ").startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("path", ["/nowhere", "/health"])
def test_a_body_that_nobody_reads_keeps_no_connection_open(hurried: Served, path: str) -> None:
    """Catches a refusal that is sent before the body has come, after which the rest of it may take for ever."""
    with connected(hurried) as connection:
        connection.sendall(head(path, length=10**6))
        assert trickled(connection, lambda: b" ").startswith(b"HTTP/1.1 40")


def test_a_second_head_has_the_limit_too(hurried: Served) -> None:
    """Catches a connection that is trusted once a request has been answered on it."""
    with connected(hurried) as connection:
        connection.sendall(head() + BODY)
        assert b" 200 OK" in connection.recv(65536)
        connection.sendall(b"GET /health HT")
        assert b"HTTP/1.1" not in received(connection)


def test_an_answer_may_take_longer_than_its_request(hurried: Served) -> None:
    """Catches a limit that goes on after the request is there, and cuts a streamed answer."""
    with connected(hurried) as connection:
        connection.sendall(head(length=len(ENDLESS)) + ENDLESS)
        until = time.monotonic() + 3 * SHORT_S
        while time.monotonic() < until:
            assert connection.recv(65536), "the answer was cut"


def test_who_is_slow_but_within_the_limit_is_answered(pair: Pair) -> None:
    """Catches pieces of a head or a body that are taken for the whole, and a body whose limit began with the connection."""
    with served(pair, limits=Limits(arrival_s=PATIENCE_S)) as server, connected(server) as connection:
        for _ in range(2):
            for byte in head() + BODY:
                connection.sendall(bytes([byte]))
                time.sleep(0.001)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")
