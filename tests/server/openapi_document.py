"""The OpenAPI document, made of the types of bodies: those of requests are the server's own, those of answers are here.

`python tests/server/openapi_document.py` writes it into the server's package, after a change of the API.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from openapi_responses import ResponseEvent, ResponseObject, ResponseTokenCount

from pilotfish.operate.explaining.cohorts import CohortStatistics
from pilotfish.server import routes
from pilotfish.server.bodies.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FeedbackRequest,
    TokenizeRequest,
)
from pilotfish.server.http_errors import OVERLOADED
from pilotfish.server.messages.message_body import CountTokensRequest, MessagesRequest
from pilotfish.server.observe.draft_pools import DraftPools
from pilotfish.server.observe.request_records import ServedMode
from pilotfish.server.responses.response_body import ResponsesRequest
from pilotfish.server.routes import VERSION, Api
from pilotfish.server.traffic.rollout import RolloutState

FILE = Path(routes.__file__).with_name("openapi.json")
Seed = int | str | UnsetType  # text where the request's was


class ErrorDetail(Struct, frozen=True):
    message: str  # one line: field, value, what is allowed
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, frozen=True):
    error: ErrorDetail


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class SpeculativeDecoding(Struct, frozen=True):
    """How an output's speculation went, in vLLM's shape. Only steps that verified nodes count."""

    mean_acceptance_length: float  # tokens of a step, the target's own one included
    draft_acceptance_rate: float
    acceptance_histogram: dict[int, int]  # nodes accepted: steps
    acceptance_histogram_by_draft_length: dict[int, dict[int, int]]  # nodes verified: nodes accepted: steps
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int  # most nodes of a step
    per_step_accepted: list[int] | UnsetType = UNSET
    per_step_drafted: list[int] | UnsetType = UNSET


class HandOverFigures(Struct, frozen=True):
    """A hand-over of KV from a prefill worker. Times are seconds; of parts that are not known, 0."""

    pool: str
    transport: str  # how its cohorts were read
    outcome: str  # "whole", or why it ended early
    began: float  # a moment of the target's clock
    seconds: float  # from its beginning to its end
    queued: float  # that it waited at the pool
    computing: float  # from its first row there to its last
    exposed: float  # on top of these
    arriving: float  # from its beginning to its first cohort
    transfer: float  # reading, checking and writing its cohorts
    hidden: float  # of the transfer, while the pool computed
    size: int  # bytes
    tokens: int
    cached: int  # tokens of the sequence whose KV the pool had already


class Metrics(Struct, frozen=True):
    speculative_decoding: SpeculativeDecoding | None  # None: no speculation, or several outputs
    cached_by_tier: dict[Literal["device", "host", "disk"], int]  # of usage's cached_tokens; those with any
    accepted_by_origin: dict[str, int] | UnsetType = UNSET  # accepted nodes by who guessed them
    handed_over: int | UnsetType = UNSET  # tokens whose KV prefill workers computed
    handovers: list[HandOverFigures] | UnsetType = UNSET


class PromptLogprob(Struct, frozen=True):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class TextLogprobs(Struct, frozen=True):
    """Log-probabilities of a completion, by token. The first token of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob, frozen=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class TextChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None  # the stop string or token that ended it
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    seed: Seed = UNSET  # of each output where there are several


class FunctionCall(Struct, frozen=True):
    name: str
    arguments: str  # JSON


