"""Bodies with the fields that coding agents send: taken as they are. What is left out of them is told."""

import json
import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from http_double import Client, Engine
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import sized
from test_response_answers import events_of, response_of

from pilotfish.grammar.parsers.pieces import content_of
from pilotfish.server.bodies import ignored
from pilotfish.server.bodies.ignored import HEADER
from pilotfish.server.responses.response_chat import InputParser, arguments_of, function_name

#: Of Codex CLI in a turn after a call, of Claude Code, opencode and Continue.
BODIES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("agents.json").read_text())
CODEX, CLAUDE = BODIES["codex"], BODIES["claude code"]
_, PATCH, *HOSTED, SPACE = CODEX["tools"]
(CLOSE,) = SPACE["tools"]
LEFT_OUT_OF_CODEX = {
    *("client_metadata", "service_tier", "include[reasoning.encrypted_content]", "input[web_search_call]"),
    *("input[].encrypted_content", "input[].kind", "input[].turn"),
    *("reasoning.effort", "reasoning.summary", "text.verbosity"),
    *(f"tools[{tool['type']}]" for tool in HOSTED),
}
BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"
LEFT_OUT_OF_CLAUDE = {
    *("context_management", "output_config.effort", "thinking.type", "system[x-anthropic-]"),
    *("tools[text_editor_20250728]", "tools[web_search_20250305]", "tools[].defer_loading"),
}
#: With roles of one system message and turns that alternate, as Gemma's has them; it tells of tools.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system') }}{% endif %}"
    "{% if loop.previtem and m.role == 'user' == loop.previtem.role %}{{ raise_exception('user') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
    "{% endfor %}{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}<assistant>"
)


@pytest.fixture
def taking(engine: Engine, serve: Callable[..., Client]) -> Callable[..., Client]:
    """A server whose template knows tools."""
    engine.tokenizer.chat_template = TEMPLATE
    return serve


def left_out(headers: dict[str, str]) -> set[str]:
    return set(headers[HEADER].split(", ")) if HEADER in headers else set()


# -- agents


def test_codex(taking: Callable[..., Client], engine: Engine) -> None:
    answer = taking().post("/v1/responses", CODEX)
    assert events_of(answer)[-1]["type"] == "response.completed"
    assert left_out(answer.headers) == LEFT_OUT_OF_CODEX
    assert engine.prompt == (
        '<system>rules\nmore<user>place\nlist<assistant><exec_command {"cmd": "ls"}><tool>a.py'
        '<assistant><apply_patch {"input": "*** Begin Patch"}><tool>done'
        "[exec_command][apply_patch][agents__close_agent]<assistant>"
    )


def test_claude_code(taking: Callable[..., Client], engine: Engine) -> None:
    client = taking()
    answer = client.post("/v1/messages?beta=true", CLAUDE)
    assert answer.status == 200 and b"message_stop" in answer.body
    assert left_out(answer.headers) == LEFT_OUT_OF_CLAUDE
    first = engine.submitted[-1].tokens
    assert engine.prompt.startswith("<system>You work here.<user>hi<assistant><Bash")
    other = {"type": "text", "text": BILLING.format("0b1c2") + "\nYou work here."}
    counted = client.post("/v1/messages", {**CLAUDE, "system": [other]})
    assert counted.status == 200 and engine.submitted[-1].tokens == first
    plain = client.post("/v1/messages/count_tokens", {**CLAUDE, "max_tokens": None, "stream": None, "metadata": None})
    assert plain.json == {"input_tokens": len(first)}


@pytest.mark.parametrize(("agent", "hints"), [("opencode", set()), ("continue", {"prediction", "reasoning_effort"})])
def test_agents_that_chat(taking: Callable[..., Client], agent: str, hints: set[str]) -> None:
    answer = taking().post("/v1/chat/completions", BODIES[agent])
    assert answer.status == 200 and answer.body.endswith(b"data: [DONE]\n\n")
    assert left_out(answer.headers) == hints


def test_codex_asks_for_the_model(client: Client) -> None:
    assert "models" not in client.get("/v1/models").json
    answer = client.get("/v1/models?client_version=0.171.0").json
    (model,) = answer["models"]
    assert (model["slug"], model["context_window"]) == ("tiny", answer["data"][0]["max_model_len"])
    assert model["supported_reasoning_levels"] == [] and "rg" in model["base_instructions"]


