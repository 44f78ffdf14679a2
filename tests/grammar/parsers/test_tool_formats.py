"""Which format a template shows; what parsers hold back, and what they cost."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from cuts import calls_of, content_of, parse, parts_of
from recorded import OUTPUTS, TOOLS
from sizes import sized

from pilotfish.grammar.parsers.formats import TOOL_FORMATS, tool_format_of
from pilotfish.grammar.parsers.pieces import Arguments, CallBegin, OutputParser
from pilotfish.grammar.parsers.reasoning import REASONING_FORMATS, ReasoningParser


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>', "hermes"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=example>", None),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", None),
        ('{{- "<|python_tag|>" + tool_call.name + ".call(" }}', "llama3_json"),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name', "llama3_json"),
        ("Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]", "pythonic"),
        ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral"),
        ("{{ messages | map(attribute='content') | join('\\n') }}", None),
        (None, None),
    ],
)
def test_a_template_shows_its_format(template: str | None, name: str | None) -> None:
    assert tool_format_of(template) == name
    assert name is None or TOOL_FORMATS[name].name == name


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_no_more_content_is_held_back_than_may_begin_a_call(name: str) -> None:
    made, told = TOOL_FORMATS[name].parser(TOOLS), ""
    text = "A <tool> [x] {y}. I [TOOL] <|see|> and\n\nmore of [it]\n"
    for at, sign in enumerate(text, 1):
        told += content_of(made.feed(sign))
        held = text[len(told) : at]
        assert not held or held.lstrip()[0] in "<[{", held
    assert told + content_of(made.finish()) == text


def test_a_call_is_told_as_soon_as_its_name_is_known_and_arguments_as_they_come() -> None:
    made = TOOL_FORMATS["hermes"].parser(TOOLS)
    assert made.feed('<tool_call>\n{"name": "get_weather') == []
    assert made.feed('"') == [CallBegin(0, "get_weather")]
    assert made.feed(', "arguments": ') == []
    for sign in '{"city": "</tool_call>"}':
        assert made.feed(sign) == [Arguments(0, sign)]
    assert made.feed("}\n</tool_call>") == made.finish() == []


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_without_tools_what_has_no_mark_is_content(name: str) -> None:
    text = OUTPUTS[name][0].text
    pieces = parse(TOOL_FORMATS[name].parser([]), [text])
    assert bool(calls_of(pieces)) == (name in ("hermes", "mistral"))
    assert content_of(pieces) == ("" if calls_of(pieces) else text)


# -- what it costs


def steps_of(run: Callable[[], Any]) -> int:
    """How many functions were called, of Python or below it."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        del frame, argument
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


VALUES = {
    "a text": lambda n: '"' + "x" * n + '"',
    "escapes": lambda n: '"' + r"\n\"" * (n // 4) + '"',
    "lists in lists": lambda n: "[" * (n // 2) + "]" * (n // 2),
    "texts": lambda n: "[" + ", ".join(['"x"'] * (n // 5)) + "]",
    "white space": lambda n: "[" + " " * n + "]",
}
LONG = {
    "hermes": '<tool_call>\n{"name": "note.add", "arguments": {"a": VALUE}}\n</tool_call>',
    "hermes, arguments first": '<tool_call>\n{"arguments": {"a": VALUE}, "name": "note.add"}\n</tool_call>',
    "hermes, no call": '<tool_call>\n{"a": VALUE}\n</tool_call>',
    "llama3_json": '{"name": "note.add", "parameters": {"a": VALUE}}',
    "pythonic": "[note.add(a=VALUE)]",
    "mistral": '[TOOL_CALLS]note.add[ARGS]{"a": VALUE}',
    "content": "VALUE",
}


def parser_of(case: str) -> OutputParser:
    name = case.split(",")[0]
    made = TOOL_FORMATS["hermes" if name == "content" else name].parser(TOOLS)
    return ReasoningParser(REASONING_FORMATS["qwen3"], made, begins_inside=False)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("case", LONG)
def test_an_output_of_twice_the_length_costs_twice_as_much(case: str, value: str) -> None:
    def steps(length: int) -> int:
        text = LONG[case].replace("VALUE", VALUES[value](length))
        return steps_of(lambda: parse(parser_of(case), parts_of(text, 4)))

    length = sized(600, 2000)
    assert steps(2 * length) < 2.2 * steps(length)


@pytest.mark.parametrize("case", ["hermes", "llama3_json", "pythonic", "mistral", "content"])
def test_a_parser_keeps_nothing_of_what_it_told(case: str) -> None:
    made = TOOL_FORMATS["hermes" if case == "content" else case].parser(TOOLS)
    told = 0
    for delta in parts_of(LONG[case].replace("VALUE", VALUES["a text"](sized(30_000, 100_000))), 4):
        told += sum(len(getattr(piece, "text", "")) for piece in made.feed(delta))
        reader = made._reader  # type: ignore[attr-defined]
        assert len(reader._text) + sum(map(len, reader._taken)) < 100
    assert told > sized(30_000, 100_000)
