"""Outputs as models of each family write them, and what they say."""

from dataclasses import dataclass
from typing import Any

from pilotfish.grammar.parsers.grammars import Tool


def object_of(*required: str, **properties: Any) -> dict[str, Any]:
    """A schema of an object with these properties alone."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


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


@dataclass(frozen=True)
class Output:
    name: str
    text: str
    calls: tuple[tuple[str, str], ...]  # name, arguments
    content: str


def said(name: str, text: str, *calls: tuple[str, str], content: str = "") -> Output:
    """Without calls all of it is content."""
    return Output(name, text, calls, content if calls else text)


PING, ROME = ("ping", "{}"), ("get_weather", '{"city": "Rome"}')
PARIS = ("get_weather", '{"city": "Paris", "unit": "celsius"}')

HERMES = (
    said(
        "a call",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}\n</tool_call>',
        PARIS,
    ),
    said(
        "two calls",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
        ROME,
        PING,
    ),
    said(
        "content between and after",
        'First:\n<tool_call>{"name": "ping", "arguments": {}}</tool_call>\nThen:\n'
        '<tool_call>{"name": "ping", "arguments": {}}</tool_call>\nDone.',
        PING,
        PING,
        content="First:\n\nThen:\n\nDone.",
    ),
    said(
        "code with marks and brackets",
        '<tool_call>\n{"name": "run_python", '
        '"arguments": {"code": "d = {\\"a\\": [1]}\\nprint(\'</tool_call>}\', \\"\\\\\\\\\\")"}}'
        "\n</tool_call>",
        ("run_python", '{"code": "d = {\\"a\\": [1]}\\nprint(\'</tool_call>}\', \\"\\\\\\\\\\")"}'),
    ),
    said(
        "arguments before the name",
        '<tool_call>\n{"arguments": {"city": "Oslo", "days": 1}, "name": "get_weather"}\n</tool_call>',
        ("get_weather", '{"city": "Oslo", "days": 1}'),
    ),
    said(
        "further members, other white space",
        '<tool_call>{ "id" : "c{1", "type":"function",\r\n\t"name" :"ping" , "arguments": { } , '
        '"n": [1, {"a": "}"}] }\r\n</tool_call>',
        ("ping", "{ }"),
    ),
    said("no arguments", '<tool_call>\n{"name": "ping"}\n</tool_call>', PING),
    said(
        "no last bracket",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Lima"}\n</tool_call>\nOk',
        ("get_weather", '{"city": "Lima"}'),
        content="\nOk",
    ),
    said(
        "arguments that do not end",
        '<tool_call>\n{"name": "note.add", "arguments": {"x": [1, {\n</tool_call>\n'
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
        ("note.add", '{"x": [1, {\n'),
        PING,
    ),
    said(
        "two objects between the marks",
        '<tool_call>\n{"name": "ping", "arguments": null}\n'
        '{"name": "note.add", "arguments": {"x": {"y": [[], {}]}}}\n</tool_call>',
        PING,
        ("note.add", '{"x": {"y": [[], {}]}}'),
    ),
    said(
        "a mark too many",
        '<tool_call>\nLet me see. <tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
        PING,
        content="<tool_call>\nLet me see. ",
    ),
    said(
        "cut in the arguments",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "San Fr',
        ("get_weather", '{"city": "San Fr'),
    ),
    said("cut in the name", 'Ok. <tool_call>\n{"name": "get_we'),
    said("no call", "A < b, and <tool is no mark. {}\n"),
)

LLAMA3_JSON = (
    said("a call", '{"name": "get_weather", "parameters": {"city": "Paris", "unit": "celsius"}}', PARIS),
    said(
        "behind the tag",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rome", "days": 2}}',
        ("get_weather", '{"city": "Rome", "days": 2}'),
    ),
    said(
        "several",
        '{"name": "ping", "parameters": {}}; {"name": "get_weather", '
        '"parameters": {"city": "Rome; {"}}; {"name": "ping"}',
        PING,
        ("get_weather", '{"city": "Rome; {"}'),
        PING,
    ),
    said(
        "several behind the tag, on lines",
        '<|python_tag|>{"name": "ping", "parameters": {}}\n{"name": "run_python", '
        '"parameters": {"code": "x = \\"}\\""}}',
        PING,
        ("run_python", '{"code": "x = \\"}\\""}'),
    ),
    said(
        "parameters first",
        ' {"parameters": {"city": "Kyiv"}, "name": "get_weather"} ',
        ("get_weather", '{"city": "Kyiv"}'),
    ),
    said(
        "on many lines",
        '{\n  "name": "get_weather",\n  "parameters": {\n    "city": "Łódź",\n    "days": 2\n  }\n}\n',
        ("get_weather", '{\n    "city": "Łódź",\n    "days": 2\n  }'),
    ),
    said(
        "content before and after",
        'Here it is:\n\n{"name": "ping", "parameters": {}}\n\nThat {is} all.',
        PING,
        content="Here it is:\n\n\n\nThat {is} all.",
    ),
    said("no such tool", '{"name": "Bob", "parameters": {"age": 5}}'),
    said("an answer in JSON", '{"answer": {"name": "ping"}, "ok": true}'),
    said("an answer that names a tool", '{"name": "ping", "state": "up"}'),
    said("code of the model", "<|python_tag|>print({'name': 1})"),
    said("a tool nobody gave", '<|python_tag|>{"name": "rm", "parameters": {}}', ("rm", "{}")),
    said("cut", '{"name": "run_python", "parameters": {"code": "a\\', ("run_python", '{"code": "a\\')),
    said(
        "something else behind a call",
        '{"name": "ping", "parameters": {}}; and {"name": "ping"}',
        PING,
        content='; and {"name": "ping"}',
    ),
)

PYTHONIC = (
    said("a call", '[get_weather(city="Paris", unit="celsius")]', PARIS),
    said(
        "several",
        "[get_weather(city='Rome', days=3), ping(), get_weather(city=\"Oslo\")]",
        ("get_weather", '{"city": "Rome", "days": 3}'),
        PING,
        ("get_weather", '{"city": "Oslo"}'),
    ),
    said("no arguments", "[ping()]", PING),
    said(
        "between marks",
        '<|python_start|>[run_python(code="print(1)", trace=False)]<|python_end|>',
        ("run_python", '{"code": "print(1)", "trace": false}'),
    ),
    said(
        "what nests",
        "[send_email(to=[{'name': 'Ann'}, {\"name\": \"B]b)\"}], "
        "subject=None, header={'urgent': True, 'cost': -1.5e2})]",
        (
            "send_email",
            '{"to": [{"name": "Ann"}, {"name": "B]b)"}], "subject": null, "header": {"urgent": true, "cost": -1.5e2}}',
        ),
    ),
    said(
        "quotes and escapes",
        "[run_python(code='it\\'s \"x\"\\n\\t\\x41\\u00e9\\U0001F600\\101 C:\\\\d \\q')]",
        ("run_python", '{"code": "it\'s \\"x\\"\\n\\t\\u0041\\u00e9😀A C:\\\\d \\\\q"}'),
    ),
    said(
        "three quotes",
        '[run_python(code="""def f():\n    return "a" + \'b\'\n""", trace=True)]',
        ("run_python", '{"code": "def f():\\n    return \\"a\\" + \'b\'\\n", "trace": true}'),
    ),
    said(
        "white space and last commas",
        " [\n  get_weather( city = 'Łódź' , days=+02, ) ,\r\n  ping( ),\n]\n",
        ("get_weather", '{"city": "Łódź", "days": 2}'),
        PING,
    ),
    said(
        "other numbers, tuples, words of JSON",
        "[note.add(a=.5, b=5., c=1_000, d=(1, (), []), e=null, f=true)]",
        ("note.add", '{"a": 0.5, "b": 5.0, "c": 1000, "d": [1, [], []], "e": null, "f": true}'),
    ),
    said("a mapping", '[note.add(**{"a b": 1})]', ("note.add", '{"a b": 1}')),
    said(
        "content before and after",
        "On it.\n[ping()]\nA [list] of [link](url) and [1, 2].",
        PING,
        content="On it.\n\nA [list] of [link](url) and [1, 2].",
    ),
    said("no such tool", "[rm(path='/')]"),
    said("a list", '["get_weather", 1]\n[]\n[ ] ping()'),
    said("an expression", "[ping(), get_weather(city=home(1))]", PING, ("get_weather", "{"), content="city=home(1))]"),
    said("cut", '[get_weather(city="Paris", un', ("get_weather", '{"city": "Paris"')),
    said("cut in an escape", "[run_python(code='\\u00", ("run_python", '{"code": "\\\\u00')),
)

