"""A server in a thread of this process, on a port of its own."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import openai

from specdecpp.loading.pair import Pair
from specdecpp.serving.engine import End, EngineThread, StepEvent
from specdecpp.serving.server import Server, address, bound, server_for
from specdecpp.serving.settings import ServerSettings

PATIENCE_S = 300.0
"""Only what has gone wrong takes as long, however busy the machine."""


class Listener:
    """All events of one request, and a way to hold the engine's thread at one."""

    def __init__(self) -> None:
        self.events: list[StepEvent] = []
        self.ends: list[End] = []
        self.ended, self.may_go_on, self.is_held = threading.Event(), threading.Event(), threading.Event()
        self.may_go_on.set()

    def __call__(self, what: StepEvent | End) -> None:
        if isinstance(what, End):
            self.ends.append(what)
            self.ended.set()
            return
        self.events.append(what)
        self.is_held.set()
        assert self.may_go_on.wait(PATIENCE_S)

    @property
    def end(self) -> End:
        assert self.ended.wait(PATIENCE_S), "the request never ended"
        return self.ends[0]

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.step.tokens]


@dataclass(frozen=True)
class Served:
    """A running server: where it is, and what a test may look at from within."""

    url: str
    server: Server
    engine: EngineThread
    name: str
    thread: threading.Thread
    clients: ExitStack

    def client(self, **options: Any) -> openai.OpenAI:
        """A client of OpenAI's, closed before the server stops."""
        given = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE_S} | options
        return self.clients.enter_context(openai.OpenAI(base_url=f"{self.url}/v1", **given))

    def post(self, path: str, body: Any = None, **options: Any) -> httpx2.Response:
        given = options if body is None else options | {"json": body}
        return httpx2.post(f"{self.url}{path}", timeout=PATIENCE_S, **given)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return httpx2.get(f"{self.url}{path}", timeout=PATIENCE_S, **options)


@contextmanager
def served(pair: Pair, **settings: Any) -> Iterator[Served]:
    """A server around a pair, stopped afterwards."""
    ready = threading.Event()
    server = server_for(pair, ServerSettings(**settings), on_ready=ready.set)
    with bound("127.0.0.1", 0) as listening, ExitStack() as clients:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        assert ready.wait(PATIENCE_S), "the server did not start"
        state = server.config.app.state.server  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
        try:
            yield Served(address(listening), server, state.engine, state.model.id, thread, clients)
        finally:
            clients.close()
            server.should_exit = True
            thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the server did not stop"


def eventually(condition: Callable[[], bool]) -> bool:
    """True once a condition is true; False where patience ends before."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True
