from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from pilotfish.validation import not_allowed, refused

Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z", description="1 to 64 letters, digits, _ and -")]


class ExactStruct(Struct, forbid_unknown_fields=True):
    """An object that says what an answer must be, or how it is made: it has no field that could be left out."""


class TextPart(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text"]
    text: str


class CalledFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    arguments: str  # JSON
    parsed_arguments: Any = None  # which OpenAI's client adds where it has parsed them


class ToolCall(Struct, forbid_unknown_fields=True, kw_only=True):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None  # where the message was put together from a stream


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """A turn. The other fields of an answer's message are allowed as long as they are empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None  # required, but checked later: errors name other fields first
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None  # of the call that a tool's message answers
    reasoning: str | None = None
    reasoning_content: str | None = None  # its older name
    parsed: Any = None  # the content as OpenAI's client has parsed it
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Any = None  # sources of the content

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content or ())

    @property
    def thoughts(self) -> str | None:
        return self.reasoning_content if self.reasoning is None else self.reasoning

    @property
    def texts(self) -> Iterator[str]:
        yield self.text
        yield self.thoughts or ""
        yield from (call.function.arguments for call in self.tool_calls or ())


class ToolFunction(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema of an object; none: no arguments
    strict: bool | None = None


class FunctionTool(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    function: ToolFunction


class ChosenFunction(ExactStruct):
    name: str


class ToolReference(ExactStruct, kw_only=True):
    """One of the tools on offer."""

    type: Literal["function"]
    function: ChosenFunction


class NamedTool(ExactStruct, tag_field="type", tag="function"):
    function: ChosenFunction


class ToolSubset(ExactStruct):
    mode: Literal["auto", "required"]
    tools: list[ToolReference]


class AllowedTools(ExactStruct, tag_field="type", tag="allowed_tools"):
    allowed_tools: ToolSubset


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedTools,
    Meta(description="none, auto, required, or an object that names a function"),
]


def template_tools(given: list[FunctionTool] | None) -> dict[str, Any]:
    return {"tools": [{"type": "function", **msgspec.to_builtins(each)} for each in given]} if given else {}


def template_messages(path: str, messages: list[Message]) -> list[dict[str, Any]]:
    """ParameterError names the first bad field below `path`."""
    if not messages:
        raise not_allowed(path, messages, "a list of at least one message")
    return [template_message(f"{path}[{i}]", message) for i, message in enumerate(messages)]


def template_message(path: str, message: Message) -> dict[str, Any]:
    """`developer` becomes `system`. ParameterError names a missing or misplaced field below `path`."""
    _check_role(path, message)
    plain = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning": message.thoughts,
        "reasoning_content": message.thoughts,
        "tool_calls": _template_calls(path, message.tool_calls or []) or None,
    }
    return {name: value for name, value in plain.items() if value is not None}


def _check_role(path: str, message: Message) -> None:
    calls = bool(message.tool_calls)
    if message.content is None and not calls:
        raise refused(f"{path}.content", "it is missing")
    if calls and message.role != "assistant":
        raise refused(f"{path}.tool_calls", "they are not allowed but in messages of the assistant")
    if (message.tool_call_id is None) == (message.role == "tool"):
        problem = "it is missing" if message.role == "tool" else "it is not allowed but in messages of a tool"
        raise refused(f"{path}.tool_call_id", problem)


def _template_calls(path: str, calls: list[ToolCall]) -> list[dict[str, Any]]:
    """Arguments are parsed, as templates write them as JSON themselves."""
    plain = []
    for i, call in enumerate(calls):
        arguments = _object(f"{path}.tool_calls[{i}].function.arguments", call.function.arguments)
        function = {"name": call.function.name, "arguments": arguments}
        plain.append({"id": call.id, "type": call.type, "function": function})
    return plain


def _object(path: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise not_allowed(path, text, "a JSON object as text") from error
