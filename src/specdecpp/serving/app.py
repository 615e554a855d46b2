"""The ASGI application: its endpoints, its state, and the engine started and stopped with it."""

import asyncio
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import generate_latest

from specdecpp import __version__
from specdecpp.loading.pair import Pair
from specdecpp.serving import replies, schema
from specdecpp.serving.answers import Answer
from specdecpp.serving.completion import NativeAnswer, NativeReply, NativeRequest, Props, props
from specdecpp.serving.engine import EngineThread
from specdecpp.serving.errors import ApiError, add_handlers
from specdecpp.serving.exchange import EventStream, Exchange
from specdecpp.serving.metrics import CONTENT_TYPE, ServerMetrics
from specdecpp.serving.middleware import RequestMiddleware
from specdecpp.serving.settings import ServerSettings
from specdecpp.serving.validation import RequestValidator

PAGE = Path(__file__).parent / "page"
STREAM = {
    "text/event-stream": {"itemSchema": {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}}
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": replies.ErrorReply, "description": "What is wrong with the request; 429 when all places are taken."},
}
ANSWERS: dict[int | str, dict[str, Any]] = {
    **REFUSALS,
    200: {"content": STREAM},
    503: {"model": replies.ErrorReply, "description": "The server is shutting down, or has failed."},
    504: {"model": replies.ErrorReply, "description": "The request took too long."},
}


@dataclass(frozen=True, kw_only=True)
class AppState:
    """Shared state of the endpoints."""

    validator: RequestValidator
    engine: EngineThread
    metrics: ServerMetrics
    model: replies.ModelCard


def _state(request: Request) -> AppState:
    return request.app.state.server


State = Annotated[AppState, Depends(_state)]
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


def _check_key(state: State, given: Credentials) -> None:
    """Refuse requests without the server's key, where it has one."""
    key = state.validator.settings.api_key
    sent = b"" if given is None else given.credentials.strip(" ").encode("latin-1")  # as it came in the header
    if key is not None and not hmac.compare_digest(sent, key.encode()):
        message = "this server needs its key, as the header Authorization: Bearer KEY."
        raise ApiError(message, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


router = APIRouter()
guarded = APIRouter(dependencies=[Depends(_check_key)])


@router.get("/", include_in_schema=False)
async def playground() -> HTMLResponse:
    """The page that shows drafting live: one document that needs nothing else."""
    html, css, script = ((PAGE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    return HTMLResponse(html.replace("/* style */", css).replace("/* script */", script))


@router.get("/health", responses={503: {"model": replies.Health}})
async def health(state: State, response: Response) -> replies.Health:
    """200 while requests are taken; 503 from the signal to stop, and once the engine has failed."""
    engine = state.engine
    response.status_code = 200 if engine.status == "ok" else 503
    return replies.Health(status=engine.status, running=engine.num_running, waiting=engine.num_waiting)


@router.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}, response_class=Response)
async def metrics(state: State) -> Response:
    """Counters and histograms for Prometheus."""
    return Response(generate_latest(state.metrics.registry), media_type=CONTENT_TYPE)


@guarded.get("/models", include_in_schema=False)
@guarded.get("/v1/models", responses=REFUSALS)
async def models(state: State) -> replies.ModelList:
    """The one model that is served."""
    return replies.ModelList(data=[state.model])


@guarded.get("/v1/models/{name:path}", responses=REFUSALS)
async def model(name: str, state: State) -> replies.ModelCard:
    """The model of that name."""
    state.validator.check_model(name)
    return state.model


@guarded.post("/v1/completions", response_model=replies.Completion, responses=ANSWERS)
async def completions(body: schema.CompletionRequest, request: Request, state: State) -> Any:
    """Continue a text."""
    return await _answer(body, request, state)


@guarded.post("/v1/chat/completions", response_model=replies.ChatCompletion, responses=ANSWERS)
async def chat_completions(body: schema.ChatRequest, request: Request, state: State) -> Any:
    """Answer a conversation."""
    return await _answer(body, request, state)


@guarded.post("/completions", include_in_schema=False)
@guarded.post("/completion", response_model=NativeReply | list[NativeReply], responses=ANSWERS)
async def native_completion(body: NativeRequest, request: Request, state: State) -> Any:
    """Continue a text, as llama.cpp's server does."""
    return await _answer(body, request, state)


@guarded.get("/props", responses=REFUSALS)
async def properties(state: State) -> Props:
    """Properties and defaults of this server, under llama.cpp's names."""
    return props(state.validator.pair, state.validator.settings, name=state.model.id)


async def _answer(body: schema.BaseRequest, request: Request, state: AppState) -> Any:
    facts = request.state.facts
    facts["user"] = body.user or body.safety_identifier
    plan = await state.validator.validate(body)
    kind = NativeAnswer if isinstance(body, NativeRequest) else Answer
    answer = kind(plan, name=request.state.name, model=state.model.id)
    exchange = Exchange(answer, timeout_s=state.validator.settings.timeout_s, metrics=state.metrics, facts=facts)
    exchange.submit(state.engine)
    return EventStream(exchange) if body.stream else await exchange.whole(request)


def build(pair: Pair, settings: ServerSettings) -> FastAPI:
    """The application around a pair. Its engine starts with the lifespan, which measures costs and runs the models once.

    Raises `UnsoundError` for a policy and a verification that together would change the distribution.
    """
    validator, counters = RequestValidator(pair, settings), ServerMetrics()
    engine = EngineThread(settings, on_turn=counters.add_turn)
    counters.watch(engine, pair)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(engine.start, validator.prepare)
        try:
            yield
        finally:
            engine.drop(ApiError("the server has stopped.", status=503, code="shutting_down"))
            await asyncio.to_thread(engine.stop)

    app = FastAPI(
        title="specdecpp",
        version=__version__,
        summary="OpenAI's API over one model pair, decoded speculatively.",
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
    )
    card = replies.ModelCard(id=validator.name, created=int(time()), max_model_len=pair.target.max_length)
    app.state.server = AppState(validator=validator, engine=engine, metrics=counters, model=card)
    app.include_router(router)
    app.include_router(guarded)
    app.add_middleware(RequestMiddleware, max_body_bytes=settings.max_body_bytes, hosts=settings.hosts)
    add_handlers(app)
    return app
