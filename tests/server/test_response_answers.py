"""/v1/responses over an engine that says what it was told to: what its body means, its answers, its streams."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from http_double import Answer, Client, Engine, saying
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from pilotfish.conversation import template_message
from pilotfish.errors import EngineError, ParameterError
from pilotfish.server.bodies.ignored import Ignored
from pilotfish.server.responses.response_body import ResponsesRequest
from pilotfish.server.responses.response_chat import chat_of
from pilotfish.validation import converted
from pilotfish.wire.serving import Finish

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LENGTH = Finish("length", None)
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
TIME = {"type": "function", "name": "time", "parameters": None}
IMAGE = {"type": "input_image", "image_url": "x"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TWO_CALLS = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def events_of(answer: Answer) -> list[Any]:
    """Of a stream, each checked by OpenAI's types."""
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream") and answer.ended
    *blocks, rest = answer.body.decode().split("\n\n")
    assert rest == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        EVENT.validate_python(event, strict=True)
        events.append(event)
    return events


def response_of(client: Client, **fields: Any) -> dict[str, Any]:
    """The response, which says the same where it is streamed."""
    answer = client.post(PATH, {"input": "hi", **fields})
    assert answer.status == 200, answer.body
    whole: dict[str, Any] = answer.json
    Response.model_validate(whole, strict=True)
    events = events_of(client.post(PATH, {"input": "hi", "stream": True, **fields}))
    assert same(events[-1]["response"]) == same(whole) and events[-1]["type"] == f"response.{whole['status']}"
    for event, what in zip(events, ("created", "in_progress"), strict=False):
        opened = event["response"]
        assert event["type"] == f"response.{what}" and opened["status"] == "in_progress"
        assert (opened["output"], opened["usage"]) == ([], None)
    return whole


def same(value: Any) -> Any:
    """Without what is drawn or depends on the time and on how the request was asked."""
    drawn = {"id", "call_id", "created_at", "completed_at"}
    if isinstance(value, dict):
        return {name: same(item) for name, item in value.items() if name not in drawn}
    return [same(item) for item in value] if isinstance(value, list) else value


@pytest.fixture
def asked(client: Client, engine: Engine) -> Callable[..., str]:
    """The prompt that an input becomes."""

    def ask(given: Any, **fields: Any) -> str:
        answer = client.post(PATH, {"input": given, **fields})
        assert answer.status == 200, answer.body
        return engine.prompt

    return ask


# -- answers


def test_a_text(client: Client) -> None:
    whole = response_of(client)
    part = {"type": "output_text", "text": "import os", "annotations": [], "logprobs": []}
    message = {"id": whole["output"][0]["id"], "type": "message", "status": "completed", "role": "assistant"}
    assert whole["output"] == [{**message, "content": [part]}]
    assert whole["id"].startswith("resp_") and message["id"].startswith("msg_")
    assert (whole["status"], whole["error"], whole["incomplete_details"]) == ("completed", None, None)
    assert whole["completed_at"] >= whole["created_at"]
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"] and usage["output_tokens"] == 6
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


def test_a_response_says_what_it_was_asked_for(client: Client) -> None:
    said = {"instructions": "Be brief.", "max_output_tokens": 64, "max_tool_calls": 3, "metadata": {"tag": "nightly"}}
    said |= {"parallel_tool_calls": False, "prompt_cache_key": "k", "safety_identifier": "s", "temperature": 0.5}
    said |= {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "tool_choice": "none", "tools": [WEATHER]}
    said |= {"top_logprobs": 2, "top_p": 0.5, "truncation": "auto", "user": "u"}
    whole = response_of(client, **said)
    assert {name: whole[name] for name in said} == said


