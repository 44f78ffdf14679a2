"""The official client's own helpers over live servers: answers parsed by Pydantic, streams put together, loops of
tools, and what they raise."""

from typing import Any, Literal

import pytest
from openai import LengthFinishReasonError, OpenAI, pydantic_function_tool
from openai_cases import MODEL
from openai_fleet import Fleet
from pydantic import BaseModel, Field

ASK: Any = {"role": "user", "content": "def mean(values):"}
GREEDY: dict[str, Any] = {"model": MODEL, "messages": [ASK], "temperature": 0, "max_tokens": 256}


class Step(BaseModel):
    name: Literal["load", "sort"]
    seconds: int = Field(ge=0, le=99)


class Plan(BaseModel):
    steps: list[Step] = Field(min_length=1, max_length=2)
    safe: bool


class GetWeather(BaseModel):
    """Of a city."""

    city: Literal["Oslo", "Ås"]
    unit: Literal["celsius", "fahrenheit"]


WEATHER = pydantic_function_tool(GetWeather)
NAMED: Any = {"type": "function", "function": {"name": "GetWeather"}}


@pytest.fixture
def client(bundled: Fleet, mode: str) -> OpenAI:
    return bundled.client(mode)


# -- parse


def test_an_answer_that_was_cut_is_not_parsed(client: OpenAI) -> None:
    with pytest.raises(LengthFinishReasonError):
        client.chat.completions.parse(**{**GREEDY, "max_tokens": 2}, response_format=Plan)


# -- streams


def test_a_stream_of_an_answer(client: OpenAI) -> None:
    with client.chat.completions.stream(**GREEDY, response_format=Plan) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Plan) and kinds[-1] == "content.done"
    whole = client.chat.completions.parse(**GREEDY, response_format=Plan)
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_a_stream_of_several_answers(client: OpenAI) -> None:
    asked = {**GREEDY, "temperature": 1, "seed": 5}
    with client.chat.completions.stream(**asked, n=3, response_format=Step) as stream:
        final = stream.until_done().get_final_completion()
    assert sorted(choice.index for choice in final.choices) == [0, 1, 2]
    assert all(isinstance(choice.message.parsed, Step) for choice in final.choices)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_stream_of_calls(client: OpenAI, choice: Any) -> None:
    asked = {**GREEDY, "tools": [WEATHER], "tool_choice": choice}
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    arguments = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    (call,) = final.choices[0].message.tool_calls or []
    assert "".join(event.arguments_delta for event in arguments) == call.function.arguments
    assert [event.name for event in done] == ["GetWeather"] and final.choices[0].message.content is None
    assert isinstance(call.function.parsed_arguments, GetWeather) and call.id and final.usage is not None
    assert final.choices[0].finish_reason == ("stop" if choice is NAMED else "tool_calls")


def test_chunks_are_of_openais_types(bundled: Fleet, mode: str) -> None:
    """A strict client refuses what its types do not allow."""
    client = bundled.client(mode, strict=True)
    asked: dict[str, Any] = {**GREEDY, "tools": [WEATHER], "tool_choice": "required", "logprobs": True}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert whole.choices[0].logprobs is not None
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "tool_calls"
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    entries = [entry for part in parts if part is not None for entry in part.content or []]
    assert entries == whole.choices[0].logprobs.content
