"""Tools of a response as functions, the only kind that models know.

body                             model                              answer
function f                       f, its parameters                  function_call f
custom c: input is a text        c, with one parameter `input`      custom_tool_call c
namespace n: f, c                n__f, n__c                         either, with `namespace`
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from pilotfish.grammar.parsers.call_parser import SPACE, TextParser
from pilotfish.grammar.parsers.json_text import read_decoded
from pilotfish.grammar.parsers.pieces import Content
from pilotfish.grammar.parsers.reader import Reading
from pilotfish.server.responses.response_body import CustomTool, NamespaceTool, ResponsesRequest, ResponseTool

#: The one parameter of a custom tool.
INPUT = "input"
_REST = re.compile(r".*", re.DOTALL)
#: Characters that a function's name may have.
LONGEST = 64


@dataclass(frozen=True)
class OfferedTool:
    path: str  # in the body
    tool: ResponseTool | CustomTool
    namespace: str | None = None

    @property
    def name(self) -> str:
        return function_name(self.tool.name, self.namespace)

    @property
    def function(self) -> dict[str, Any]:
        tool = self.tool
        if isinstance(tool, ResponseTool):
            fields = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
        else:
            text = {"type": "string", **({"description": shown} if (shown := _shown(tool)) else {})}
            schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
            fields = {"description": tool.description, "parameters": schema}
        return {"name": self.name, **{name: value for name, value in fields.items() if value is not None}}

    @property
    def told(self) -> dict[str, str]:
        return {"name": self.tool.name, **({} if self.namespace is None else {"namespace": self.namespace})}


def offered_tools(body: ResponsesRequest) -> Iterator[OfferedTool]:
    for i, tool in enumerate(body.tools or ()):
        if isinstance(tool, NamespaceTool):
            inner = ((j, each) for j, each in enumerate(tool.tools) if each is not None)
            yield from (OfferedTool(f"tools[{i}].tools[{j}]", each, tool.name) for j, each in inner)
        elif tool is not None:
            yield OfferedTool(f"tools[{i}]", tool)


def function_name(name: str, namespace: str | None) -> str:
    joined = name if namespace is None else f"{namespace}__{name}"
    if len(joined) <= LONGEST:
        return joined
    return f"{joined[: LONGEST - 9]}_{hashlib.sha256(joined.encode()).hexdigest()[:8]}"


def _shown(tool: CustomTool) -> str:
    """The input's grammar as text for the model. No grammar of ours enforces it within JSON."""
    definition = (tool.format or {}).get("definition")
    return f"Of this grammar:\n{definition}" if isinstance(definition, str) else ""


def arguments_of(text: str) -> str:
    return msgspec.json.encode({INPUT: text}).decode()


class InputParser(TextParser):
    """Gives a custom tool's input as content. Arguments that are no object with an input are the input itself."""

    def _read(self) -> Reading[None]:
        for sign in ("{", f'"{INPUT}"', ":", '"'):
            yield from self._reader.span(SPACE)
            if not (yield from self._reader.mark((sign,))):
                self._content(self._reader.taken())
                yield from self._reader.run(_REST, self._content)
                return
            self._reader.take(len(sign))
        yield from read_decoded(self._reader, self._content)
        yield from self._reader.run(_REST, lambda _: None)

    def _content(self, text: str) -> None:
        self._pieces.append(Content(text))
