"""The ASGI application: endpoints behind the gate, errors in OpenAI's shape, the engine started and stopped with it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from specdecpp import __version__
from specdecpp.loading.pair import Pair
from specdecpp.policies import Policy
from specdecpp.serving.gate import Gate, Hosts
from specdecpp.serving.intake import Intake
from specdecpp.serving.limits import Limits
from specdecpp.serving.refusals import Refusal, of_validation
from specdecpp.serving.routes import built_house, router


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of a server: the rule and verification for requests that name none, limits, the model's name, a key.

    `allowed_hosts` are the names that it answers to, beside localhost and addresses (`gate.Hosts`); a "*" stands for any. With
    a key and no names: any.
    """

    limits: Limits = field(default_factory=Limits)
    policy: Policy | str | None = None
    verification: str = "token"
    name: str | None = None
    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()


def build(pair: Pair, setup: Setup) -> FastAPI:
    """The application around a pair. Its engine starts with the lifespan, which measures costs and runs the models once.

    Raises `UnsoundError` for a policy and a verification that together would change the distribution.
    """
    intake = Intake(pair, setup.limits, policy=setup.policy, verification=setup.verification, name=setup.name)
    house = built_house(intake)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(house.engine.start, intake.prepare)
        try:
            yield
        finally:
            house.engine.drop(Refusal("the server has stopped.", status=503, code="shutting_down"))
            await asyncio.to_thread(house.engine.stop)

    app = FastAPI(
        title="specdecpp",
        version=__version__,
        summary="OpenAI's API over one model pair, decoded speculatively.",
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.house = house
    app.include_router(router)
    hosts = Hosts("*") if setup.api_key is not None and not setup.allowed_hosts else Hosts(*setup.allowed_hosts)
    app.add_middleware(Gate, api_key=setup.api_key, limits=setup.limits, hosts=hosts)
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(RequestValidationError, _refused)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Exception, _refused)
    return app


async def _refused(request: Request, error: Exception) -> JSONResponse:
    """Any error in OpenAI's shape, plain ASCII so that what a client sent cannot break it."""
    refusal = _as_refusal(error)
    facts: dict[str, Any] = getattr(request.state, "facts", {})
    facts["error"] = refusal.message
    return _AsciiJson(refusal.body, status_code=refusal.status, headers=refusal.headers)


class _AsciiJson(JSONResponse):
    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=True).encode()


def _as_refusal(error: Exception) -> Refusal:
    if isinstance(error, Refusal):
        return error
    if isinstance(error, RequestValidationError):
        return of_validation(error.errors(), error.body)
    if isinstance(error, HTTPException):
        if error.status_code == 400:  # the only one that is not our own
            return Refusal("the body is not JSON that can be read: it is not UTF-8, or too deep, or has a number too long.")
        message = f"{str(error.detail).rstrip('.').lower()}."
        headers = dict(error.headers or {})
        if headers.get("Allow") == "GET":
            headers["Allow"] = "GET, HEAD"  # `Gate`
        return Refusal(message, status=error.status_code, headers=headers)
    return Refusal("the server failed on this request; its log says how.", status=500, code="failed")