def test_codex_is_told_of_efforts(engine: Engine, serve: Callable[..., Client]) -> None:
    engine.tokenizer.chat_template = "{{ reasoning_effort }}{{ messages[0].content }}"
    (model,) = serve().get("/v1/models?client_version=1").json["models"]
    assert [level["effort"] for level in model["supported_reasoning_levels"]] == ["low", "medium", "high"]


# -- what is left out


def test_names_are_told_once(client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ignored, "_logged", set())
    with caplog.at_level(logging.INFO, "pilotfish.server.bodies.ignored"):
        for _ in range(2):
            client.post("/v1/completions", {"prompt": "x", "beta_field": "secret", "max_tokens": 4})
    (line,) = caplog.messages
    assert line.startswith("beta_field is left out of requests") and "secret" not in line


def test_names_in_the_header_are_few_and_plain(client: Client) -> None:
    message = {"role": "user", "content": "x", **{f"field_{i}": i for i in range(100)}}
    answer = client.post("/v1/chat/completions", {"messages": [message]})
    *names, last = answer.headers[HEADER].split(", ")
    assert answer.status == 200 and len(names) == ignored.MOST and names[0] == "messages[].field_0"
    assert last == ignored.MORE
    odd = client.post("/v1/responses", {"input": "x", "tools": [{"type": "a\r\nx-key: b"}, {"type": "my secret"}]})
    assert odd.headers[HEADER] == "tools[]"


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "function", "function": {"name": "f"}, "when": 1}},
        {"topP": 0.5},
        {"stops": ["x"]},
        {"messages": [{"role": "user", "content": "x", "toolcalls": []}]},
        {"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]},
        {"stream": True, "stream_options": {"include_usgae": True}},
    ],
)
def test_what_says_how_to_answer_is_never_left_out(client: Client, fields: dict[str, Any]) -> None:
    answer = client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **fields})
    assert answer.status == 400 and "there is no such parameter" in answer.error["message"]


@pytest.mark.parametrize("field", ["images", "prefix"])
def test_what_a_message_cannot_have_is_refused(client: Client, field: str) -> None:
    answer = client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", field: ["x"]}]})
    assert answer.status == 400 and answer.error["param"] == f"messages[0].{field}"
    metadata = {"role": "user", "content": "x", "options": {"cache": True}}
    assert left_out(client.post("/v1/chat/completions", {"messages": [metadata]}).headers) == {"messages[].options"}


