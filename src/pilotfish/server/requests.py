"""The bodies that clients send, and how they are read and checked. A field that is not here is refused, and so is one
that has an effect in OpenAI's API but none here."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta, Struct
from starlette.requests import ClientDisconnect, Request

from pilotfish.config import MetricsLevel, Mode, ServerConfig
from pilotfish.core.noise import SEED_LIMIT
from pilotfish.core.sampling_params import MAX_LOGPROBS, SamplingParams
from pilotfish.server.responses import ClientGone, HttpError, bad, bad_request, short

#: Fields of OpenAI's and vLLM's APIs that are not supported, by the values besides null that change nothing.
_BY_NEUTRAL_VALUES: list[tuple[tuple[Any, ...], str]] = [
    ((), "audio prediction web_search_options reasoning_effort structured_outputs structural_tag guided_json"),
    ((), "guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern"),
    ((), "logprob_token_ids repetition_detection prompt_embeds"),
    ((), "chat_template"),  # a program of the client's
    (([],), "tools functions documents logits_processors"),
    (({},), "mm_processor_kwargs media_io_kwargs kv_transfer_params ec_transfer_params vllm_xargs"),
    ((False,), "store use_beam_search early_stopping watermarking return_token_offsets return_prompt_text"),
    ((True,), "include_reasoning detokenize"),
    ((0,), "priority routed_experts_prompt_start"),
    ((1,), "beam_width stream_interval length_penalty"),
    ((-1,), "thinking_token_budget"),
    (("",), "suffix"),
    (("none",), "tool_choice function_call"),
    (("medium",), "verbosity"),
    (("auto", "default"), "service_tier"),
    ((["text"],), "modalities"),
    (({"type": "text"},), "response_format"),
]
UNSUPPORTED = {name: (None, *values) for values, names in _BY_NEUTRAL_VALUES for name in names.split()}
#: Fields for the client's bookkeeping; they change no output, whatever they hold.
HARMLESS = {
    *("user", "safety_identifier", "session_id", "prompt_cache_key", "prompt_cache_retention"),
    *("parallel_tool_calls", "return_mm_kwargs"),
}
SEED = f"an integer 0 to {SEED_LIMIT - 1}, or its digits as text"
Nothing = Annotated[list[Any], Meta(max_length=0, description="an empty list or null")]
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS, description=f"an integer 0 to {MAX_LOGPROBS}")]
RequestId = Annotated[str, Meta(pattern=r"^[ -~]{1,128}\Z", description="1 to 128 printable ASCII characters")]
#: Sampling parameters that no body has, and those whose JSON is not SamplingParams' own type. A description is what
#: errors say is allowed.
NOT_IN_BODIES = frozenset({"bad_token_ids", "logprobs"})
AS_JSON: dict[str, Any] = {
    "seed": Annotated[int | str, Meta(description=SEED)],
    "stop": str | list[str],
    "logit_bias": Annotated[dict[str, float], Meta(description="an object of token ids and numbers")],
}
SAMPLING = {name: hint for name, hint in get_type_hints(SamplingParams).items() if name not in NOT_IN_BODIES}

if TYPE_CHECKING:

    class DerivedFields(Struct):
        def __getattr__(self, name: str) -> Any: ...
else:
    _sampling = [(name, AS_JSON.get(name, hint) | None, None) for name, hint in SAMPLING.items()]
    _harmless = [(name, Any, None) for name in HARMLESS]
    DerivedFields = msgspec.defstruct("DerivedFields", [*_sampling, *_harmless], kw_only=True)


class SpeculationOptions(Struct, forbid_unknown_fields=True):
    """How to speculate for a request, within the server's options. Never changes the output."""

    mode: Mode | None = None  # off, or the server's own
    max_nodes: int | None = None  # of a tree
    metrics: MetricsLevel | None = None
    detail: bool | None = None  # each event of a stream tells the steps behind it


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Literal[False], Meta(description="false")] | None = None


