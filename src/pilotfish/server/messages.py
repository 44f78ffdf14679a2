"""The bodies that clients of Anthropic's Messages API send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from pilotfish.conversation import Nothing
from pilotfish.server.requests import RequestBody, SpeculationOptions

#: What Anthropic asks of a tool's name, and of a budget to think.
ToolName = Annotated[
    str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}\Z", description="1 to 128 letters, digits, underscores and hyphens")
]
Budget = Annotated[int, Meta(ge=1024, description="an integer of at least 1024")]


class CacheControl(Struct, forbid_unknown_fields=True):
    """Changes nothing: all prompts are cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Struct, tag_field="type", forbid_unknown_fields=True, kw_only=True):
    cache_control: CacheControl | None = None


class TextBlock(Block, tag="text"):
    text: str
    citations: Nothing | None = None


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
    toolset_name: None = None


class ToolResultBlock(Block, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None  # chat templates know no such field: the content has to say so
    toolset_name: None = None


ContentBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class MessageTurn(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]

    @property
    def blocks(self) -> list[ContentBlock]:
        return [TextBlock(text=self.content)] if isinstance(self.content, str) else self.content


class ClientTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that the client runs. There are no others."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: Annotated[Literal[True], Meta(description="true")] | None = None  # as all inputs are


class AutoChoice(Struct, tag_field="type", tag="auto", forbid_unknown_fields=True):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, tag_field="type", tag="any", forbid_unknown_fields=True):
    disable_parallel_tool_use: bool | None = None


class NamedChoice(Struct, tag_field="type", tag="tool", forbid_unknown_fields=True):
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Struct, tag_field="type", tag="none", forbid_unknown_fields=True):
    pass


class ThinkingConfig(Struct, tag_field="type", forbid_unknown_fields=True, kw_only=True):
    display: Literal["summarized"] | None = None  # nothing is summarized: all of it is shown


class EnabledThinking(ThinkingConfig, tag="enabled"):
    budget_tokens: Budget  # a hint, which no model here takes


class AdaptiveThinking(ThinkingConfig, tag="adaptive"):
    pass


class DisabledThinking(Struct, tag_field="type", tag="disabled", forbid_unknown_fields=True):
    pass


class JsonOutput(Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True):
    format: JsonOutput | None = None


class Metadata(Struct, forbid_unknown_fields=True):
    user_id: str | None = None
    tag: Any = None  # labels metrics


class CountTokensRequest(RequestBody, kw_only=True):
    """A prompt."""

    model: str
    messages: list[MessageTurn]
    system: str | list[TextBlock] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None = None
    thinking: EnabledThinking | AdaptiveThinking | DisabledThinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # Pilotfish's own


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int  # 0: only the prompt is computed, and cached
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    seed: int | str | None = None  # this and the next two are Pilotfish's own
    cache_salt: str | None = None
    speculation: SpeculationOptions | None = None
