"""Grammars of calls: what they allow is what their format's parser reads."""

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jsonschema_rs
import numpy as np
import pytest
from cuts import calls_of, content_of, parse
from llguidance import LLMatcher, LLTokenizer
from recorded import OUTPUTS, TOOLS
from sizes import sized
from tokenizers import AddedToken, Tokenizer

import pilotfish
from pilotfish.errors import ParameterError
from pilotfish.grammar.parsers.formats import TOOL_FORMATS
from pilotfish.grammar.parsers.grammars import Tool

TOKENIZER = Path(pilotfish.__file__).parent / "engine" / "pairs" / "pycode" / "target" / "tokenizer.json"
#: How a tokenizer has the marks: not at all, as added tokens, as special ones.
KINDS = ("text", "added", "special")
#: Recorded outputs in the very form of their grammar: of Mistral's, for tokenizers without [ARGS] and with it.
ACCEPTED = {
    "hermes": {"text": ["a call"], "added": ["two calls"]},
    "llama3_json": {"text": ["a call"], "added": ["a call"], "special": ["behind the tag"]},
    "pythonic": {"text": ["a call"], "added": ["no arguments"], "special": ["between marks"]},
    "mistral": {"text": ["a list"], "added": ["a name and arguments"], "special": ["several names", "with an id"]},
}
CLOSING, END = frozenset('"}])'), "<|endoftext|>"


@cache
def tokenizer(name: str, kind: str) -> Tokenizer:
    made = Tokenizer.from_file(str(TOKENIZER))
    if kind != "text":
        marks = TOOL_FORMATS[name].marks
        made.add_tokens([AddedToken(mark, normalized=False, special=kind == "special") for mark in marks])
    return made


@cache
def vocabulary(name: str, kind: str) -> LLTokenizer:
    return LLTokenizer(tokenizer(name, kind).to_str())


@cache
def closing(name: str, kind: str) -> list[int]:
    """Tokens that close a value, and the last one."""
    made = tokenizer(name, kind)
    return [i for text, i in made.get_vocab().items() if text == END or set(text or "x") <= CLOSING]


@cache
def matcher(name: str, kind: str, named: str | None, parallel: bool) -> LLMatcher:
    return compiled(name, kind, TOOLS, named=named, parallel=parallel)


def compiled(name: str, kind: str, tools: tuple[Tool, ...], *, named: str | None, parallel: bool) -> LLMatcher:
    added = {token.content: i for i, token in tokenizer(name, kind).get_added_tokens_decoder().items()}
    grammar = TOOL_FORMATS[name].grammar(tools, named=named, parallel=parallel, added=added)
    made = LLMatcher(vocabulary(name, kind), grammar)
    assert not made.is_error(), made.get_error()
    return made


def accepts(state: LLMatcher, text: str, made: Tokenizer) -> bool:
    state, tokens = state.deep_copy(), made.encode(text, add_special_tokens=False).ids
    return bool(state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting())


def walk(state: LLMatcher, eos: int, closing: list[int], rng: random.Random) -> Iterator[int]:
    """Tokens that the grammar forces, or allows: of these, those that close a value more often than others."""
    for _ in range(300):
        if not (tokens := state.compute_ff_tokens()):
            legal = np.flatnonzero(np.unpackbits(np.frombuffer(state.compute_bitmask(), np.uint8), bitorder="little"))
            ends = np.intersect1d(legal, closing)
            tokens = [int(rng.choice(ends if ends.size and rng.random() < 0.4 else legal))]
        if eos in tokens:
            return
        yield from tokens
        assert state.consume_tokens(tokens)
        if state.is_stopped():
            return


