"""What a body says that an output must be goes to the engine as a Constraint, and comes back as the field to blame."""

from copy import deepcopy
from typing import Any

import pytest
from http_double import CHAT, COMPLETIONS, USER, Client, Engine

from pilotfish.core.sampling.constraint import MAX_LENGTH, Constraint
from pilotfish.errors import ParameterError
from pilotfish.grammar.compile import Grammars
from pilotfish.server.bodies.constraints import closed

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
KEPT = Constraint.json({**SCHEMA, "additionalProperties": False}, compact=True)
FORMAT = {"type": "json_schema", "json_schema": {"name": "point-2_D", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "f"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 5}}\n</tool_call>'


def asked(path: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": "x", **fields} if path == COMPLETIONS else {"messages": [USER], **fields}


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


def structured(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


def schema_format(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, **fields}}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "json_object"}}, Constraint.json({"type": "object"}, compact=True)),
        ({"response_format": FORMAT}, KEPT),
        ({"response_format": schema_format(schema=SCHEMA, strict=True, description="A point.")}, KEPT),
        (structured(json=SCHEMA), KEPT),
        (structured(json='{"enum": [1]}'), Constraint.json({"enum": [1]}, compact=True)),
        (structured(regex=r"\d+"), Constraint.regex(r"\d+")),
        (structured(choice=["yes", "no"]), Constraint.choice(["yes", "no"])),
        (structured(grammar='root ::= "a"'), Constraint.grammar('root ::= "a"')),
        (structured(json_object=True), Constraint.json({"type": "object"}, compact=True)),
        (
            structured(json_object=True, disable_any_whitespace=False),
            Constraint.json({"type": "object"}, compact=False),
        ),
        (structured(regex="a", json=None, whitespace_pattern=None, structural_tag=None), Constraint.regex("a")),
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}, Constraint.regex("a")),
        ({"guided_json": SCHEMA}, KEPT),
        ({"guided_regex": "a"}, Constraint.regex("a")),
        ({"guided_choice": ["a"]}, Constraint.choice(["a"])),
        ({"guided_grammar": 'start: "a"'}, Constraint.grammar('start: "a"')),
    ],
)
def test_the_engine_is_told(
    client: Client, engine: Engine, path: str, fields: dict[str, Any], expected: Constraint | None
) -> None:
    assert client.post(path, asked(path, **fields)).status == 200
    assert engine.submitted[0].params.structured_outputs == expected


def test_every_prompt_and_output_has_it(client: Client, engine: Engine) -> None:
    assert client.post(COMPLETIONS, {"prompt": ["x", "y"], "n": 2, "guided_regex": "a"}).status == 200
    assert [each.params.structured_outputs for each in engine.submitted] == [Constraint.regex("a")] * 2


