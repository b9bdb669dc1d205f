"""The HTTP API: its routes and the small endpoints about the process itself.  Imports no torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from omnistage.errors import NotFound
from omnistage.serving.audio_protocol import SpeechRequest, TranscriptionRequest
from omnistage.serving.chat import chat_completions
from omnistage.serving.chat_protocol import ChatCompletionRequest
from omnistage.serving.http_errors import install_error_handlers
from omnistage.serving.middleware import BodyLimit, CountRequests
from omnistage.serving.requests import Backend
from omnistage.serving.service import Service
from omnistage.serving.settings import ServerSettings
from omnistage.serving.speech import speech
from omnistage.serving.transcriptions import transcriptions

Endpoint = Callable[[Request, Service], Awaitable[Response]]


def create_app(backend: Backend, settings: ServerSettings | None = None) -> FastAPI:
    """An ASGI app over a backend, which may still be loading: then /ready and the endpoints answer 503."""
    service = Service(backend, settings or ServerSettings())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.media.aclose()

    app = FastAPI(
        title="Omnistage", version=version("omnistage"), lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.service = service
    install_error_handlers(app)
    app.add_middleware(
        BodyLimit,
        max_bytes=service.settings.max_body_bytes,
        max_total_bytes=service.settings.max_total_body_bytes,
    )
    app.add_middleware(CountRequests, metrics=service.metrics)  # outermost: added last
    _add_posts(app, service)
    _add_gets(app, service)
    return app


def _add_posts(app: FastAPI, service: Service) -> None:
    json_type, form_type = "application/json", "multipart/form-data"
    posts: list[tuple[str, Endpoint, type[BaseModel], str]] = [
        ("/v1/chat/completions", chat_completions, ChatCompletionRequest, json_type),
        ("/v1/audio/speech", speech, SpeechRequest, json_type),
        ("/v1/audio/transcriptions", transcriptions, TranscriptionRequest, form_type),
    ]
    for path, endpoint, model, content_type in posts:
        app.add_api_route(
            path,
            _bound(endpoint, service),
            methods=["POST"],
            name=endpoint.__name__,
            response_model=None,
            openapi_extra={
                "requestBody": {
                    "required": True,
                    "content": {content_type: {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}},
                }
            },
        )
    plain_openapi = app.openapi

    def openapi() -> dict[str, Any]:
        """FastAPI's description plus the schemas of bodies, which the endpoints parse themselves."""
        if app.openapi_schema is None:
            described = plain_openapi()
            schemas = described.setdefault("components", {}).setdefault("schemas", {})
            for _, _, model, _ in posts:
                schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
                schemas.update(schema.pop("$defs", {}))
                schemas[model.__name__] = schema
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]


def _add_gets(app: FastAPI, service: Service) -> None:
    gets: list[tuple[str, Endpoint]] = [
        ("/health", _health),
        ("/ready", _ready),
        ("/metrics", _metrics),
        ("/v1/models", _models),
        ("/v1/models/{model:path}", _model),
        ("/v1/audio/voices", _voices),
    ]
    for path, endpoint in gets:
        app.add_api_route(
            path,
            _bound(endpoint, service),
            methods=["GET"],
            name=endpoint.__name__.strip("_"),
            response_model=None,
        )


def _bound(endpoint: Endpoint, service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        return await endpoint(request, service)

    handle.__doc__ = endpoint.__doc__
    return handle


async def _health(request: Request, service: Service) -> Response:
    """Whether the API process lives; says nothing of the stages."""
    return JSONResponse({"status": "ok"})


async def _ready(request: Request, service: Service) -> Response:
    """200 once every stage is loaded and requests are taken, 503 before and while draining."""
    is_ready = service.backend.is_ready
    return JSONResponse(
        {"status": "ready" if is_ready else "not ready"}, status_code=200 if is_ready else 503
    )


async def _metrics(request: Request, service: Service) -> Response:
    """Prometheus metrics."""
    return Response(service.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _models(request: Request, service: Service) -> Response:
    """The one model served."""
    return JSONResponse({"object": "list", "data": [_model_as_json(service)]})


async def _model(request: Request, service: Service) -> Response:
    name = request.path_params["model"]
    if name != service.info.model:
        raise NotFound(
            f"the model {name[:100]!r} is not served here; use {service.info.model!r}",
            code="model_not_found",
            param="model",
        )
    return JSONResponse(_model_as_json(service))


async def _voices(request: Request, service: Service) -> Response:
    """What `voice` may be."""
    voices = [{"id": name, "name": name, "object": "audio.voice"} for name in service.info.voices]
    return JSONResponse({"object": "list", "data": voices})


def _model_as_json(service: Service) -> dict[str, Any]:
    info = service.info
    return {
        "id": info.model,
        "object": "model",
        "created": service.created,
        "owned_by": "omnistage",
        "max_model_len": info.max_model_len,
        "inputs": ["text", *info.encoders],
        "outputs": list(info.outputs),
    }
