import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast, get_type_hints

import msgspec
from msgspec import Meta, Struct

from pilotfish.config.fields import Mode
from pilotfish.config.server import MetricsLevel, ToolTemplate
from pilotfish.conversation import ExactStruct, FunctionTool, Message, Name, ToolChoice
from pilotfish.core.sampling.noise import SEED_LIMIT
from pilotfish.core.sampling.sampling_params import MAX_LOGPROBS, SamplingParams
from pilotfish.server.bodies.ignored import Ignored
from pilotfish.server.http_errors import FieldNames, bad
from pilotfish.server.observe.request_records import OutputKind

_FIELDS = tomllib.loads(Path(__file__).with_name("fields.toml").read_text("utf-8"))
HARMLESS: list[str] = _FIELDS["harmless"]  # fields that may hold anything
#: Fields that are not supported, with their values that change nothing; of the second kind no value changes an answer.
UNSUPPORTED = {name: (None, *values) for name, values in _FIELDS["unsupported"].items()}
HINTS = {name: (None, *values) for name, values in _FIELDS["hints"].items()}
#: Unsupported fields that parts of messages may not have either.
WITHIN_MESSAGES = frozenset(_FIELDS["within_messages"])
#: Fields of any API that hold parts of a prompt.
WITHIN_PROMPTS = frozenset(_FIELDS["within_prompts"])
INSTEAD: dict[str, str] = _FIELDS["instead"]  # errors' words for some of them
#: For errors about a chat that another body became, by that body's API.
CHAT_NAMES: dict[str, FieldNames] = _FIELDS["chat_names"]
SEED = f"an integer 0 to {SEED_LIMIT - 1}, or its digits as text"
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS, description=f"an integer 0 to {MAX_LOGPROBS}")]
RequestId = Annotated[str, Meta(pattern=r"^[ -~]{1,128}\Z", description="1 to 128 printable ASCII characters")]
AnswerId = Annotated[str, Meta(pattern=r"^[ -~]{1,160}\Z", description="1 to 160 printable ASCII characters")]
Seconds = Annotated[float, Meta(gt=0, le=1e9, description="a number of seconds, more than 0")]
#: Sampling parameters that no body has, and those whose JSON has a type of its own, with what errors say is allowed.
NOT_IN_BODIES = frozenset({"bad_token_ids", "logprobs", "structured_outputs"})
AS_JSON: dict[str, Any] = {
    "seed": Annotated[int | str, Meta(description=SEED)],
    "stop": str | list[str],
    "logit_bias": Annotated[dict[str, float], Meta(description="an object of token ids and numbers")],
}
SAMPLING = {name: hint for name, hint in get_type_hints(SamplingParams).items() if name not in NOT_IN_BODIES}
#: Those that responses have by other names, or lack: a response is one output.
NOT_IN_RESPONSES = frozenset({"max_tokens", "n", "prompt_logprobs"})
#: With their types in bodies, and what stands for an absent one.
SAMPLING_FIELDS = [(name, AS_JSON.get(name, hint) | None, None) for name, hint in SAMPLING.items()]