def nested(depth: int) -> Any:
    schema: Any = {}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {}}, "response_format.type", "it is missing"),
        ({"response_format": "json"}, "response_format", "expected an object"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "expected text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "it is missing"),
        ({"response_format": {"type": "json_schema", "json_schema": None}}, "response_format.json_schema", "an object"),
        ({"response_format": schema_format(schema=None)}, "response_format.json_schema.schema", "an object"),
        ({"response_format": schema_format(name="a b")}, "response_format.json_schema.name", "1 to 64 letters, digits"),
        ({"response_format": schema_format(strict=1)}, "response_format.json_schema.strict", "true or false"),
        ({"response_format": schema_format(more=1)}, "response_format.json_schema.more", "no such parameter"),
        (json_schema(schema={}), "response_format.json_schema.name", "it is missing"),
        (json_schema(name="a"), "response_format.json_schema.schema", "it is missing"),
        ({"structured_outputs": {}}, "structured_outputs", "one of json, regex, choice, grammar and json_object"),
        (structured(json=None), "structured_outputs", "is needed"),
        (structured(json="{"), "structured_outputs.json", "a JSON schema, as an object or as its text"),
        (structured(regex="a" * (MAX_LENGTH + 1)), "structured_outputs.regex", f"1 to {MAX_LENGTH}"),
        (structured(choice=[]), "structured_outputs.choice", "a choice of one or more texts"),
        (structured(choice=["a", ""]), "structured_outputs.choice", "texts that are not empty"),
        (structured(choices=["a"]), "structured_outputs.choices", "there is no such parameter"),
        (structured(json_object=False), "structured_outputs.json_object", "expected true"),
        (structured(regex="a", whitespace_pattern=" "), "structured_outputs.whitespace_pattern", "null"),
        (structured(json={}, regex="a"), "structured_outputs.regex", "with structured_outputs.json"),
        ({"guided_json": {}, "guided_choice": ["a"]}, "guided_choice", "cannot be combined with guided_json"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
            "it cannot be combined with response_format",
        ),
        ({"response_format": schema_format(schema=nested(400))}, "response_format", "it is nested too deep"),
    ],
)
def test_what_is_wrong_is_named(
    client: Client, engine: Engine, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = client.post(path, asked(path, **fields))
    assert (answer.status, answer.error["param"]) == (400, param) and words in answer.error["message"]
    assert answer.error["message"].startswith(f"{param}: ") and not engine.submitted


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_is_no_text_of_a_grammar(client: Client, choice: Any) -> None:
    fields = {"tools": [TOOL], "tool_choice": choice, "structured_outputs": {"regex": "a"}}
    answer = client.post(CHAT, asked(CHAT, **fields))
    assert (answer.status, answer.error["param"]) == (400, "structured_outputs.regex")
    assert "tool_choice" in answer.error["message"]


def test_a_required_call_leaves_a_format_nothing_to_say(client: Client, engine: Engine) -> None:
    fields = {"tools": [TOOL], "tool_choice": "required"}
    for more in ({}, {"response_format": FORMAT}):
        assert client.post(CHAT, asked(CHAT, **fields, **more)).status == 200
    first, second = (each.params.structured_outputs for each in engine.submitted)
    assert first is not None and first == second


def test_a_free_choice_leaves_the_format(client: Client, engine: Engine) -> None:
    for choice in ("none", "auto"):
        fields = {"tools": [TOOL], "tool_choice": choice, "structured_outputs": {"regex": "a"}}
        assert client.post(CHAT, asked(CHAT, **fields)).status == 200
        assert engine.submitted[-1].params.structured_outputs == Constraint.regex("a")


def test_a_model_that_is_told_of_tools_may_call_them_in_place_of_an_answer(client: Client, engine: Engine) -> None:
    engine.tokenizer.chat_template = "{{ messages[0].content }}{# tools #}"
    for form in (FORMAT, {"type": "json_object"}):
        assert client.post(CHAT, asked(CHAT, tools=[TOOL], response_format=form)).status == 200
        constraint = engine.submitted[-1].params.structured_outputs
        assert constraint is not None and constraint.text.startswith("start: some_calls | answer\n")
        matcher = Grammars(engine.tokenizer, 512, [0]).compile(constraint)
        for text, whole in (('{"a": 5}', True), (CALL, True), (CALL[:-1], False), ("[]", False), ("Hm.", False)):
            own, tokens = matcher.deep_copy(), engine.tokenizer.encode(text)
            taken = own.try_consume_tokens(tokens) == len(tokens)
            assert (taken and own.is_accepting()) == whole, text


STRICT = {**TOOL, "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]


@pytest.fixture
def told(engine: Engine) -> Engine:
    """Its template tells of tools, and the mark of its calls is a token."""
    engine.tokenizer = deepcopy(engine.tokenizer)
    engine.tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    engine.tokenizer.chat_template = "{{ messages[0].content }}{# tools <tool_call> #}"
    return engine


def test_arguments_of_strict_tools_are_enforced_where_a_text_may_come_too(client: Client, told: Engine) -> None:
    other = {"type": "function", "function": {"name": "g"}}
    assert client.post(CHAT, asked(CHAT, tools=[TOOL, other])).status == 200
    assert told.submitted[-1].params.structured_outputs is None
    assert client.post(CHAT, asked(CHAT, tools=[other, STRICT])).status == 200
    constraint = told.submitted[-1].params.structured_outputs
    assert constraint is not None
    matcher = Grammars(told.tokenizer, 514, [0]).compile(constraint)
    for text, whole in (
        *(("Hm. é☃\n", True), (CALL, True), (f"Hm.\n{CALL}", True), (f"Hm.\n{CALL}\n{CALL}", True)),
        *((CALL.replace("5", "true"), False), (f"Hm. {CALL}".replace('"a"', '"b"'), False)),
    ):
        own, tokens = matcher.deep_copy(), told.tokenizer.encode(text)
        taken = own.try_consume_tokens(tokens) == len(tokens)
        assert (taken and own.is_accepting()) == whole, text


def test_strict_tools_of_a_model_without_a_mark_are_not_enforced(client: Client, engine: Engine) -> None:
    assert client.post(CHAT, asked(CHAT, tools=[STRICT])).status == 200
    assert engine.submitted[0].params.structured_outputs is None


# -- what the target refuses


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": FORMAT}, "response_format"),
        (structured(regex="("), "structured_outputs.regex"),
        ({"guided_grammar": "("}, "guided_grammar"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"tools": [{**TOOL, "function": {"name": "g"}}, TOOL], "tool_choice": NAMED}, "tools[1].function.parameters"),
        ({"tools": [{**TOOL, "function": {"name": "g"}}, TOOL], "tool_choice": "required"}, "tools"),
    ],
)
def test_a_constraint_that_the_target_refuses(
    client: Client, engine: Engine, fields: dict[str, Any], param: str, stream: bool
) -> None:
    error = ParameterError.described("structured_outputs", "structured_outputs: 'if' is not supported")
    engine.script = lambda _: [error]
    answer = client.post(CHAT, asked(CHAT, stream=stream, **fields))
    assert (answer.status, answer.error["param"]) == (400, param)
    assert answer.error["message"] == f"{param}: 'if' is not supported"


