"""Anthropic's official client gets one answer from real servers, whatever the mode, the load, and how it is sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import cache
from inspect import signature
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from anthropic.resources.messages import Messages
from anthropic.types import Message
from jsonschema_rs import Draft202012Validator
from messages_cases import CASES, FORMAT, HI, PLACE, SWITCH, TOOLS, WEATHER
from openai_cases import MODEL, case
from openai_fleet import MODES, SECRETS, Fleet
from pydantic import BaseModel
from sizes import sized

#: Fields that the client knows; all others go into `extra_body`.
THEIRS = signature(Messages.create).parameters.keys()
SCHEMAS = {tool["name"]: Draft202012Validator(tool["input_schema"]) for tool in (WEATHER, SWITCH)}
each_case = pytest.mark.parametrize("name", CASES)


def arguments(**asked: Any) -> dict[str, Any]:
    """Of the client's `create`."""
    fields = {"model": MODEL, "max_tokens": 24, "messages": [HI], **asked}
    ours = {name: fields.pop(name) for name in fields.keys() - THEIRS}
    return {**fields, "extra_body": ours}


def held(message: Message) -> dict[str, Any]:
    """All that equal requests have in common."""
    fields = message.model_dump(exclude={"id", "metrics"}, exclude_none=True)
    usage = fields.pop("usage")
    for block in fields["content"]:
        assert block.pop("id", "toolu_").startswith("toolu_")
    assert usage["cache_creation_input_tokens"] == 0
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    fields = {"stop_sequence": None, **fields}
    return {**fields, "prompt": prompt, "output": usage["output_tokens"]}


