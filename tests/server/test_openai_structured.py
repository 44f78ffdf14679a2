"""The official client asks live servers over the bundled pair for JSON, choices, expressions, grammars and calls: what
ends is valid, and the same in all modes, whole and as a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from typing import Any, Literal

import jsonschema_rs
import pytest
from live import HttpServer
from openai import OpenAI
from pydantic import BaseModel, Field
from sizes import sized

MODEL = "pycode"
THREADS = 8
ASK = {"role": "user", "content": "def mean(values):"}


class Color(Enum):
    RED = "red"
    BLUE = "bleu – ☃"


class Point(BaseModel):
    x: int = Field(ge=-99, le=99)
    color: Color


class Shape(BaseModel):
    kind: Literal["line", "area"]
    points: list[Point] = Field(min_length=1, max_length=3)
    label: str | None = Field(pattern="^[a-z]{1,9}$")


class GetWeather(BaseModel):
    """Of a city."""

    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["ok", "n"],
    },
    "pydantic": Shape.model_json_schema(),
    "union": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 3}]},
    "references": {
        "$defs": {"leaf": {"type": "object", "properties": {"v": {"const": "x"}}, "required": ["v"]}},
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}},
        "required": ["left", "right"],
    },
    "date": {"type": "string", "format": "date"},
}


def json_format(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


def tool(name: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    parameters = {} if schema is None else {"parameters": schema}
    return {"type": "function", "function": {"name": name, "description": f"{name} it", **parameters}}


WEATHER = tool("weather", GetWeather.model_json_schema())
FLAT = tool("flat", SCHEMAS["flat"])
NOW = tool("now")
CITY = tool("city", {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}})


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@dataclass(frozen=True)
class Output:
    content: str | None
    calls: tuple[tuple[str, str], ...]  # names and arguments
    reason: str


@dataclass(frozen=True)
class Case:
    name: str
    asked: dict[str, Any] = field(hash=False, compare=False)
    check: Callable[[Output], None] = field(hash=False, compare=False)
    chat: bool = True

    def __str__(self) -> str:
        return f"{'chat' if self.chat else 'completion'}-{self.name}"


def matches(pattern: str) -> Callable[[Output], None]:
    def check(output: Output) -> None:
        assert output.reason == "stop" and not output.calls
        assert output.content is not None and re.fullmatch(pattern, output.content)

    return check


def valid(schema: dict[str, Any], *, compact: bool = False) -> Callable[[Output], None]:
    def check(output: Output) -> None:
        assert output.reason == "stop" and not output.calls and output.content
        value = json.loads(output.content)
        jsonschema_rs.validate(schema, value)
        if compact:
            assert "\n" not in output.content and "  " not in output.content

    return check


def calls(*tools: dict[str, Any], reason: str = "tool_calls") -> Callable[[Output], None]:
    schemas = {each["function"]["name"]: each["function"].get("parameters", {"maxProperties": 0}) for each in tools}

    def check(output: Output) -> None:
        assert output.reason == reason and output.content is None and output.calls
        for name, arguments in output.calls:
            jsonschema_rs.validate(schemas[name], json.loads(arguments))

    return check


def text(output: Output) -> None:
    assert output.content and not output.calls


def structured(**fields: Any) -> dict[str, Any]:
    return {"extra_body": {"structured_outputs": fields}}


HOT = {"temperature": 1.0}
GBNF = 'root ::= "SELECT " column (", " column)? " FROM t"\ncolumn ::= "a" | "b"'
LARK = 'start: "SELECT " column (", " column)? " FROM t"\ncolumn: "a" | "b"'
SQL = r"SELECT [ab](, [ab])? FROM t"
OBJECT = {"type": "object"}
HEATED = sized({"pydantic": SCHEMAS["pydantic"]}, SCHEMAS)

CHATS: dict[str, tuple[dict[str, Any], Callable[[Output], None]]] = {
    "json-object": ({"response_format": {"type": "json_object"}}, valid(OBJECT)),
    **{f"schema-{name}": ({"response_format": json_format(s)}, valid(s)) for name, s in SCHEMAS.items()},
    **{
        f"{name}-hot": ({"response_format": json_format(SCHEMAS[name]), **HOT}, valid(SCHEMAS[name])) for name in HEATED
    },
    "schema-strict": ({"response_format": json_format(SCHEMAS["flat"], strict=True)}, valid(SCHEMAS["flat"])),
    "json": (structured(json=SCHEMAS["flat"]), valid(SCHEMAS["flat"])),
    "json-text": (structured(json=json.dumps(SCHEMAS["flat"])), valid(SCHEMAS["flat"])),
    "json-compact": (structured(json=SCHEMAS["flat"], disable_any_whitespace=True), valid(OBJECT, compact=True)),
    "json-indented": (structured(json=SCHEMAS["flat"], disable_any_whitespace=False), valid(SCHEMAS["flat"])),
    "choice": (structured(choice=["positive", "negative", "sí"]), matches("positive|negative|sí")),
    "regex": (structured(regex=r"[a-z]{2,5}@[a-z]{2,5}\.com"), matches(r"[a-z]{2,5}@[a-z]{2,5}\.com")),
    "regex-hot": ({**structured(regex=r"\d{3}-[Å-Ö]{2}"), **HOT}, matches(r"\d{3}-[Å-Ö]{2}")),
    "gbnf": (structured(grammar=GBNF), matches(SQL)),
    "lark-hot": ({**structured(grammar=LARK), **HOT}, matches(SQL)),
    "guided": ({"extra_body": {"guided_choice": ["a", "b"]}}, matches("a|b")),
    "logprobs": ({**structured(choice=["yes", "no"]), "logprobs": True, "top_logprobs": 3}, matches("yes|no")),
    "n": ({**structured(regex="[a-f]{8}"), **HOT, "n": 3}, matches("[a-f]{8}")),
    "stop": ({**structured(regex="[a-f]{3};[a-f]{3}"), "stop": ";"}, matches("[a-f]{3}")),
    "required": ({"tools": [WEATHER, FLAT], "tool_choice": "required"}, calls(WEATHER, FLAT)),
    "required-hot": ({"tools": [WEATHER, FLAT], "tool_choice": "required", **HOT}, calls(WEATHER, FLAT)),
    "required-n": ({"tools": [FLAT, NOW], "tool_choice": "required", "n": 2, **HOT}, calls(FLAT, NOW)),
    "required-one": (
        {"tools": [FLAT], "tool_choice": "required", "parallel_tool_calls": False, "logprobs": True},
        calls(FLAT),
    ),
    "named": ({"tools": [WEATHER, FLAT], "tool_choice": named("flat")}, calls(FLAT, reason="stop")),
    "named-hot": ({"tools": [CITY], "tool_choice": named("city"), **HOT}, calls(CITY, reason="stop")),
    "named-without-arguments": ({"tools": [WEATHER, NOW], "tool_choice": named("now")}, calls(NOW, reason="stop")),
    "auto": ({"tools": [WEATHER], "max_tokens": 8}, text),
    "none": ({"tools": [WEATHER], "tool_choice": "none", "max_tokens": 8}, text),
    "auto-with-a-format": (
        {"tools": [WEATHER], "response_format": json_format(SCHEMAS["flat"])},
        valid(SCHEMAS["flat"]),
    ),
}
COMPLETIONS: dict[str, tuple[dict[str, Any], Callable[[Output], None]]] = {
    "regex": (structured(regex="[0-9]{4}"), matches("[0-9]{4}")),
    "choice-hot": ({**structured(choice=["one", "two"]), **HOT}, matches("one|two")),
    "json": (structured(json=SCHEMAS["pydantic"]), valid(SCHEMAS["pydantic"])),
    "format": ({"extra_body": {"response_format": json_format(SCHEMAS["flat"])}}, valid(SCHEMAS["flat"])),
    "prompts": ({**structured(choice=["one", "two"]), "prompt": ["a", "b"], "n": 2, **HOT}, matches("one|two")),
    "logprobs": ({**structured(regex="[0-9]{4}"), "logprobs": 2, "echo": False}, matches("[0-9]{4}")),
}
CASES = [Case(name, *case) for name, case in CHATS.items()]
CASES += [Case(name, *case, chat=False) for name, case in COMPLETIONS.items()]


class Servers:
    """One in each mode. A case is asked once in each way."""

    def __init__(self, urls: dict[str, str]) -> None:
        self.clients = {
            mode: OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) for mode, url in urls.items()
        }
        self._wholes = cache(partial(self._together, self._whole))
        self._streams = cache(partial(self._together, self._streamed))

    def whole(self, mode: str, case: Case) -> list[Output]:
        return self._wholes(mode)[case].result()

    def streamed(self, mode: str, case: Case) -> list[Output]:
        return self._streams(mode)[case].result()

    def _together(self, ask: Callable[[str, Case], list[Output]], mode: str) -> dict[Case, Future[list[Output]]]:
        """All cases, a few at a time: a forward of several rows costs hardly more than one of one."""
        with ThreadPoolExecutor(THREADS) as pool:
            return {case: pool.submit(ask, mode, case) for case in CASES}

    def _create(self, mode: str, case: Case, **more: Any) -> Any:
        client, asked = (
            self.clients[mode],
            {"model": MODEL, "max_tokens": 512, "temperature": 0, "seed": 7, **case.asked},
        )
        if case.chat:
            return client.chat.completions.create(**{"messages": [ASK], **asked}, **more)
        return client.completions.create(**{"prompt": ASK["content"], **asked}, **more)

    def _whole(self, mode: str, case: Case) -> list[Output]:
        return [_output(case, choice) for choice in self._create(mode, case).choices]

    def _streamed(self, mode: str, case: Case) -> list[Output]:
        parts: dict[int, Streamed] = {}
        for chunk in self._create(mode, case, stream=True):
            for choice in chunk.choices:
                parts.setdefault(choice.index, Streamed()).add(case, choice)
        return [parts[index].output for index in sorted(parts)]


def _output(case: Case, choice: Any) -> Output:
    if not case.chat:
        return Output(choice.text, (), choice.finish_reason)
    functions = [call.function for call in choice.message.tool_calls or ()]
    return Output(choice.message.content, tuple((f.name, f.arguments) for f in functions), choice.finish_reason)


@dataclass
class Streamed:
    content: str | None = None
    calls: list[list[str]] = field(default_factory=list)
    reason: str | None = None

    def add(self, case: Case, choice: Any) -> None:
        assert self.reason is None  # nothing follows the end
        self.reason = choice.finish_reason
        said = choice.delta.content if case.chat else choice.text
        if said is not None:
            self.content = (self.content or "") + said
        for call in (choice.delta.tool_calls or []) if case.chat else ():
            if call.index == len(self.calls):
                assert call.id and call.type == "function"
                self.calls.append([call.function.name, ""])
            self.calls[call.index][1] += call.function.arguments

    @property
    def output(self) -> Output:
        assert self.reason is not None
        return Output(self.content, tuple((name, arguments) for name, arguments in self.calls), self.reason)


@pytest.fixture(scope="module")
def servers(bundled: dict[str, HttpServer]) -> Iterator[Servers]:
    with ExitStack() as stack:
        made = Servers({mode: server.url for mode, server in bundled.items()})
        for client in made.clients.values():
            stack.callback(client.close)
        yield made


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_are_what_they_must_be_and_equal(servers: Servers, mode: str, case: Case) -> None:
    outputs = servers.whole("off", case)
    for output in outputs:
        case.check(output)
    assert servers.streamed(mode, case) == outputs == servers.whole(mode, case)
