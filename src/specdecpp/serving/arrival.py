"""How long a connection is kept for a request that does not come: uvicorn has a limit between two requests only."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_Protocol: Any = AutoHTTPProtocol


def punctual(limit_s: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, which closes a connection when the head of a request is not here after so many seconds.

    They begin with the connection or, after an answer, with the next byte: that of another request, or of a body that nobody
    has waited for. Bodies that are waited for have their limit in `Gate`.
    """

    class Punctual(_Protocol):
        _closing: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._forget()

        def _watch(self) -> None:
            """Close the connection in time unless there is a request to be answered."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._forget()
            elif self._closing is None:
                self._closing = self.loop.call_later(limit_s, self.transport.close)

        def _forget(self) -> None:
            if self._closing is not None:
                self._closing.cancel()
                self._closing = None

    return Punctual
