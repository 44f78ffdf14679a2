"""/v1/messages over outputs that are written down: what the official client makes of them, streamed or not."""

import asyncio
import json
import logging
from collections.abc import Callable
from copy import copy
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message, RawMessageStreamEvent, ToolUseBlock
from anthropic.types.beta import BetaMessage, BetaMessageTokensCount
from anthropic.types.shared import ErrorResponse
from http_double import IDENTITY, Client, Engine, Health, Submitted, Update, application, saying, unready
from msgspec.structs import replace
from pydantic import BaseModel, TypeAdapter

from pilotfish.errors import EngineError
from pilotfish.wire.serving import Finish

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
#: Writes everything that it is given, the tools as Hermes does.
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c | tojson }}</tool_call>{% endfor %}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKS = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
HI = {"role": "user", "content": "hi"}
WEATHER = {
    "name": "weather",
    "description": "Of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME = {"name": "time", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bergen ☃"}}\n</tool_call>'
ROOMY = replace(IDENTITY, context=1024, longest=1024)
LENGTH = Finish("length", None)
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(params=["whole", "streamed"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Says = Callable[..., "Answering"]


@pytest.fixture
def says(tokenizer: Any) -> Says:
    """A server whose model says a text."""

    def made(
        *texts: str, template: str = TEMPLATE, finish: Finish | None = None, at_a_time: int = 2, **config: Any
    ) -> Answering:
        own = copy(tokenizer)
        own.chat_template = template
        script = saying(own, *texts, finish=finish, at_a_time=at_a_time)
        return Answering(Engine(own, script, health=Health(identity=ROOMY)), **config)

    return made


class Answering:
    """A server, and the official client of it."""

    def __init__(self, engine: Engine, **config: Any) -> None:
        self.engine, self.app = engine, application(engine, **config)
        self.client = Client(self.app)

    def create(self, way: str = "whole", **fields: Any) -> Message:
        return asyncio.run(self._ask(way, "create", fields))

    def parse(self, way: str, **fields: Any) -> Any:
        """The output as the client's `parse` reads it."""
        return asyncio.run(self._ask(way, "parse", fields)).parsed_output

    @property
    def prompt(self) -> str:
        return self.engine.prompt

    @property
    def submitted(self) -> Submitted:
        return self.engine.submitted[-1]

    async def _ask(self, way: str, method: str, fields: dict[str, Any]) -> Any:
        fields = {"model": "tiny", "max_tokens": 99, "messages": [HI], **fields}
        async with self._official() as client:
            if way == "whole":
                return await getattr(client.messages, method)(**fields)
            async with client.messages.stream(**fields) as stream:
                return await stream.get_final_message()

    def _official(self) -> AsyncAnthropic:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app), base_url="http://server")
        return AsyncAnthropic(
            api_key="none", base_url="http://server", max_retries=0, http_client=http, _strict_response_validation=True
        )


def blocks(message: Message) -> list[Any]:
    """What the message holds, without the ids of calls, which have a form of their own."""
    found = [block.model_dump(exclude_none=True) for block in message.content]
    ids = [block.pop("id") for block in found if block["type"] == "tool_use"]
    assert all(given.startswith("toolu_") for given in ids) and len(set(ids)) == len(ids)
    return found


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def from_user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*content]}]}


def called(city: str = "Bergen ☃") -> dict[str, Any]:
    return {"type": "tool_use", "name": "weather", "input": {"city": city}}


def test_a_text(says: Says, way: str) -> None:
    server = says("Hello ☃ there")
    message = server.create(way)
    assert blocks(message) == [text("Hello ☃ there")]
    assert (message.role, message.model, message.type) == ("assistant", "tiny", "message")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_")
    tokens = len(server.engine.tokenizer.encode("Hello ☃ there", add_special_tokens=False))
    usage = message.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(server.submitted.tokens), tokens)
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (0, 0)
    assert usage.output_tokens_details is not None and usage.output_tokens_details.thinking_tokens == 0


@pytest.mark.parametrize(
    ("finish", "reason", "sequence"),
    [
        (Finish("stop", None), "end_turn", None),
        (Finish("stop", 7), "end_turn", None),  # a stop token
        (Finish("stop", "END"), "stop_sequence", "END"),
        (LENGTH, "max_tokens", None),
    ],
)
def test_why_it_ended(says: Says, way: str, finish: Finish, reason: str, sequence: str | None) -> None:
    message = says("Hello", finish=finish).create(way, stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


def test_a_limit_beyond_the_context(says: Says, way: str) -> None:
    server = says("Hello", finish=LENGTH)
    message = server.create(way, max_tokens=2000)
    assert message.stop_reason == "model_context_window_exceeded"
    assert server.submitted.params.max_tokens == ROOMY.longest - len(server.submitted.tokens)


def test_only_the_prompt(says: Says, way: str) -> None:
    message = says("Hello").create(way, max_tokens=0)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)


