"""Tools of chats over an engine that says what it was told to: what the model is told, what it must write, and what is
made of it."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from http_double import CHAT, USER, Client, Engine

from pilotfish.config.server import ServerConfig
from pilotfish.grammar.parsers.formats import TOOL_FORMATS
from pilotfish.grammar.parsers.grammars import Tool
from pilotfish.server.bodies.reading import MOST_TOOLS, OutputFormats
from pilotfish.server.bodies.requests import ChatRequest
from pilotfish.server.bodies.tools import ToolUse
from pilotfish.server.http_errors import HttpError

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "time", "strict": True}}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ås"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}>{{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}:{{ c.function.name }}:{{ c.function.arguments.city }}{% endfor %}"
    "{% endfor %}<assistant>"
)


@pytest.fixture
def templated(engine: Engine) -> Engine:
    engine.tokenizer.chat_template = TEMPLATE
    return engine


def asked(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "tools": [WEATHER, TIME], **fields}


def streamed(client: Client, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The message that the deltas of output 0 make, and all of its choices."""
    message: dict[str, Any] = {"content": None, "calls": {}}
    choices = [event["choices"][0] for event in client.post(CHAT, asked(stream=True, **fields)).events]
    own = [choice for choice in choices if choice["index"] == 0]
    for choice in own:
        delta = choice["delta"]
        if delta.get("content") is not None:
            message["content"] = (message["content"] or "") + delta["content"]
        for part in delta.get("tool_calls", []):
            call = message["calls"].setdefault(part["index"], {"arguments": ""})
            call |= {name: part[name] for name in ("id", "type") if name in part}
            call["arguments"] += part["function"].get("arguments", "")
            call |= {"name": part["function"]["name"]} if "name" in part["function"] else {}
    return message, own


# -- what is made of an output


@pytest.mark.parametrize("at_a_time", [1, 2, 5, 100])
def test_calls_are_told_apart_from_the_text(client: Client, engine: Engine, at_a_time: int) -> None:
    engine.says(f"Let me see. {CALL}\n{SECOND}", at_a_time=at_a_time)
    (choice,) = client.post(CHAT, asked()).json["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"].strip() == "Let me see."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Ås"}'},
        {"name": "time", "arguments": "{}"},
    ]
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    ids = {call["id"] for call in message["tool_calls"]}
    assert len(ids) == 2 and all(each.startswith("call_") for each in ids)


@pytest.mark.parametrize("at_a_time", [1, 2, 5, 100])
def test_calls_of_a_stream_begin_with_their_name(client: Client, engine: Engine, at_a_time: int) -> None:
    engine.says(f"Let me see. {CALL}\n{SECOND}", at_a_time=at_a_time)
    message, choices = streamed(client)
    assert message["content"].strip() == "Let me see."
    calls = message["calls"]
    assert [(calls[i]["name"], json.loads(calls[i]["arguments"])) for i in (0, 1)] == [
        ("weather", {"city": "Ås"}),
        ("time", {}),
    ]
    parts = [part for choice in choices for part in choice["delta"].get("tool_calls", [])]
    for index in (0, 1):
        first, *rest = [part for part in parts if part["index"] == index]
        assert first["id"].startswith("call_") and first["type"] == "function"
        assert first["function"]["arguments"] == ""
        assert rest and all(part.keys() == {"index", "function"} for part in rest)
        assert all(part["function"].keys() == {"arguments"} for part in rest)
    assert all(len(choice["delta"].get("tool_calls", [])) <= 1 for choice in choices)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "reason", "told"),
    [
        *(("auto", "stop", "tool_calls"), ("required", "stop", "tool_calls")),
        *((NAMED, "stop", "stop"), ("auto", "length", "length"), ("required", "length", "length")),
    ],
)
def test_reasons_of_the_end(client: Client, engine: Engine, choice: Any, reason: str, told: str, stream: bool) -> None:
    engine.says(CALL, reason=reason)
    fields = {"tool_choice": choice}
    choices = streamed(client, **fields)[1] if stream else client.post(CHAT, asked(**fields)).json["choices"]
    assert choices[-1]["finish_reason"] == told


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("length", [1, 8, 18, 28])
def test_a_call_cut_before_its_name_is_nothing(client: Client, engine: Engine, choice: Any, length: int) -> None:
    engine.says(CALL[:length], reason="length")
    (whole,) = client.post(CHAT, asked(tool_choice=choice)).json["choices"]
    assert whole["message"] == {"role": "assistant", "content": ""} and whole["finish_reason"] == "length"
    message, choices = streamed(client, tool_choice=choice)
    assert message == {"content": None, "calls": {}} and choices[-1]["finish_reason"] == "length"


