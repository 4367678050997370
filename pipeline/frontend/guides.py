"""``response_format`` as a guide for the model's guided decoding."""

from __future__ import annotations

import orjson

from pipeline.frontend.api_errors import bad_request, unsupported
from pipeline.frontend.backend import Features, Guide
from pipeline.frontend.schema import Generation


def guide_of(body: Generation, features: Features) -> Guide | None:
    """Return what the answer must match.

    Raises:
        ApiError: 400 when the format is incomplete or the model has no guided decoding.
    """
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        guide = Guide("json")
    elif wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            raise bad_request("response_format.json_schema.schema is missing.", "response_format")
        guide = Guide("json_schema", orjson.dumps(wanted.json_schema.schema_).decode())
    elif wanted.type == "grammar":
        guide = Guide("ebnf_grammar", _text(wanted.grammar, "grammar"))
    else:
        guide = Guide("regex", _text(wanted.regex, "regex"))
    if not features.guided:
        message = f"This model has no guided decoding, so response_format {wanted.type} cannot be guaranteed."
        raise unsupported(message, "response_format")
    return guide


def _text(value: str | None, name: str) -> str:
    if not value:
        raise bad_request(f"response_format.{name} is missing.", "response_format")
    return value
