"""Serve a pair to clients of OpenAI's API: one model pair, many requests, a step at a time.

    requests (what may be asked) -> intake (checked, tokens, a decoder) -> engine (steps of all, one thread)
        -> answers (steps become choices) -> routes (HTTP, streams of events) <- gate (key, log line)

Needs the extra [serve]. `create_app` gives the ASGI application, `specdecpp serve` runs it.
"""

from typing import TYPE_CHECKING, Any

from specdecpp.errors import MissingExtraError
from specdecpp.serving.limits import Limits

if TYPE_CHECKING:
    from fastapi import FastAPI

    from specdecpp.loading.pair import Pair

__all__ = ["Limits", "check_extra", "create_app"]


def create_app(pair: "Pair", **setup: Any) -> "FastAPI":
    """The application around a pair; `setup` are the fields of `app.Setup`. Raises `MissingExtraError` without the extra.

    >>> app = create_app(sd.load_pair(), limits=Limits(max_running=4))               # doctest: +SKIP
    """
    check_extra()
    from specdecpp.serving import app

    return app.build(pair, app.Setup(**setup))


def check_extra() -> None:
    """Raise `MissingExtraError` unless what serving needs is installed."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"serving needs the package {error.name}. Install it with: pip install 'specdecpp[serve]'"
        ) from error