def test_what_was_not_asked_for_has_openais_defaults(client: Client) -> None:
    whole = response_of(client)
    usual = {"temperature": 1.0, "top_p": 1.0, "tool_choice": "auto", "tools": [], "top_logprobs": 0}
    assert {name: whole[name] for name in usual} == usual
    assert whole["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert whole["reasoning"] == {"effort": None, "summary": None}
    assert (whole["store"], whole["background"], whole["parallel_tool_calls"]) == (False, False, True)
    assert (whole["truncation"], whole["metadata"], whole["previous_response_id"]) == ("disabled", {}, None)


def test_a_response_that_is_cut(client: Client, engine: Engine) -> None:
    engine.says("import o", reason="length")
    whole = response_of(client, max_output_tokens=5)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete" and whole["completed_at"] is None


def test_log_probabilities(client: Client, engine: Engine) -> None:
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (part,) = response_of(client, **wanted)["output"][0]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    assert engine.submitted[-1].params.logprobs == 2
    response_of(client, top_logprobs=2)
    assert engine.submitted[-1].params.logprobs is None


# -- calls


@pytest.mark.parametrize("at_a_time", [1, 2, 5, 1000])
def test_calls(client: Client, engine: Engine, at_a_time: int) -> None:
    engine.says(TWO_CALLS, at_a_time=at_a_time)
    message, first, second = response_of(client, tools=[WEATHER, TIME])["output"]
    assert message["content"][0]["text"].strip() == "Let me see."
    assert (first["name"], json.loads(first["arguments"])) == ("weather", {"city": "Oslo"})
    assert (second["name"], json.loads(second["arguments"])) == ("time", {})
    assert first["type"] == "function_call" and first["status"] == "completed"
    assert first["id"].startswith("fc_") and first["call_id"] != second["call_id"]


@pytest.mark.parametrize(
    ("choice", "kind"),
    [("auto", None), ("none", None), ("required", "grammar"), ({"type": "function", "name": "time"}, "grammar")],
)
def test_a_required_call_is_a_constraint(client: Client, engine: Engine, choice: Any, kind: str | None) -> None:
    assert client.post(PATH, {"input": "x", "tools": [WEATHER, TIME], "tool_choice": choice}).status == 200
    constraint = engine.submitted[-1].params.structured_outputs
    assert (None if constraint is None else constraint.kind) == kind
    chats = [{"type": "function", "function": {n: x for n, x in one.items() if n != "type"}} for one in (WEATHER, TIME)]
    of_chat = choice if isinstance(choice, str) else {"type": "function", "function": {"name": "time"}}
    message = {"role": "user", "content": "x"}
    chat = {"messages": [message], "tools": chats, "tool_choice": of_chat}
    assert client.post("/v1/chat/completions", chat).status == 200
    assert engine.submitted[-1].params.structured_outputs == constraint


def test_a_choice_among_some_tools(client: Client, engine: Engine) -> None:
    tools = [{"type": "function", "name": "time"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": tools}
    whole = response_of(client, tools=[WEATHER, TIME], tool_choice=choice)
    constraint = engine.submitted[-1].params.structured_outputs
    assert constraint is not None and "weather" not in constraint.text and whole["tool_choice"] == choice


# -- reasoning


@pytest.mark.parametrize("at_a_time", [1, 3, 1000])
def test_reasoning(serve: Callable[..., Client], engine: Engine, at_a_time: int) -> None:
    engine.says(f"<think>\nI may call.\n</think>\n\nYes.{CALL}", at_a_time=at_a_time)
    whole = response_of(serve(reasoning_parser="qwen3"), tools=[WEATHER], include=["message.output_text.logprobs"])
    thought, message, call = whole["output"]
    content = [{"type": "reasoning_text", "text": "I may call."}]
    drawn = {"id": thought["id"], "type": "reasoning", "status": "completed"}
    assert thought == {**drawn, "summary": [], "content": content} and thought["id"].startswith("rs_")
    (part,) = message["content"]
    assert part["text"] == "Yes." == "".join(entry["token"] for entry in part["logprobs"])
    assert call["name"] == "weather"
    size = len(engine.tokenizer.encode("I may call.", add_special_tokens=False))
    counted = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert size <= counted < size + len(engine.tokenizer.encode("<think>\n\n", add_special_tokens=False)) + 1


# -- formats


SCHEMA_FORMAT = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True, "description": None}
CHATS_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({"text": {"format": {"type": "text"}}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"text": {"format": SCHEMA_FORMAT}}, {"response_format": CHATS_FORMAT}),
        ({"structured_outputs": {"regex": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
    ],
)
def test_a_format_is_as_in_a_chat(client: Client, engine: Engine, fields: dict[str, Any], chat: dict[str, Any]) -> None:
    whole = response_of(client, **fields)
    assert whole["text"]["format"] == fields.get("text", {}).get("format", {"type": "text"})
    asked = engine.submitted[-1].params.structured_outputs
    assert (asked is None) == (not chat)
    messages = [{"role": "user", "content": "hi"}]
    assert client.post("/v1/chat/completions", {"messages": messages, **chat}).status == 200
    assert engine.submitted[-1].params.structured_outputs == asked


# -- the prompt


def test_inputs(asked: Callable[..., str]) -> None:
    assert asked("hi") == "<user>hi\n<assistant>"
    assert asked("hi", instructions="Be brief.") == "<system>Be brief.\n<user>hi\n<assistant>"
    assert asked([{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]) == (
        "<system>a\n<user>b\n<assistant>"
    )
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert asked([{"role": "user", "content": parts}]) == asked([{"role": "user", "content": "a\nb"}])
    assert asked([{"type": "message", "role": "user", "content": "x", "status": "completed", "id": "msg_1"}]) == (
        "<user>x\n<assistant>"
    )


def test_an_output_is_an_input(client: Client, engine: Engine, asked: Callable[..., str]) -> None:
    said = client.post(PATH, {"input": "hi"}).json["output"]
    user = {"role": "user", "content": "again"}
    assert asked([{"role": "user", "content": "hi"}, *said, user]) == (
        "<user>hi\n<assistant>import os\n<user>again\n<assistant>"
    )
    dumped = Response.model_validate(client.post(PATH, {"input": "hi"}).json).model_dump()["output"]
    assert asked([{"role": "user", "content": "hi"}, *dumped, user]) == engine.prompt


def test_an_incomplete_message_goes_on(asked: Callable[..., str]) -> None:
    parts = [{"type": "output_text", "text": "I am", "annotations": []}]
    begun = {"type": "message", "role": "assistant", "content": parts, "status": "incomplete", "id": "msg_1"}
    assert asked(["skip", begun][1:]).endswith("I am")


def seen(given: Any, **fields: Any) -> list[dict[str, Any]]:
    """The messages that a chat template is given."""
    body = converted("", ResponsesRequest.normal({"input": given, **fields}, Ignored()), ResponsesRequest)
    messages = chat_of(body, Ignored()).messages
    return [template_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def call(name: str, call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "id": f"fc_{name}", "call_id": call_id, "name": name, "arguments": '{"a": 1}'}


def test_what_the_assistant_says_at_once_is_one_message() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
    user, assistant, tool, last = seen(
        [
            {"role": "user", "content": "hi"},
            {**thought, "id": "rs_1", "encrypted_content": None},
            {"role": "assistant", "content": "Well"},
            call("f", "call_1"),
            call("g", "call_2"),
            {**output, "id": None},
            call("f", "call_3"),
        ]
    )
    assert user["role"] == "user" and assistant["content"] == "Well"
    assert [each["function"]["name"] for each in assistant["tool_calls"]] == ["f", "g"]
    assert assistant["tool_calls"][0]["function"]["arguments"] in ('{"a": 1}', {"a": 1})
    assert (tool["role"], tool["content"], tool["tool_call_id"]) == ("tool", "sunny", "call_1")
    assert [each["id"] for each in last["tool_calls"]] == ["call_3"]


def test_turns_of_the_assistant_stay_apart() -> None:
    said = [{"role": "assistant", "content": text} for text in ("a", "b")]
    thought = {"type": "reasoning", "summary": []}
    messages = seen([*said, call("f", "call_1"), said[0], thought, {"role": "user", "content": "x"}])
    assert [message["role"] for message in messages] == ["assistant", "assistant", "assistant", "user"]
    assert [message.get("content") or "" for message in messages] == ["a", "b", "a", "x"]


# -- parameters


def test_sampling(client: Client, engine: Engine) -> None:
    fields = {"temperature": 0.3, "top_p": 0.4, "max_output_tokens": 17, "top_k": 3, "min_p": 0.1, "seed": 5}
    more = {"repetition_penalty": 1.1, "stop": ["x"], "ignore_eos": True, "logit_bias": {"5": 1}}
    response_of(client, **fields, **more)
    params = engine.submitted[-1].params
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.3, 0.4, 17, 5)
    assert (params.top_k, params.min_p, params.stop, params.logit_bias) == (3, 0.1, ("x",), {5: 1.0})


def test_what_changes_nothing_is_allowed(client: Client) -> None:
    bare = same(response_of(client))
    for fields in (
        {"store": True},
        {"store": False, "background": False, "service_tier": "auto"},
        {"stream_options": None, "conversation": None, "prompt": None, "previous_response_id": None},
        {"include": ["reasoning.encrypted_content"], "reasoning": {}, "text": {}},
        {"tool_choice": "auto", "tools": []},
        {"model": "tiny", "prompt_cache_retention": "24h"},
        {"reasoning": {"summary": None}, "chat_template_kwargs": {"any": 1}},
    ):
        assert same(response_of(client, **fields)) == bare, fields


def test_a_limit_beyond_the_context_is_what_it_leaves(client: Client, engine: Engine) -> None:
    assert response_of(client, max_output_tokens=10_000)["max_output_tokens"] == 10_000
    assert engine.submitted[-1].params.max_tokens == 256 - len(engine.submitted[-1].tokens)


def test_a_prompt_that_is_too_long_is_truncated_where_it_may_be(client: Client, engine: Engine) -> None:
    long = "def " * 300
    error = client.post(PATH, {"input": long}).error
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert client.post(PATH, {"input": long, "truncation": "auto", "max_output_tokens": 9}).status == 200
    assert len(engine.submitted[-1].tokens) == 256 - 9


def test_tokens_of_a_prompt(client: Client, engine: Engine) -> None:
    body = {"input": [{"role": "user", "content": "hi"}], "instructions": "Be brief."}
    told = client.post(f"{PATH}/input_tokens", body).json
    client.post(PATH, body)
    assert told == {"object": "response.input_tokens", "input_tokens": len(engine.submitted[-1].tokens)}
    assert client.post(f"{PATH}/input_tokens", {**body, "tool_choice": "required"}).error["param"] == "tool_choice"


def test_variables_of_the_template(serve: Callable[..., Client], engine: Engine) -> None:
    engine.tokenizer.chat_template = "{{ reasoning_effort }} {{ tone }} {{ messages[0].content }}"
    fields = {"reasoning": {"effort": "high"}, "chat_template_kwargs": {"tone": "calm"}}
    response = response_of(serve(), **fields)
    assert engine.prompt == "high calm hi" and response["reasoning"]["effort"] == "high"


def test_efforts_of_a_model_that_knows_none(serve: Callable[..., Client]) -> None:
    client = serve(strict=True)
    assert response_of(client, reasoning={"effort": "medium"})["reasoning"]["effort"] == "medium"
    assert response_of(client, reasoning={"effort": "none"})["status"] == "completed"
    error = client.post(PATH, {"input": "x", "reasoning": {"effort": "high"}}).error
    assert (error["param"], error["code"]) == ("reasoning.effort", "unsupported_parameter")


# -- errors


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": "image"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"messages": []}, "messages"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TIME, TIME]}, "tools[1].name"),
        ({"tools": [{**TIME, "parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, None),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"speculation": {"detail": True}}, "speculation.detail"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ],
)
def test_a_bad_field_is_named(serve: Callable[..., Client], fields: dict[str, Any], param: str | None) -> None:
    answer = serve(strict=True).post(PATH, {"input": "x", **fields})
    assert answer.status == 400
    error = answer.error
    assert param is None or (error["param"] == param and error["message"].startswith(param))
    assert error["type"] == "invalid_request_error"


def test_an_error_names_fields_of_the_response_alone(client: Client) -> None:
    form = {"format": {"type": "json_object"}}
    message = client.post(PATH, {"input": "x", "text": form, "structured_outputs": {"regex": "a"}}).error["message"]
    assert "text.format" in message and "response_format" not in message
    subset = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    error = client.post(PATH, {"input": "x", "tools": [TIME], "tool_choice": subset}).error
    assert error["param"] == "tool_choice.tools[0].name" and error["message"].startswith(error["param"])
    refused = client.post(PATH, {"input": [{"role": "user", "content": "refuse"}]}).error
    assert refused["param"] == "input"
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "no JSON"}
    assert client.post(PATH, {"input": ["x", call][1:]}).error["param"] == "input"


def test_an_unknown_response_or_model_is_not_found(client: Client) -> None:
    answer = client.post(PATH, {"input": "x", "previous_response_id": "resp_1"})
    assert (answer.status, answer.error["param"]) == (400, "previous_response_id")
    assert answer.error["code"] == "previous_response_not_found"
    answer = client.post(PATH, {"input": "x", "model": "other"})
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token(client: Client, engine: Engine, stream: bool) -> None:
    engine.script = lambda _: [ParameterError("structured_outputs", "x", "less")]
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    answer = client.post(PATH, {"input": "x", "stream": stream, "text": {"format": form}})
    assert (answer.status, answer.error["param"]) == (400, "text.format")


def test_an_error_after_the_first_token(client: Client, engine: Engine) -> None:
    said = saying(engine.tokenizer, "import os")
    engine.script = lambda submitted: [*list(said(submitted))[:2], EngineError("a step broke")]
    *events, error, failed = events_of(client.post(PATH, {"input": "x", "stream": True}))
    assert error["type"] == "error" and error["message"] == "a step broke"
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["message"] == "a step broke"
    text = "".join(event.get("delta", "") for event in events)
    assert failed["response"]["output"][0]["content"][0]["text"] == text == "import"
    assert failed["response"]["output"][0]["status"] == "incomplete"
