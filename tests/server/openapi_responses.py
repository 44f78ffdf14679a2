"""The types of /v1/responses' answers, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from pilotfish.server.bodies.requests import AnyText, JsonObject
from pilotfish.server.responses.response_body import FunctionChoice, ResponseTool, SchemaJson, ToolSubsetChoice

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseTopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ResponseLogprob(ResponseTopLogprob, frozen=True):
    top_logprobs: list[ResponseTopLogprob]


class SaidText(Struct, frozen=True, tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[ResponseLogprob]


class ThoughtText(Struct, frozen=True, tag="reasoning_text"):
    text: str


class MessageOutput(Struct, frozen=True, tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[SaidText]


class ReasoningOutput(Struct, frozen=True, tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[Any]
    content: list[ThoughtText]


class FunctionCallItem(Struct, frozen=True, tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str  # JSON


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class ResponseError(Struct, frozen=True):
    code: str
    message: str
    param: str | None


class ResponseReasoning(Struct, frozen=True):
    effort: str | None
    summary: None


class ResponseText(Struct, frozen=True):
    format: AnyText | JsonObject | SchemaJson
    verbosity: str


class ResponseObject(Struct, frozen=True):
    """The answer of /v1/responses; `response` of the first two events of its stream and of the last one."""

    id: str
    created_at: int  # Unix time, seconds
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[MessageOutput | ReasoningOutput | FunctionCallItem]
    usage: ResponseUsage | None
    temperature: float
    top_p: float
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    text: ResponseText
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | ToolSubsetChoice
    tools: list[ResponseTool]
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
    user: str | None
    background: Literal[False]
    previous_response_id: None
    service_tier: Literal["default"]
    store: Literal[False]
    object: Literal["response"] = "response"
    seed: int | str | UnsetType = UNSET
    metrics: Any = UNSET


class ResponseTokenCount(Struct, frozen=True):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ResponseEvent(Struct, frozen=True):
    """An event of a stream. Its other fields depend on its type, which its line `event` says too."""

    type: str
    sequence_number: int