def test_a_large_body_with_a_bad_part_is_looked_at_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Types are taken apart once, not for each of a hundred thousand items."""
    looks = 0
    true_fields = msgspec.structs.fields

    def counted(kind: Any) -> Any:
        nonlocal looks
        looks += 1
        return true_fields(kind)

    monkeypatch.setattr(msgspec.structs, "fields", counted)
    answer = client.post("/v1/chat/completions", {"messages": [{}] * 50_000})
    assert answer.status == 400 and answer.error["param"] == "messages[0].role" and looks < 50


def test_an_effort_of_none_leaves_no_reasoning_before_a_format(taking: Callable[..., Client], engine: Engine) -> None:
    client = taking(reasoning_parser="qwen3")
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}
    constraints = []
    for told in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert client.post("/v1/chat/completions", {**body, **told}).status == 200
        constraints.append(engine.submitted[-1].params.structured_outputs)
    assert constraints[0] == constraints[1] and not constraints[0].after


def test_a_tool_that_is_null_is_refused(client: Client) -> None:
    for path, body in (("/v1/responses", {"input": "x"}), ("/v1/messages", {**CLAUDE, "tool_choice": None})):
        answer = client.post(path, {**body, "tools": [None]})
        assert answer.status == 400 and "tools[0]: None is not allowed; expected an object" in answer.body.decode()


def test_an_answer_has_no_tools_that_were_left_out(taking: Callable[..., Client]) -> None:
    tools = [{"type": "namespace", "name": "n", "description": "", "tools": [HOSTED[0], CLOSE]}, HOSTED[1]]
    (space,) = response_of(taking(), tools=tools)["tools"]
    assert [tool["name"] for tool in space["tools"]] == ["close_agent"]


def test_a_choice_of_what_is_left_out_is_refused(taking: Callable[..., Client]) -> None:
    client, search = taking(), {"type": "web_search_20250305", "name": "web_search"}
    for choice in ({"type": "any"}, {"type": "tool", "name": "web_search"}):
        answer = client.post("/v1/messages", {**CLAUDE, "tools": [search], "tool_choice": choice})
        assert answer.status == 400 and answer.json["error"]["message"].startswith("tool_choice")
    assert client.post("/v1/messages", {**CLAUDE, "tools": [search]}).status == 200
    assert client.post("/v1/responses", {"input": "x", "tools": HOSTED, "tool_choice": "required"}).status == 400
    assert client.post("/v1/responses", {"input": "x", "tools": HOSTED, "tool_choice": HOSTED[0]}).status == 400


def test_a_bad_tool_is_named_by_its_place_in_the_body(taking: Callable[..., Client]) -> None:
    client, bad = taking(), {**CLOSE, "parameters": {"type": "array"}}
    tools = [HOSTED[0], {"type": "namespace", "name": "n", "tools": [HOSTED[1], bad]}]
    error = client.post("/v1/responses", {"input": "x", "tools": tools}).error
    assert error["param"] == "tools[1].tools[1].parameters.type"
    search, time = {"type": "web_search_20250305", "name": "s"}, {"name": "t", "input_schema": {"type": "array"}}
    message = client.post("/v1/messages", {**CLAUDE, "tools": [search, time]}).json["error"]["message"]
    assert message.startswith("tools[1].input_schema.type: 'array'")


# -- namespaces and custom tools


@pytest.mark.parametrize("at_a_time", [1, 3, 1000])
def test_a_call_within_a_namespace(taking: Callable[..., Client], engine: Engine, at_a_time: int) -> None:
    call = '<tool_call>\n{"name": "agents__close_agent", "arguments": {"target": "a"}}\n</tool_call>'
    engine.says(call, at_a_time=at_a_time)
    (item,) = response_of(taking(), tools=[SPACE])["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "agents", "close_agent")
    assert json.loads(item["arguments"]) == {"target": "a"}


@pytest.mark.parametrize("at_a_time", [1, 3, 1000])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (arguments_of('*** Begin Patch\n+ print("☃😀\\n")\n'), '*** Begin Patch\n+ print("☃😀\\n")\n'),
        ('{"input": ""}', ""),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ("{}", "{}"),
        ('{"input": "a\\qb"}', "a\\qb"),
        ('{"input": "a", "input": "b"}', "a"),
    ],
)
def test_a_custom_call(
    taking: Callable[..., Client], engine: Engine, at_a_time: int, arguments: str, expected: str
) -> None:
    text = f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>'
    engine.says(text, at_a_time=at_a_time)
    client = taking()
    (item,) = response_of(client, tools=[PATCH])["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", expected)
    events = events_of(client.post("/v1/responses", {"input": "x", "stream": True, "tools": [PATCH]}))
    kind = "response.custom_tool_call_input"
    assert "".join(event["delta"] for event in events if event["type"] == f"{kind}.delta") == expected
    assert [event["input"] for event in events if event["type"] == f"{kind}.done"] == [expected]
    given = [
        {"role": "user", "content": "x"},
        item,
        {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": ""},
    ]
    assert client.post("/v1/responses", {"input": given, "tools": [PATCH]}).status == 200


def test_a_custom_tool_that_must_be_called(taking: Callable[..., Client], engine: Engine) -> None:
    choice = {"type": "custom", "name": "apply_patch"}
    assert taking().post("/v1/responses", {"input": "x", "tools": [PATCH], "tool_choice": choice}).status == 200
    constraint = engine.submitted[-1].params.structured_outputs
    assert constraint is not None and '"input"' in constraint.text


@settings(max_examples=sized(15, 50))
@given(text=st.text(max_size=60), cuts=st.lists(st.integers(0, 300), max_size=20))
def test_an_input_is_read_as_it_comes(text: str, cuts: list[int]) -> None:
    for arguments, expected in ((arguments_of(text), text), (f'{{"x": {text}', f'{{"x": {text}')):
        places = [0, *sorted(cut for cut in cuts if cut < len(arguments)), len(arguments)]
        parser = InputParser()
        parts = [content_of(parser.feed(arguments[i:j])) for i, j in pairwise(places)]
        assert "".join([*parts, content_of(parser.finish())]) == expected


@given(name=st.text("abc_", min_size=1, max_size=64), space=st.text("xyz_", min_size=1, max_size=64))
def test_names_of_functions(name: str, space: str) -> None:
    made = function_name(name, space)
    assert len(made) <= 64 and function_name(name, None) == name
    assert made == f"{space}__{name}" or made != function_name(name + "d", space)
