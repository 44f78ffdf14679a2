"""A response's input as a chat:

input    reasoning · message · function_call · function_call    function_call_output    message
chat     one message of the assistant, with two calls           a tool's message        the user's message
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from pilotfish.grammar.parsers.call_parser import SPACE, TextParser
from pilotfish.grammar.parsers.json_text import read_decoded
from pilotfish.grammar.parsers.pieces import Content
from pilotfish.grammar.parsers.reader import Reading
from pilotfish.printable import short
from pilotfish.server.bodies.ignored import Ignored, kind_of
from pilotfish.server.bodies.requests import ChatRequest, JsonOfSchema
from pilotfish.server.http_errors import bad, bad_request
from pilotfish.server.responses import response_body as body
from pilotfish.server.responses.response_body import CustomTool, NamespaceTool, ResponsesRequest, ResponseTool
from pilotfish.validation import converted

#: The one parameter of a custom tool.
INPUT = "input"
_REST = re.compile(r".*", re.DOTALL)
LONGEST = 64  # characters that a function's name may have


@dataclass(frozen=True)
class OfferedTool:
    """A tool as a function, the only kind that models know.

    body                             model                              answer
    function f                       f, its parameters                  function_call f
    custom c: input is a text        c, with one parameter `input`      custom_tool_call c
    namespace n: f, c                n__f, n__c                         either, with `namespace`
    """

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


#: Fields of chats with the same name. They have the same meaning, too, unless `chat_of` says otherwise.
SHARED = [name for name in body.ResponsesRequest.__struct_fields__ if name in ChatRequest.__struct_fields__]


class ResponseChat(ChatRequest, kw_only=True):
    asked: body.ResponsesRequest
    tool_paths: list[str]

    output: ClassVar = "response"
    prompt_field: ClassVar = "input"
    effort_field: ClassVar = "reasoning.effort"
    id_prefix: ClassVar = "resp_"
    clipped: ClassVar = True  # as in vLLM

    @property
    def limit(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_completion_tokens

    def tool_path(self, i: int) -> str:
        return f"{self.tool_paths[i]}.function"


def chat_of(request: body.ResponsesRequest, ignored: Ignored) -> ResponseChat:
    if request.previous_response_id is not None:
        problem = f"{short(request.previous_response_id)} is not found: nothing is stored; send the items as input"
        raise bad_request("previous_response_id", problem, "previous_response_not_found")
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options", "it is not allowed without stream")
    if request.speculation is not None and request.speculation.detail:
        ignored.leave_out(bad("speculation.detail", True, "false"))
    text = request.text or body.TextOptions()
    if text.verbosity not in (None, "medium"):
        ignored.leave_out(bad("text.verbosity", text.verbosity, "medium"))
    for i, wanted in enumerate(request.include or ()):
        if wanted != body.LOGPROBS:
            ignored.leave_out(bad(f"include[{i}]", wanted, body.LOGPROBS), kind_of("include", wanted))
    wants_logprobs, tools = body.LOGPROBS in (request.include or ()), list(offered_tools(request))
    fields = {
        **{name: getattr(request, name) for name in SHARED},
        "stream_options": None,  # a response's say nothing to a chat
        "asked": request,
        "messages": _messages(request),
        "continue_final_message": _goes_on(request.input),
        "max_completion_tokens": request.max_output_tokens,
        "truncate_prompt_tokens": -1 if request.truncation == "auto" else None,
        "logprobs": wants_logprobs,
        "top_logprobs": request.top_logprobs if wants_logprobs else None,
        "tools": [{"type": "function", "function": tool.function} for tool in tools] or None,
        "tool_paths": [tool.path for tool in tools],
        "tool_choice": _tool_choice(request),
        "response_format": JsonOfSchema(text.format) if isinstance(text.format, body.SchemaJson) else text.format,
        "reasoning_effort": request.reasoning and request.reasoning.effort,
    }
    return converted("", {name: value for name, value in fields.items() if value is not None}, ResponseChat)


def _goes_on(items: str | list[Any]) -> bool | None:
    match items:
        case [*_, body.InputMessage(role="assistant", status="in_progress" | "incomplete")]:
            return True
    return None


def _messages(request: body.ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": _content(request.instructions)})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    for part in (_message(item) for item in request.input if item is not None):
        if messages and part["role"] == messages[-1]["role"] in ("system", "user"):
            messages[-1] = {**part, "content": messages[-1]["content"] + part["content"]}
        elif messages and _belongs(part, messages[-1]):
            calls = [*messages[-1].get("tool_calls", ()), *part.get("tool_calls", ())]
            messages[-1] |= {**part, "tool_calls": calls} if calls else part
        elif part != {"role": "assistant"}:
            messages.append(part)
    return [{"content": ""} | message if message["role"] == "assistant" else message for message in messages]


def _message(item: body.InputItem) -> dict[str, Any]:
    match item:
        case body.InputMessage(role=role, content=content):
            return {"role": "system" if role == "developer" else role, "content": _content(content)}
        case body.InputCall(call_id=call_id, name=name, arguments=arguments, namespace=namespace):
            return _call(call_id, function_name(name, namespace), arguments)
        case body.InputCustomCall(call_id=call_id, name=name, input=text, namespace=namespace):
            return _call(call_id, function_name(name, namespace), arguments_of(text))
        case body.InputCallOutput(call_id=call_id, output=output):
            return {"role": "tool", "tool_call_id": call_id, "content": _content(output)}
        case body.InputReasoning(content=content, summary=summary):
            text = "\n".join(part.text for part in content or summary)
            return {"role": "assistant", **({"reasoning": text} if text else {})}
    raise TypeError(item)


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def _content(given: str | Sequence[body.ItemPart | body.RefusalText]) -> list[dict[str, str]]:
    texts = [given] if isinstance(given, str) else [part.text for part in given]
    return [{"type": "text", "text": text} for text in texts]


_ORDER = ("reasoning", "content", "tool_calls")  # in the order in which the assistant says them


def _belongs(part: dict[str, Any], message: dict[str, Any]) -> bool:
    if part["role"] != "assistant" or message["role"] != "assistant":
        return False
    said = [_ORDER.index(name) for name in message if name in _ORDER]
    says = [_ORDER.index(name) for name in part if name in _ORDER]
    return not says or max(said) < says[0] or says == [_ORDER.index("tool_calls")]


def _tool_choice(request: body.ResponsesRequest) -> Any:
    match request.tool_choice:
        case "auto":
            return None
        case body.FunctionChoice() as chosen:
            return _reference(chosen)
        case body.ToolSubsetChoice(mode=mode, tools=tools):
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*map(_reference, tools)]}}
    return request.tool_choice


def _reference(chosen: body.FunctionChoice) -> dict[str, Any]:
    return {"type": "function", "function": {"name": function_name(chosen.name, chosen.namespace)}}