def test_other_errors_of_the_target_stay(client: Client, engine: Engine) -> None:
    engine.script = lambda _: [ParameterError("stop", "x", "nothing")]
    answer = client.post(CHAT, asked(CHAT, response_format=FORMAT))
    assert answer.error["param"] == "stop"


# -- objects have no other properties than their schema names, unless that would forbid what it asks for


A, B = {"properties": {"a": {}}}, {"properties": {"b": {}}}
NO = {"additionalProperties": False}
REF = {"$ref": "#/$defs/B"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, {**A, **NO}),
        ({"type": "object"}, {"type": "object"}),
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({**A, "required": ["a"]}, {**A, "required": ["a"], **NO}),
        ({**A, "required": ["a", "b"]}, {**A, "required": ["a", "b"]}),
        ({"patternProperties": {"^x": A}}, {"patternProperties": {"^x": {**A, **NO}}, **NO}),
        ({"properties": {"properties": A}}, {"properties": {"properties": {**A, **NO}}, **NO}),
        ({"items": A}, {"items": {**A, **NO}}),
        ({"prefixItems": [A, True]}, {"prefixItems": [{**A, **NO}, True]}),
        ({"anyOf": [A, B]}, {"anyOf": [{**A, **NO}, {**B, **NO}]}),
        ({"allOf": [A, B]}, {"allOf": [A, B]}),
        ({**A, "anyOf": [B]}, {**A, "anyOf": [B]}),
        ({"enum": [A], "const": A, "default": A}, {"enum": [A], "const": A, "default": A}),
        ({"not": A}, {"not": A}),
        # definitions, and a part that has parts of its own
        ({"$defs": {"B": B}, **REF}, {"$defs": {"B": {**B, **NO}}, **REF}),
        ({"$defs": {"B": B}, "items": REF}, {"$defs": {"B": {**B, **NO}}, "items": REF}),
        ({"allOf": [{"properties": {"a": A}}, B]}, {"allOf": [{"properties": {"a": {**A, **NO}}}, B]}),
    ],
)
def test_what_is_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema) == expected


def test_definitions_of_a_part_stay_open() -> None:
    joined = {"$defs": {"B": B}, "allOf": [A, REF]}
    assert closed(joined) == joined
    through = {"$defs": {"B": B, "C": {"allOf": [REF]}}, "allOf": [A, {"$ref": "#/$defs/C"}]}
    assert closed(through) == through
    itself = {**A, "items": {**B, "$ref": "#"}}
    assert closed(itself) == itself


def test_a_long_chain_of_definitions_stays_open() -> None:
    """Its length squared would be far more than a request may take: this test would not end."""
    count = 20_000
    names = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    chain = {"$defs": {**names, f"d{count}": B, "alone": B}, "allOf": [A, {"$ref": "#/$defs/d0"}]}
    assert closed(chain) == {**chain, "$defs": {**chain["$defs"], "alone": {**B, **NO}}}


@pytest.mark.parametrize("wrong", [None, True, 5, 1.5, "a", [], {}, [None], [[]], [{}], {"a": 5}, {"a": None}])
@pytest.mark.parametrize("beside", [{}, A, {"required": ["a"]}])
@pytest.mark.parametrize(
    "keyword",
    ["properties", "required", "patternProperties", "allOf", "anyOf", "$ref", "$defs", "items", "additionalProperties"],
)
def test_what_is_no_schema_is_left_to_others(keyword: str, beside: dict[str, Any], wrong: Any) -> None:
    """Who compiles it says what is wrong with it."""
    assert closed({**beside, keyword: wrong}).keys() - {"additionalProperties"} <= {*beside, keyword}
