from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from pilotfish.config.server import ToolTemplate
from pilotfish.conversation import ExactStruct
from pilotfish.server.bodies.ignored import Ignored
from pilotfish.server.bodies.requests import CHAT_NAMES, RequestBody, SpeculationOptions

#: Anthropic's rules for a tool's name, and for a budget to think.
ToolName = Annotated[
    str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}\Z", description="1 to 128 letters, digits, underscores and hyphens")
]
Budget = Annotated[int, Meta(ge=1024, description="an integer of at least 1024")]


class Block(Struct, tag_field="type", forbid_unknown_fields=True, kw_only=True):
    cache_control: Any = None  # changes nothing: all prompts are cached


class TextBlock(Block, tag="text"):
    text: str
    citations: Any = None


class ThinkingBlock(Block, tag="thinking"):
    """What the model thought in an earlier turn."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Block, tag="redacted_thinking"):
    """Thoughts of another server's model, which none but that can read: left out."""

    data: str


class ToolUseBlock(Block, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None


class ToolResultBlock(Block, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None  # chat templates know no such field: the content has to say so


ContentBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class MessageTurn(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]

    @property
    def blocks(self) -> list[ContentBlock]:
        return [TextBlock(text=self.content)] if isinstance(self.content, str) else self.content


class ClientTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that the client runs, and that the model is told of."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Annotated[Literal[True], Meta(description="true")] | None = None  # as all inputs are


class AutoChoice(ExactStruct, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(ExactStruct, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool | None = None


class NamedChoice(ExactStruct, tag_field="type", tag="tool"):
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(ExactStruct, tag_field="type", tag="none"):
    pass


class EnabledThinking(Struct, tag_field="type", tag="enabled", forbid_unknown_fields=True, kw_only=True):
    display: Any = None  # all of it is shown
    budget_tokens: Budget  # a hint, which no model here takes


class AdaptiveThinking(Struct, tag_field="type", tag="adaptive", forbid_unknown_fields=True):
    display: Any = None


class DisabledThinking(Struct, tag_field="type", tag="disabled", forbid_unknown_fields=True):
    pass


class JsonOutput(ExactStruct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True):
    format: JsonOutput | None = None
    effort: str | None = None  # for chat templates that know `reasoning_effort`


class Metadata(Struct, forbid_unknown_fields=True):
    user_id: str | None = None
    tag: Any = None  # labels metrics


class CountTokensRequest(RequestBody, kw_only=True):
    """A prompt."""

    model: str
    messages: list[MessageTurn]
    system: str | list[TextBlock] | None = None
    tools: list[ClientTool | None] | None = None  # None: one that is left out
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None = None
    thinking: EnabledThinking | AdaptiveThinking | DisabledThinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    chat_template_kwargs: dict[str, Any] | None = None  # this and the next are Pilotfish's own
    tool_template: ToolTemplate | None = None

    chat_names: ClassVar = CHAT_NAMES["messages"]

    @classmethod
    def normal(cls, fields: dict[str, Any], ignored: Ignored) -> dict[str, Any]:
        """Tools that run at Anthropic, or that only its models know, are left out."""
        given = fields.get("tools")
        return fields if not isinstance(given, list) else {**fields, "tools": ignored.offered(given, ("custom",))}


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int  # 0: only the prompt is computed, and cached
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    seed: int | str | None = None  # this and the next two are Pilotfish's own
    cache_salt: str | None = None
    speculation: SpeculationOptions | None = None
