"""What happens around every request: keys, request ids, errors, counting, the access log.

Plain ASGI: a middleware that wraps responses in objects would cost on every streamed token.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.frontend.api_errors import ApiError, internal
from pipeline.frontend.api_keys import ApiKeys
from pipeline.frontend.metrics import Metrics
from pipeline.frontend.streaming import ClientLeft

_log = logging.getLogger("pipeline.frontend.access")
_errors = logging.getLogger(__name__)

# nginx's number for "the client closed the request"; it is never sent.
_CLIENT_LEFT = 499


class Surroundings:
    """Wraps the application."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        metrics: Metrics,
        protect_metrics: bool,
        log: bool,
        log_prompts: bool = False,
    ) -> None:
        """Set what surrounds requests.

        Args:
            app: The application.
            keys: Who may come in.
            metrics: Counts answers.
            protect_metrics: Whether ``/metrics`` needs a key.
            log: Whether to write an access log.
            log_prompts: Whether it holds prompts.
        """
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._protected = ("/v1/", "/tokenize", "/detokenize", *(("/metrics",) if protect_metrics else ()))
        self._log = log
        self._log_prompts = log_prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        try:
            if scope["path"].startswith(self._protected):
                self._keys.check(scope)
            await self._app(scope, receive, exchange.send)
        except ClientLeft:
            exchange.status = _CLIENT_LEFT
        except ApiError as error:
            await exchange.refuse(error)
        except Exception:
            _errors.exception("request failed", extra={"request_id": exchange.request_id})
            await exchange.refuse(internal())
        finally:
            self._finish(scope, exchange)

    def _finish(self, scope: Scope, exchange: _Exchange) -> None:
        route = scope.get("route")
        endpoint = getattr(route, "path", "unknown")
        self._metrics.request(endpoint, exchange.status)
        if self._log:
            fields = {
                "request_id": exchange.request_id,
                "method": scope["method"],
                "path": scope["path"][:256],
                "status": exchange.status,
                "seconds": round(time.perf_counter() - exchange.start_s, 6),
                **self._generation(scope),
            }
            _log.info("request", extra=fields)

    def _generation(self, scope: Scope) -> dict[str, Any]:
        """Return what a generating endpoint has to say about its request; no text unless that is wanted."""
        record = scope["state"].get("record")
        if record is None:
            return {}
        fields: dict[str, Any] = record()
        prompts = fields.pop("prompts")
        return {**fields, "prompts": prompts} if self._log_prompts else fields


class _Exchange:
    """One request and what was answered."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self.start_s = time.perf_counter()
        self.started = False
        self.status = 500
        self.request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = self.request_id

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
            message = {**message, "headers": headers}
        await self._send(message)

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error, if nothing has been answered yet."""
        if self.started:
            return
        body = orjson.dumps(error.body())
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})


def _request_id(scope: Scope) -> str:
    """Return the client's id where it is harmless, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text: str = value.decode("latin-1")
            if 0 < len(text) <= 128 and text.isascii() and text.isprintable():
                return text
    return "r" + uuid.uuid4().hex
