"""Objects have no other properties than their schema names, unless that would forbid what it asks for."""

from __future__ import annotations

from typing import Any

import pytest

from pilotfish.server.bodies.closed_schema import closed

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
    ],
)
def test_what_is_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema) == expected


def test_definitions_are_closed() -> None:
    assert closed({"$defs": {"B": B}, **REF}) == {"$defs": {"B": {**B, **NO}}, **REF}
    assert closed({"$defs": {"B": B}, "items": REF}) == {"$defs": {"B": {**B, **NO}}, "items": REF}


def test_definitions_of_a_part_stay_open() -> None:
    joined = {"$defs": {"B": B}, "allOf": [A, REF]}
    assert closed(joined) == joined
    through = {"$defs": {"B": B, "C": {"allOf": [REF]}}, "allOf": [A, {"$ref": "#/$defs/C"}]}
    assert closed(through) == through
    itself = {**A, "items": {**B, "$ref": "#"}}
    assert closed(itself) == itself


def test_a_schema_of_a_part_has_parts_of_its_own() -> None:
    schema = {"allOf": [{"properties": {"a": A}}, B]}
    assert closed(schema) == {"allOf": [{"properties": {"a": {**A, **NO}}}, B]}


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
