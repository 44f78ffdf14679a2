"""Responses through the official client: one answer to a request, whatever the mode and the way it is sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.resources.responses import Responses
from openai_cases import MODEL
from openai_fleet import SECRETS, Fleet
from response_cases import RESPONSES, TOOLS, TURNS, Clock, Reading, Weather

#: Fields that the client knows; all others are ours, and go into `extra_body`.
THEIRS = signature(Responses.create).parameters.keys()
#: Drawn, or dependent on the time and on what was asked before, or the client's own.
DRAWN = {"id", "call_id", "created_at", "completed_at", "cached_tokens", "metrics", "parsed_arguments"}


def arguments(name: str, **changes: Any) -> dict[str, Any]:
    """Of the client's `create`."""
    asked = {"model": MODEL, "seed": 7, "input": "Say hello.", "max_output_tokens": 24, **RESPONSES[name], **changes}
    ours = {field: asked.pop(field) for field in asked.keys() - THEIRS}
    return {**asked, "extra_body": ours}


def same(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: same(item) for name, item in value.items() if name not in DRAWN and item is not None}
    return [same(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def answers(fleet: Fleet) -> Callable[[str, str, bool], Any]:
    """Answers of a mode to a case, whole or streamed."""

    @cache
    def answer(mode: str, name: str, stream: bool) -> Any:
        client = fleet.client(mode, strict=True)
        if not stream:
            return same(client.responses.create(**arguments(name)).to_dict())
        with client.responses.create(**arguments(name), stream=True) as events:
            *_, last = events
        assert last.type in ("response.completed", "response.incomplete")
        return same(last.response.to_dict())

    return answer


@pytest.mark.parametrize("name", RESPONSES)
def test_an_answer(answers: Any, mode: str, name: str) -> None:
    expected = answers("off", name, False)
    assert answers(mode, name, True) == expected
    usage = expected["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    cut = expected["status"] == "incomplete"
    limit = RESPONSES[name].get("max_output_tokens", 24)
    assert usage["output_tokens"] == limit if cut else usage["output_tokens"] <= limit
    assert expected["output"][-1]["status"] == expected["status"]


def test_all_at_once(fleet: Fleet, answers: Any, mode: str) -> None:
    async def gather() -> list[Any]:
        async with AsyncOpenAI(**fleet.options(mode)) as client:
            return await asyncio.gather(*(client.responses.create(**arguments(name)) for name in RESPONSES))

    for name, response in zip(RESPONSES, asyncio.run(gather()), strict=True):
        assert same(response.to_dict()) == answers("off", name, False)


# -- streams

#: What each of these ends.
BEGUN = {
    "response.output_item.done": "response.output_item.added",
    "response.content_part.done": "response.content_part.added",
    "response.output_text.done": "response.output_text.delta",
    "response.reasoning_text.done": "response.reasoning_text.delta",
    "response.function_call_arguments.done": "response.function_call_arguments.delta",
    "response.completed": "response.created",
    "response.incomplete": "response.created",
}


@pytest.mark.parametrize("name", ["sampled", "tool-required", "tool-named", "schema", "logprobs", "object"])
def test_the_events_of_a_stream(fleet: Fleet, name: str) -> None:
    with fleet.client("async", strict=True).responses.create(**arguments(name), stream=True) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    under_way: list[str] = []
    for event in events:
        if event.type in BEGUN:
            assert under_way.pop() == BEGUN[event.type]
        elif event.type.endswith((".added", ".created", ".delta")) and under_way[-1:] != [event.type]:
            under_way.append(event.type)
    assert not under_way
    response = events[-1].response
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert response.output_text == text
    arguments_told = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert "".join(item.arguments for item in response.output if item.type == "function_call") == arguments_told


def test_the_bytes_of_a_stream(fleet: Fleet) -> None:
    body = {"model": MODEL, "input": "x", "max_output_tokens": 4, "stream": True}
    status, text = fleet.servers["off"].post("/v1/responses", body, authorization=f"Bearer {SECRETS['main']}")
    *blocks, rest = text.split("\n\n")
    assert status == 200 and rest == ""
    assert all(block.startswith("event: response.") and "\ndata: {" in block for block in blocks)


@pytest.mark.parametrize("name", ["greedy", "tool-required-once", "logprobs"])
def test_the_clients_own_stream(fleet: Fleet, answers: Any, name: str) -> None:
    """It puts the response together from the events, and gives a final one only where it is complete."""
    told = answers("off", name, False)
    with fleet.client("async").responses.stream(**arguments(name)) as stream:
        events = list(stream)
    assert same(events[-1].response.to_dict()) == told
    texts = [event.snapshot for event in events if event.type == "response.output_text.delta"]
    assert not texts or texts[-1] == told["output"][0]["content"][0]["text"]


def test_the_clients_own_stream_without_waiting(fleet: Fleet, answers: Any) -> None:
    async def ask() -> Any:
        client = AsyncOpenAI(**fleet.options("async"))
        async with client, client.responses.stream(**arguments("schema")) as stream:
            return await stream.get_final_response()

    assert same(asyncio.run(ask()).to_dict()) == answers("off", "schema", False)


# -- formats and calls


def test_a_parsed_answer(fleet: Fleet, mode: str) -> None:
    asked = {**arguments("sampled"), "max_output_tokens": 240}
    parsed = fleet.client(mode).responses.parse(**asked, text_format=Reading)
    assert parsed.status == "completed" and isinstance(parsed.output_parsed, Reading)
    with fleet.client(mode).responses.stream(**asked, text_format=Reading) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_an_answer_keeps_to_its_format(answers: Any) -> None:
    schema = json.loads(answers("off", "schema", False)["output"][0]["content"][0]["text"])
    assert schema["a"] in (1, 2) and isinstance(schema["b"], bool)
    assert answers("off", "object", False)["output"][0]["content"][0]["text"].startswith("{")
    text = answers("off", "regex", False)["output"][0]["content"][0]["text"]
    assert len(text) == 8 and set(text[0::2]) <= {"a", "c"}


def test_required_calls(answers: Any) -> None:
    for name in ("tool-required-once", "tool-named", "tool-required"):
        output = answers("off", name, False)["output"]
        complete = [item for item in output if item["status"] == "completed"]
        assert {item["type"] for item in output} == {"function_call"} and complete
        for item in complete:
            {"Weather": Weather, "Clock": Clock}[item["name"]].model_validate_json(item["arguments"])
    assert len(answers("off", "tool-required-once", False)["output"]) == 1
    assert answers("off", "tool-named", False)["output"][0]["name"] == "Clock"


def test_nothing_is_called_where_nothing_may_be(answers: Any) -> None:
    assert [item["type"] for item in answers("off", "tools-none", False)["output"]] == ["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_calls(fleet: Fleet, mode: str, stream: bool) -> None:
    """Ask, call what is asked for, tell the result: the client's items go back as they came."""
    client = fleet.client(mode)
    items: list[Any] = [{"role": "user", "content": "What time is it in Oslo?"}]
    asked = {"model": MODEL, "tools": [openai.pydantic_function_tool(Clock)], "temperature": 0.8}
    asked |= {"max_output_tokens": 160, "extra_body": {"seed": 7}, "parallel_tool_calls": False}

    def respond(choice: Any) -> Any:
        if not stream:
            return client.responses.parse(**asked, input=items, tool_choice=choice)
        with client.responses.stream(**asked, input=items, tool_choice=choice) as events:
            return events.get_final_response()

    called = respond("required")
    (call,) = called.output
    assert isinstance(call.parsed_arguments, Clock) and call.call_id.startswith("call_")
    items += called.output
    items.append(
        {"type": "function_call_output", "call_id": call.call_id, "output": f"noon in {call.parsed_arguments.city}"}
    )
    asked["max_output_tokens"] = 24
    answered = client.responses.create(**{**asked, "tools": TOOLS}, input=items, tool_choice="none")
    assert [item.type for item in answered.output] == ["message"]
    assert answered.usage.input_tokens > called.usage.input_tokens
    items += answered.output  # the message, though it is incomplete: a turn of the user's follows
    items.append({"role": "user", "content": "And in Rome?"})
    assert (
        client.responses.create(**{**asked, "tools": TOOLS}, input=items).usage.input_tokens
        > answered.usage.input_tokens
    )


def test_turns(fleet: Fleet, answers: Any) -> None:
    """A conversation by items is that of a chat by messages."""
    chat = fleet.client("off").chat.completions.create(
        model=MODEL,
        messages=[*TURNS[:3], {"role": "user", "content": "Once\nmore: ☃"}],
        max_completion_tokens=24,
        temperature=0.8,
        seed=7,
    )
    told = answers("off", "turns", False)
    assert told["output"][0]["content"][0]["text"] == chat.choices[0].message.content
    assert told["usage"]["input_tokens"] == chat.usage.prompt_tokens
    assert answers("off", "turns-with-instructions", False)["output"] == told["output"]


def test_output_text_is_an_input(fleet: Fleet) -> None:
    client = fleet.client("off")
    first = client.responses.create(**arguments("sampled"))
    turns = [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": first.output_text}]
    again = {"role": "user", "content": "Again."}
    by_text = client.responses.create(**{**arguments("sampled"), "input": [*turns, again]})
    by_items = client.responses.create(**{**arguments("sampled"), "input": [turns[0], *first.output, again]})
    assert by_items.output_text == by_text.output_text and by_items.usage.input_tokens == by_text.usage.input_tokens


def test_log_probabilities(answers: Any) -> None:
    for name, most in (("logprobs", 0), ("logprobs-greedy", 4)):
        (part,) = answers("off", name, False)["output"][0]["content"]
        said = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"])
        assert said.decode(errors="replace") == part["text"]
        assert all(len(entry["top_logprobs"]) == most for entry in part["logprobs"])


# -- errors


@pytest.mark.parametrize(
    ("changes", "kind", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"input": []}, openai.BadRequestError, "input"),
        ({"input": "def f():\n" * 4000}, openai.BadRequestError, "input"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_output_tokens": -1}, openai.BadRequestError, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, openai.BadRequestError, "previous_response_id"),
        ({"background": True}, openai.BadRequestError, "background"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "tools[0].name"),
        (
            {"tool_choice": {"type": "function", "name": "f"}, "tools": TOOLS},
            openai.BadRequestError,
            "tool_choice.name",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, openai.BadRequestError, "text.format.schema"),
        ({"max_tokens": 1}, openai.BadRequestError, "max_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error(
    fleet: Fleet, changes: dict[str, Any], kind: type[openai.APIStatusError], param: str, stream: bool
) -> None:
    asked = {**arguments("greedy", **changes), "stream": stream}
    with pytest.raises(kind) as caught:
        fleet.client("async").responses.create(**asked)
    assert caught.value.param == param and caught.value.type == "invalid_request_error"
    assert str(caught.value.body["message"]).startswith(param)  # type: ignore[index]


def test_a_schema_that_cannot_be_kept(fleet: Fleet) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {"a": {"$ref": "#/none"}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        fleet.client("off").responses.create(**arguments("greedy", text={"format": form}))
    assert caught.value.param is not None and caught.value.param.startswith("text.format")


def test_a_key_that_nobody_knows(fleet: Fleet) -> None:
    with pytest.raises(openai.AuthenticationError):
        fleet.client("off", "unknown").responses.create(**arguments("greedy"))
