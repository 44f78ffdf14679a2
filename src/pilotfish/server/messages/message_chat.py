"""A body of Anthropic's Messages API as a chat:

user:      text …                                      ─► user
           tool_result …, text …                       ─► tool, for each result; user
assistant: thinking, text …, tool_use …                ─► assistant, with its reasoning and its calls
           text … as the last turn                     ─► assistant, which the answer goes on with
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from pilotfish import conversation as chat
from pilotfish.server.bodies.ignored import Ignored
from pilotfish.server.bodies.reading import SWITCHES
from pilotfish.server.bodies.requests import ChatRequest, JsonOfSchema, JsonSchema
from pilotfish.server.http_errors import bad, bad_request
from pilotfish.server.messages import message_body as anthropic

#: Fields of chats with the same name and meaning.
SHARED = ("max_tokens", "temperature", "top_p", "top_k", "stream", "seed", "cache_salt", "speculation")
CALL = "toolu_"  # ids of calls begin so, but not for the chat template: some want ids of their own form
_CLIENT_LINES = re.compile(r"\A(x-anthropic-[\w-]+:.*(\n|\Z))+")  # Claude Code's system text begins so


class MessageChat(ChatRequest, kw_only=True):
    places: list[int]  # of its tools among the body's

    output: ClassVar = "message"
    effort_field: ClassVar = "output_config.effort"
    id_prefix: ClassVar = "msg_"
    clipped: ClassVar = True

    @property
    def only_echo(self) -> bool:
        return bool(self.max_tokens == 0)

    def tool_path(self, i: int) -> str:
        return super().tool_path(self.places[i])


def chat_of(body: anthropic.CountTokensRequest, ignored: Ignored, *, reasons: bool) -> MessageChat:
    """`reasons`: whether the model can think before it answers. HttpError names the first bad field."""
    output = body.output_config or anthropic.OutputConfig()
    tools = {i: _tool(tool) for i, tool in enumerate(body.tools or ()) if tool is not None}
    return MessageChat(
        model=body.model,
        messages=[*_system(body, ignored), *_conversation(body)],
        continue_final_message=_goes_on(body),
        tools=list(tools.values()) or None,
        places=list(tools),
        tool_template=body.tool_template,
        tool_choice=_tool_choice(body, offered=bool(tools)),
        parallel_tool_calls=not getattr(body.tool_choice, "disable_parallel_tool_use", None),
        response_format=JsonOfSchema(JsonSchema(name="answer", schema=output.format.schema)) if output.format else None,
        reasoning_effort=output.effort,
        chat_template_kwargs={**_thinking(body, ignored, reasons=reasons), **(body.chat_template_kwargs or {})},
        **(_sampling(body, ignored) if isinstance(body, anthropic.MessagesRequest) else {}),
    )


def _sampling(body: anthropic.MessagesRequest, ignored: Ignored) -> dict[str, Any]:
    if body.speculation is not None and body.speculation.detail:
        ignored.leave_out(bad("speculation.detail", True, "false: streams of completions and chats have it"))
    return {
        **{name: getattr(body, name) for name in SHARED},
        "stop": body.stop_sequences,
        "user": body.metadata.user_id if body.metadata else None,
        "metadata": {"tag": body.metadata.tag} if body.metadata else None,
    }


def _thinking(body: anthropic.CountTokensRequest, ignored: Ignored, *, reasons: bool) -> dict[str, bool]:
    thinking = body.thinking
    if thinking is None or isinstance(thinking, anthropic.AdaptiveThinking):
        return {}
    if isinstance(thinking, anthropic.EnabledThinking):
        if not reasons:
            allowed = "disabled or adaptive, as this model does not think"
            ignored.leave_out(bad("thinking.type", "enabled", allowed))
        elif isinstance(body, anthropic.MessagesRequest) and thinking.budget_tokens >= body.max_tokens:
            raise bad("thinking.budget_tokens", thinking.budget_tokens, f"less than max_tokens, {body.max_tokens}")
    return dict.fromkeys(SWITCHES if reasons else (), isinstance(thinking, anthropic.EnabledThinking))


# -- tools


def _tool(tool: anthropic.ClientTool) -> chat.FunctionTool:
    function = chat.ToolFunction(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return chat.FunctionTool(type="function", function=function)


def _tool_choice(body: anthropic.CountTokensRequest, *, offered: bool) -> chat.ToolChoice | None:
    match body.tool_choice:
        case anthropic.NamedChoice(name=name):
            return chat.NamedTool(function=chat.ChosenFunction(name))
        case anthropic.AnyChoice():
            return "required"
        case anthropic.NoChoice():
            return "none"
    return "auto" if body.tool_choice and offered else None


# -- turns


@dataclass
class _Turn:
    role: str
    blocks: list[tuple[str, anthropic.ContentBlock]]  # with their paths in the body

    @property
    def texts(self) -> list[chat.TextPart]:
        return [_part(block) for _, block in self.blocks if isinstance(block, anthropic.TextBlock)]

    def only(self, *kinds: type[anthropic.ContentBlock]) -> None:
        for path, block in self.blocks:
            if not isinstance(block, kinds):
                allowed = " or ".join(str(kind.__struct_config__.tag) for kind in kinds)
                raise bad(f"{path}.type", block.__struct_config__.tag, f"{allowed} in a turn of the {self.role}")


def _system(body: anthropic.CountTokensRequest, ignored: Ignored) -> list[chat.Message]:
    """Drops lines that identify the client, unless strict: with their changing hash no KV would be found."""
    texts = [body.system] if isinstance(body.system, str) else [block.text for block in body.system or ()]
    if not ignored.strict and any(map(_CLIENT_LINES.match, texts)):
        ignored.tell("system[x-anthropic-]", "it only says which client asks")
        texts = [_CLIENT_LINES.sub("", text) for text in texts]
    content = [chat.TextPart(type="text", text=text) for text in texts if text]
    return [chat.Message(role="system", content=content)] if content else []


def _goes_on(body: anthropic.CountTokensRequest) -> bool:
    return bool(body.messages) and body.messages[-1].role == "assistant" and bool(body.messages[-1].content)


def _conversation(body: anthropic.CountTokensRequest) -> Iterator[chat.Message]:
    turns = _turns(body)
    calls: dict[str, str] = {}  # of the turn before, that no result has answered yet: paths by id
    for turn in turns:
        if turn.role == "user":
            yield from _user(turn, calls)
        _refuse_unanswered(calls)
        if turn.role == "assistant":
            yield _assistant(turn)
            calls = {block.id: path for path, block in turn.blocks if isinstance(block, anthropic.ToolUseBlock)}
        elif turn.role == "system":
            turn.only(anthropic.TextBlock)
            yield chat.Message(role="system", content=turn.texts)
    _refuse_unanswered(calls)
    if _goes_on(body):
        _check_beginning(body, turns[-1])


def _check_beginning(body: anthropic.CountTokensRequest, turn: _Turn) -> None:
    path, begun = f"messages[{len(body.messages) - 1}].content", "".join(part.text for part in turn.texts)
    if not begun or begun[-1].isspace():
        raise bad_request(path, "an answer can only go on with a text that does not end in white space")
    if body.output_config is not None and body.output_config.format is not None:
        raise bad_request("output_config.format", "it is not allowed where the last turn is the assistant's")


def _turns(body: anthropic.CountTokensRequest) -> list[_Turn]:
    """HttpError for a turn without content; the assistant's last turn may be empty, and is left out."""
    turns: list[_Turn] = []
    for i, turn in enumerate(body.messages):
        if not turn.content and turn.role == "assistant" and i == len(body.messages) - 1:
            break
        if not turn.content:
            raise bad(f"messages[{i}].content", turn.content, "at least one character or block")
        blocks = [(f"messages[{i}].content[{j}]", block) for j, block in enumerate(turn.blocks)]
        if turns and turns[-1].role == turn.role:
            turns[-1].blocks += blocks
        else:
            turns.append(_Turn(turn.role, blocks))
    return turns


