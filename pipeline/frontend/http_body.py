"""Reading request bodies: bounded, timed, and refused in OpenAI's words."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from pipeline.frontend.api_errors import ApiError, bad_request, too_large
from pipeline.frontend.streaming import ClientLeft

_Body = TypeVar("_Body", bound=BaseModel)


async def read_body(request: Request, model: type[_Body], *, max_bytes: int, timeout_s: float) -> _Body:
    """Return the checked body.

    Raises:
        ApiError: 400 for what is wrong with it, 408 when it comes too slowly, 413 when it is too large.
        ClientLeft: The client left while sending.
    """
    try:
        data = await asyncio.wait_for(_read(request, max_bytes), timeout_s)
    except asyncio.TimeoutError as error:
        message = f"The request body did not arrive within {timeout_s:g} s."
        raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from error
    except ClientDisconnect as error:
        raise ClientLeft from error
    try:
        # pydantic parses off the loop's back: a large body must not stop the streams.
        if len(data) > 1_000_000:
            return await asyncio.to_thread(model.model_validate_json, data)
        return model.model_validate_json(data)
    except ValidationError as error:
        raise _refusal(error) from error


async def _read(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length")
    if length is not None and (not length.isascii() or not length.isdigit()):
        raise bad_request("The Content-Length header is not a number.", code="invalid_content_length")
    if length is not None and int(length) > max_bytes:
        raise _closing(max_bytes)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise _closing(max_bytes)
        parts.append(part)
    return b"".join(parts)


def _closing(max_bytes: int) -> ApiError:
    """Refuse and close, so that the rest need not be read."""
    error = too_large(max_bytes)
    error.headers["Connection"] = "close"
    return error


def _refusal(error: ValidationError) -> ApiError:
    """Put the first problem into OpenAI's words."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where, kind = problem["loc"], problem["type"]
    if kind in ("json_invalid", "json_type"):
        return bad_request(f"We could not parse the JSON body of your request: {problem['msg']}.", code="invalid_json")
    param = _path(where)
    if kind == "extra_forbidden":
        return bad_request(f"Unrecognized request argument supplied: {param}", param, "unknown_parameter")
    if kind == "missing":
        return bad_request(f"Missing required parameter: {param!r}.", param, "missing_required_parameter")
    return bad_request(f"Invalid value for {param!r}: {problem['msg']}.", param, "invalid_value")


def _path(where: tuple[Any, ...]) -> str | None:
    """Return a path such as ``messages[0].role``; names that stand for alternatives of a type are left out."""
    path = ""
    for step in where[:8]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not path:
            path = str(step)[:64]
        elif step.isidentifier() and step.islower() and step not in ("str", "int", "float", "bool", "dict"):
            path += f".{step[:64]}"
    return path or None
