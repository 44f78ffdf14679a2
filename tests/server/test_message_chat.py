"""The chat that a body of Anthropic's Messages API means."""

from typing import Any

import msgspec
import pytest

from pilotfish.server.bodies.ignored import Ignored
from pilotfish.server.http_errors import HttpError
from pilotfish.server.messages.message_body import CountTokensRequest, MessagesRequest
from pilotfish.server.messages.message_chat import MessageChat, chat_of

USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bergen"}}
EMPTY: dict[str, Any] = {"type": "tool_result", "tool_use_id": "toolu_1"}
RESULT = {**EMPTY, "content": "rain"}
WEATHER = {"name": "weather", "description": "Of a city.", "input_schema": {"type": "object"}}
HI = {"role": "user", "content": "hi"}
BRIEF = {"role": "system", "content": "Be brief."}
YES = {"role": "assistant", "content": "yes"}
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}


def chat(*, reasons: bool = False, **body: Any) -> MessageChat:
    given = {"model": "tiny", "messages": [HI], "max_tokens": 9, **body}
    return chat_of(msgspec.convert(given, MessagesRequest), Ignored(strict=True), reasons=reasons)


def said(*messages: Any, **body: Any) -> list[dict[str, Any]]:
    """What the chat's messages hold: a list of parts as its text."""
    made = chat(messages=list(messages), **body).messages
    return [given({**msgspec.to_builtins(message), "content": message.text}) for message in made]


def given(value: Any) -> Any:
    """Without what is null."""
    if isinstance(value, list):
        return [given(item) for item in value]
    return {name: given(item) for name, item in value.items() if item is not None} if isinstance(value, dict) else value


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


THOUGHT = {"type": "thinking", "thinking": "hm", "signature": ""}
CALLED = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bergen"}'}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALLED]}
ANSWERED = {"role": "tool", "tool_call_id": "1", "content": "rain"}
SECOND = {"tool_call_id": "x-2"}
REDACTED = {"type": "redacted_thinking", "data": "abc"}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([HI], [HI]),
        ([user(text("a"), text("b"))], [{"role": "user", "content": "a\nb"}]),
        ([HI, user(text("there"))], [{"role": "user", "content": "hi\nthere"}]),
        ([user(text("a", cache_control={"type": "ephemeral", "ttl": "1h"}))], [{"role": "user", "content": "a"}]),
        ([HI, BRIEF, HI], [HI, BRIEF, HI]),
        ([HI, YES, HI], [HI, YES, HI]),
        ([HI, assistant(USE), user(RESULT)], [HI, CALLING, ANSWERED]),
        (
            [HI, assistant(text("Let me see."), USE), user(RESULT, text("So?"))],
            [HI, {**CALLING, "content": "Let me see."}, ANSWERED, {"role": "user", "content": "So?"}],
        ),
        (
            [HI, assistant(USE), assistant({**USE, "id": "x-2"}), user({**RESULT, "tool_use_id": "x-2"}), user(RESULT)],
            [HI, {**CALLING, "tool_calls": [CALLED, {**CALLED, "id": "x-2"}]}, {**ANSWERED, **SECOND}, ANSWERED],
        ),
        (
            [HI, assistant(USE), user({**RESULT, "content": [text("no"), text("rain")], "is_error": True})],
            [HI, CALLING, {**ANSWERED, "content": "no\nrain"}],
        ),
        ([HI, assistant(USE), user(EMPTY)], [HI, CALLING, {**ANSWERED, "content": ""}]),
        ([HI, assistant(THOUGHT, REDACTED, text("yes")), HI], [HI, {**YES, "reasoning": "hm"}, HI]),
    ],
)
def test_turns(messages: list[Any], expected: list[dict[str, Any]]) -> None:
    assert said(*messages) == expected


@pytest.mark.parametrize("system", ["Be\nbrief.", [text("Be"), text("brief.", cache_control={"type": "ephemeral"})]])
def test_the_system_comes_first(system: Any) -> None:
    assert said(HI, system=system) == [{"role": "system", "content": "Be\nbrief."}, HI]