@pytest.mark.parametrize("at_a_time", [1, 2, 7, 100])
def test_a_call(says: Says, way: str, at_a_time: int) -> None:
    message = says(f"Let me see. {CALL}", at_a_time=at_a_time).create(way, tools=[WEATHER])
    assert blocks(message) == [text("Let me see."), called()] or blocks(message) == [text("Let me see. "), called()]
    assert message.stop_reason == "tool_use"


def test_a_call_without_tools_is_text(says: Says, way: str) -> None:
    for fields in ({}, {"tools": [WEATHER], "tool_choice": {"type": "none"}}):
        message = says(CALL).create(way, **fields)
        assert blocks(message) == [text(CALL)] and message.stop_reason == "end_turn"


def after_a_call(server: Answering, way: str) -> tuple[ToolUseBlock, list[Any]]:
    """What the client got, and turns with it as it is and with a result."""
    message = server.create(way, tools=[WEATHER])
    (use,) = message.content
    assert isinstance(use, ToolUseBlock)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain", "is_error": False}
    return use, [HI, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]


def test_the_loop_of_a_tool(says: Says, way: str) -> None:
    use, turns = after_a_call(says(CALL), way)
    server = says("It rains.")
    assert blocks(server.create(way, tools=[WEATHER], messages=turns)) == [text("It rains.")]
    function = '{"name": "weather", "arguments": {"city": "Bergen ☃"}}'
    given = f'{{"id": "{use.id.removeprefix("toolu_")}", "type": "function", "function": {function}}}'
    assert server.prompt.endswith(f"<tool_call>{given}</tool_call>|<tool>rain|<assistant>")


#: As Mistral's, it takes no ids but of its own kind.
MISTRAL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


def test_the_loop_of_a_tool_with_ids_of_the_templates_kind(says: Says, way: str) -> None:
    server = says('[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', template=MISTRAL)
    _, turns = after_a_call(server, way)
    server.create(way, tools=[WEATHER], messages=turns)
    assert server.prompt.endswith('[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}<tool>rain')


def test_thoughts(says: Says, way: str) -> None:
    server = says("<think>\nhm, so\n</think>\n\nYes.", template=THINKS)
    message = server.create(way)
    assert blocks(message) == [{"type": "thinking", "thinking": "hm, so", "signature": ""}, text("Yes.")]
    details, tokens = message.usage.output_tokens_details, server.engine.tokenizer.tokenize("<think>\nhm, so")
    assert details is not None and details.thinking_tokens == len(tokens)  # with the mark that begins it
    again = server.create(way, messages=[HI, {"role": "assistant", "content": message.content}, HI])
    assert "hm, so" in server.prompt and again.stop_reason == "end_turn"


def test_a_forced_tool_has_a_grammar(says: Says, way: str) -> None:
    server = says(CALL)
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}):
        assert server.create(way, tools=[WEATHER, TIME], tool_choice=choice).stop_reason == "tool_use"
        constraint = server.submitted.params.structured_outputs
        assert constraint is not None and constraint.kind == "grammar" and "weather" in constraint.text
        assert ("time" in constraint.text) == (choice["type"] == "any")


class Place(BaseModel):
    city: str


def test_a_structured_output(says: Says, way: str) -> None:
    server = says('{"city": "Oslo"}')
    assert server.parse(way, output_format=Place) == Place(city="Oslo")
    constraint = server.submitted.params.structured_outputs
    assert constraint is not None and constraint.kind == "json_schema" and '"city"' in constraint.text


def test_a_structured_output_does_not_go_on(says: Says, way: str) -> None:
    turns = [HI, {"role": "assistant", "content": "{"}]
    with pytest.raises(
        anthropic.BadRequestError, match=r"output_config\.format: it is not allowed where the last turn"
    ):
        says("}").parse(way, messages=turns, output_format=Place)


def test_the_beta_client(says: Says) -> None:
    async def asked() -> tuple[BetaMessage, BetaMessage, BetaMessageTokensCount]:
        async with server._official() as client:
            given: dict[str, Any] = {"model": "tiny", "messages": [HI], "tools": [WEATHER], "betas": ["x-2025-01-01"]}
            whole = await client.beta.messages.create(**given, max_tokens=9)
            async with client.beta.messages.stream(**given, max_tokens=9) as stream:
                streamed = await stream.get_final_message()
            return whole, streamed, await client.beta.messages.count_tokens(**given)

    server = says(f"Well, {CALL}")
    whole, streamed, count = asyncio.run(asked())
    for message in (whole, streamed):
        words, use = message.content
        assert words.type == "text" and use.type == "tool_use" and use.input == {"city": "Bergen ☃"}
    assert count.input_tokens == whole.usage.input_tokens == len(server.submitted.tokens)