def _user(turn: _Turn, calls: dict[str, str]) -> Iterator[chat.Message]:
    """Results take their calls out of `calls`, and come before all text."""
    turn.only(anthropic.TextBlock, anthropic.ToolResultBlock)
    texts_begun = False
    for path, block in turn.blocks:
        if isinstance(block, anthropic.TextBlock):
            texts_begun = True
        elif isinstance(block, anthropic.ToolResultBlock):
            if texts_begun:
                raise bad_request(path, "a tool_result after text is not allowed; expected results first")
            if calls.pop(block.tool_use_id, None) is None:
                raise bad(f"{path}.tool_use_id", block.tool_use_id, "the id of a tool_use block in the turn before")
            content = block.content if isinstance(block.content, str) else [_part(part) for part in block.content or ()]
            yield chat.Message(role="tool", tool_call_id=block.tool_use_id.removeprefix(CALL), content=content)
    if turn.texts:
        yield chat.Message(role="user", content=turn.texts)


def _assistant(turn: _Turn) -> chat.Message:
    turn.only(anthropic.TextBlock, anthropic.ThinkingBlock, anthropic.RedactedThinkingBlock, anthropic.ToolUseBlock)
    thoughts = "\n".join(block.thinking for _, block in turn.blocks if isinstance(block, anthropic.ThinkingBlock))
    calls = [_call(block) for _, block in turn.blocks if isinstance(block, anthropic.ToolUseBlock)]
    content = turn.texts or (None if calls else "")
    return chat.Message(role="assistant", content=content, tool_calls=calls or None, reasoning=thoughts or None)


def _call(block: anthropic.ToolUseBlock) -> chat.ToolCall:
    called = chat.CalledFunction(name=block.name, arguments=msgspec.json.encode(block.input).decode())
    return chat.ToolCall(id=block.id.removeprefix(CALL), type="function", function=called)


def _refuse_unanswered(calls: dict[str, str]) -> None:
    for name, path in calls.items():
        raise bad_request(path, f"no tool_result for the tool_use {name!r} in the turn after it")


def _part(block: anthropic.TextBlock) -> chat.TextPart:
    return chat.TextPart(type="text", text=block.text)
