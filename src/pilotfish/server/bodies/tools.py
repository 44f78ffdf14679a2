from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pilotfish.conversation import AllowedTools, NamedTool, ToolReference
from pilotfish.grammar.parsers.grammars import Tool
from pilotfish.server.bodies.constraints import blaming, closed
from pilotfish.server.bodies.requests import ChatRequest
from pilotfish.server.http_errors import bad, bad_request

#: Of a function's arguments where it has no schema.
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
Offered = tuple[Tool, str]  # a tool, and where its schema stands in the body


@dataclass(frozen=True)
class ToolUse:
    tools: tuple[Tool, ...] = ()  # none: nothing is a call
    required: bool = False
    named: str | None = None  # the one that must be called
    parallel: bool = True
    field: str = "tools"  # to blame for a schema that cannot be kept


NO_TOOLS = ToolUse()


def tool_use(body: ChatRequest) -> ToolUse:
    offered, choice, parallel = _by_name(body), body.tool_choice, body.parallel_tool_calls is not False
    if choice is None:
        choice = "auto" if offered else "none"
    if choice == "none":
        return NO_TOOLS
    if not offered:
        raise bad_request("tool_choice", "it is not allowed without tools")
    if isinstance(choice, NamedTool):
        name = choice.function.name
        _check_offered("tool_choice.function.name", name, offered)
        tool, field = offered[name]
        return ToolUse((tool,), required=True, named=name, parallel=False, field=field)
    mode = choice
    if isinstance(choice, AllowedTools):
        mode, offered = choice.allowed_tools.mode, _subset(choice.allowed_tools.tools, offered)
    field = next(iter(offered.values()))[1] if len(offered) == 1 else "tools"
    tools = tuple(tool for tool, _ in offered.values())
    return ToolUse(tools, required=mode == "required", parallel=parallel, field=field)


def _by_name(body: ChatRequest) -> dict[str, Offered]:
    offered: dict[str, Offered] = {}
    for i, each in enumerate(body.tools or ()):
        path, function = body.tool_path(i), each.function
        if function.name in offered:
            raise bad(f"{path}.name", function.name, "names that differ")
        schema = function.parameters or NO_ARGUMENTS
        if (kind := schema.get("type", "object")) != "object":
            raise bad(f"{path}.parameters.type", kind, "object")
        with blaming(f"{path}.parameters"):
            tool = Tool(function.name, function.description, closed(schema), bool(function.strict))
        offered[function.name] = tool, f"{path}.parameters"
    return offered


def _subset(given: list[ToolReference], offered: Mapping[str, Offered]) -> dict[str, Offered]:
    path = "tool_choice.allowed_tools.tools"
    if not given:
        raise bad(path, given, "a list of at least one tool")
    for i, each in enumerate(given):
        _check_offered(f"{path}[{i}].function.name", each.function.name, offered)
    names = {each.function.name for each in given}
    return {name: each for name, each in offered.items() if name in names}


def _check_offered(field: str, name: str, offered: Mapping[str, Offered]) -> None:
    if name not in offered:
        raise bad(field, name, f"a function of tools: {' or '.join(offered)}")


TOOLS = """You may call functions. Each line between <tools> and </tools> describes one, in JSON:
<tools>
{}
</tools>
To call one, write its name and its arguments, as a JSON object between <tool_call> and </tool_call>:
<tool_call>
{{"name": "…", "arguments": {{…}}}}
</tool_call>
What it returns follows between <tool_response> and </tool_response>."""


def with_tools_as_text(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For models whose chat template knows no tools. Calls are written as Hermes writes them.

    system      as it was, and the list of tools
    assistant   as it was, and <tool_call> … </tool_call> for each call
    tool        user: <tool_response> … </tool_response>
    """
    plain: list[dict[str, Any]] = []
    for message in map(_plain, messages):
        if plain and plain[-1]["role"] == message["role"] == "user":  # some templates have them take turns
            plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}\n{message['content']}"}
        else:
            plain.append(message)
    if not tools:
        return plain
    text = TOOLS.format("\n".join(_json(tool) for tool in tools))
    if plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    said = [message["content"]] if message["content"] else []
    written = [f"<tool_call>\n{_json(call['function'])}\n</tool_call>" for call in message.get("tool_calls", ())]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join([*said, *written])}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