def test_the_cached_part_of_a_prompt_counts_apart(says: Says, way: str) -> None:
    server = says("x")
    script = server.engine.script

    def cached(submitted: Submitted) -> list[Any]:
        first, *others = script(submitted)
        assert isinstance(first, Update)
        first.delta.cached.update({"device": 3, "host": 1})
        return [first, *others]

    server.engine.script = cached
    usage = server.create(way).usage
    assert usage.cache_read_input_tokens == 4
    assert usage.input_tokens + 4 == len(server.submitted.tokens)


# -- bytes


def test_the_events_of_a_stream(says: Says) -> None:
    body = {"model": "tiny", "max_tokens": 9, "messages": [HI], "stream": True}
    answer = says("ab", at_a_time=1).client.post(PATH, body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    parts = answer.body.decode().split("\n\n")
    assert parts.pop() == ""
    events = []
    for part in parts:
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        EVENT.validate_python(events[-1])
    start, begun, *deltas, stopped, ended, last = events
    assert start["message"]["content"] == [] and start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["output_tokens"] == 0
    assert begun == {"type": "content_block_start", "index": 0, "content_block": text("")}
    assert "".join(event["delta"]["text"] for event in deltas) == "ab"
    assert stopped == {"type": "content_block_stop", "index": 0}
    assert ended["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert ended["usage"]["output_tokens"] > 0 and last == {"type": "message_stop"}


def test_metrics_are_told_where_asked_for(says: Says) -> None:
    body = {"model": "tiny", "max_tokens": 9, "messages": [HI], "speculation": {"metrics": "summary"}}
    server = says("Hello there")
    assert server.client.post(PATH, body).json["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert '"num_spec_steps"' in server.client.post(PATH, {**body, "stream": True}).body.decode()
    assert "metrics" not in server.client.post(PATH, {**body, "speculation": None}).json


# -- errors


IMAGE = {"type": "image"}
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": [HI]}
#: Fields, and how the message of the error begins.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model: it is missing"),
    ({"messages": None}, "messages: it is missing"),
    ({"max_tokens": None}, "max_tokens: it is missing"),
    ({"max_tokens": -1}, "max_tokens: -1 is not allowed; expected an integer of at least 1"),
    ({"messages": []}, "messages: [] is not allowed; expected a list of at least one message"),
    ({"messages": [{**HI, "role": "tool"}]}, "messages[0].role: 'tool' is not allowed; expected user, assistant or"),
    (from_user({"text": "x"}), "messages[0].content[0].type: it is missing"),
    (from_user({"type": ["text"], "text": "x"}), "messages[0].content[0].type: ['text'] is not allowed; expected text"),
    (
        from_user(text("x"), IMAGE),
        "messages[0].content[1].type: 'image' is not allowed; expected text, thinking, redacted_thinking, tool_use or",
    ),
    (
        from_user({"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}),
        "messages[0].content[0].content[0].type: 'image' is not allowed; expected text",
    ),
    ({"system": [{"type": "image"}]}, "system[0].type: 'image' is not allowed; expected text"),
    ({"stop_sequences": [""]}, "stop_sequences: "),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences: 17 entries are not allowed"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema: it is missing"),
    ({"tools": [{**TIME, "name": "a b"}]}, "tools[0].name: 'a b' is not allowed; expected 1 to 128 letters"),
    ({"tools": [TIME, TIME]}, "tools[1].name: 'time' is not allowed"),
    ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type: 'array' is not"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: it is not allowed without tools"),
    (
        {"tools": [TIME], "tool_choice": {"type": "f"}},
        "tool_choice.type: 'f' is not allowed; expected auto, any, tool or",
    ),
    ({"tools": [TIME], "tool_choice": {"type": "tool"}}, "tool_choice.name: it is missing"),
    ({"tools": [TIME], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name: 'g' is not allowed"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens: 5 is not allowed"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type: 'between_tools' is not allowed"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type: 'xml' is not allowed"),
    ({"max_completion_tokens": 3}, "max_completion_tokens: there is no such parameter"),
    ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages: 100000 characters are more than"),
    ({"messages": [{"role": "user", "content": "☃" * 2000}]}, "messages: 4014 tokens are not allowed"),
]


#: Those that a server that is strict refuses, and others leave out.
STRICT: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{**HI, "name": "me"}]}, "messages[0].name: there is no such parameter"),
    (from_user({**text("x"), "font": 1}), "messages[0].content[0].font: there is"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: 'web_search_20250305' is not"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.type: 'enabled' is not allowed"),
    ({"output_config": {"effort": "low"}}, "output_config.effort: 'low' is not supported with this model"),
    ({"metadata": {"user": "me"}}, "metadata.user: there is no such parameter"),
    ({"mcp_servers": []}, "mcp_servers: there is no such parameter"),
    ({"speculation": {"detail": True}}, "speculation.detail: "),
]


