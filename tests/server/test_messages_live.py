"""Anthropic's official client gets one answer from real servers, whatever the mode, the load, and how it is sent."""

import asyncio
from collections.abc import Iterator
from functools import cache
from inspect import signature
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from anthropic.resources.messages import Messages
from anthropic.types import Message
from messages_cases import CASES, HI, SWITCH
from openai_cases import MODEL, case
from openai_fleet import MODES, Fleet
from sizes import sized

#: Fields that the client knows; all others go into `extra_body`.
THEIRS = signature(Messages.create).parameters.keys()
#: No validator knows its property's type.
UNKNOWN = {"type": "object", "properties": {"a": {"type": "widget"}}}
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
        self.client = cache(lambda mode: Anthropic(**self.options(mode), _strict_response_validation=True))
        self.whole = cache(lambda mode, name: held(self.client(mode).messages.create(**arguments(**CASES[name]))))
        self.at_once = cache(lambda mode: asyncio.run(self._at_once(mode)))

    def options(self, mode: str) -> dict[str, Any]:
        return {"base_url": self.fleet.servers[mode].url, "api_key": "unused", "max_retries": 0, "timeout": 60}

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


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema", "schema": UNKNOWN}}}),
        (r"tools\[0\].input_schema", {"tools": [{**SWITCH, "input_schema": UNKNOWN}], "tool_choice": {"type": "any"}}),
    ],
)
def test_a_schema_that_cannot_be_kept(answers: Fleeting, field: str, fields: dict[str, Any], streamed: bool) -> None:
    """test_message_bodies has all other errors: of these the target tells."""
    with pytest.raises(anthropic.BadRequestError, match=f"{field}: ") as raised:
        answers.client("async").messages.create(**arguments(**fields), stream=streamed)
    assert raised.value.type == "invalid_request_error"
