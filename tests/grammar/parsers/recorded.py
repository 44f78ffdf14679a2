"""Outputs as models of each family write them, and what they say: recorded.json, by the format of the calls."""

from pathlib import Path

import msgspec
from json_schemas import object_of

from pilotfish.grammar.parsers.grammars import Tool

PERSON = object_of("name", name={"type": "string", "maxLength": 8})
TOOLS = (
    Tool(
        "get_weather",
        "The weather in a city.",
        object_of(
            "city",
            city={"type": "string", "maxLength": 16},
            unit={"type": "string", "enum": ["celsius", "fahrenheit"]},
            days={"type": "integer", "minimum": 1, "maximum": 14},
        ),
    ),
    Tool(
        "run_python",
        "Runs a program.",
        object_of("code", code={"type": "string", "maxLength": 60}, trace={"type": "boolean"}),
    ),
    Tool(
        "send_email",
        "Sends a message.",
        object_of(
            *("to", "subject"),
            to={"type": "array", "items": {"$ref": "#/$defs/person"}, "minItems": 1, "maxItems": 2},
            subject={"anyOf": [{"type": "string", "maxLength": 12}, {"type": "null"}]},
            header=object_of("urgent", urgent={"type": "boolean"}, cost={"type": "number", "maximum": 9}),
        )
        | {"$defs": {"person": PERSON}},
    ),
    Tool("ping", "Answers.", object_of()),
    Tool("note.add"),
)


class Output(msgspec.Struct, frozen=True):
    name: str
    text: str
    calls: tuple[tuple[str, str], ...]  # name, arguments
    content: str  # without calls all of it


_FILE = Path(__file__).with_name("recorded.json")
OUTPUTS = msgspec.json.decode(_FILE.read_bytes(), type=dict[str, tuple[Output, ...]])
