"""Tools as plain text, for models whose chat template knows no tools. Calls are written as Hermes writes them.

system      as it was, and the list of tools
assistant   as it was, and <tool_call> … </tool_call> for each call
tool        user: <tool_response> … </tool_response>
"""

from collections.abc import Sequence
from typing import Any

import msgspec

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