CHOICES = [(None, True), (None, False), ("get_weather", True), ("send_email", False)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_a_grammar_allows_is_read_as_calls(name: str, kind: str) -> None:
    rng, made, ended = random.Random(f"{name} {kind}"), tokenizer(name, kind), 0
    eos, ends = made.token_to_id(END), closing(name, kind)
    for named, parallel in CHOICES * sized(2, 3):
        state = matcher(name, kind, named, parallel).deep_copy()
        text = made.decode(list(walk(state, eos, ends, rng)), skip_special_tokens=False)
        if not (state.is_accepting() or state.is_stopped()):
            continue  # it is longer
        ended += 1
        pieces = parse(TOOL_FORMATS[name].parser(TOOLS), [text])
        calls = calls_of(pieces)
        assert content_of(pieces) == ""
        assert len(calls) == 1 or (len(calls) > 1 and parallel and named is None)
        for tool, arguments in calls:
            assert named in (None, tool)
            schema = next(known.parameters for known in TOOLS if known.name == tool)
            jsonschema_rs.validate(schema or {"type": "object"}, json.loads(arguments))
    assert ended >= sized(4, 6)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_models_write_is_allowed(name: str) -> None:
    for kind, recorded in ACCEPTED[name].items():
        made, state = tokenizer(name, kind), matcher(name, kind, None, True)
        for text in [output.text for output in OUTPUTS[name] if output.name in recorded]:
            assert accepts(state, text, made) and not accepts(state, f"{text} And", made), text
            assert accepts(state, f"\n\n{text}", made) == (name != "mistral"), text


#: Two calls; a call that lacks what is required.
SAMPLES = {
    "hermes": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>',
    ),
    "llama3_json": (
        '{"name": "get_weather", "parameters": {"city": "Rome"}}; {"name": "ping", "parameters": {}}',
        '{"name": "get_weather", "parameters": {"days": 1}}',
    ),
    "pythonic": ('[get_weather(city="Rome", days=3), ping()]', "[get_weather(days=3)]"),
    "mistral": (
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}[TOOL_CALLS]ping[ARGS]{}',
        "[TOOL_CALLS]get_weather[ARGS]{}",
    ),
}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_several_calls_are_allowed_where_parallel_and_not_named(name: str) -> None:
    two, lacking = SAMPLES[name]
    made = tokenizer(name, "added")
    assert [accepts(matcher(name, "added", *choice), two, made) for choice in CHOICES] == [True, False, False, False]
    assert not accepts(matcher(name, "added", None, True), lacking, made)


@pytest.mark.parametrize(
    ("parameters", "allowed", "refused"),
    [
        (None, ["[f()]", '[f(**{"a": [true]})]'], ["[f(a=1)]"]),
        ({}, ["[f()]"], []),
        (
            {"properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}},
            ["[f()]", "[f(a=True)]", "[f(b=None)]"],
            [],
        ),
        (
            {"properties": {x: {"type": "integer"} for x in "abc"}, "required": ["b"]},
            ["[f(b=1)]", "[f(a=1, b=2)]", "[f(b=1, c=2)]", "[f(a=1, b=2, c=3)]"],
            ["[f(a=1)]", "[f(a=1, c=1)]", "[f(b=1,)]", "[f(, b=1)]"],
        ),
        ({"properties": {"a b": {"type": "integer"}}, "required": ["a b"]}, ['[f(**{"a b": 1})]'], ["[f()]"]),
        ({"properties": {"a": True}, "required": ["a", "z"]}, ['[f(**{"a": 1, "z": 2})]'], ["[f(a=1)]"]),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"const": 7}}}, ["[f(a=7)]"], ["[f(a=8)]"]),
        ({"properties": {"a": {"$ref": "#"}}}, ['[f(**{"a": {"a": {}}})]'], ['[f(a={"a": {}})]']),
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['[f(**{"a": 1})]'], ["[f(**{})]"]),
    ],
)
def test_pythonic_arguments(parameters: dict[str, object] | None, allowed: list[str], refused: list[str]) -> None:
    grammar = compiled("pythonic", "text", (Tool("f", parameters=parameters),), named=None, parallel=True)
    made = tokenizer("pythonic", "text")
    assert all(accepts(grammar, text, made) for text in allowed)
    assert not any(accepts(grammar, text, made) for text in refused)


def test_names_are_text() -> None:
    tools = (Tool('a"b\\c é\n'), Tool("a"))
    grammar = compiled("hermes", "text", tools, named=None, parallel=True)
    text = '<tool_call>\n{"name": "a\\"b\\\\c é\\n", "arguments": {}}\n</tool_call>'
    assert accepts(grammar, text, tokenizer("hermes", "text"))
    assert calls_of(parse(TOOL_FORMATS["hermes"].parser(tools), [text])) == [(tools[0].name, "{}")]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_tool_that_nobody_gave_cannot_be_forced(name: str) -> None:
    with pytest.raises(ParameterError, match=r"^tool_choice: 'rm' is not allowed; expected one of the tools: ping"):
        TOOL_FORMATS[name].grammar([Tool("ping")], named="rm", parallel=True, added={})


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_of_many_tools_are_told_apart(name: str) -> None:
    """As many as the server enforces."""
    many = tuple(Tool(f"tool_{i}", None, {"type": "object", "properties": {}}) for i in range(256))
    call = {
        "hermes": '<tool_call>\n{"name": "tool_255", "arguments": {}}\n</tool_call>',
        "llama3_json": '{"name": "tool_255", "parameters": {}}',
        "pythonic": "[tool_255()]",
        "mistral": '[TOOL_CALLS][{"name": "tool_255", "arguments": {}}]',
    }[name]
    assert accepts(compiled(name, "text", many, named=None, parallel=True), call, tokenizer(name, "text"))
