"""A server of OpenAI's API: one model pair, many requests, a step of each at a time.

    schema (bodies) -> validation (limits, tokens, a decoder) -> engine (one thread, `scheduler.step`)
        -> answers (steps to `replies`; `completion`: llama.cpp's) -> exchange (whole or streamed)
        -> app (endpoints) <- middleware (name, host, log)

Needs the extra [serve]. `create_app` makes the ASGI application, `specdecpp serve` runs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specdecpp.errors import MissingExtraError
from specdecpp.serving.settings import ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from specdecpp.loading.pair import Pair

__all__ = ["ServerSettings", "check_extra", "create_app"]


def create_app(pair: "Pair", **settings: Any) -> "FastAPI":
    """The application around a pair, with the fields of `ServerSettings`. Raises `MissingExtraError` without the extra.

    >>> app = create_app(sd.load_pair(), max_running=4)               # doctest: +SKIP
    """
    check_extra()
    from specdecpp.serving import app

    return app.build(pair, ServerSettings(**settings))


def check_extra() -> None:
    """Raise `MissingExtraError` unless what serving needs is installed."""
    try:
        for name in ("fastapi", "prometheus_client", "uvicorn"):
            import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"serving needs the package {error.name}. Install it with: pip install 'specdecpp[serve]'"
        ) from error