MISTRAL = (
    said("a list", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}]', PARIS),
    said(
        "a list of several, with ids",
        '[TOOL_CALLS][{"name": "ping", "arguments": {}, "id": "aB3dE6gH9"}, '
        '{"name": "get_weather", "arguments": {"city": "[TOOL_CALLS]"}}]',
        PING,
        ("get_weather", '{"city": "[TOOL_CALLS]"}'),
    ),
    said(
        "content after a list",
        '[TOOL_CALLS] [{"arguments": {"city": "Nîmes"}, "name": "get_weather"}]\n\nDone: [1].',
        ("get_weather", '{"city": "Nîmes"}'),
        content="\n\nDone: [1].",
    ),
    said("an object", '[TOOL_CALLS]{"name": "ping", "arguments": {}}', PING),
    said(
        "a name and arguments",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}',
        ("get_weather", '{"city": "Paris", "days": 3}'),
    ),
    said("several names", '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}[TOOL_CALLS]ping[ARGS]{}', ROME, PING),
    said("with an id", '[TOOL_CALLS]get_weather[CALL_ID]aB3dE6gH9[ARGS]{"city": "Rome"}', ROME),
    said(
        "without a mark before the arguments",
        '[TOOL_CALLS]run_python{"code": "print(\\"[ARGS]}\\")"}[TOOL_CALLS]note.add {"x": [{"y": {}}]}',
        ("run_python", '{"code": "print(\\"[ARGS]}\\")"}'),
        ("note.add", '{"x": [{"y": {}}]}'),
    ),
    said("content before", "I'll look [it] up.[TOOL_CALLS]ping[ARGS]{}", PING, content="I'll look [it] up."),
    said("no arguments", "[TOOL_CALLS]ping[ARGS][TOOL_CALLS]ping[ARGS]{}", PING, PING),
    said("no call", "[TOOL_CALLS] none of them, [TOOL_CALLS][], [TOOL_"),
    said("cut in a list", '[TOOL_CALLS] [{"name": "ping", "arg', ("ping", "")),
    said("cut in the arguments", '[TOOL_CALLS]get_weather[ARGS]{"city": "', ("get_weather", '{"city": "')),
)

OUTPUTS = {"hermes": HERMES, "llama3_json": LLAMA3_JSON, "pythonic": PYTHONIC, "mistral": MISTRAL}
