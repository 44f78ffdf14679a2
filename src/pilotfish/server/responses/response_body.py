from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from pilotfish.config.server import ToolTemplate
from pilotfish.conversation import ExactStruct, Name
from pilotfish.server.bodies.ignored import Ignored
from pilotfish.server.bodies.requests import CHAT_NAMES, AnyText, JsonObject, JsonSchema, LogprobCount, SharedFields
from pilotfish.server.http_errors import bad

ItemState = Literal["in_progress", "completed", "incomplete"]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16, description="an object of at most 16 texts, of up to 512 characters, with names of up to 64"),
]
AtLeastOne = Annotated[int, Meta(ge=1, description="an integer of at least 1")]
Never = Annotated[Literal[False], Meta(description="false")]
#: What an answer can have beside its items. All else that clients ask for concerns items that it never has.
LOGPROBS = "message.output_text.logprobs"

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
    namespace: str | None = None


class InputCallOutput(InputItem, tag="function_call_output"):
    call_id: str
    output: str | list[InputText | OutputText]


class InputCustomCall(InputItem, tag="custom_tool_call"):
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class InputCustomCallOutput(InputCallOutput, tag="custom_tool_call_output"):
    pass


class InputReasoning(InputItem, tag="reasoning"):
    """What the model thought in an earlier turn. Another server's encrypted thoughts are left out."""

    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None


# -- the body


class ResponseStreamOptions(Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None  # nothing is obfuscated


class ToolBody(Struct, tag_field="type", forbid_unknown_fields=True, kw_only=True):
    name: Name
    description: str | None = None


class ResponseTool(ToolBody, tag="function", kw_only=True):
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class CustomTool(ToolBody, tag="custom", kw_only=True, omit_defaults=True):
    """A tool whose input is a text."""

    format: dict[str, Any] | None = None  # a grammar, which the model is shown


class NamespaceTool(ToolBody, tag="namespace", kw_only=True, omit_defaults=True):
    """Tools under one name."""

    tools: list[ResponseTool | CustomTool | None]  # None: one that is left out


class FunctionChoice(ExactStruct, tag_field="type", tag="function", omit_defaults=True):
    name: str
    namespace: str | None = None


class CustomChoice(FunctionChoice, tag="custom"):
    pass


class ToolSubsetChoice(ExactStruct, tag_field="type", tag="allowed_tools", kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice | CustomChoice]


class SchemaJson(JsonSchema, tag_field="type", tag="json_schema"):
    pass


class TextOptions(Struct, forbid_unknown_fields=True):
    format: AnyText | JsonObject | SchemaJson | None = None
    verbosity: str | None = None


class ReasoningOptions(Struct, forbid_unknown_fields=True):
    effort: str | None = None


class ResponsesRequest(SharedFields, kw_only=True):
    input: (
        str
        | list[
            InputMessage | InputCall | InputCallOutput | InputCustomCall | InputCustomCallOutput | InputReasoning | None
        ]
    )
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: list[ResponseTool | CustomTool | NamespaceTool | None] | None = None  # None: one that is left out
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | CustomChoice | ToolSubsetChoice | None = None
    tool_template: ToolTemplate | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: AtLeastOne | None = None  # of tools that run at OpenAI
    text: TextOptions | None = None
    top_logprobs: LogprobCount | None = None
    include: list[str] | None = None
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
    chat_template_kwargs: dict[str, Any] | None = None

    chat_names: ClassVar = CHAT_NAMES["responses"]

    @classmethod
    def normal(cls, fields: dict[str, Any], ignored: Ignored) -> dict[str, Any]:
        """Items without a type are messages, nulls are absent. OpenAI's own tools, and their results, are left out."""
        present = {name: _present(fields[name]) for name in ("input", "tools") if name in fields}
        if isinstance(items := present.get("input"), list):
            present["input"] = _remembered(items, ignored)
        if isinstance(tools := present.get("tools"), list):
            present["tools"] = ignored.offered(tools, ("function", "custom", "namespace"))
        return fields | present


def _remembered(items: list[Any], ignored: Ignored) -> list[Any]:
    kept = [{"type": "message", **item} if isinstance(item, dict) else item for item in items]
    for i, item in enumerate(kept):
        if isinstance(item, dict) and item["type"] == "web_search_call":
            refusal = bad(f"input[{i}].type", item["type"], "items that this server's answers have")
            ignored.leave_out(refusal, "input[web_search_call]")
            kept[i] = None
    return kept


def _present(value: Any, depth: int = 2) -> Any:
    """Removes nulls from a list's objects, and from those of their lists down to `depth`."""
    if not isinstance(value, list) or not depth:
        return value
    return [
        {name: _present(item, depth - 1) for name, item in each.items() if item is not None}
        if isinstance(each, dict)
        else each
        for each in value
    ]
