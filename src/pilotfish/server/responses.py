"""Bodies of answers in OpenAI's and vLLM's shapes, of which the OpenAPI document is made, and errors as answers."""

from __future__ import annotations

import logging
import math
import reprlib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from pilotfish.errors import EngineError, InputError, ParameterError, TargetUnavailable
from pilotfish.printable import one_line

logger = logging.getLogger(__name__)

MAX_MESSAGE = 400
MAX_RETRY = 60  # seconds: an estimate further ahead is none
_repr = reprlib.Repr()  # neither deep nor long, whatever the value
_repr.maxstring = _repr.maxother = _repr.maxlong = 60
_repr.maxlevel = 2

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


class Metrics(Struct, frozen=True):
    speculative_decoding: SpeculativeDecoding | None  # None: no speculation, or several outputs
    accepted_by_origin: dict[str, int] | UnsetType = UNSET  # accepted nodes by who guessed them


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


# -- errors


class HttpError(Exception):
    """Ends a request with a status and one line."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(shortened(message))
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> ErrorBody:
        return ErrorBody(ErrorDetail(str(self), self.kind, self.param, self.code))


class ClientGone(Exception):  # noqa: N818  # not an error: an end
    """Nobody waits for the answer."""


def shortened(message: str) -> str:
    """A message as one line; of a long one its two ends, which name the field and what is allowed."""
    line = one_line(message)
    return line if len(line) <= MAX_MESSAGE else f"{line[: MAX_MESSAGE // 2]} … {line[-MAX_MESSAGE // 2 :]}"


def short(value: object) -> str:
    """A value, shortened for a message."""
    return _repr.repr(value)


def bad(field: str, value: object, allowed: str) -> HttpError:
    """400 for a value that is not allowed."""
    return bad_request(field, f"{short(value)} is not allowed; expected {allowed}")


def bad_request(field: str, problem: str, code: str | None = None) -> HttpError:
    """400 whose message begins with the field to blame."""
    return HttpError(400, f"{field}: {problem}", param=field, code=code)


def retry_after(seconds: float) -> dict[str, str]:
    """The header Retry-After of an estimate: whole seconds, 1 to MAX_RETRY."""
    return {"retry-after": str(max(1, math.ceil(min(seconds, MAX_RETRY))))}


def http_error(error: BaseException) -> HttpError:
    """The answer to a request that ended with `error`. An unforeseen one is logged."""
    match error:
        case HttpError():
            return error
        case InputError():
            return HttpError(400, str(error), param=error.field if isinstance(error, ParameterError) else None)
        case TargetUnavailable():
            return HttpError(503, str(error), "service_unavailable", headers=retry_after(error.retry_after))
        case EngineError():
            logger.error("%s", error)
            return HttpError(500, str(error), "internal_error")
    logger.error("a request ended with an error that nobody foresaw", exc_info=error)
    return HttpError(500, "internal error; the server's log says more", "internal_error")
