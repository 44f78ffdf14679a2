"""The OpenAPI document: of the types that bodies are decoded to and answers are encoded from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from pilotfish.server import answers, requests

_REF = "#/components/schemas/{name}"


@dataclass(frozen=True)
class Operation:
    """What an operation takes and gives."""

    answer: type
    failures: tuple[int, ...] = ()
    body: type | None = None
    event: type | None = None  # of a stream
    others: tuple[tuple[int, type], ...] = ()  # statuses whose body is no ErrorBody


_MODEL = (401, 404, 429, 503)
_BODY = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)
OPERATIONS = {
    "completions": Operation(answers.Completion, _BODY, requests.CompletionRequest, answers.Completion),
    "chat_completions": Operation(answers.ChatCompletion, _BODY, requests.ChatRequest, answers.ChatChunk),
    "tokenize": Operation(answers.Tokenized, _BODY, requests.TokenizeRequest),
    "detokenize": Operation(answers.Detokenized, _BODY, requests.DetokenizeRequest),
    "models": Operation(answers.Models, _MODEL),
    "model": Operation(answers.Model, _MODEL),
    "health": Operation(answers.Live),
    "ready": Operation(answers.Ready, others=((503, answers.Ready),)),
    "version": Operation(answers.Version),
}


def document(app: FastAPI) -> dict[str, Any]:
    """The whole document; operations that are not ours are as FastAPI sees them."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path in made["paths"].values():
            for operation in path.values():
                if known := OPERATIONS.get(operation.get("operationId")):
                    _describe(operation, known)
        made.setdefault("components", {}).setdefault("schemas", {}).update(_schemas())
        app.openapi_schema = made
    return app.openapi_schema


def _describe(operation: dict[str, Any], known: Operation) -> None:
    if known.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(known.body)}
    content = _json(known.answer)
    if known.event is not None:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    responses = {200: {"description": "Success", "content": content}}
    responses |= {status: _response(status, answers.ErrorBody) for status in known.failures}
    responses |= {status: _response(status, kind) for status, kind in known.others}
    operation["responses"] = {str(status): response for status, response in responses.items()}


def _response(status: int, kind: type) -> dict[str, Any]:
    return {"description": f"Status {status}", "content": _json(kind)}


def _json(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=kind.__name__)}}}


def _schemas() -> dict[str, Any]:
    kinds = [
        kind
        for operation in OPERATIONS.values()
        for kind in (operation.answer, operation.body, operation.event, *(kind for _, kind in operation.others))
        if kind is not None
    ]
    return msgspec.json.schema_components([*kinds, answers.ErrorBody], ref_template=_REF)[1]