class GenerationRequest(DerivedFields, forbid_unknown_fields=True, kw_only=True):
    """Fields of completions and of chats. None: as if it was not there."""

    model: str | None = None
    best_of: int | None = None  # n
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    spaces_between_special_tokens: bool | None = None  # there are none, whatever it says
    echo: bool | None = None  # of a chat: the last message, if it is the assistant's
    add_special_tokens: bool | None = None  # those that the tokenizer puts around a text; a chat template has its own
    truncate_prompt_tokens: int | None = None  # that are kept; -1: as many as fit
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities
    cache_salt: str | None = None
    timeout: Annotated[float, Meta(gt=0, le=1e9, description="a number of seconds, more than 0")] | None = None
    request_id: RequestId | None = None  # in the answer's id
    speculation: SpeculationOptions | None = None
    metadata: Any = None  # of it, `tag` labels metrics

    prompt_field: ClassVar[str]
    id_prefix: ClassVar[str]
    default_tokens: ClassVar[int | None]  # of an output

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that limits an output's tokens, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to report of each token of the output; None: no log-probabilities at all."""
        raise NotImplementedError

    @property
    def only_echo(self) -> bool:
        """Whether only the prompt is wanted."""
        return False

    @property
    def tag(self) -> Any:
        """The client's name for the request's purpose."""
        return self.metadata.get("tag") if isinstance(self.metadata, dict) else None

    @property
    def detail(self) -> bool:
        return self.speculation is not None and bool(self.speculation.detail)


class CompletionRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[str | int | list[int]]  # a text, tokens, or a list of either
    logprobs: int | None = None

    prompt_field: ClassVar = "prompt"
    id_prefix: ClassVar = "cmpl"
    default_tokens: ClassVar = 16  # OpenAI's

    @property
    def texts(self) -> list[str]:
        """The prompts that are texts."""
        return [part for part in ([self.prompt] if isinstance(self.prompt, str) else self.prompt) if type(part) is str]

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def only_echo(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0


class TextPart(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text"]
    text: str


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """A turn. The other fields of an answer's message are allowed as long as they are empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None  # needed; but what stands in its place is to blame first
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Nothing | None = None
    annotations: Nothing | None = None
    reasoning: None = None
    reasoning_content: None = None

    @property
    def text(self) -> str:
        """All parts of it."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content or ())


class ChatRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    add_generation_prompt: bool | None = None  # true unless continue_final_message
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    prompt_field: ClassVar = "messages"
    id_prefix: ClassVar = "chatcmpl"
    default_tokens: ClassVar = None

    @property
    def limit(self) -> tuple[str, int | None]:
        newer = self.max_completion_tokens
        if newer is None:
            return "max_tokens", self.max_tokens
        if self.max_tokens not in (None, newer):
            raise bad("max_tokens", self.max_tokens, f"max_completion_tokens, {newer}")
        return "max_completion_tokens", newer

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise bad("logprobs", self.logprobs, "true with top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def echoed(self) -> str:
        """The beginning of the answer: the last message, if the assistant goes on with it."""
        return self.messages[-1].text if self.echo and self.messages[-1].role == "assistant" else ""


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """A prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None  # true for a prompt; a chat template has its own
    add_generation_prompt: bool | None = None  # this and the next two are of messages
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


# -- from bytes to a body

Body = TypeVar("Body", CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
_JSON_TYPE = re.compile(r"application/([\w.-]+\+)?json\s*(;.*)?", re.IGNORECASE)
#: Types in JSON's words.
_WORDS: dict[Any, str] = {str: "text", int: "an integer", float: "a number", bool: "true or false", NoneType: "null"}


async def read_body(request: Request, kind: type[Body], config: ServerConfig) -> Body:
    """HttpError 408 for a body that takes too long, 413 for one that is too large, 415 for another type than JSON, else
    400."""
    content_type = request.headers.get("content-type")
    if content_type and not _JSON_TYPE.fullmatch(content_type.strip()):
        raise HttpError(415, f"content-type: {short(content_type)} is not allowed; expected application/json")
    try:
        async with asyncio.timeout(config.read_timeout):
            body = await _bytes(request, config.max_body_bytes)
    except TimeoutError as error:
        message = f"body: it was not complete after {config.read_timeout:g} s"
        raise HttpError(408, message, "timeout", code="timeout", headers={"connection": "close"}) from error
    return parse(body, kind)


async def _bytes(request: Request, limit: int) -> bytes:
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and (len(stated) > 18 or int(stated) > limit):
        raise _too_large(limit)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
    except ClientDisconnect as error:
        raise ClientGone from error
    return b"".join(parts)


def _too_large(limit: int) -> HttpError:
    """The connection stays open: the HTTP server drops what still comes, and a client that sends first reads this."""
    return HttpError(413, f"body: it is too large; expected at most {limit} bytes", code="request_too_large")


def parse(body: bytes, kind: type[Body]) -> Body:
    """HttpError 400 names the first bad field."""
    fields = _supported(_object(body), kind)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _blame("", fields, kind) from error


def _object(body: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(body)
    except RecursionError as error:
        raise HttpError(400, "body: it is nested too deep") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        problem = f"it is not JSON in UTF-8, without NaN, infinity and lone surrogates: {error}"
        raise HttpError(400, f"body: {problem}") from error
    if not isinstance(fields, dict):
        raise bad("body", fields, "an object")
    return fields


def _supported(fields: dict[str, Any], kind: type[Struct]) -> dict[str, Any]:
    """The fields that `kind` has and that are not null; HttpError for any other that would change something."""
    names = set(kind.__struct_fields__)
    for name, value in fields.items():
        if name in names or (name in UNSUPPORTED and value in UNSUPPORTED[name]):
            continue
        if name in UNSUPPORTED:
            raise bad_request(name, f"{short(value)} is not supported; leave it out")
        raise bad_request(name, "there is no such parameter")
    return {
        name: value for name, value in fields.items() if name in names and name not in HARMLESS and value is not None
    }


def _blame(path: str, value: Any, kind: Any) -> HttpError:
    """The error for the innermost part of `value` that is not allowed by its type in `kind`."""
    for inner_path, inner_value, inner_kind in _parts(path, value, kind):
        if inner_value is msgspec.UNSET:
            return bad_request(inner_path, "it is missing")
        if inner_kind is None:
            return bad_request(inner_path, "there is no such parameter")
        if not _fits(inner_value, inner_kind):
            return _blame(inner_path, inner_value, inner_kind)
    return bad(path or "body", value, _allowed(kind))


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _parts(path: str, value: Any, kind: Any) -> Iterator[tuple[str, Any, Any]]:
    """Path, value and type of the parts of an object or a list. UNSET: a value that is missing; None: the type of an
    unknown name."""
    for option in _options(kind):
        if isinstance(value, list) and get_origin(option) in (list, Sequence):
            i = _first_misfit(value, option)
            yield f"{path}[{i}]", value[i], get_args(option)[0]
        elif isinstance(value, dict) and isinstance(option, type) and issubclass(option, Struct):
            prefix, known = f"{path}." if path else "", {field.name: field for field in msgspec.structs.fields(option)}
            for name, item in value.items():
                yield prefix + name, item, known[name].type if name in known else None
            missing = (name for name, field in known.items() if field.required and name not in value)
            yield from ((prefix + name, msgspec.UNSET, known[name].type) for name in missing)


def _first_misfit(items: list[Any], kind: Any) -> int:
    """The index of the first item that is not allowed in a list of type `kind`, by bisection: a body may hold
    millions."""
    low, high = 0, len(items)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(items[low:middle], kind) else (low, middle)
    return low


def _options(kind: Any) -> tuple[Any, ...]:
    """The types of a union, without their constraints."""
    if get_origin(kind) is Annotated:
        return _options(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return tuple(option for each in get_args(kind) for option in _options(each))
    return (kind,)


def _allowed(kind: Any) -> str:
    """The type in words: its description, the values of a literal, or JSON's types."""
    origin = get_origin(kind) or kind
    if origin is Annotated:
        return str(get_args(kind)[1].description)
    if origin in (Union, UnionType):
        return " or ".join(_allowed(each) for each in get_args(kind) if each is not NoneType)
    if origin is Literal:
        *first, last = get_args(kind)
        return f"{', '.join(first)} or {last}" if first else str(last)
    return "a list" if origin in (list, Sequence) else _WORDS.get(origin, "an object")
