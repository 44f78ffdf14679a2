"""What is compiled is enforced, and what would not be is refused, by name; grammars that explode are stopped."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLParserLimits
from pycode_grammars import EOS, VOCAB, accepts, grammars, ids, new_grammars
from refusals import refused
from sizes import sized

from pilotfish.core.sampling.constraint import Constraint
from pilotfish.errors import ParameterError
from pilotfish.grammar import compile as compiling
from pilotfish.grammar.schema import COMPACT
from pilotfish.grammar.trial import LIMITS


def refusal(constraint: Constraint) -> str:
    with pytest.raises(ParameterError) as raised:
        grammars().compile(constraint)
    message = str(raised.value)
    assert raised.value.field == "structured_outputs" and message.startswith("structured_outputs: ")
    assert "\n" not in message and len(message) < 500
    return message


def json_of(schema: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(schema))


INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "instance"),
    [
        ({"pattern": "^a$"}, "b"),
        ({"format": "date"}, "2023-02-29"),
        ({"type": "array", "items": [INTEGER], "additionalItems": False}, [1, 2]),
    ],
)
def test_a_keyword_is_enforced(schema: Any, instance: Any) -> None:
    """The corpus has the other keywords."""
    assert not accepts(json_of(schema), json.dumps(instance))


#: Keywords that would not be enforced, in a schema that is one but for them.
REFUSED: list[tuple[Sequence[str], Any]] = [
    (["uniqueItems"], {"type": "array", "uniqueItems": True}),
    (["contains"], {"type": "array", "contains": INTEGER}),
    (["maxContains", "minContains"], {"type": "array", "minContains": 2, "maxContains": 3}),
    (["minProperties"], {"type": "object", "minProperties": 2}),
    (["minProperties"], {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"], "minProperties": 2}),
    (["maxProperties"], {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 2}),
    (["if", "then", "else"], {"if": INTEGER, "then": {"minimum": 2}, "else": {}}),
    (["not"], {"not": INTEGER}),
    (["dependentRequired"], {"type": "object", "dependentRequired": {"a": ["b"]}}),
    (["dependentSchemas"], {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}),
    (["dependencies"], {"type": "object", "dependencies": {"a": ["b"]}}),
    (["propertyNames"], {"type": "object", "propertyNames": {"maxLength": 3}}),
    (["unevaluatedProperties"], {"type": "object", "unevaluatedProperties": False}),
    (["unevaluatedItems"], {"type": "array", "unevaluatedItems": False}),
    (["contentEncoding", "contentMediaType"], {"contentEncoding": "base64", "contentMediaType": "image/png"}),
    (["contentSchema"], {"contentSchema": INTEGER}),
    (["$dynamicRef", "$dynamicAnchor"], {"$dynamicRef": "#a", "$dynamicAnchor": "a"}),
    (["$recursiveRef"], {"$recursiveRef": "#"}),
    (["$vocabulary"], {"$vocabulary": {}}),
    (["$id"], {"properties": {"a": {"$id": "b"}}}),
    (["nullable"], {"type": "integer", "nullable": True}),
    (["additionalItems"], {"type": "array", "prefixItems": [INTEGER], "additionalItems": False}),
    (["maxlength"], {"type": "string", "maxlength": 3}),
    (["x-guidance"], {"x-guidance": {"lenient": True}}),
    (["format", "iri"], {"type": "string", "format": "iri"}),
    (["format", "unknown"], {"type": "string", "format": "unknown"}),
    (["oneOf", "anyOf"], {"oneOf": [INTEGER, {"type": "number"}]}),
    (["oneOf"], {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 2}]}),
    (["patternProperty", "disjoint"], {"type": "object", "patternProperties": {"^a": INTEGER, "b$": {}}}),
    (["$ref", "#/$defs/b"], {"$ref": "#/$defs/b", "$defs": {"a": INTEGER}}),
    (["$ref"], {"$ref": "https://example.com/schema.json"}),
    (["$ref"], {"$ref": "#/default", "default": {"uniqueItems": True}}),
]


@pytest.mark.parametrize(("names", "schema"), REFUSED)
def test_what_would_not_be_enforced_is_refused_by_name(names: Sequence[str], schema: Any) -> None:
    message = refusal(json_of(schema))
    assert all(name in message for name in names)


@pytest.mark.parametrize(
    "outer",
    [
        lambda inner: {"properties": {"a/~": inner}},
        lambda inner: {"patternProperties": {"a": inner}},
        lambda inner: {"additionalProperties": inner},
        lambda inner: {"items": inner},
        lambda inner: {"items": [INTEGER, inner]},
        lambda inner: {"prefixItems": [inner]},
        lambda inner: {"items": [{}], "additionalItems": inner},
        lambda inner: {"anyOf": [INTEGER, inner]},
        lambda inner: {"oneOf": [inner]},
        lambda inner: {"allOf": [{"allOf": [inner]}]},
        lambda inner: {"$defs": {"unused": inner}, "type": "integer"},
        lambda inner: {"definitions": {"a": {"properties": {"b": inner}}}, "$ref": "#/definitions/a"},
    ],
)
def test_it_is_refused_wherever_it_stands(outer: Any) -> None:
    assert "uniqueItems (at /" in refusal(json_of(outer({"type": "array", "uniqueItems": True})))


def test_annotations_say_nothing() -> None:
    notes = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/a",
        "$comment": "",
        "title": "",
        "description": "",
        "default": {"not": 1},
        "examples": [{"if": 2}],
        "deprecated": True,
        "readOnly": True,
        "writeOnly": True,
        "strict": True,
        "discriminator": {"propertyName": "a"},
        "x-order": 3,
        "uniqueItems": False,
    }
    constraint = json_of(notes | INTEGER)
    assert accepts(constraint, "12") and not accepts(constraint, "true")


def test_a_property_may_have_the_name_of_any_keyword() -> None:
    names = ["not", "if", "uniqueItems", "title", "x-a", "$id"]
    constraint = json_of({"type": "object", "properties": dict.fromkeys(names, INTEGER), "required": names})
    assert accepts(constraint, json.dumps(dict.fromkeys(names, 1)))
    assert not accepts(constraint, json.dumps(dict.fromkeys(names, "a")))


#: What is no schema, and why.
NO_SCHEMAS = [
    ("{", "no JSON"),
    ('{"maximum": NaN}', "no JSON"),
    ("[]", "no schema"),
    ("false", "nothing matches"),
    ('{"properties": {"a": 5}}', "/properties/a is no schema"),
    ('{"type": "text"}', "text"),
    ('{"type": "string", "minLength": 3, "maxLength": 2}', "minLength (3)"),
    ('{"type": "integer", "minimum": "2"}', "minimum"),
    ('{"enum": []}', "nsatisfiable"),
    ('{"type": "string", "format": "uuid", "maxLength": 8}', "nothing matches it: a pattern"),
    ('{"type": "string", "pattern": "("}', "unclosed group"),
    ('{"type": "string", "pattern": "(?!a)b"}', "look-ahead"),
    ('{"$ref": "#"}', "nothing matches"),
]


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        *((Constraint("json_schema", text), reason) for text, reason in NO_SCHEMAS),
        (Constraint.regex("a("), "unclosed group"),
        (Constraint.regex(r"(?<=a)b"), "look-behind"),
        (Constraint.regex(r"(a)\1"), "backreferences"),
        (Constraint.regex("a" * 20_000), "at most"),
        (Constraint.grammar('start: "a" c\nc: "d" b'), 'at 2(4): unknown name: "b"'),
        (Constraint.grammar("start: ("), "1(9)"),
        (Constraint.grammar("root ::= ("), "line 1"),
        (Constraint.grammar("hello"), "line 1"),
        (Constraint.grammar("start: <|nothing|>"), "<|nothing|>"),
        (Constraint.grammar("start: a\na[max_tokens=3]: /b+/"), "max_tokens"),
        (Constraint.grammar('start: a "c"\na[stop="c"]: /b+/'), "stop"),
        (Constraint.grammar('start: %json {"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Constraint.grammar('start: %json {"x-guidance": {"lenient": true}}'), "x-guidance"),
    ],
)
def test_what_is_no_grammar_is_refused_with_a_reason(constraint: Constraint, reason: str) -> None:
    assert reason in refusal(constraint)


LIST = {"type": "array", "items": INTEGER}


@pytest.mark.parametrize(
    ("text", "loose", "compact"),
    [
        *(("[1, 2]", True, True), ("[1,2]", True, False), ("[\n  1,\n  2\n]", True, False)),
        *(("[1,\n" + " " * 32 + "2]", True, False), ("[1,\n" + " " * 33 + "2]", False, False)),
        *(("[1,  2]", False, False), ("[1,\n\n2]", False, False), ("[1, \n2]", False, False)),
        *((" [1, 2]", False, False), ("[1, 2] ", False, False)),
    ],
)
def test_white_space_is_bounded(text: str, loose: bool, compact: bool) -> None:
    schema = json.dumps(LIST)
    assert accepts(Constraint("json_schema", schema), text) == loose
    assert accepts(Constraint("json_schema", schema, compact=True), text) == compact
    assert accepts(Constraint.grammar(f"start: %json {schema}"), text) == loose
    styled = json.dumps({**LIST, "x-guidance": COMPACT})
    assert accepts(Constraint.grammar(f'start: "" %json {styled}\n'), text) == compact


def test_a_name_is_written_in_one_way() -> None:
    """An escape would hide that it is the name of a listed property."""
    open_ended = json_of({"type": "object", "properties": {"a": INTEGER}, "additionalProperties": {"type": "string"}})
    assert accepts(open_ended, '{"b": "c"}') and not accepts(open_ended, r'{"\u0061": "c"}')


def test_embedded_schemas_are_checked_one_by_one() -> None:
    text = 'start: "%json {" a "x" b\na: %json {"type": "string", "format": "date", "const": "}"}\n'
    assert "nothing matches" in refusal(Constraint.grammar(f'{text}b: %json {{"enum": [1]}}'))
    both = 'start: "a" %json {"enum": [1]} "%json {" %json\n {"type": "string", "format": "date"}'
    assert accepts(Constraint.grammar(both), 'a1%json {"2024-02-29"')
    assert not accepts(Constraint.grammar(both), 'a1%json {"2023-02-29"')


def chained(length: int) -> dict[str, Any]:
    links = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)}
    return {"$defs": {**links, f"d{length}": INTEGER}, "$ref": "#/$defs/d0"}


EXPLOSIVE = {
    "many alternatives": Constraint("json_schema", json.dumps({"enum": [f"entry {i}" for i in range(16_000)]})),
    "nested deeply": Constraint("json_schema", '{"type": "array", "items": ' * 9000 + "{}" + "}" * 9000),
    "all of many patterns": json_of({"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(50)]}),
    "a large remainder": json_of({"type": "integer", "multipleOf": 99_999_989}),
    "products of choices": json_of(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": INTEGER}} for j in range(4)]} for i in range(6)]}
    ),
    "many optional properties": json_of({"type": "object", "properties": {f"p{i}": INTEGER for i in range(3000)}}),
    "rules in rules": Constraint.grammar(
        "\n".join(["start: r0", *(f"r{i}: r{i + 1} | r{i + 1}" for i in range(2500)), 'r2500: "a"'])
    ),
    "terminals in terminals": Constraint.grammar(
        "\n".join(["start: T0", *(f"T{i}: (T{i + 1}|T{i + 1})" for i in range(2200)), 'T2200: "a"'])
    ),
    "terminals that double": Constraint.grammar(
        "\n".join(["start: T0", *(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)), 'T40: "a"'])
    ),
    "nested rules": Constraint.grammar("start: " + "(" * 5000 + '"a"' + ")" * 5000),
}


#: Each takes the second that a trial has.
TRIED = sized(
    ["all of many patterns", "terminals that double", "nested rules"],
    [name for name in EXPLOSIVE if name != "many alternatives"],
)


@pytest.mark.parametrize("name", TRIED)
def test_a_grammar_that_explodes_is_refused(name: str) -> None:
    assert refusal(EXPLOSIVE[name])
    assert accepts(json_of(INTEGER | {"maximum": len(name)}), "1")  # the next one is compiled


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint.grammar('start: start start | "a"'),
        Constraint.grammar('start: start start start | start start | "a" | ""'),
        Constraint.grammar('start: (("a" "b"?){1,999}){1,999}'),
        Constraint.regex("((a{1,999}){1,999}){1,999}"),
    ],
)
def test_a_step_that_explodes_ends_in_an_error(constraint: Constraint) -> None:
    matcher = grammars().compile(constraint).deep_copy()
    tokens = ids("a")
    for _ in range(3000):
        matcher.compute_bitmask()
        if matcher.is_error() or not matcher.consume_tokens(tokens):
            break
    assert matcher.is_error() and matcher.get_error()


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (EXPLOSIVE["many alternatives"], '"entry 15999"'),
        (Constraint.choice([f"entry {i}" for i in range(3000)]), "entry 49"),
        (Constraint.regex("(a|aa)*b"), "aaaaab"),
        (Constraint.regex("(a|b)*a(a|b){40}"), "ba" + "ab" * 20),
        (Constraint.grammar('start: start "a" | "a"'), "aaaa"),
        (Constraint.grammar('start: "a" start | "a"'), "aaaa"),
        (json_of({"type": "string", "maxLength": 1_000_000}), '"a"'),
        (json_of({"type": "array", "items": INTEGER, "maxItems": 1_000_000}), "[1, 2]"),
        (json_of({"properties": {f"p{i}": INTEGER for i in range(110)}}), '{"p7": 1, "p99": 2}'),
        (json_of(chained(60)), '{"a": {"a": {}}}'),
    ],
)
def test_what_is_only_large_is_served(constraint: Constraint, text: str) -> None:
    assert accepts(constraint, text)


def test_a_compiled_grammar_is_kept_and_a_refusal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = new_grammars()
    known, bad = Constraint.regex("[ab]{3}"), Constraint.regex("(")
    matcher = grammars.compile(known)
    assert "unclosed" in refused(ParameterError, grammars.compile, bad)
    monkeypatch.setattr(compiling, "_grammar", lambda _: pytest.fail("compiled again"))
    assert grammars.compile(known) is matcher
    assert "unclosed" in refused(ParameterError, grammars.compile, bad)


def test_the_grammars_used_longest_ago_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "KEPT", 2)
    grammars = new_grammars()
    one, two, three = (Constraint.regex(f"a{{{i}}}") for i in (1, 2, 3))
    first, second = grammars.compile(one), grammars.compile(two)
    assert grammars.compile(one) is first
    grammars.compile(three)
    assert grammars.compile(one) is first and grammars.compile(two) is not second


def test_any_end_of_sequence_ends_an_output() -> None:
    matcher = new_grammars([EOS, 7]).compile(Constraint.regex("a*")).deep_copy()
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    assert bits >> EOS & 1 and bits >> 7 & 1 and bits.bit_length() <= VOCAB


def test_limits_are_those_that_llguidance_has() -> None:
    limits = LLParserLimits(**LIMITS)
    assert {name: getattr(limits, name) for name in LIMITS} == LIMITS
