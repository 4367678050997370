"""Errors as OpenAI's API words them: a status and ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An answer other than 200.

    Attributes:
        status: HTTP status.
        message: For the client; never holds a trace, a file path or prompt text.
        kind: OpenAI's ``type``.
        param: The request field at fault.
        code: Machine-readable reason.
        headers: Extra response headers (``Retry-After``, ``WWW-Authenticate``).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Refuse a request for what one of its fields says."""
    return ApiError(400, message, param=param, code=code)


def unsupported(message: str, param: str) -> ApiError:
    """Refuse a field that is fine in itself and that this deployment cannot serve."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def model_not_found(name: str) -> ApiError:
    """Refuse a model name nobody serves."""
    return ApiError(404, f"The model {name!r} does not exist.", param="model", code="model_not_found")


def unauthorized(message: str) -> ApiError:
    """Refuse a missing or wrong key."""
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key", headers=headers)


def too_large(limit: int) -> ApiError:
    """Refuse a body above the limit."""
    return ApiError(413, f"The request body is larger than {limit} bytes.", code="content_too_large")


def overloaded(message: str, retry_after_s: int = 1) -> ApiError:
    """Refuse because the queue is full."""
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(429, message, kind="rate_limit_error", code="overloaded", headers=headers)


def unavailable(message: str) -> ApiError:
    """Say that nothing can generate at the moment."""
    return ApiError(503, message, kind="server_error", code="model_unavailable", headers={"Retry-After": "2"})


def internal(message: str = "The server failed to answer this request.") -> ApiError:
    """Say that the fault is on this side."""
    return ApiError(500, message, kind="server_error", code="internal_error")
