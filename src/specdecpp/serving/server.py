"""uvicorn around the application: from a bound socket to a signal, and from the signal to the end."""

import asyncio
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from specdecpp.loading.pair import Pair
from specdecpp.serving import logs
from specdecpp.serving.app import build
from specdecpp.serving.engine import EngineThread
from specdecpp.serving.errors import ApiError
from specdecpp.serving.logs import log_event
from specdecpp.serving.settings import ServerSettings

KEEP_ALIVE_S = 30
SPARE_S = 5
"""For the last bytes, after what was unfinished has been dropped."""


class Server(uvicorn.Server):
    """A uvicorn server that lets requests finish before it stops, and logs those that it dropped.

    From the first signal on, new requests are refused; `grace_s` later, or at a second Ctrl-C, those that are unfinished get an
    error. A third Ctrl-C does not wait for that to be sent.
    """

    def __init__(self, config: uvicorn.Config, *, engine: EngineThread, grace_s: float, on_ready: Callable[[], None]):
        super().__init__(config)
        self._engine, self._grace_s, self._on_ready = engine, grace_s, on_ready
        self._is_hurried = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop as uvicorn does, but the signal is not raised again afterwards: a stop that was asked for is no failure."""
        if sig == signal.SIGINT:
            self.force_exit, self._is_hurried = self._is_hurried, self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests finish for a while, then end them; the socket stays open meanwhile, so that /health answers 503."""
        log_event("stopping", running=self._engine.num_running, waiting=self._engine.num_waiting, grace_s=self._grace_s)
        loop = asyncio.get_running_loop()
        until = loop.time() + self._grace_s
        self._engine.close()
        while self._engine.num_running + self._engine.num_waiting and loop.time() < until and not self._is_hurried:
            await asyncio.sleep(0.05)
        message = "the server is shutting down, and this request was not finished in time. Send it again elsewhere, or later."
        dropped = self._engine.drop(ApiError(message, status=503, code="shutting_down"))
        for job in dropped:
            log_event("dropped", level=logging.WARNING, answers=len(job.parts), completion_tokens=job.num_tokens)
        await super().shutdown(sockets)
        log_event("stopped", dropped=len(dropped))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()


def serve(pair: Pair, settings: ServerSettings, *, listening: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serve on a bound socket until a signal comes; `on_ready` is called once requests are answered."""
    server = server_for(pair, settings, on_ready=on_ready, log_config=logs.config())
    is_local = ipaddress.ip_address(listening.getsockname()[0]).is_loopback
    if settings.api_key is None and not is_local:
        log_event("anybody who reaches this address is answered", level=logging.WARNING, address=address(listening))
    server.run(sockets=[listening])


def server_for(
    pair: Pair,
    settings: ServerSettings,
    *,
    on_ready: Callable[[], None] = lambda: None,
    log_config: dict[str, Any] | None = None,
) -> Server:
    """A server that is yet to run, for tests and for programs of your own; logging stays as it is without `log_config`."""
    app = build(pair, settings)
    config = uvicorn.Config(
        app,
        log_config=log_config,
        access_log=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SPARE_S,
    )
    return Server(config, engine=app.state.server.engine, grace_s=settings.grace_s, on_ready=on_ready)


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address; port 0 takes a free one. Raises ValueError where the address cannot be had."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        taken = socket.socket(family, kind)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except (OSError, OverflowError) as error:
        raise ValueError(f"cannot listen on {host} port {port}: {error}. Choose another with --host and --port.") from error
    return taken


def address(listening: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
