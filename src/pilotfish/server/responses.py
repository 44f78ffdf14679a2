"""The body of /v1/responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from pilotfish.conversation import Name
from pilotfish.server.constraints import StructuredOutputs
from pilotfish.server.requests import (
    AS_JSON,
    SAMPLING,
    LogprobCount,
    RequestBody,
    RequestId,
    SpeculationOptions,
)

#: Sampling parameters that this body has by other names, or lacks: a response is one output.
_OTHERWISE = frozenset({"max_tokens", "n", "prompt_logprobs"})
RESPONSE_SAMPLING = [name for name in SAMPLING if name not in _OTHERWISE]
ItemState = Literal["in_progress", "completed", "incomplete"]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16, description="an object of at most 16 texts, of up to 512 characters, with names of up to 64"),
]
AtLeastOne = Annotated[int, Meta(ge=1, description="an integer of at least 1")]
Never = Annotated[Literal[False], Meta(description="false")]
#: All but the first concern what this server's answers never hold.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]

# -- items of the input


class ItemPart(Struct, forbid_unknown_fields=True, kw_only=True):
    """A text within an item."""

    text: str


class InputText(ItemPart, tag="input_text"):
    pass


class OutputText(ItemPart, tag="output_text"):
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalText(Struct, tag="refusal", forbid_unknown_fields=True, kw_only=True):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class SummaryText(ItemPart, tag="summary_text"):
    pass


class ReasoningText(ItemPart, tag="reasoning_text"):
    pass


class InputItem(Struct, forbid_unknown_fields=True, kw_only=True):
    """An item of a conversation, as answers have them too. Its id and status mean nothing here."""

    id: str | None = None
    status: ItemState | None = None


class InputMessage(InputItem, tag="message"):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText | OutputText | RefusalText]
    phase: Literal["commentary", "final_answer"] | None = None


class InputCall(InputItem, tag="function_call"):
    call_id: str
    name: str
    arguments: str


class InputCallOutput(InputItem, tag="function_call_output"):
    call_id: str
    output: str | list[InputText]


class InputReasoning(InputItem, tag="reasoning"):
    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None
    encrypted_content: None = None


# -- the body


class ResponseStreamOptions(Struct, forbid_unknown_fields=True):
    include_obfuscation: Never | None = None


class ResponseTool(Struct, tag_field="type", tag="function", forbid_unknown_fields=True, kw_only=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class FunctionChoice(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    name: str


class ToolSubsetChoice(Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice]


class PlainText(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    pass


class AnyJson(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    pass


class SchemaJson(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True, kw_only=True):
    name: Name
    schema: dict[str, Any]
    strict: bool | None = None
    description: str | None = None


class TextOptions(Struct, forbid_unknown_fields=True):
    format: PlainText | AnyJson | SchemaJson | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Struct, forbid_unknown_fields=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: None = None  # nobody writes one
    generate_summary: None = None  # its older name


if TYPE_CHECKING:

    class ResponseSampling(RequestBody):
        def __getattr__(self, name: str) -> Any: ...
else:
    _fields = [(name, AS_JSON.get(name, SAMPLING[name]) | None, None) for name in RESPONSE_SAMPLING]
    ResponseSampling = msgspec.defstruct("ResponseSampling", _fields, bases=(RequestBody,), kw_only=True)


class ResponsesRequest(ResponseSampling, kw_only=True):
    input: str | list[InputMessage | InputCall | InputCallOutput | InputReasoning]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | ToolSubsetChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: AtLeastOne | None = None  # of tools that run at OpenAI
    text: TextOptions | None = None
    top_logprobs: LogprobCount | None = None
    include: list[Includable] | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    store: bool | None = None  # nothing is stored, whatever it says, as in vLLM
    background: Never | None = None
    previous_response_id: str | None = None
    conversation: None = None
    prompt: None = None  # a template stored at OpenAI
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Any = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    request_id: RequestId | None = None
    timeout: Annotated[float, Meta(gt=0, le=1e9, description="a number of seconds, more than 0")] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    speculation: SpeculationOptions | None = None

    @classmethod
    def normal(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Items without a type are messages. What is null in an item or a tool is absent."""
        present = {name: _present(fields[name]) for name in ("input", "tools") if name in fields}
        if isinstance(items := present.get("input"), list):
            present["input"] = [{"type": "message", **item} if isinstance(item, dict) else item for item in items]
        return fields | present


def _present(value: Any, depth: int = 2) -> Any:
    """A list without what is null in its objects, and in those of their lists down to `depth`."""
    if not isinstance(value, list) or not depth:
        return value
    return [
        {name: _present(item, depth - 1) for name, item in each.items() if item is not None}
        if isinstance(each, dict)
        else each
        for each in value
    ]