class ChatCall(Struct, frozen=True):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Struct, frozen=True):
    role: Literal["assistant"]
    content: str | None  # null: calls, or only reasoning
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # the same
    tool_calls: list[ChatCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    seed: Seed = UNSET


class FunctionDelta(Struct, frozen=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CallDelta(Struct, frozen=True):
    """The beginning of a call, or a piece of its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class ChatDelta(Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    seed: Seed = UNSET


class BaseAnswer(Struct, frozen=True, kw_only=True):
    """Fields of all answers and of each event of a stream."""

    id: str
    object: str
    created: int  # Unix time, seconds
    model: str
    system_fingerprint: str
    choices: list[Any]
    seed: Seed = UNSET  # of the first output
    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET
    pilotfish: Any = UNSET


class BaseChatAnswer(BaseAnswer, frozen=True, kw_only=True):
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextCompletion(BaseAnswer, frozen=True, kw_only=True):
    """The answer of /v1/completions, and each event of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]


class ChatCompletion(BaseChatAnswer, frozen=True, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(BaseChatAnswer, frozen=True, kw_only=True):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class AnswerText(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class AnswerThinking(Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str  # "": nobody verifies it


class AnswerToolUse(Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class ThinkingTokens(Struct, frozen=True):
    thinking_tokens: int  # of the output's, with the mark that begins them


class MessageUsage(Struct, frozen=True):
    input_tokens: int  # without those below
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessageAnswer(Struct, frozen=True, kw_only=True):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None  # null where a stream begins
    stop_sequence: str | None
    usage: MessageUsage
    metrics: Metrics | UnsetType = UNSET


class MessageErrorDetail(Struct, frozen=True):
    type: str
    message: str  # one line: field, value, what is allowed


class MessageError(Struct, frozen=True):
    """An error of Anthropic's API."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str


class EventDelta(Struct, frozen=True):
    """More of a block; or, without a type, why the message ended."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(Struct, frozen=True, kw_only=True):
    """An event of /v1/messages, which has the name of its type."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    message: MessageAnswer | UnsetType = UNSET
    index: int | UnsetType = UNSET  # of the block
    content_block: AnswerBlock | UnsetType = UNSET
    delta: EventDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET
    error: MessageErrorDetail | UnsetType = UNSET
    request_id: str | UnsetType = UNSET


class TokenCount(Struct, frozen=True):
    input_tokens: int


class Model(Struct, frozen=True):
    id: str
    created: int
    max_model_len: int  # tokens of prompt and output
    chat: bool  # whether its chat template marks turns
    object: Literal["model"] = "model"
    owned_by: Literal["pilotfish"] = "pilotfish"


class ModelList(Struct, frozen=True):
    data: list[Model]
    object: Literal["list"] = "list"


class Tokenized(Struct, frozen=True):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Detokenized(Struct, frozen=True):
    prompt: str


class FeedbackTold(Struct, frozen=True):
    request_id: str
    category: str  # of the table: "other" beyond its limit, "none" without any
    mode: ServedMode  # of the request's speculation
    success: bool
    score: float
    object: Literal["feedback"] = "feedback"


class FeedbackSums(Struct, frozen=True):
    """Requests of a category and mode that feedback came for."""

    category: str
    mode: ServedMode
    requests: int
    successes: int
    success_rate: float
    mean_score: float
    tokens_per_verify_step: float | None


class FeedbackTable(Struct, frozen=True):
    data: list[FeedbackSums]
    object: Literal["list"] = "list"


class Live(Struct, frozen=True):
    status: Literal["ok"] = "ok"


class ToldReplica(Struct, frozen=True, omit_defaults=True):
    """A target. What it serves and how much it has is there once it has told so."""

    name: str
    ready: bool
    reason: str  # why not; "" when it is
    requests: int  # of this server, that it has
    running: int = 0  # sequences, of all servers
    waiting: int = 0  # likewise
    free_slots: int = 0
    version: str = ""
    fingerprint: str = ""  # targets whose are equal go on with each other's requests


class Ready(Struct, frozen=True, omit_defaults=True):
    ready: bool
    reason: str  # why not; "" when it is
    restarts: int  # of the targets
    replicas: list[ToldReplica] = []  # where there are several


class Version(Struct, frozen=True):
    version: str


@dataclass(frozen=True)
class Operation:
    """A route of the API, and the types of its bodies."""

    path: str
    answer: type[Struct]
    body: type[Struct] | None = None
    event: type[Struct] | None = None  # of a stream
    unavailable: type[Struct] = ErrorBody  # status 503
    error: type[Struct] = ErrorBody  # any other
    conflicts: bool = False  # with what was said before
    posts: bool = False  # without a body

    @property
    def tag(self) -> str:
        return "generation" if self.event else "text" if self.body else "server"

    @property
    def method(self) -> str:
        return "post" if self.body or self.posts else "get"

    @property
    def failures(self) -> tuple[int, ...]:
        if self.body is not None:
            unavailable = 503 if self.error is ErrorBody else OVERLOADED
            return (400, 401, 404, 408, *((409,) if self.conflicts else ()), 413, 415, 429, 500, unavailable, 504)
        if self.path.startswith("/v1/rollout"):
            return (400, 401, 403) if self.posts else (401, 403)
        if self.path.startswith("/v1/"):
            return 401, 404, 429, 503
        return () if self.unavailable is ErrorBody else (503,)


#: By the names of their handlers.
OPERATIONS = {
    "completions": Operation("/v1/completions", TextCompletion, CompletionRequest, TextCompletion),
    "chat_completions": Operation("/v1/chat/completions", ChatCompletion, ChatRequest, ChatChunk),
    "messages": Operation("/v1/messages", MessageAnswer, MessagesRequest, MessageEvent, error=MessageError),
    "count_tokens": Operation("/v1/messages/count_tokens", TokenCount, CountTokensRequest, error=MessageError),
    "responses": Operation("/v1/responses", ResponseObject, ResponsesRequest, ResponseEvent),
    "response_tokens": Operation("/v1/responses/input_tokens", ResponseTokenCount, ResponsesRequest),
    "tokenize": Operation("/tokenize", Tokenized, TokenizeRequest),
    "detokenize": Operation("/detokenize", Detokenized, DetokenizeRequest),
    "feedback": Operation("/v1/feedback", FeedbackTold, FeedbackRequest, conflicts=True),
    "feedback_table": Operation("/v1/feedback", FeedbackTable),
    "drafts": Operation("/v1/drafts", DraftPools),
    "rollout": Operation("/v1/rollout", RolloutState),
    "rollout_reload": Operation("/v1/rollout/reload", RolloutState, posts=True),
    "rollout_statistics": Operation("/v1/rollout/statistics", CohortStatistics),
    "models": Operation("/v1/models", ModelList),
    "model": Operation("/v1/models/{name}", Model),
    "health": Operation("/health", Live),
    "ready": Operation("/ready", Ready, unavailable=Ready),
    "version": Operation("/version", Version),
}


def openapi(version: str) -> dict[str, Any]:
    """The OpenAPI document."""
    kinds: list[type[Struct]] = [ErrorBody]
    paths: dict[str, Any] = {}
    for name, known in OPERATIONS.items():
        used = known.answer, known.body, known.event, known.unavailable, known.error
        kinds += [kind for kind in used if kind is not None]
        paths.setdefault(known.path, {})[known.method] = _described(name, known)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Pilotfish",
            "description": "OpenAI's and Anthropic's APIs over lossless speculative decoding.",
            "version": version,
        },
        "paths": paths,
        "components": {"schemas": msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")[1]},
    }


def _described(name: str, known: Operation) -> dict[str, Any]:
    def content(kind: type) -> dict[str, Any]:
        return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}

    stream = {} if known.event is None else {"text/event-stream": {"schema": {"type": "string"}}}
    answers: dict[str, Any] = {"200": {"description": "Success", "content": content(known.answer) | stream}}
    for status in known.failures:
        kind = known.unavailable if status == 503 else known.error
        answers[str(status)] = {"description": f"Status {status}", "content": content(kind)}
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
        described["requestBody"] = {"required": True, "content": content(known.body)}
    return described


if __name__ == "__main__":
    FILE.write_text(json.dumps(openapi(VERSION), indent=1, ensure_ascii=False) + "\n")
