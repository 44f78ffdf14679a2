"""Requests of the official client for responses, with a fixed seed."""

from enum import StrEnum
from typing import Annotated, Any, Literal

import openai
from pydantic import BaseModel, Field

SAMPLED: dict[str, Any] = {"temperature": 0.8}
GREEDY: dict[str, Any] = {"temperature": 0}
LOGPROBS = ["message.output_text.logprobs"]


class Unit(StrEnum):
    """Of a temperature."""

    celsius = "celsius"
    fahrenheit = "fahrenheit"


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Paris", "Rome"]
    unit: Unit


class Clock(BaseModel):
    """The time in a city."""

    city: Literal["Oslo", "Paris", "Rome"]


class Reading(BaseModel):
    """What the text format is parsed as."""

    sky: Literal["clear", "cloudy"]
    degrees: Annotated[int, Field(ge=0, le=40)]
    units: Annotated[list[Unit], Field(min_length=1, max_length=2)]


def tool(model: type[BaseModel]) -> dict[str, Any]:
    """In the flat shape of responses."""
    function: dict[str, Any] = dict(openai.pydantic_function_tool(model)["function"])
    return {"type": "function", **function}


TOOLS = [tool(Weather), tool(Clock)]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
SCHEMA_FORMAT = {"type": "json_schema", "name": "reading", "schema": {**SCHEMA, "additionalProperties": False}}
TURNS = [
    {"role": "system", "content": "Answer in code."},
    {"role": "user", "content": "Say hello."},
    {"role": "assistant", "content": "print('hello')"},
    {"role": "user", "content": [{"type": "input_text", "text": "Once"}, {"type": "input_text", "text": "more: ☃"}]},
]
ARGUMENTS = '{"city": "Oslo", "unit": "celsius"}'
CALLED = [
    {"role": "user", "content": "How is Oslo?"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Let me see."}]},
    {"type": "function_call", "call_id": "call_1", "name": "Weather", "arguments": ARGUMENTS},
    {"type": "function_call", "call_id": "call_2", "name": "Clock", "arguments": '{"city": "Oslo"}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "7 degrees"},
    {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "noon"}]},
]

CALLS: dict[str, Any] = {**SAMPLED, "tools": TOOLS, "max_output_tokens": 160}
#: Fields by the name of their case, over max_output_tokens 24, seed 7 and a text as the input.
RESPONSES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "sampled-long": {**SAMPLED, "max_output_tokens": 96},
    "instructions": {**SAMPLED, "instructions": "Answer in code."},
    "turns": {**SAMPLED, "input": TURNS},
    "turns-with-instructions": {**SAMPLED, "input": TURNS[1:], "instructions": "Answer in code."},
    "called": {**SAMPLED, "input": CALLED, "tools": TOOLS},
    "logprobs": {**SAMPLED, "include": LOGPROBS},
    "logprobs-greedy": {**GREEDY, "include": LOGPROBS, "top_logprobs": 4},
    "stop": {**SAMPLED, "stop": ["e", "a"], "max_output_tokens": 48},
    "no-speculation": {**SAMPLED, "speculation": {"mode": "off"}},
    "truncated": {**SAMPLED, "input": "def f():\n" * 400, "truncation": "auto"},
    "object": {**SAMPLED, "text": {"format": {"type": "json_object"}}, "max_output_tokens": 40},
    "schema": {**SAMPLED, "text": {"format": SCHEMA_FORMAT}, "max_output_tokens": 160},
    "regex": {**SAMPLED, "structured_outputs": {"regex": "(ab|cd){4}"}},
    "tools-none": {**SAMPLED, "tools": TOOLS, "tool_choice": "none"},
    "tool-required": {**SAMPLED, "tools": TOOLS, "tool_choice": "required", "max_output_tokens": 240},
    "tool-required-once": {**CALLS, "tool_choice": "required", "parallel_tool_calls": False},
    "tool-named": {**CALLS, **GREEDY, "tool_choice": {"type": "function", "name": "Clock"}},
}