def test_every_chunk_of_a_stream_tells_something(client: Client, engine: Engine) -> None:
    engine.says(CALL, at_a_time=1)
    for fields in ({}, {"tool_choice": "required"}):
        opening, *choices = streamed(client, **fields)[1]
        assert opening["delta"]["role"] == "assistant"
        assert all(choice["delta"] or choice["finish_reason"] for choice in choices)
    scored = streamed(client, logprobs=True)[1]
    assert all(c["delta"] or c["finish_reason"] or c["logprobs"]["content"] for c in scored)
    tokens = streamed(client, return_token_ids=True)[1]
    assert all(c["delta"] or c["finish_reason"] or c["token_ids"] for c in tokens)


def test_content_is_null_beside_calls_alone(client: Client, engine: Engine) -> None:
    engine.says(CALL)
    for choice in ("auto", "required", NAMED):
        message = client.post(CHAT, asked(tool_choice=choice)).json["choices"][0]["message"]
        assert message["content"] is None and len(message["tool_calls"]) == 1
    assert streamed(client, tool_choice="required")[0]["content"] is None


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": None}, {"tools": []}])
def test_without_tools_all_is_text(client: Client, engine: Engine, fields: dict[str, Any]) -> None:
    engine.says(CALL)
    (choice,) = client.post(CHAT, asked(**fields)).json["choices"]
    assert choice["message"] == {"role": "assistant", "content": CALL} and choice["finish_reason"] == "stop"
    assert streamed(client, **fields)[0] == {"content": CALL, "calls": {}}


def test_one_call_where_several_are_not_wanted(client: Client, engine: Engine) -> None:
    engine.says(f"{CALL}\n{SECOND}")
    message = client.post(CHAT, asked(parallel_tool_calls=False)).json["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    assert streamed(client, parallel_tool_calls=False)[0]["calls"].keys() == {0}


def test_every_output_has_calls_of_its_own(client: Client, engine: Engine) -> None:
    engine.says(CALL, "No idea.", SECOND)
    choices = client.post(CHAT, asked(n=3)).json["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop", "tool_calls"]
    names = [[call["function"]["name"] for call in c["message"].get("tool_calls", [])] for c in choices]
    assert names == [["weather"], [], ["time"]]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_of_all_tokens(client: Client, engine: Engine, stream: bool) -> None:
    engine.says(CALL, at_a_time=2)
    fields = {"logprobs": True, "return_token_ids": True}
    choices = streamed(client, **fields)[1] if stream else client.post(CHAT, asked(**fields)).json["choices"]
    content = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", [])]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == CALL
    assert sum(len(choice.get("token_ids", [])) for choice in choices) == len(content)


# -- what the model must write


def lark(*tools: Any, named: str | None = None, parallel: bool = True) -> str:
    functions = [tool["function"] for tool in tools]
    known = [
        Tool(f["name"], None, {**f.get("parameters", NO_ARGUMENTS), "additionalProperties": False}) for f in functions
    ]
    return TOOL_FORMATS["hermes"].grammar(known, named=named, parallel=parallel, added={})


def test_a_required_call_is_enforced(client: Client, templated: Engine) -> None:
    templated.says(CALL)
    for fields, expected in (
        ({"tool_choice": "required"}, lark(WEATHER, TIME)),
        ({"tool_choice": "required", "parallel_tool_calls": False}, lark(WEATHER, TIME, parallel=False)),
        ({"tool_choice": NAMED}, lark(WEATHER, named="weather", parallel=False)),
        ({"tool_choice": subset("required", "time")}, lark(TIME)),
    ):
        assert client.post(CHAT, asked(**fields)).status == 200
        constraint = templated.submitted[-1].params.structured_outputs
        assert constraint is not None and (constraint.kind, constraint.text) == ("grammar", expected)


def test_a_model_that_is_not_told_of_tools_makes_one_call(client: Client, engine: Engine) -> None:
    assert client.post(CHAT, asked(tool_choice="required")).status == 200
    constraint = engine.submitted[0].params.structured_outputs
    assert constraint is not None and constraint.text == lark(WEATHER, TIME, parallel=False)


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_a_free_choice_is_not_constrained(client: Client, engine: Engine, choice: str | None) -> None:
    assert client.post(CHAT, asked(tool_choice=choice)).status == 200
    assert engine.submitted[0].params.structured_outputs is None
    assert engine.submitted[0].params.skip_special_tokens


def test_calls_of_too_many_tools_are_not_enforced(engine: Engine) -> None:
    config = ServerConfig(tool_call_parser="hermes", reasoning_parser="none")
    formats, body = OutputFormats(config, engine.tokenizer), ChatRequest(messages=[])
    tools = tuple(Tool(f"tool_{i}", None, NO_ARGUMENTS) for i in range(MOST_TOOLS + 1))
    with pytest.raises(HttpError, match="of 257 tools no call can be enforced; expected 256 at most") as raised:
        formats.chat(body, ToolUse(tools, required=True), [1])
    assert (raised.value.status, raised.value.param) == (400, "tools")
    assert formats.chat(body, ToolUse(tools), [1]).constraint is None
    assert formats.chat(body, ToolUse(tools[1:], required=True), [1]).constraint is not None


def subset(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


# -- what the model is told


def test_the_template_has_the_tools(client: Client, templated: Engine) -> None:
    for choice in ("auto", "required", "none", NAMED, subset("auto", "time")):
        assert client.post(CHAT, asked(tool_choice=choice)).status == 200
        assert templated.prompt == f"[{json.dumps(WEATHER)}][{json.dumps(TIME)}]<user>hi<assistant>"
    tokens = client.post("/tokenize", {"messages": [USER], "tools": [WEATHER, TIME]}).json["tokens"]
    assert tokens == templated.submitted[-1].tokens


def test_a_loop_of_tools(client: Client, templated: Engine) -> None:
    """The answer goes back as it came, with the call's result."""
    templated.says(CALL)
    message = client.post(CHAT, asked()).json["choices"][0]["message"]
    call = message["tool_calls"][0]
    result = {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "sunny"}]}
    thoughts = {**message, "reasoning": "hm", "parsed": None}
    assert client.post(CHAT, {"messages": [USER, thoughts, result]}).status == 200
    expected = f"<user>hi<assistant>(hm){call['id']}:weather:Ås<tool {call['id']}>sunny<assistant>"
    assert templated.prompt.endswith(expected)