class Fleeting:
    """What each server of a fleet has answered to the cases."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.client = cache(self._client)
        self.whole = cache(lambda mode, name: held(self.client(mode).messages.create(**arguments(**CASES[name]))))
        self.at_once = cache(lambda mode: asyncio.run(self._at_once(mode)))

    def options(self, mode: str, key: str = "main") -> dict[str, Any]:
        url = self.fleet.servers[mode].url
        return {"base_url": url, "api_key": SECRETS.get(key, key), "max_retries": 0, "timeout": 60}

    def _client(self, mode: str, key: str = "main") -> Anthropic:
        return Anthropic(**self.options(mode, key), _strict_response_validation=True)

    async def _at_once(self, mode: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
        """All cases, each whole and as a stream, sent together."""
        async with AsyncAnthropic(**self.options(mode), _strict_response_validation=True) as client:
            whole = asyncio.gather(*(client.messages.create(**arguments(**asked)) for asked in CASES.values()))
            streams = asyncio.gather(*(_streamed(client, asked) for asked in CASES.values()))
            pairs = zip(CASES, await whole, await streams, strict=True)
            return {name: (held(one), held(other)) for name, one, other in pairs}


async def _streamed(client: AsyncAnthropic, asked: dict[str, Any]) -> Message:
    async with client.messages.stream(**arguments(**asked)) as stream:
        return await stream.get_final_message()


@pytest.fixture(scope="module")
def answers(fleet: Fleet) -> Iterator[Fleeting]:
    made = Fleeting(fleet)
    yield made
    for mode in MODES:
        made.client(mode).close()


@each_case
def test_whole(answers: Fleeting, name: str) -> None:
    """Checks that every answer passes."""
    message, asked = answers.whole("off", name), CASES[name]
    most = asked.get("max_tokens", 24)
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
    assert message["stop_reason"] in ("end_turn", "max_tokens", "tool_use") and message["stop_sequence"] is None
    assert message["output"] == most if message["stop_reason"] == "max_tokens" else message["output"] < most
    kinds = [block["type"] for block in message["content"]]
    assert ("tool_use" in kinds) == (asked.get("tool_choice", {}).get("type") in ("any", "tool"))
    if "tool_use" not in kinds:
        assert kinds == (["text"] if most else [])


@each_case
def test_among_all_others(answers: Fleeting, mode: str, name: str) -> None:
    whole, streamed = answers.at_once(mode)[name]
    assert whole == streamed == answers.whole("off", name)


FORCED = [name for name in CASES if name.startswith(("tools-any", "tool-named"))]


@pytest.mark.parametrize("name", FORCED)
def test_forced_calls_are_what_their_schemas_say(answers: Fleeting, name: str) -> None:
    asked, message = CASES[name], answers.whole("off", name)
    calls = message["content"]
    complete = calls if message["stop_reason"] == "tool_use" else calls[:-1]
    assert complete
    for call in complete:
        SCHEMAS[call["name"]].validate(call["input"])
    if asked["tool_choice"].get("name"):
        assert [call["name"] for call in calls] == [asked["tool_choice"]["name"]]
    if asked["tool_choice"].get("disable_parallel_tool_use"):
        assert len(calls) == 1


def test_the_text_is_that_of_a_chat(answers: Fleeting) -> None:
    """Seed, prompt and parameters are equal, and so is the output."""
    for name in ("greedy", "sampled", "sampled-long"):
        (block,) = answers.whole("off", name)["content"]
        assert block["text"] == answers.fleet.whole("async", case(name, chat=True)).choices[0].text


def test_a_call_that_is_cut(answers: Fleeting) -> None:
    message = answers.whole("off", "tool-cut")
    (call,) = message["content"]
    assert message["stop_reason"] == "max_tokens" and call["input"].keys() < {"city", "days"}


def test_a_call_is_cut_in_the_same_way_streamed_or_not(answers: Fleeting, mode: str) -> None:
    client, asked = answers.client(mode), CASES["tool-cut"]
    complete = answers.whole("off", "tool-named")["output"]
    for most in range(1, complete + 1, sized(9, 3)):
        fields = arguments(**{**asked, "max_tokens": most})
        with client.messages.stream(**fields) as stream:
            assert held(stream.get_final_message()) == held(client.messages.create(**fields))


@pytest.mark.parametrize("name", ["json", "json-greedy"])
def test_structured_outputs_are_what_their_schema_says(answers: Fleeting, name: str) -> None:
    message = answers.whole("off", name)
    assert message["stop_reason"] == "end_turn"
    Draft202012Validator(PLACE).validate(json.loads(message["content"][0]["text"]))


class Size(BaseModel):
    large: bool
    steps: list[bool] = []


def test_parse(answers: Fleeting, mode: str) -> None:
    asked = arguments(max_tokens=200, temperature=0)
    whole = answers.client(mode).messages.parse(**asked, output_format=Size).parsed_output
    with answers.client(mode).messages.stream(**asked, output_format=Size) as stream:
        streamed = stream.get_final_message().parsed_output
    assert isinstance(whole, Size) and whole == streamed


def test_stop_sequences(answers: Fleeting, mode: str) -> None:
    client, asked = answers.client(mode), CASES["sampled-long"]
    text = client.messages.create(**arguments(**asked)).content[0].text  # type: ignore[union-attr]
    at = next(i for i in range(len(text) // 2, len(text) - 3) if "\ufffd" not in text[i : i + 3])
    stop = text[at : at + 3]
    asked = arguments(**asked, stop_sequences=["never, never", stop])
    message = client.messages.create(**asked)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    before = text[: text.index(stop)]
    assert [block.text for block in message.content] == ([before] if before else [])  # type: ignore[union-attr]
    with client.messages.stream(**asked) as stream:
        pieces = "".join(stream.text_stream)
        assert held(stream.get_final_message()) == held(message) and pieces == before


def test_the_loop_of_a_tool(answers: Fleeting, mode: str) -> None:
    """Call, result, answer, twice."""
    client, messages = answers.client(mode), [HI]
    for _ in range(2):
        asked = arguments(**TOOLS, messages=messages, tool_choice={"type": "any"}, max_tokens=400, temperature=0)
        message = client.messages.create(**asked)
        calls = [block for block in message.content if block.type == "tool_use"]
        assert calls and len({call.id for call in calls}) == len(calls)
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "done"} for call in calls]
        messages = [*messages, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        if message.stop_reason != "tool_use":
            break
    answer = client.messages.create(**arguments(**TOOLS, messages=messages, temperature=0))
    assert answer.stop_reason in ("end_turn", "max_tokens")


def test_tokens_are_counted(answers: Fleeting, mode: str) -> None:
    for name in ("sampled", "system", "turns", "tool-result", "tools-any"):
        known = {"messages", "system", "tools", "tool_choice"}
        asked = {field: value for field, value in {"messages": [HI], **CASES[name]}.items() if field in known}
        counted = answers.client(mode).messages.count_tokens(model=MODEL, **asked).input_tokens
        assert counted == answers.whole("off", name)["prompt"]


def test_what_was_cached_counts_apart(answers: Fleeting, mode: str) -> None:
    asked = arguments(messages=[{"role": "user", "content": "apart " * 100}], max_tokens=2, cache_salt=mode)
    first, second = (answers.client(mode).messages.create(**asked).usage for _ in range(2))
    assert first.cache_read_input_tokens == 0 and second.cache_read_input_tokens > 0
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens


def test_both_headers_of_a_key(answers: Fleeting, mode: str) -> None:
    by_token = Anthropic(base_url=answers.fleet.servers[mode].url, auth_token=SECRETS["main"], max_retries=0)
    with by_token:
        assert held(by_token.messages.create(**arguments(**CASES["greedy"]))) == answers.whole("off", "greedy")
    with answers._client(mode, "a-key-that-nobody-knows") as stranger:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            stranger.messages.create(**arguments())
        assert refused.value.type == "authentication_error"
        with pytest.raises(anthropic.AuthenticationError):
            stranger.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "x"}])


#: Fields, the client's class of the error, and words of its message. test_message_bodies has more.
ERRORS: list[tuple[dict[str, Any], type[anthropic.APIStatusError], str]] = [
    ({"model": "claude"}, anthropic.NotFoundError, "model: 'claude' is not served"),
    ({"temperature": -1}, anthropic.BadRequestError, "temperature: -1"),
    (
        {"messages": [{"role": "user", "content": "x" * 70_000}]},
        anthropic.ContentTooLargeError,
        "body: it is too large",
    ),
    ({"messages": [{"role": "user", "content": "x y " * 4000}]}, anthropic.BadRequestError, "messages: "),
    (
        {"output_config": {"format": {**FORMAT["output_config"]["format"], "schema": {"type": "widget"}}}},
        anthropic.BadRequestError,
        "output_config.format.schema: ",
    ),
    (
        {"tools": [{"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "widget"}}}}]}
        | {"tool_choice": {"type": "any"}},
        anthropic.BadRequestError,
        r"tools\[0\].input_schema: ",
    ),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("fields", "kind", "message"), ERRORS, ids=[message for _, _, message in ERRORS])
def test_errors(
    answers: Fleeting, fields: dict[str, Any], kind: type[anthropic.APIStatusError], message: str, streamed: bool
) -> None:
    with pytest.raises(kind, match=message) as raised:
        answers.client("async").messages.create(**arguments(**fields), stream=streamed)
    assert raised.value.type == ("request_too_large" if kind is anthropic.ContentTooLargeError else _type(kind))
    assert raised.value.request_id == raised.value.body["request_id"]  # type: ignore[index]


def _type(kind: type[anthropic.APIStatusError]) -> str:
    return "not_found_error" if kind is anthropic.NotFoundError else "invalid_request_error"


def test_a_rate_limit(answers: Fleeting, mode: str) -> None:
    with answers._client(mode, "spent") as client, pytest.raises(anthropic.RateLimitError) as raised:
        for _ in range(3):
            client.messages.create(**arguments(max_tokens=1))
    assert raised.value.type == "rate_limit_error" and int(raised.value.response.headers["retry-after"]) >= 1


def test_a_client_that_leaves(answers: Fleeting, mode: str) -> None:
    client = answers.client(mode)
    with client.messages.create(**arguments(max_tokens=1000), stream=True) as stream:
        assert next(iter(stream)).type == "message_start"
    assert held(client.messages.create(**arguments(**CASES["greedy"]))) == answers.whole("off", "greedy")