@pytest.mark.parametrize("content", ["The answer is (", [text("The answer"), text("is (")], "", []])
def test_the_answer_goes_on_with_the_assistants_last_turn_unless_that_is_empty(content: Any) -> None:
    made = chat(messages=[HI, {"role": "assistant", "content": content}])
    assert made.continue_final_message is bool(content)
    assert [message.role for message in made.messages] == (["user", "assistant"] if content else ["user"])
    assert chat().continue_final_message is False


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([user()], "messages[0].content: [] is not allowed; expected at least one character or block"),
        ([HI, {"role": "user", "content": ""}], "messages[1].content: '' is not allowed"),
        ([user(USE)], "messages[0].content[0].type: 'tool_use' is not allowed; expected text or tool_result in a turn"),
        (
            [HI, assistant(text("a"), RESULT)],
            "messages[1].content[1].type: 'tool_result' is not allowed; expected text",
        ),
        ([HI, {"role": "system", "content": [USE]}], "messages[1].content[0].type: 'tool_use' is not allowed"),
        ([user(RESULT)], "messages[0].content[0].tool_use_id: 'toolu_1' is not allowed; expected the id of a tool_use"),
        (
            [HI, assistant(USE)],
            "messages[1].content[0]: no tool_result for the tool_use 'toolu_1' in the turn after it",
        ),
        ([HI, assistant(text("a"), USE), HI], "messages[1].content[1]: no tool_result"),
        ([HI, assistant(USE), BRIEF, user(RESULT)], "messages[1].content[0]: no tool_result"),
        ([HI, assistant(USE), user(RESULT, RESULT)], "messages[2].content[1].tool_use_id: 'toolu_1' is not allowed"),
        ([HI, assistant(USE), user(text("x"), RESULT)], "messages[2].content[1]: a tool_result after text"),
        ([HI, {"role": "assistant", "content": "So "}], "messages[1].content: an answer can only go on with a text"),
        ([HI, assistant(text("So\n"))], "messages[1].content: an answer can only go on with a text"),
    ],
)
def test_turns_that_cannot_be(messages: list[Any], message: str) -> None:
    with pytest.raises(HttpError) as raised:
        chat(messages=messages)
    assert str(raised.value).startswith(message) and raised.value.status == 400


def test_tools() -> None:
    made = chat(tools=[{**WEATHER, "type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}}])
    assert made.tools is not None and made.tool_choice is None and made.parallel_tool_calls is True
    function = made.tools[0].function
    assert (function.name, function.description, function.strict) == ("weather", "Of a city.", True)
    assert function.parameters == {"type": "object"}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    ],
)
def test_the_choice_of_a_tool(choice: dict[str, Any], expected: Any) -> None:
    made = chat(tools=[WEATHER], tool_choice=choice)
    assert msgspec.to_builtins(made.tool_choice) == expected and made.parallel_tool_calls is True
    if choice["type"] != "none":
        alone = chat(tools=[WEATHER], tool_choice={**choice, "disable_parallel_tool_use": True})
        assert alone.parallel_tool_calls is False and alone.tool_choice == made.tool_choice


def test_an_output_format() -> None:
    made = chat(output_config={"format": FORMAT}).response_format
    assert msgspec.to_builtins(made)["json_schema"]["schema"] == FORMAT["schema"]
    assert chat(output_config={}).response_format is None


ENABLED = {"type": "enabled", "budget_tokens": 1024}


@pytest.mark.parametrize(
    ("thinking", "arguments"),
    [
        (None, {}),
        ({"type": "adaptive"}, {}),
        ({"type": "disabled"}, {"enable_thinking": False, "thinking": False}),
        ({**ENABLED, "display": "summarized"}, {"enable_thinking": True, "thinking": True}),
    ],
)
def test_thinking(thinking: Any, arguments: dict[str, bool]) -> None:
    assert chat(reasons=True, thinking=thinking, max_tokens=1025).chat_template_kwargs == arguments
    if thinking is None or thinking["type"] != "enabled":
        assert chat(thinking=thinking).chat_template_kwargs == {}


def test_thinking_that_cannot_be() -> None:
    with pytest.raises(HttpError, match=r"thinking\.type: 'enabled' is not allowed; expected disabled or adaptive"):
        chat(thinking=ENABLED, max_tokens=2000)
    with pytest.raises(HttpError, match=r"thinking\.budget_tokens: 1024 is not allowed; expected less than max_tokens"):
        chat(reasons=True, thinking=ENABLED, max_tokens=1024)


def test_sampling() -> None:
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stream": True, "seed": 7, "cache_salt": "s"}
    made = chat(**asked, stop_sequences=["x"], metadata={"user_id": "me", "tag": "t"}, chat_template_kwargs={"a": 1})
    assert {name: getattr(made, name) for name in asked} == asked
    assert made.stop == ["x"] and made.tag == "t" and made.max_tokens == 9 and made.chat_template_kwargs == {"a": 1}


def test_tokens_to_count() -> None:
    body = {"model": "tiny", "messages": [HI], "tools": [WEATHER], "thinking": ENABLED}
    made = chat_of(msgspec.convert(body, CountTokensRequest), Ignored(), reasons=True)
    assert made.tools is not None and made.chat_template_kwargs == {"enable_thinking": True, "thinking": True}