@pytest.mark.parametrize(("fields", "message"), [*BAD, *STRICT], ids=[message for _, message in [*BAD, *STRICT]])
def test_a_body_that_cannot_be(says: Says, fields: dict[str, Any], message: str) -> None:
    server = says("x", strict=True)
    answer = server.client.post(PATH, {**BODY, **fields}, x_request_id="req-7")
    told = ErrorResponse.model_validate(answer.json)
    assert answer.status == 400 and told.error.type == "invalid_request_error" and told.request_id == "req-7"
    assert told.error.message.startswith(message) and "\n" not in told.error.message
    assert not server.engine.submitted


def test_the_log_names_the_field_as_the_body_does(says: Says, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pilotfish.access")
    assert says("x").client.post(PATH, {**BODY, "stop_sequences": [""]}).status == 400
    (line,) = (vars(record)["fields"] for record in caplog.records if record.name == "pilotfish.access")
    assert line["param"] == "stop_sequences" and line["error"].startswith("stop_sequences: ") and line["status"] == 400


def test_an_error_of_the_official_client(says: Says, way: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"temperature: 'hot' is not allowed") as bad:
        says("x").create(way, extra_body={"temperature": "hot"})
    assert bad.value.type == "invalid_request_error" and bad.value.request_id is not None
    with pytest.raises(anthropic.NotFoundError, match="model: 'claude' is not served") as unknown:
        says("x").create(way, model="claude")
    assert unknown.value.type == "not_found_error"


def test_a_server_that_is_not_ready_and_one_that_fails(says: Says, way: str) -> None:
    server = says("x")
    server.engine.health = unready("the target is loading")
    with pytest.raises(anthropic.OverloadedError, match="the target is loading") as raised:
        server.create(way)
    assert raised.value.type == "overloaded_error" and "retry-after" in raised.value.response.headers
    server.engine.health = Health(identity=ROOMY)
    server.engine.script = lambda _: [EngineError("the target has ended")]
    with pytest.raises(anthropic.InternalServerError, match="the target has ended") as raised:
        server.create(way)
    assert raised.value.status_code == 500 and raised.value.type == "api_error"


def test_a_stream_that_breaks(says: Says) -> None:
    server = says("Hello there", at_a_time=1)
    script = server.engine.script
    server.engine.script = lambda submitted: [*list(script(submitted))[:2], EngineError("the target has ended")]
    with pytest.raises(anthropic.APIStatusError, match="the target has ended") as raised:
        server.create("streamed")
    assert raised.value.type == "api_error"
    answer = server.client.post(PATH, {**BODY, "stream": True}, x_request_id="req-7")
    *_, event, end = answer.body.decode().split("\n\n")
    name, data = event.split("\n")
    told = ErrorResponse.model_validate(json.loads(data.removeprefix("data: ")))
    assert answer.status == 200 and name == "event: error" and end == "" and told.request_id == "req-7"


@pytest.mark.parametrize(
    ("path", "raw", "headers", "status", "kind"),
    [
        (PATH, b"{", {}, 400, "invalid_request_error"),
        (PATH, b"[]", {}, 400, "invalid_request_error"),
        (PATH, b"{}", {"content_type": "text/plain"}, 415, "invalid_request_error"),
        (PATH, b" " * (1 << 17), {}, 413, "request_too_large"),
        (COUNT, b" " * (1 << 17), {}, 413, "request_too_large"),
        (COUNT, b'{"model": "other", "messages": []}', {}, 404, "not_found_error"),
        (f"{PATH}/batches", b"{}", {}, 404, "not_found_error"),
    ],
)
def test_errors_of_http(tokenizer: Any, path: str, raw: bytes, headers: dict[str, str], status: int, kind: str) -> None:
    client = Client(application(Engine(tokenizer, saying(tokenizer, "x")), max_body_bytes=1 << 16))
    answer = client.post(path, raw=raw, **headers)
    assert (answer.status, answer.json["type"], answer.json["error"]["type"]) == (status, "error", kind)
    assert client.post("/v1/chat/completions", raw=raw, **headers).json.keys() == {"error"}


def test_tokens_are_counted_with_the_same_checks(says: Says) -> None:
    server = says("x")
    body = {"model": "tiny", **from_user(IMAGE)}
    answer = server.client.post(COUNT, body)
    assert answer.status == 400 and answer.json["error"]["message"].startswith("messages[0].content[0].type: 'image'")
    assert server.client.post(COUNT, {**BODY}).json["error"]["message"].startswith("max_tokens: there is no such")
