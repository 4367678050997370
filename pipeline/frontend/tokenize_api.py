"""``/tokenize`` and ``/detokenize``: the exact ids that the generating endpoints send."""

from __future__ import annotations

from typing import Any

from pipeline.frontend.api_errors import bad_request
from pipeline.frontend.chat_prompt import render_chat
from pipeline.frontend.schema import DetokenizeRequest, TokenizeRequest
from pipeline.frontend.service import Service


async def tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    """Return the ids of a prompt or conversation.

    Raises:
        ApiError: 400 when not exactly one of both is given, 404 for an unknown model.
    """
    if body.model is not None:
        service.resolve_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Give either prompt or messages.", "prompt")
    if body.prompt is not None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        ids = await service.encode(body.prompt, add_special_tokens=special)
    else:
        text = await render_chat(service, body, tools=body.tools)
        ids = await service.encode(text, add_special_tokens=bool(body.add_special_tokens))
    limit = service.settings.max_seq_len or service.tokenizer.model_max_length
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": limit}
    if body.return_token_strs:
        answer["token_strs"] = [service.tokenizer.token_label(index) for index in ids]
    return answer


def detokenize(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    """Return the text of ids.

    Raises:
        ApiError: 400 for an id outside the vocabulary, 404 for an unknown model.
    """
    if body.model is not None:
        service.resolve_model(body.model)
    size = service.tokenizer.vocab_size
    wrong = [index for index in body.tokens if index >= size]
    if wrong:
        raise bad_request(f"tokens holds id {wrong[0]}, expected ids below {size}.", "tokens")
    return {"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)}