# -- refusals


def changed(tool: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], **fields}}


def called(arguments: Any) -> list[Any]:
    call = {"id": "a", "type": "function", "function": {"name": "time", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type", "'custom' is not allowed"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "it is missing"),
        ({"tools": [changed(TIME, name="a b")]}, "tools[0].function.name", "1 to 64 letters, digits, _ and -"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "names that differ"),
        ({"tools": [changed(TIME, parameters=[])]}, "tools[0].function.parameters", "expected an object"),
        ({"tools": [changed(TIME, parameters={"type": "string"})]}, "tools[0].function.parameters.type", "'string'"),
        ({"tools": [changed(TIME, strict="yes")]}, "tools[0].function.strict", "true or false"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice", "not allowed without tools"),
        ({"tool_choice": "any"}, "tool_choice", "none, auto, required, or an object that names a function"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "it is missing"),
        ({"tool_choice": {"type": "tool", "function": {"name": "time"}}}, "tool_choice.type", "expected function or"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "sleep"}}},
            "tool_choice.function.name",
            "'sleep' is not allowed; expected a function of tools: weather or time",
        ),
        ({"tool_choice": subset("required")}, "tool_choice.allowed_tools.tools", "at least one tool"),
        ({"tool_choice": subset("none", "time")}, "tool_choice.allowed_tools.mode", "auto or required"),
        ({"tool_choice": subset("auto", "a")}, "tool_choice.allowed_tools.tools[0].function.name", "weather or time"),
        ({"messages": called(5)}, "messages[1].tool_calls[0].function.arguments", "expected text"),
        ({"messages": called("{")}, "messages[1].tool_calls[0].function.arguments", "a JSON object as text"),
        ({"messages": [{**called("{}")[1], "role": "user"}]}, "messages[0].tool_calls", "of the assistant"),
        ({"messages": [{**USER, "tool_call_id": "a"}]}, "messages[0].tool_call_id", "of a tool"),
        ({"messages": [{"role": "tool", "tool_call_id": "a"}]}, "messages[0].content", "it is missing"),
    ],
)
def test_what_is_wrong_is_named(client: Client, engine: Engine, fields: dict[str, Any], param: str, words: str) -> None:
    answer = client.post(CHAT, asked(**fields))
    assert (answer.status, answer.error["param"]) == (400, param)
    assert words in answer.error["message"] and not engine.submitted


def test_ids_are_as_the_template_takes_them(serve: Callable[..., Client], engine: Engine) -> None:
    engine.says('[TOOL_CALLS][{"name": "time", "arguments": {}}]')
    message = serve(tool_call_parser="mistral").post(CHAT, asked()).json["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert len(call["id"]) == 9 and call["id"].isalnum()


def test_a_server_without_a_parser(serve: Callable[..., Client], engine: Engine) -> None:
    """Calls that are enforced need none, as with vLLM."""
    engine.says(CALL)
    client = serve(tool_call_parser="none")
    answer = client.post(CHAT, asked())
    assert (answer.status, answer.error["param"]) == (400, "tool_choice") and "--tool-call-parser" in str(answer.error)
    for choice in ("required", NAMED):
        message = client.post(CHAT, asked(tool_choice=choice)).json["choices"][0]["message"]
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    assert client.post(CHAT, asked(tool_choice="none")).status == 200
