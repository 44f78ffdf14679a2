"""Models whose chat template tells of no tools: the answer says so, or a plain text tells of them."""

from collections.abc import Callable
from typing import Any

import pytest
from http_double import CHAT, IDENTITY, Client, Engine, Health, saying
from live import HttpServer
from msgspec.structs import replace

from pilotfish.server.bodies.ignored import HEADER
from pilotfish.server.bodies.tools import with_tools_as_text

FUNCTION = {"name": "weather", "description": "Of a city.", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
USER = {"role": "user", "content": "How is it?"}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ås"}'}}
HISTORY = [
    USER,
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "rain"},
    {"role": "tool", "tool_call_id": "c", "content": "sun"},
]
WRITTEN = '<tool_call>\n{"name":"weather","arguments":{"city":"Ås"}}\n</tool_call>'
ANSWERED = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"


@pytest.fixture
def engine(engine: Engine) -> Engine:
    """With a context for what tools take."""
    engine.health = Health(identity=replace(IDENTITY, context=4096, longest=4096))
    return engine


def test_an_answer_says_that_tools_are_not_told(client: Client, engine: Engine) -> None:
    assert client.post(CHAT, {"messages": [USER], "tools": [TOOL]}).headers[HEADER] == "tools"
    with_tools = engine.prompt
    assert HEADER not in client.post(CHAT, {"messages": [USER]}).headers and engine.prompt == with_tools
    told = client.post(CHAT, {"messages": HISTORY, "tools": [TOOL]}).headers[HEADER]
    assert told == "tools, messages[].tool_calls"


def test_a_strict_server_takes_tools(serve: Callable[..., Client]) -> None:
    answer = serve(strict=True).post(CHAT, {"messages": [USER], "tools": [TOOL]})
    assert answer.status == 200 and answer.headers[HEADER] == "tools"


@pytest.mark.parametrize("asked", ["server", "request"])
def test_a_plain_text_tells_of_tools(serve: Callable[..., Client], engine: Engine, asked: str) -> None:
    engine.script = saying(engine.tokenizer, f"Well. {WRITTEN}")
    client = serve(**({"tool_template": "default"} if asked == "server" else {}))
    fields = {} if asked == "server" else {"tool_template": "default"}
    answer = client.post(CHAT, {"messages": HISTORY, "tools": [TOOL], **fields})
    assert answer.status == 200 and HEADER not in answer.headers
    prompt = engine.prompt
    assert prompt.startswith("<system>You may call functions.") and '"name":"weather"' in prompt
    assert f"<assistant>I look.\n{WRITTEN}\n{WRITTEN}\n<user>{ANSWERED}\n<assistant>" in prompt
    (call,) = answer.json["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city":"Ås"}'}
    assert answer.json["choices"][0]["finish_reason"] == "tool_calls"


def test_the_other_apis_have_it_too(serve: Callable[..., Client], engine: Engine) -> None:
    client, tool = serve(), {"type": "function", **FUNCTION}
    own = {"name": "weather", "input_schema": FUNCTION["parameters"], "description": "Of a city."}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [USER], "tools": [TOOL]},
        "/v1/responses": {"input": "How is it?", "tools": [tool]},
        "/v1/messages": {"model": "tiny", "max_tokens": 9, "messages": [USER], "tools": [own]},
    }
    prompts = set()
    for path, body in bodies.items():
        assert client.post(path, body).headers[HEADER] == "tools"
        assert client.post(path, {**body, "tool_template": "default"}).status == 200
        prompts.add(engine.prompt)
    (prompt,) = prompts
    tokens = client.post("/tokenize", {**bodies[CHAT], "tool_template": "default"}).json["tokens"]
    assert engine.tokenizer.decode(tokens) == prompt


def test_a_template_that_tells_of_tools_is_left_to_it(serve: Callable[..., Client], engine: Engine) -> None:
    engine.tokenizer.chat_template = "{{ tools | length }}{{ messages | length }}"
    assert serve(tool_template="default").post(CHAT, {"messages": HISTORY, "tools": [TOOL]}).status == 200
    assert engine.prompt == "14"


def test_a_chat_without_tools_is_as_it_was(serve: Callable[..., Client], engine: Engine) -> None:
    for client in (serve(), serve(tool_template="default")):
        assert client.post(CHAT, {"messages": [USER, USER]}).status == 200
    assert engine.submitted[0].tokens == engine.submitted[1].tokens


def test_the_system_message_comes_first() -> None:
    system = {"role": "system", "content": "Be brief."}
    (first, second) = with_tools_as_text([system, USER], [TOOL])
    assert first["content"].startswith("Be brief.\n\nYou may call functions.") and second == USER
    assert with_tools_as_text([system, USER], []) == [system, USER]


def test_the_log_says_it_at_the_start(synchronous: HttpServer) -> None:
    assert "tools are left out of prompts: the model's chat template does not tell of them" in synchronous.log
