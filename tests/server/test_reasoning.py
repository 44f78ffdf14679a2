"""Reasoning of chats over an engine that says what it was told to: it is told apart from the answer, and what a body
says of the answer does not hold for it."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from http_double import CHAT, USER, Client, Engine

#: As Qwen3's: reasoning goes back as `reasoning_content`, and is closed at once where it is not wanted.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\n"
    "{% endfor %}<assistant>{% if tools %}<tool_call>{% endif %}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% elif open %}<think>\n{% endif %}"
)
THOUGHT = "<think>\nLet me see: <b>\n</think>\n\nYes."
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "f"}}
JSON = {"type": "json_object"}


@pytest.fixture
def engine(engine: Engine) -> Engine:
    """With a template that knows of reasoning."""
    engine.tokenizer.chat_template = TEMPLATE
    return engine


def asked(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], **fields}


def streamed(client: Client, **fields: Any) -> dict[str, str]:
    """The deltas' texts by their field."""
    texts: dict[str, str] = {}
    for event in client.post(CHAT, asked(stream=True, **fields)).events:
        for name, text in event["choices"][0]["delta"].items():
            if isinstance(text, str):
                texts[name] = texts.get(name, "") + text
    return texts


@pytest.mark.parametrize("at_a_time", [1, 2, 5, 100])
def test_reasoning_is_told_apart(client: Client, engine: Engine, at_a_time: int) -> None:
    engine.says(THOUGHT, at_a_time=at_a_time)
    thought = {"reasoning": "Let me see: <b>", "reasoning_content": "Let me see: <b>"}
    message = {"role": "assistant", "content": "Yes.", **thought}
    assert client.post(CHAT, asked()).json["choices"][0]["message"] == message
    assert streamed(client) == message


@pytest.mark.parametrize(
    ("fields", "text", "reason", "reasoning", "content"),
    [
        ({"chat_template_kwargs": {"open": True}}, "I think so.</think>Yes.", "stop", "I think so.", "Yes."),
        ({}, "<think>I th", "length", "I th", None),
        ({"tools": [TOOL]}, f"<think>I must call {CALL}</think>{CALL}", "tool_calls", f"I must call {CALL}", None),
    ],
    ids=["begun by the prompt", "cut", "before a call"],
)
def test_reasoning_stands_apart(
    client: Client, engine: Engine, fields: dict[str, Any], text: str, reason: str, reasoning: str, content: str | None
) -> None:
    engine.says(text, reason="length" if reason == "length" else "stop")
    choice = client.post(CHAT, asked(**fields)).json["choices"][0]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (reasoning, content)
    assert len(choice["message"].get("tool_calls", ())) == ("tools" in fields) and choice["finish_reason"] == reason


def test_reasoning_may_be_left_out(client: Client, engine: Engine) -> None:
    engine.says(THOUGHT)
    fields = {"include_reasoning": False}
    assert client.post(CHAT, asked(**fields)).json["choices"][0]["message"] == {"role": "assistant", "content": "Yes."}
    assert streamed(client, **fields) == {"role": "assistant", "content": "Yes."}


def test_reasoning_goes_back_to_the_template(client: Client, engine: Engine) -> None:
    engine.says(THOUGHT)
    message = client.post(CHAT, asked()).json["choices"][0]["message"]
    for turn in (message, {**message, "reasoning": None}, {**message, "reasoning_content": None}):
        assert client.post(CHAT, {"messages": [USER, turn, USER]}).status == 200
        assert engine.prompt == "<user>hi\n<assistant><think>Let me see: <b></think>Yes.\n<user>hi\n<assistant>"


@pytest.mark.parametrize(
    ("fields", "comes"),
    [
        ({}, True),
        ({"include_reasoning": False}, True),
        ({"chat_template_kwargs": {"open": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"thinking": False}}, False),
    ],
)
@pytest.mark.parametrize("wants", [{"response_format": JSON}, {"tools": [TOOL], "tool_choice": "required"}])
def test_a_constraint_begins_after_reasoning(
    client: Client, engine: Engine, fields: dict[str, Any], comes: bool, wants: Any
) -> None:
    engine.says(THOUGHT)
    assert client.post(CHAT, asked(**fields, **wants)).status == 200
    constraint = engine.submitted[0].params.structured_outputs
    end = engine.tokenizer.encode("</think>", add_special_tokens=False)
    assert constraint is not None and constraint.after == (end if comes else [])


@pytest.mark.parametrize(("inside", "token"), [(False, True), (True, True), (False, False)])
def test_what_does_not_reason_is_constrained_at_once(client: Client, engine: Engine, inside: bool, token: bool) -> None:
    """Where the start mark is one token, and the prompt has not begun a reasoning."""
    if token:
        engine.tokenizer = deepcopy(engine.tokenizer)
        engine.tokenizer.add_tokens(["<think>"])
    engine.says(THOUGHT)
    assert client.post(CHAT, asked(response_format=JSON, chat_template_kwargs={"open": inside})).status == 200
    constraint = engine.submitted[0].params.structured_outputs
    expected = engine.tokenizer.convert_tokens_to_ids("<think>") if token and not inside else None
    assert constraint is not None and constraint.after and constraint.opening == expected


def test_marks_that_are_special_tokens_are_shown_to_the_parser(client: Client, engine: Engine) -> None:
    engine.tokenizer = deepcopy(engine.tokenizer)
    engine.tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    engine.says(THOUGHT)
    message = client.post(CHAT, asked(skip_special_tokens=True)).json["choices"][0]["message"]
    assert not engine.submitted[0].params.skip_special_tokens
    assert (message["reasoning"], message["content"]) == ("Let me see: <b>", "Yes.")


def test_without_a_parser_all_is_content(serve: Callable[..., Client], engine: Engine) -> None:
    engine.says(THOUGHT)
    client = serve(reasoning_parser="none")
    fields = {"response_format": JSON}
    message = client.post(CHAT, asked(**fields)).json["choices"][0]["message"]
    assert message == {"role": "assistant", "content": THOUGHT}
    constraint = engine.submitted[0].params.structured_outputs
    assert constraint is not None and constraint.after == []


def test_a_parser_may_be_named(serve: Callable[..., Client], engine: Engine) -> None:
    engine.says("[THINK]Hm.[/THINK]Yes.")
    message = serve(reasoning_parser="mistral").post(CHAT, asked()).json["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")
