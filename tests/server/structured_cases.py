"""Requests for JSON, choices, expressions, grammars and calls, and what their outputs must be."""

import json
import re
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal

import jsonschema_rs
from openai_cases import Case
from openai_fleet import Choice
from pydantic import BaseModel, Field
from sizes import sized

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


def matches(pattern: str) -> Callable[[Choice], None]:
    def check(output: Choice) -> None:
        assert output.finish_reason == "stop" and not output.calls
        assert re.fullmatch(pattern, output.text)

    return check


def valid(schema: dict[str, Any], *, compact: bool = False) -> Callable[[Choice], None]:
    def check(output: Choice) -> None:
        assert output.finish_reason == "stop" and not output.calls and output.text
        value = json.loads(output.text)
        jsonschema_rs.validate(schema, value)
        if compact:
            assert "\n" not in output.text and "  " not in output.text

    return check


def calls(*tools: dict[str, Any], reason: str = "tool_calls") -> Callable[[Choice], None]:
    schemas = {each["function"]["name"]: each["function"].get("parameters", {"maxProperties": 0}) for each in tools}

    def check(output: Choice) -> None:
        assert output.finish_reason == reason and not output.text and output.calls
        for name, arguments in output.calls:
            jsonschema_rs.validate(schemas[name], json.loads(arguments))

    return check


def text(output: Choice) -> None:
    assert output.text and not output.calls


def structured(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


HOT = {"temperature": 1.0}
GBNF = 'root ::= "SELECT " column (", " column)? " FROM t"\ncolumn ::= "a" | "b"'
LARK = 'start: "SELECT " column (", " column)? " FROM t"\ncolumn: "a" | "b"'
SQL = r"SELECT [ab](, [ab])? FROM t"
OBJECT, ONE = {"type": "object"}, {"parallel_tool_calls": False}
FORMATTED = {"response_format": json_format(SCHEMAS["flat"])}
HEATED = sized({"pydantic": SCHEMAS["pydantic"]}, SCHEMAS)

CHATS: dict[str, tuple[dict[str, Any], Callable[[Choice], None]]] = {
    "json-object": ({"response_format": {"type": "json_object"}}, valid(OBJECT)),
    **{f"schema-{name}": ({"response_format": json_format(s)}, valid(s)) for name, s in SCHEMAS.items()},
    **{
        f"{name}-hot": ({"response_format": json_format(SCHEMAS[name]), **HOT}, valid(SCHEMAS[name])) for name in HEATED
    },
    "schema-strict": ({"response_format": json_format(SCHEMAS["flat"], strict=True)}, valid(SCHEMAS["flat"])),
    "json": (structured(json=SCHEMAS["flat"]), valid(SCHEMAS["flat"])),
    "json-compact": (structured(json=SCHEMAS["flat"], disable_any_whitespace=True), valid(OBJECT, compact=True)),
    "choice": (structured(choice=["positive", "negative", "sí"]), matches("positive|negative|sí")),
    "regex": (structured(regex=r"[a-z]{2,5}@[a-z]{2,5}\.com"), matches(r"[a-z]{2,5}@[a-z]{2,5}\.com")),
    "gbnf": (structured(grammar=GBNF), matches(SQL)),
    "lark-hot": ({**structured(grammar=LARK), **HOT}, matches(SQL)),
    "guided": ({"guided_choice": ["a", "b"]}, matches("a|b")),
    "logprobs": ({**structured(choice=["yes", "no"]), "logprobs": True, "top_logprobs": 3}, matches("yes|no")),
    "stop": ({**structured(regex="[a-f]{3};[a-f]{3}"), "stop": ";"}, matches("[a-f]{3}")),
    "required": ({"tools": [WEATHER, FLAT], "tool_choice": "required"}, calls(WEATHER, FLAT)),
    "required-n": ({"tools": [FLAT, NOW], "tool_choice": "required", "n": 2, **HOT}, calls(FLAT, NOW)),
    "required-one": ({**ONE, "tools": [FLAT], "tool_choice": "required", "logprobs": True}, calls(FLAT)),
    "named": ({"tools": [WEATHER, FLAT], "tool_choice": named("flat")}, calls(FLAT, reason="stop")),
    "named-hot": ({"tools": [CITY], "tool_choice": named("city"), **HOT}, calls(CITY, reason="stop")),
    "auto": ({"tools": [WEATHER], "max_tokens": 8}, text),
    "none": ({"tools": [WEATHER], "tool_choice": "none", "max_tokens": 8}, text),
    "auto-with-a-format": ({**FORMATTED, "tools": [WEATHER]}, valid(SCHEMAS["flat"])),
}
COMPLETIONS: dict[str, tuple[dict[str, Any], Callable[[Choice], None]]] = {
    "regex": (structured(regex="[0-9]{4}"), matches("[0-9]{4}")),
    "json": (structured(json=SCHEMAS["pydantic"]), valid(SCHEMAS["pydantic"])),
    "format": (FORMATTED, valid(SCHEMAS["flat"])),
    "prompts": ({**structured(choice=["one", "two"]), "prompt": ["a", "b"], "n": 2, **HOT}, matches("one|two")),
}
OVER: dict[str, Any] = {"max_tokens": 512, "temperature": 0}
CHECKED = {Case(True, name, {"messages": [ASK], **OVER, **asked}): check for name, (asked, check) in CHATS.items()}
CHECKED |= {
    Case(False, name, {"prompt": ASK["content"], **OVER, **asked}): check
    for name, (asked, check) in COMPLETIONS.items()
}
CASES = list(CHECKED)