class RequestBody(Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None

    chat_names: ClassVar[FieldNames] = ()  # of a body that becomes a chat

    @classmethod
    def normal(cls, fields: dict[str, Any], ignored: Ignored) -> dict[str, Any]:  # noqa: ARG003
        return fields


if TYPE_CHECKING:

    class SamplingFields(RequestBody):
        def __getattr__(self, name: str) -> Any: ...
else:
    _fields = [field for field in SAMPLING_FIELDS if field[0] not in NOT_IN_RESPONSES]
    SamplingFields = msgspec.defstruct("SamplingFields", _fields, bases=(RequestBody,), kw_only=True)


class SharedFields(SamplingFields, kw_only=True):
    """Fields of completions, chats and responses."""

    stream: bool | None = None
    cache_salt: str | None = None
    timeout: Seconds | None = None
    request_id: RequestId | None = None  # in the answer's id
    speculation: "SpeculationOptions | None" = None
    structured_outputs: "StructuredOutputs | None" = None


if TYPE_CHECKING:
    DerivedFields = SharedFields
else:
    _fields = [field for field in SAMPLING_FIELDS if field[0] in NOT_IN_RESPONSES]
    _fields += [(name, Any, None) for name in HARMLESS]
    DerivedFields = msgspec.defstruct("DerivedFields", _fields, bases=(SharedFields,), kw_only=True)


class SpeculationOptions(ExactStruct):
    """How to speculate for a request, within the server's options. Never changes the output."""

    mode: Mode | None = None  # off, or the server's own
    max_nodes: int | None = None  # of a tree
    metrics: MetricsLevel | None = None
    detail: bool | None = None  # each event of a stream tells the steps behind it


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # nothing is obfuscated


class JsonSchema(ExactStruct, kw_only=True):
    name: Name
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None  # it is kept either way


class AnyText(ExactStruct, tag_field="type", tag="text"):
    pass


class JsonObject(ExactStruct, tag_field="type", tag="json_object"):
    pass


class JsonOfSchema(ExactStruct, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


OutputFormat = AnyText | JsonObject | JsonOfSchema


class StructuredOutputs(ExactStruct, kw_only=True):
    """Exactly one of the first five."""

    json: dict[str, Any] | str | None = None  # a schema, or its JSON
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # EBNF
    json_object: Annotated[Literal[True], Meta(description="true")] | None = None
    disable_any_whitespace: bool | None = None  # false: JSON may be indented
    disable_additional_properties: bool | None = None  # `closed` does so, whatever it says
    whitespace_pattern: None = None
    structural_tag: None = None


class GenerationRequest(DerivedFields, kw_only=True):
    """Fields of completions and of chats. None means absent."""

    best_of: int | None = None  # n
    stream_options: StreamOptions | None = None
    spaces_between_special_tokens: bool | None = None  # there are none, whatever it says
    echo: bool | None = None  # of a chat: the last message, if it is the assistant's
    add_special_tokens: bool | None = None  # those that the tokenizer puts around a text; a chat template has its own
    truncate_prompt_tokens: int | None = None  # that are kept; -1: as many as fit
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities
    response_format: OutputFormat | None = None
    guided_json: dict[str, Any] | str | None = None  # this and the next three: vLLM's older structured_outputs
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    metadata: Any = None  # of it, `tag` labels metrics

    output: ClassVar[OutputKind]
    answer_object: ClassVar[str]  # what the answer calls itself
    event_object: ClassVar[str]  # what each event of a stream does
    prompt_field: ClassVar[str]
    id_prefix: ClassVar[str]
    default_tokens: ClassVar[int | None]  # of an output
    clipped: ClassVar[bool] = False  # a limit beyond the context becomes what the context leaves

    @property
    def limit(self) -> tuple[str, int | None]:
        return "max_tokens", self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        raise NotImplementedError

    @property
    def only_echo(self) -> bool:
        return False

    @property
    def tag(self) -> Any:
        return self.metadata.get("tag") if isinstance(self.metadata, dict) else None

    @property
    def session(self) -> str | None:
        names = (self.session_id, self.prompt_cache_key, self.user)
        return next((name for name in names if isinstance(name, str) and name), None)

    @property
    def detail(self) -> bool:
        return self.speculation is not None and bool(self.speculation.detail)


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]  # a text, tokens, or a list of either
    logprobs: int | None = None

    output: ClassVar = "completion"
    answer_object: ClassVar = "text_completion"
    event_object: ClassVar = "text_completion"
    prompt_field: ClassVar = "prompt"
    id_prefix: ClassVar = "cmpl-"
    default_tokens: ClassVar = 16  # OpenAI's

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(part) for part in self.prompt}
        if int in kinds and len(kinds) > 1:
            raise bad("prompt", self.prompt, "a text, a list of tokens, or a list of either")
        return cast(list[str | list[int]], [self.prompt] if int in kinds else self.prompt)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def only_echo(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    add_generation_prompt: bool | None = None  # true unless continue_final_message
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None  # auto where there are tools
    tool_template: ToolTemplate | None = None  # the server's
    parallel_tool_calls: bool | None = None  # true: several calls in an output
    include_reasoning: bool | None = None  # true
    reasoning_effort: str | None = None  # for chat templates that know it

    output: ClassVar[OutputKind] = "chat"
    answer_object: ClassVar = "chat.completion"
    event_object: ClassVar = "chat.completion.chunk"
    prompt_field: ClassVar = "messages"
    effort_field: ClassVar = "reasoning_effort"
    id_prefix: ClassVar = "chatcmpl-"
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

    def tool_path(self, i: int) -> str:
        return f"tools[{i}].function"

    @property
    def echoed(self) -> str:
        return self.messages[-1].text if self.echo and self.messages[-1].role == "assistant" else ""


class TokenizeRequest(RequestBody, kw_only=True):
    """A prompt, or messages."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None  # true for a prompt; a chat template has its own
    tools: list[FunctionTool] | None = None  # this and the next three are of messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tool_template: ToolTemplate | None = None
    return_token_strs: bool = False


class DetokenizeRequest(RequestBody, kw_only=True):
    tokens: list[int]


class FeedbackRequest(RequestBody, kw_only=True):
    """How well a request was served: either `success` or `score`."""

    request_id: AnswerId  # the answer's id, or its X-Request-Id
    success: bool | None = None
    score: Annotated[float, Meta(ge=0, le=1, description="a number 0 to 1")] | None = None
    category: str | None = None  # the request's tag
    comment: Annotated[str, Meta(max_length=2000, description="a text of up to 2000 characters")] | None = None
