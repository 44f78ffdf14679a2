"""An argument's value is JSON, but for Python's True, False and None."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pilotfish.grammar.parsers.grammars import ANY_OBJECT, Tool, json_of, listed, mark, parameters, rules, text
from pilotfish.grammar.parsers.pythonic import END, START

_DEFINED = ("$defs", "definitions")
#: Keywords of a schema whose properties can be written one by one.
_PLAIN = {"type", "properties", "required", "additionalProperties", "title", "description", "$schema"}
_PLAIN |= set(_DEFINED)
_REFERENCE = re.compile(r'"\$(?:ref|dynamicRef|recursiveRef)": "(?!#/(?:\$defs|definitions)/)')


def pythonic_grammar(tools: Sequence[Tool], several: bool, added: Mapping[str, int]) -> str:
    calls = listed("call", several, by=", ")
    marked = f"{mark(START, added)} list {mark(END, added)} | " if START in added else ""
    return rules(
        f'start: "\\n"{{0,2}} ({marked}list)',
        f'list: "[" {calls} "]"',
        f"call: {' | '.join(f'call{i}' for i in range(len(tools)))}",
        *(rule for i, tool in enumerate(tools) for rule in _call(f"call{i}", tool)),
    )


def _call(rule: str, tool: Tool) -> list[str]:
    schema, name = parameters(tool), text(f"{tool.name}(")
    if _is_plain(schema):
        return [f'{rule}: {name} {rule}first0 ")"', *_keywords(rule, schema)]
    may_lack = "?" if schema == ANY_OBJECT else ""
    return [f'{rule}: {name} ("**" {rule}all){may_lack} ")"', f"{rule}all: {json_of(schema)}"]


def _keywords(rule: str, schema: Mapping[str, Any]) -> list[str]:
    """Properties in order, optional ones skipped at will. Nothing precedes `first`; `rest` follows a property."""
    properties, required = schema.get("properties", {}), schema.get("required", ())
    defined = {name: schema[name] for name in _DEFINED if name in schema}
    lines = []
    for k, (name, value) in enumerate(properties.items()):
        own, skip = f"{rule}key{k}", "" if name in required else f" | {rule}first{k + 1}"
        lines += [
            f"{own}: {text(f'{name}=')} ({_value({**defined, **_object(value)})})",
            f"{rule}first{k}: {own} {rule}rest{k + 1}{skip}",
            f'{rule}rest{k}: (", " {own}){"" if name in required else "?"} {rule}rest{k + 1}',
        ]
    last = len(properties)
    return [*lines, f'{rule}first{last}: ""', f'{rule}rest{last}: ""']


def _value(schema: Mapping[str, Any]) -> str:
    """Top-level constants are Python's; inside lists and objects they are JSON's."""
    if schema.get("type") == "boolean" and not schema.keys() & {"enum", "const"}:
        return '"True" | "False"'
    return '"None"' if schema.get("type") == "null" else json_of(schema)


def _object(schema: Any) -> Mapping[str, Any]:
    return schema if isinstance(schema, Mapping) else {} if schema else {"not": {}}


def _is_plain(schema: Mapping[str, Any]) -> bool:
    properties = schema.get("properties")
    return (
        isinstance(properties, Mapping)
        and schema.keys() <= _PLAIN
        and all(name.isidentifier() for name in properties)
        and set(schema.get("required", ())) <= properties.keys()
        and not _REFERENCE.search(json.dumps(schema))
    )
