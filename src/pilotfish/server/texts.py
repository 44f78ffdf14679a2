"""/tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response
from msgspec import Struct

from pilotfish.server.answers import Detokenized, Tokenized, encode
from pilotfish.server.body import read
from pilotfish.server.failures import HttpError, bad
from pilotfish.server.prompts import chat_tokens, text_tokens, tokens_text
from pilotfish.server.requests import DetokenizeRequest, TokenizeRequest
from pilotfish.server.service import Service


def json(answer: Struct, status: int = 200) -> Response:
    return Response(encode(answer), status, media_type="application/json")


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["text"])

    @routes.post("/tokenize", operation_id="tokenize")
    async def tokenize(request: Request) -> Response:
        """The tokens of a prompt, or of the chat template around messages."""
        service.gate.identify(request)
        asked = await read(request, TokenizeRequest, service.config)
        service.name(asked.model)
        tokens = await _tokens(asked, service)
        strings = service.engine.tokenizer.convert_ids_to_tokens(tokens) if asked.return_token_strs else None
        return json(Tokenized(tokens, len(tokens), service.identity.context, strings))

    @routes.post("/detokenize", operation_id="detokenize")
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        service.gate.identify(request)
        asked = await read(request, DetokenizeRequest, service.config)
        service.name(asked.model)
        _check(asked.tokens, len(service.engine.tokenizer))
        return json(Detokenized(await tokens_text(asked.tokens, service.engine.tokenizer)))

    return routes


async def _tokens(asked: TokenizeRequest, service: Service) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        raise HttpError(400, "prompt: exactly one of prompt and messages is needed", param="prompt")
    if asked.messages is not None:
        service.refuse_long("messages", (message.text for message in asked.messages))
        return await chat_tokens(asked, service.engine.tokenizer)
    assert asked.prompt is not None
    service.refuse_long("prompt", [asked.prompt])
    return await text_tokens(asked.prompt, service.engine.tokenizer, special=asked.add_special_tokens is not False)


def _check(tokens: Sequence[int], size: int) -> None:
    for token in tokens:
        if not 0 <= token < size:
            raise bad("tokens", token, f"token ids 0 to {size - 1}")
