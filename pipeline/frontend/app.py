"""The application: routes, and what they need."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

import pipeline.frontend.streaming as streaming
from pipeline.frontend import api_errors
from pipeline.frontend.api_errors import ApiError
from pipeline.frontend.api_keys import ApiKeys
from pipeline.frontend.backend import Backend, GenerateRequest
from pipeline.frontend.backend_pool import BackendPool, Probe
from pipeline.frontend.chat import Chat
from pipeline.frontend.chat_template import ChatTemplates
from pipeline.frontend.completions import Completion
from pipeline.frontend.http_body import read_body
from pipeline.frontend.lora import read_adapter
from pipeline.frontend.middleware import Surroundings
from pipeline.frontend.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from pipeline.frontend.service import Service
from pipeline.frontend.settings import FrontendSettings
from pipeline.frontend.status_page import status_page
from pipeline.frontend.tokenize_api import detokenize, tokenize
from pipeline.frontend.tokenizer import Tokenizer
from pipeline.frontend.triton_backend import TritonBackend

if TYPE_CHECKING:
    from pipeline.frontend.backend_pool import Member

_BODIES: tuple[type[BaseModel], ...] = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)


def create_app(settings: FrontendSettings, backend: Backend | None = None) -> FastAPI:
    """Return the ASGI application.

    Args:
        settings: What to serve.
        backend: What generates; by default the Triton servers of the settings.

    Raises:
        SourceError: The tokenizer, a chat template or the API keys cannot be read.
    """
    tokenizer = Tokenizer(settings.tokenizer, clean_up_spaces=settings.clean_up_spaces)
    templates = ChatTemplates.from_folder(settings.tokenizer, tokenizer.special_tokens, override=settings.chat_template)
    service = Service(settings, tokenizer, templates, backend or triton_pool(settings, tokenizer))
    keys = ApiKeys(settings.api_keys_file, settings.api_keys_env)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        if isinstance(service.backend, BackendPool):
            service.backend.start()
        yield
        await service.backend.close()

    app = FastAPI(
        title="OpenAI-compatible server for Triton",
        version=_version(),
        lifespan=lifespan,
        redoc_url=None,
        exception_handlers={HTTPException: _http_error},
    )
    app.state.service = service
    _add_routes(app, service)
    app.add_middleware(
        Surroundings,
        keys=keys,
        metrics=service.metrics,
        protect_metrics=settings.protect_metrics,
        log=settings.log_format != "none",
        log_prompts=settings.log_prompts,
    )
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def triton_pool(settings: FrontendSettings, tokenizer: Tokenizer) -> BackendPool:
    """Return the Triton servers of the settings.

    Raises:
        SourceError: The weights of an adapter cannot be read.
    """
    adapters = {settings.lora[name]: read_adapter(folder) for name, folder in settings.lora_weights.items()}
    backends = [
        (
            address,
            TritonBackend(
                address,
                settings.model,
                gathered_logits=settings.gathered_logits,
                timeout_s=settings.connect_timeout_s,
                vocab_size=settings.vocab_size or tokenizer.vocab_size,
                adapters=adapters,
            ),
        )
        for address in settings.triton
    ]
    probe = None
    if settings.probe_period_s > 0:
        prompt = [tokenizer.bos_id or 0]
        request = GenerateRequest("probe", prompt, 1, text=tokenizer.decode(prompt) or " ")
        probe = Probe(request, period_s=settings.probe_period_s, timeout_s=settings.stall_timeout_s)
    return BackendPool(backends, period_s=settings.health_period_s, probe=probe)


def _add_routes(app: FastAPI, service: Service) -> None:
    post = _poster(app, service)

    @post("/v1/chat/completions", ChatRequest)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await _generate(request, await Chat.prepare(service, body), bool(body.stream))

    @post("/v1/completions", CompletionRequest)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await _generate(request, await Completion.prepare(service, body), bool(body.stream))

    @post("/tokenize", TokenizeRequest)
    async def tokenize_text(request: Request, body: TokenizeRequest) -> Response:
        return _json(await tokenize(service, body))

    @post("/detokenize", DetokenizeRequest)
    async def detokenize_ids(request: Request, body: DetokenizeRequest) -> Response:
        return _json(detokenize(service, body))

    @app.post("/v1/embeddings")
    async def embeddings() -> Response:
        message = "This server generates text; the model gives no embeddings."
        raise ApiError(501, message, kind="server_error", code="not_implemented")

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [_model(service, name) for name in _names(service)]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        service.resolve_model(model)
        return _json(_model(service, model))

    @app.get("/health/live")
    async def live() -> Response:
        return _json({"status": "live"})

    @app.get("/health/ready")
    async def ready() -> Response:
        if service.draining:
            raise api_errors.unavailable("The server is shutting down.")
        if not await service.backend.is_ready():
            raise api_errors.unavailable("The model is not ready.")
        return _json({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(status_page(service, _version(), _members(service)))


def _poster(
    app: FastAPI, service: Service
) -> Callable[[str, type[Any]], Callable[[Callable[[Request, Any], Awaitable[Response]]], None]]:
    """Return a decorator for routes with a JSON body.

    The body is read and checked here and not by the framework: its size and time are bounded, and problems are
    reported as OpenAI's API does.
    """

    def post(path: str, model: type[Any]) -> Callable[[Callable[[Request, Any], Awaitable[Response]]], None]:
        schema = {"$ref": f"#/components/schemas/{model.__name__}"}
        extra = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}

        def register(handler: Callable[[Request, Any], Awaitable[Response]]) -> None:
            async def endpoint(request: Request) -> Response:
                request.scope["route"] = route
                if service.draining:
                    raise api_errors.unavailable("The server is shutting down.")
                settings = service.settings
                body = await read_body(
                    request, model, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
                )
                return await handler(request, body)

            # The framework's route describes the endpoint; a plain one in front of it answers, at half the cost.
            app.post(path, openapi_extra=extra, name=handler.__name__)(endpoint)
            route = Route(path, endpoint, methods=["POST"])
            app.router.routes.insert(0, route)

        return register

    return post


async def _generate(request: Request, prepared: Chat | Completion, stream: bool) -> Response:
    request.scope["state"]["record"] = prepared.record
    if stream:
        return streaming.EventStream(prepared.stream())
    return _json(await streaming.until_disconnect(request.receive, prepared.response()))


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def _names(service: Service) -> list[str]:
    settings = service.settings
    return [settings.name, *settings.aliases, *settings.lora]


def _model(service: Service, name: str) -> dict[str, Any]:
    settings = service.settings
    entry: dict[str, Any] = {"id": name, "object": "model", "created": service.created, "owned_by": "trtllm-pipeline"}
    if settings.target:
        entry["target"] = settings.target
    if settings.max_seq_len is not None:
        entry["max_model_len"] = settings.max_seq_len
    if name != settings.name:
        entry["parent"] = settings.name
    return entry


def _members(service: Service) -> list[Member]:
    return service.backend.members if isinstance(service.backend, BackendPool) else []


async def _http_error(request: Request, error: Exception) -> Response:
    """Word the framework's own refusals (unknown path, wrong method) as OpenAI's API does."""
    status, path = getattr(error, "status_code", 500), request.url.path[:256]
    if status == 404:
        known = ApiError(404, f"Unknown request URL: {request.method} {path}.", code="unknown_url")
    elif status == 405:
        known = ApiError(405, f"Not allowed to {request.method} on {path}.", code="method_not_allowed")
    else:
        known = ApiError(status, str(getattr(error, "detail", "The request failed.")))
    return Response(
        orjson.dumps(known.body()), status, media_type="application/json", headers=getattr(error, "headers", None)
    )


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("trtllm-pipeline")
    except PackageNotFoundError:
        return "0"


_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_REFUSALS = {
    "400": "The request cannot be served as it is",
    "401": "No valid API key",
    "404": "No such model",
    "408": "The body took too long to arrive",
    "413": "The body is too large",
    "429": "Too much is waiting already",
    "500": "The server or the model failed",
    "501": "This model cannot do that",
    "503": "The model cannot be reached, or the server is shutting down",
}


def _document_answers(path: str, responses: dict[str, Any]) -> None:
    """Add what may be answered instead of a result."""
    schema = {"$ref": "#/components/schemas/Error"}
    responses.pop("422", None)
    if path == "/metrics":
        responses["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    elif path in ("/v1/chat/completions", "/v1/completions"):
        responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    for status, text in _REFUSALS.items():
        responses[status] = {"description": text, "content": {"application/json": {"schema": schema}}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the description, with the schemas of bodies that the framework does not read itself."""
    if app.openapi_schema is None:
        description = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = description.setdefault("components", {}).setdefault("schemas", {})
        for model in _BODIES:
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[model.__name__] = schema
        schemas["Error"] = _ERROR_SCHEMA
        for path, operations in description["paths"].items():
            for operation in operations.values():
                _document_answers(path, operation["responses"])
        app.openapi_schema = description
    return app.openapi_schema
