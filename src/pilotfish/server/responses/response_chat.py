"""A response's input as a chat:

input    reasoning · message · function_call · function_call    function_call_output    message
chat     one message of the assistant, with two calls           a tool's message        the user's message
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from pilotfish.printable import short
from pilotfish.server.bodies.ignored import Ignored, kind_of
from pilotfish.server.bodies.requests import ChatRequest, JsonOfSchema
from pilotfish.server.http_errors import bad, bad_request
from pilotfish.server.responses import response_body as body
from pilotfish.server.responses.response_tools import arguments_of, function_name, offered_tools
from pilotfish.validation import converted

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


#: In the order in which the assistant says them.
_ORDER = ("reasoning", "content", "tool_calls")


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
