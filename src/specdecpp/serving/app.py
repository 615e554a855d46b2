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

from specdecpp import __version__
from specdecpp.loading.pair import Pair
from specdecpp.serving import replies, schema
from specdecpp.serving.answers import Answer
from specdecpp.serving.completion import NativeAnswer, NativeReply, NativeRequest, Props, props
from specdecpp.serving.engine import EngineThread, Job
from specdecpp.serving.errors import ApiError, add_handlers
from specdecpp.serving.exchange import EventQueue, EventStream, Exchange
from specdecpp.serving.metrics import CONTENT_TYPE, ServerMetrics
from specdecpp.serving.middleware import RequestMiddleware
from specdecpp.serving.settings import ServerSettings
from specdecpp.serving.validation import RequestValidator

PAGE = Path(__file__).parent / "page"
STREAM = {
    "text/event-stream": {"itemSchema": {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}}
}
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": replies.ErrorReply, "description": "What is wrong with the request; 429 when all places are taken."},
    503: {"model": replies.ErrorReply, "description": "The server is shutting down, or has failed."},
    504: {"model": replies.ErrorReply, "description": "The request took too long."},
}


@dataclass(frozen=True, kw_only=True)
class AppState:
    """Shared state of the endpoints."""

    settings: ServerSettings
    validator: RequestValidator
    engine: EngineThread
    metrics: ServerMetrics
    model: replies.ModelCard


def _state(request: Request) -> AppState:
    return request.app.state.server


def _check_key(
    state: Annotated[AppState, Depends(_state)],
    given: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],
) -> None:
    """Refuse requests without the server's key, where it has one."""
    key = state.settings.api_key
    sent = b"" if given is None else given.credentials.strip(" ").encode("latin-1")  # as it came in the header
    if key is not None and not hmac.compare_digest(sent, key.encode()):
        message = "this server needs its key, as the header Authorization: Bearer KEY."
        raise ApiError(message, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


State = Annotated[AppState, Depends(_state)]
router = APIRouter()
api = APIRouter(prefix="/v1", dependencies=[Depends(_check_key)])
native = APIRouter(dependencies=[Depends(_check_key)])


@router.get("/", include_in_schema=False)
async def playground() -> HTMLResponse:
    """The page that shows drafting live: one document that needs nothing else."""
    html, css, script = ((PAGE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    return HTMLResponse(html.replace("/* style */", css).replace("/* script */", script))


@router.get("/health", responses={503: {"model": replies.Health}})
async def health(state: State, response: Response) -> replies.Health:
    """200 while requests are taken; 503 from the signal to stop, and once the engine has failed."""
    engine = state.engine
    status = engine.status
    response.status_code = 200 if status == "ok" else 503
    return replies.Health(status=status, running=engine.num_running, waiting=engine.num_waiting)


@router.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}, response_class=Response)
async def metrics(state: State) -> Response:
    """Counters and histograms for Prometheus."""
    return Response(state.metrics.text(), media_type=CONTENT_TYPE)


@native.get("/models", include_in_schema=False)
@api.get("/models", responses={"4XX": ERRORS["4XX"]})
async def models(state: State) -> replies.ModelList:
    """The one model that is served."""
    return replies.ModelList(data=[state.model])


@api.get("/models/{name:path}", responses={"4XX": ERRORS["4XX"]})
async def model(name: str, state: State) -> replies.ModelCard:
    """The model of that name."""
    if name != state.model.id:
        raise state.validator.unknown_model(name)
    return state.model


@api.post("/completions", response_model=replies.Completion, responses={200: {"content": STREAM}, **ERRORS})
async def completions(body: schema.CompletionRequest, request: Request, state: State) -> Any:
    """Continue a text."""
    return await _answer(body, request, state, is_chat=False)


@api.post("/chat/completions", response_model=replies.ChatCompletion, responses={200: {"content": STREAM}, **ERRORS})
async def chat_completions(body: schema.ChatRequest, request: Request, state: State) -> Any:
    """Answer a conversation."""
    return await _answer(body, request, state, is_chat=True)


@native.post("/completions", include_in_schema=False)
@native.post("/completion", response_model=NativeReply | list[NativeReply], responses={200: {"content": STREAM}, **ERRORS})
async def native_completion(body: NativeRequest, request: Request, state: State) -> Any:
    """Continue a text, as llama.cpp's server does."""
    return await _answer(body, request, state, is_chat=False)


@native.get("/props", responses={"4XX": ERRORS["4XX"]})
async def properties(state: State) -> Props:
    """What this server has and does by default, under llama.cpp's names."""
    return props(state.validator.pair, state.settings, name=state.model.id, version=__version__)


async def _answer(body: schema.BaseRequest, request: Request, state: AppState, *, is_chat: bool) -> Any:
    request.state.facts["user"] = body.user or body.safety_identifier
    plan = await state.validator.validate(body)
    queue = EventQueue()
    job = Job(
        decoder=plan.decoder,
        parts=plan.parts,
        listener=queue.put,
        timeout_s=state.settings.timeout_s,
        recorder=plan.recorder if plan.needs_recorder else None,
    )
    try:
        state.engine.submit(job)
    except ApiError as error:
        state.metrics.add_request(error.code or "refused")
        raise
    name, model = request.state.name, state.model.id
    if isinstance(body, NativeRequest):
        answer = NativeAnswer(plan, body, model=model)
    else:
        answer = Answer(plan, is_chat=is_chat, name=name, model=model, includes_usage=body.includes_usage)
    exchange = Exchange(answer=answer, job=job, queue=queue, plan=plan, metrics=state.metrics, facts=request.state.facts)
    return EventStream(exchange) if body.stream else await exchange.whole(request)


def build(pair: Pair, settings: ServerSettings) -> FastAPI:
    """The application around a pair. Its engine starts with the lifespan, which measures costs and runs the models once.

    Raises `UnsoundError` for a policy and a verification that together would change the distribution.
    """
    validator, counters = RequestValidator(pair, settings), ServerMetrics()
    engine = EngineThread(settings, on_turn=counters.add_turn)
    counters.watch(engine)

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
    app.state.server = AppState(settings=settings, validator=validator, engine=engine, metrics=counters, model=card)
    app.include_router(router)
    app.include_router(api)
    app.include_router(native)
    app.add_middleware(RequestMiddleware, max_body_bytes=settings.max_body_bytes, hosts=settings.hosts)
    add_handlers(app)
    return app
