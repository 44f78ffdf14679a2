"""Arguments mean what the model meant: json and Python's own repr are the references."""

import json
from typing import Any

import pytest
from cuts import calls_of, parse, parts_of
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import TOOLS
from sizes import sized

from pilotfish.grammar.parsers.formats import TOOL_FORMATS

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def arguments(name: str, parts: list[str]) -> str:
    ((tool, text),) = calls_of(parse(TOOL_FORMATS[name].parser(TOOLS), parts))
    assert tool == "note.add"
    return text


@settings(max_examples=sized(40, 200), deadline=None)
@given(value=VALUES, indent=st.sampled_from([None, 1]), ascii_only=st.booleans(), size=st.integers(1, 9))
def test_json_is_passed_on_as_it_is_written(value: Any, indent: int | None, ascii_only: bool, size: int) -> None:
    text = json.dumps({"a": value}, indent=indent, ensure_ascii=ascii_only)
    output = f'<tool_call>\n{{"name": "note.add", "arguments": {text}}}\n</tool_call>'
    assert arguments("hermes", parts_of(output, size)) == text


@settings(max_examples=sized(40, 200), deadline=None)
@given(value=VALUES, ascii_only=st.booleans(), size=st.integers(1, 9))
def test_the_text_of_an_object_is_read_as_the_object(value: Any, ascii_only: bool, size: int) -> None:
    text = json.dumps({"a": value}, ensure_ascii=False)
    output = f'{{"name": "note.add", "parameters": {json.dumps(text, ensure_ascii=ascii_only)}}}'
    assert arguments("llama3_json", parts_of(output, size)) == text


@settings(max_examples=sized(40, 200), deadline=None)
@given(value=VALUES, size=st.integers(1, 9))
def test_literals_of_python_become_json(value: Any, size: int) -> None:
    output = f"[note.add(a={value!r}, b={(value,)!r})]"
    assert json.loads(arguments("pythonic", parts_of(output, size))) == {"a": value, "b": [value]}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        *((r'"\ud83d"', "\ufffd"), (r'"\ude00\ud83d\ude00"', "\ufffd😀")),
        *((r'"\ud83d\ud83d\ude00"', "\ufffd😀"), (r'"\ud83d\n\u12"', "\ufffd\n\\u12")),
        *((r'"\q\/"', r"\q/"), ('""', "{}"), ("null", "{}"), ("[1]", "[1]"), ("1.5e3", "1.5e3")),
        ("False}", ""),  # no JSON: it is content
    ],
)
def test_arguments_that_are_no_object(written: str, meant: str) -> None:
    assert arguments("hermes", [f'<tool_call>{{"name": "note.add", "arguments": {written}}}</tool_call>']) == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        *((r"'\x4'", r"\x4"), (r"'\U00110000'", r"\U00110000"), (r"'\ud83d\ude00'", "😀")),
        *(("'\\7\\a\\v\\\n'", "\7\a\v"), ('"""a"b""c"""', 'a"b""c'), ("''''a'''", "'a")),
        *(("-007.", -7.0), ("+1_0", 10), ("((), ([],), {'a': ()},)", [[], [[]], {"a": []}])),
    ],
)
def test_what_python_means(written: str, meant: object) -> None:
    assert json.loads(arguments("pythonic", [f"[note.add(a={written})]"])) == {"a": meant}


@pytest.mark.parametrize(
    "written", ["x", "1 + 2", "-", ".", "1e", "{1}", "{1: 2}", "f'{x}'", "'a' 'b'", "[" * 65 + "]" * 65, ""]
)
def test_what_is_no_literal_is_content(written: str) -> None:
    text = arguments("pythonic", [f"[note.add(a=1, b={written})]"])
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(text)
    assert text.startswith('{"a": 1')
