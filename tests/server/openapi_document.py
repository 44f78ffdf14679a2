"""The OpenAPI document: what it says of bodies of requests is made of the server's types, what it says of answers is
written in the document itself, and test_schemathesis holds the server's answers against it.

`python tests/server/openapi_document.py` writes it into the server's package, after a change of the API.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from pilotfish.operate.explaining.cohorts import CohortStatistics
from pilotfish.server import routes
from pilotfish.server.bodies import requests
from pilotfish.server.http_errors import OVERLOADED
from pilotfish.server.messages.message_body import CountTokensRequest, MessagesRequest
from pilotfish.server.observe.fleet_metrics import DraftPools
from pilotfish.server.responses.response_body import ResponsesRequest
from pilotfish.server.routes import VERSION, Api
from pilotfish.server.traffic.rollout import RolloutState

FILE = Path(routes.__file__).with_name("openapi.json")
#: Answers that the server has types of.
TYPED = (DraftPools, RolloutState, CohortStatistics)
SCHEMAS = "#/components/schemas/"


@dataclass(frozen=True)
class Operation:
    """A route of the API, and the names of its answers' schemas."""

    path: str
    answer: str
    body: type[Struct] | None = None
    streams: bool = False
    unavailable: str = "ErrorBody"  # status 503
    error: str = "ErrorBody"  # any other
    conflicts: bool = False  # with what was said before
    posts: bool = False  # without a body

    @property
    def tag(self) -> str:
        return "generation" if self.streams else "text" if self.body else "server"

    @property
    def method(self) -> str:
        return "post" if self.body or self.posts else "get"

    @property
    def failures(self) -> tuple[int, ...]:
        if self.body is not None:
            unavailable = 503 if self.error == "ErrorBody" else OVERLOADED
            return (400, 401, 404, 408, *((409,) if self.conflicts else ()), 413, 415, 429, 500, unavailable, 504)
        if self.path.startswith("/v1/rollout"):
            return (400, 401, 403) if self.posts else (401, 403)
        if self.path.startswith("/v1/"):
            return 401, 404, 429, 503
        return () if self.unavailable == "ErrorBody" else (503,)


#: By the names of their handlers.
OPERATIONS = {
    "completions": Operation("/v1/completions", "TextCompletion", requests.CompletionRequest, streams=True),
    "chat_completions": Operation("/v1/chat/completions", "ChatCompletion", requests.ChatRequest, streams=True),
    "messages": Operation("/v1/messages", "MessageAnswer", MessagesRequest, streams=True, error="MessageError"),
    "count_tokens": Operation("/v1/messages/count_tokens", "TokenCount", CountTokensRequest, error="MessageError"),
    "responses": Operation("/v1/responses", "ResponseObject", ResponsesRequest, streams=True),
    "response_tokens": Operation("/v1/responses/input_tokens", "ResponseTokenCount", ResponsesRequest),
    "tokenize": Operation("/tokenize", "Tokenized", requests.TokenizeRequest),
    "detokenize": Operation("/detokenize", "Detokenized", requests.DetokenizeRequest),
    "feedback": Operation("/v1/feedback", "FeedbackTold", requests.FeedbackRequest, conflicts=True),
    "feedback_table": Operation("/v1/feedback", "FeedbackTable"),
    "drafts": Operation("/v1/drafts", "DraftPools"),
    "rollout": Operation("/v1/rollout", "RolloutState"),
    "rollout_reload": Operation("/v1/rollout/reload", "RolloutState", posts=True),
    "rollout_statistics": Operation("/v1/rollout/statistics", "CohortStatistics"),
    "models": Operation("/v1/models", "ModelList"),
    "model": Operation("/v1/models/{name}", "Model"),
    "health": Operation("/health", "Live"),
    "ready": Operation("/ready", "Ready", unavailable="Ready"),
    "version": Operation("/version", "Version"),
}
#: Schemas of single events of streams, which OpenAPI has no place for.
EVENTS = ("ChatChunk", "MessageEvent", "ResponseEvent")


def openapi(version: str) -> dict[str, Any]:
    """The OpenAPI document."""
    kinds = [*TYPED, *(known.body for known in OPERATIONS.values() if known.body is not None)]
    made = msgspec.json.schema_components(kinds, ref_template=f"{SCHEMAS}{{name}}")[1]
    schemas = {**json.loads(FILE.read_text())["components"]["schemas"], **made}
    paths: dict[str, Any] = {}
    for name, known in OPERATIONS.items():
        paths.setdefault(known.path, {})[known.method] = _described(name, known)
    used = set[str]()
    new = references(paths) | {SCHEMAS + name for name in EVENTS}
    while new:
        used |= new
        new = set().union(*(references(schemas[ref.removeprefix(SCHEMAS)]) for ref in new)) - used
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Pilotfish",
            "description": "OpenAI's and Anthropic's APIs over lossless speculative decoding.",
            "version": version,
        },
        "paths": paths,
        "components": {"schemas": {name: one for name, one in schemas.items() if SCHEMAS + name in used}},
    }


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if "$ref" in value else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def _described(name: str, known: Operation) -> dict[str, Any]:
    def content(schema: str) -> dict[str, Any]:
        return {"application/json": {"schema": {"$ref": SCHEMAS + schema}}}

    stream = {"text/event-stream": {"schema": {"type": "string"}}} if known.streams else {}
    answers: dict[str, Any] = {"200": {"description": "Success", "content": content(known.answer) | stream}}
    for status in known.failures:
        schema = known.unavailable if status == 503 else known.error
        answers[str(status)] = {"description": f"Status {status}", "content": content(schema)}
    described: dict[str, Any] = {
        "tags": [known.tag],
        "summary": name.replace("_", " ").title(),
        "description": getattr(Api, name).__doc__,
        "operationId": name,
        "responses": answers,
    }
    if "{name" in known.path:
        parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "title": "Name"}}
        described["parameters"] = [parameter]
    if known.body is not None:
        described["requestBody"] = {"required": True, "content": content(known.body.__name__)}
    return described


if __name__ == "__main__":
    FILE.write_text(json.dumps(openapi(VERSION), indent=1, ensure_ascii=False) + "\n")
