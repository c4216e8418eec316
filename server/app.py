"""Owns the routes and what each endpoint does, in the order of a request's walk. Does not own any step of the walk itself."""

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from models import Loaded
from models.traffic import Launch, layer_launches
from runtime.device import datasheet_gbps, describe
from runtime.ops import OPS_SETS
from server.body import parse_object, read_body
from server.dispatch import Dispatcher
from server.errors import ModelNotFoundError, encode
from server.gate import Gate, refuse_foreign_pages, refuse_route
from server.intake import Intake, Job
from server.metrics import Metrics
from server.openapi import docs_page, openapi
from server.page import page_routes
from server.reply import Reply
from server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    SamplingDefaults,
    SwitchRequest,
    TokenizeRequest,
)
from server.shapes import ChatEnvelope, CompletionEnvelope, Model
from server.strict import Strict

MIN_BODY_BYTES = 8 << 20
BODY_BYTES_PER_POSITION = 64
"""A token is at most a few characters, and JSON may write one as six; lists of prompts hold several contexts."""
TOKENIZER = "tokenizer"
TOKENIZER_THREADS = 2
"""For what may take long, where the event loop does not wait for it."""
LEAVE_SECONDS = 0.1
"""How long such a thread may take to leave when the server ends; a text of megabytes takes seconds."""
LARGE_BODY_BYTES = 1 << 16
"""Larger bodies are parsed apart from the event loop."""

LAUNCHES_CONTEXT = 512
"""Positions at which GET /v1/runtime tells the bytes of a layer's launches."""

W = TypeVar("W", bound=Strict)


@dataclass(frozen=True)
class Settings:
    """What the door decides.

    Attributes:
        names: the model's names, the first one official.
        max_queue: requests that may wait beside those that hold a slot.
        max_body_bytes: a larger body is refused unread; None: 8 MiB, or 64 bytes a position of the context if that is more.
        api_key: bearer token of every path but /health and the page; None asks for nothing.
        cors_origins: origins whose pages may call; "*" is any.
        defaults: sampling values of requests that set none.
        every_mode: prepare the modes that the engine does not start in, too.
        page: serve the page at GET /, open to all: it asks for the key itself.
    """

    names: tuple[str, ...]
    max_queue: int = 128
    max_body_bytes: int | None = None
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    every_mode: bool = False
    page: bool = True


