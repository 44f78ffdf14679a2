"""Bodies that the server answers with, in OpenAI's and vLLM's shapes. The OpenAPI document is made of these types."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

encode = msgspec.json.encode
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


class SpeculationMetrics(Struct, frozen=True):
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


class Metrics(Struct, frozen=True):
    speculative_decoding: SpeculationMetrics | None  # None: no speculation, or several outputs
    accepted_by_origin: dict[str, int] | UnsetType = UNSET  # accepted nodes by who guessed them


class PromptLogprob(Struct, frozen=True):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class TextLogprobs(Struct, frozen=True):
    """Of a completion, by token. The first token of a prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
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


class ChatMessage(Struct, frozen=True):
    role: Literal["assistant"]
    content: str


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    seed: Seed = UNSET


class ChatDelta(Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    seed: Seed = UNSET


class TextCompletion(Struct, frozen=True, kw_only=True):
    """The answer of /v1/completions, and each event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int  # Unix time, seconds
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    seed: Seed = UNSET  # of the first output
    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET
    pilotfish: Any = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    seed: Seed = UNSET
    usage: Usage
    metrics: Metrics | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    """An event of the stream of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    seed: Seed = UNSET
    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET
    pilotfish: Any = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Model(Struct, frozen=True):
    id: str
    created: int
    max_model_len: int  # tokens of prompt and output
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


class Live(Struct, frozen=True):
    status: Literal["ok"] = "ok"


class Ready(Struct, frozen=True):
    ready: bool
    reason: str  # why not; "" when it is
    restarts: int  # of the target


class Version(Struct, frozen=True):
    version: str