class Service:
    """The endpoints of one loaded model."""

    def __init__(self, loaded: Loaded, settings: Settings) -> None:
        engine = loaded.engine
        self.dispatcher = Dispatcher(engine, settings.max_queue, settings.every_mode)
        self._intake = Intake(engine, loaded.tokenizer, loaded.source.end_ids, settings.defaults)
        told = self.dispatcher
        self._metrics = Metrics(settings.names[0], lambda: told.running, lambda: told.waiting, lambda: told.kv_usage)
        self._names = settings.names
        self._max_len = engine.max_len
        self._facts = {"model": settings.names[0], **facts(loaded)}
        self._max_body_bytes = settings.max_body_bytes or max(MIN_BODY_BYTES, BODY_BYTES_PER_POSITION * engine.max_len)
        self._created = int(time.time())

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """The worker lives as long as the app."""
        apart = ThreadPoolExecutor(TOKENIZER_THREADS, TOKENIZER)
        asyncio.get_running_loop().set_default_executor(apart)
        self.dispatcher.start()
        yield
        self.dispatcher.stop()
        apart.shutdown(wait=False, cancel_futures=True)

    @property
    def stopped(self) -> bool:
        """Whether no thread is inside a call any more, of the engine or of the tokenizer; behind the lifespan."""
        threads = [thread for thread in threading.enumerate() if thread.name.startswith(TOKENIZER)]
        for thread in threads:
            thread.join(LEAVE_SECONDS)
        return self.dispatcher.stopped and not any(thread.is_alive() for thread in threads)

    async def completions(self, request: Request) -> Reply:
        wanted = await self._wanted(CompletionRequest, request)
        model = self._model(wanted.model)
        self.dispatcher.check(len(wanted.prompt) * wanted.n)  # before a million prompts are tokenized
        return self._reply(wanted, model, await self._intake.completion(wanted), CompletionEnvelope)

    async def chat_completions(self, request: Request) -> Reply:
        wanted = await self._wanted(ChatRequest, request)
        model = self._model(wanted.model)
        return self._reply(wanted, model, await self._intake.chat(wanted), ChatEnvelope)

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._describe(name) for name in self._names]})

    async def model(self, request: Request) -> Response:
        return _json(self._describe(self._model(request.path_params["name"])))

    async def health(self, request: Request) -> Response:
        self.dispatcher.check()
        return _json({"status": "ok", "running": self.dispatcher.running, "waiting": self.dispatcher.waiting})

    async def runtime(self, request: Request) -> Response:
        """How steps are played; a POST changes that between two of them, and running streams go on."""
        if request.method != "POST":
            switched = await self.dispatcher.switch()
            return _json({**self._facts, **asdict(switched.playing)})
        refuse_foreign_pages(request.headers)
        wanted = await self._wanted(SwitchRequest, request)
        switched = await self.dispatcher.switch(wanted.ops, None if wanted.graph is None else wanted.graph == "on")
        return _json({**self._facts, **asdict(switched.playing), "stall_ms": round(switched.stall_ms, 3)})

    async def version(self, request: Request) -> Response:
        return _json({"version": installed_version()})

    async def tokenize(self, request: Request) -> Response:
        wanted = await self._wanted(TokenizeRequest, request)
        self._model(wanted.model)
        ids = await self._intake.tokenize(wanted)
        return _json({"count": len(ids), "max_model_len": self._max_len, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        wanted = await self._wanted(DetokenizeRequest, request)
        self._model(wanted.model)
        return _json({"prompt": await self._intake.detokenize(wanted.tokens)})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _wanted(self, kind: type[W], request: Request) -> W:
        """The request's body, typed."""
        self.dispatcher.check()
        body = await read_body(request.scope, request.receive, self._max_body_bytes)
        if len(body) <= LARGE_BODY_BYTES:
            return kind.parse(parse_object(body))
        return await asyncio.to_thread(lambda: kind.parse(parse_object(body)))

    def _model(self, name: str | None) -> str:
        if name is not None and name not in self._names:
            raise ModelNotFoundError("this server has no model of that name; GET /v1/models lists what it serves", "model")
        return name or self._names[0]

    def _describe(self, name: str) -> Model:
        created = self._created
        return {"id": name, "object": "model", "created": created, "owned_by": "quartet", "max_model_len": self._max_len}

    def _reply(self, wanted: GenerationRequest, model: str, job: Job, kind: type[CompletionEnvelope | ChatEnvelope]) -> Reply:
        envelope = kind(uuid.uuid4().hex, int(time.time()), model)
        return Reply(self.dispatcher, self._metrics, job, envelope, wanted.stream, wanted.stream_options)


def create_app(service: Service, settings: Settings) -> Starlette:
    """The ASGI application around a service; its lifespan runs the worker."""
    pages = page_routes() if settings.page else []
    open_paths = ("/health", *(route.path for route in pages))
    middleware = [Middleware(Gate, api_key=settings.api_key, open_paths=open_paths)]
    if settings.cors_origins:  # outside of the gate: browsers ask first and bring no key
        allow: dict[str, Any] = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"], "expose_headers": ["X-Request-Id"]}
        middleware.insert(0, Middleware(CORSMiddleware, allow_origins=settings.cors_origins, **allow))
    document = openapi(installed_version(), settings.api_key is not None)
    app = Starlette(
        routes=[
            Route("/v1/completions", service.completions, methods=["POST"]),
            Route("/v1/chat/completions", service.chat_completions, methods=["POST"]),
            Route("/v1/models", service.models),
            Route("/v1/models/{name:path}", service.model),
            Route("/v1/runtime", service.runtime, methods=["GET", "POST"]),
            Route("/health", service.health),
            Route("/version", service.version),
            Route("/metrics", service.metrics),
            Route("/tokenize", service.tokenize, methods=["POST"]),
            Route("/detokenize", service.detokenize, methods=["POST"]),
            Route("/openapi.json", _json(document), methods=["GET"]),
            Route("/docs", HTMLResponse(docs_page(document)), methods=["GET"]),
            *pages,
        ],
        middleware=middleware,
        exception_handlers={HTTPException: refuse_route},
        lifespan=service.lifespan,
    )
    app.router.redirect_slashes = False
    return app


def facts(loaded: Loaded) -> dict[str, Any]:
    """What stays the same of GET /v1/runtime. prompts: what the model takes, "chat", "text" without a chat template, or "ids"
    without a tokenizer. floor_ms, the least time of a token, is None without a datasheet's read rate, and
    so is each launch's us_predicted, its bytes over that rate at batch 1 and launches_context positions."""
    config, device, weights = loaded.config, loaded.engine.model.device, loaded.engine.model.weight_format
    shapes, context = loaded.source.config, min(LAUNCHES_CONTEXT, loaded.engine.max_len - 1)
    token_bytes, rate = shapes.bytes_per_token(config.dtype, weights=weights), datasheet_gbps(describe(device))
    tokenizer = loaded.tokenizer
    return {
        "prompts": "ids" if tokenizer is None else "chat" if tokenizer.has_chat_template else "text",
        "dtype": config.dtype,
        "weights": weights,
        "device": config.device,
        "device_name": describe(device),
        "max_len": config.max_len,
        "max_slots": config.max_slots,
        "layers": loaded.engine.model.num_layers,
        "weight_bytes": loaded.weight_bytes,
        "weight_bytes_per_token": token_bytes,
        "kv_cache_bytes": loaded.engine.cache.nbytes,
        "window": shapes.window,
        "kv_bytes_per_position": shapes.kv_bytes_per_position(config.dtype),
        "datasheet_gbps": rate,
        "floor_ms": None if rate is None else round(token_bytes / rate / 1e6, 3),
        "launches_context": context,
        "launches": {
            ops: [_launch(each, rate) for each in layer_launches(shapes, ops, config.dtype, 1, context, weights)]
            for ops in OPS_SETS
        },
    }


def _launch(launch: Launch, rate: float | None) -> dict[str, Any]:
    """A launch of GET /v1/runtime; `rate` in GB/s."""
    us = None if rate is None else round(launch.total_bytes / rate / 1e3, 3)
    return {"name": launch.name, "fuses": launch.fuses, "bytes": launch.total_bytes, "us_predicted": us}


def installed_version() -> str:
    """Quartet's version, as its package was installed."""
    try:
        return version("quartet")
    except PackageNotFoundError:
        return "0+source"


def _json(data: Any) -> Response:
    return Response(encode(data), media_type="application/json")
