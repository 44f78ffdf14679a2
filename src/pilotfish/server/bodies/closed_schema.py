"""Objects get no properties that their schema does not name, unless it allows them: else a model may go on with
properties of its own. OpenAI's strict schemas must say so, and vLLM reads every schema so.

    {"properties": {"a": …}}                                       closed
    {"allOf": [{"properties": {"a": …}}, {"$ref": "#/$defs/B"}]}   open, and so is B: each names only some of them
"""

from typing import Any

#: Keywords whose values are schemas by name.
NAMED = frozenset({"properties", "patternProperties"})
DEFINED = frozenset({"$defs", "definitions"})
#: Keywords whose schemas are about the same value as the schema that they stand in.
SAME = frozenset({"$ref", "anyOf", "oneOf", "allOf", "if"})
#: Keywords that say what else an object may have.
SAID = frozenset({"additionalProperties", "unevaluatedProperties"})


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    joined = _joined(schema)
    result: dict[str, Any] = _Closing(joined).schema(schema, alone="#" not in joined)
    return result


def _joined(schema: dict[str, Any]) -> set[str]:
    """References beside other schemas of the same value, also through each other; a definition is walked once."""
    walk = _Closing(set())
    walk.schema(schema, alone=True)
    named = {keyword: schema[keyword] for keyword in DEFINED if isinstance(schema.get(keyword), dict)}
    definitions = {f"#/{keyword}/{name}": each for keyword, all_of in named.items() for name, each in all_of.items()}
    definitions["#"] = schema
    joined, left = set[str](), list(walk.joined)
    while left:
        ref = left.pop()
        if ref not in joined:
            joined.add(ref)
            walk = _Closing(set())
            walk.schema(definitions.get(ref, True), alone=False)
            left += walk.joined
    return joined


class _Closing:
    """References `known` stay open; `joined` stand beside other schemas of the same value."""

    def __init__(self, known: set[str]) -> None:
        self._known = known
        self.joined: set[str] = set()

    def schema(self, given: Any, *, alone: bool) -> Any:
        if not isinstance(given, dict):
            return given  # true or false
        same, named = SAME & given.keys(), NAMED & given.keys()
        joins = isinstance(given.get("allOf"), list) and len(given["allOf"]) > 1
        inner = alone and not named and len(same) == 1 and not joins
        if not inner and isinstance(given.get("$ref"), str):
            self.joined.add(given["$ref"])
        parts = {keyword: self._part(keyword, part, inner) for keyword, part in given.items()}
        closes = alone and named and not same and not SAID & given.keys() and _names_all(given)
        return {**parts, "additionalProperties": False} if closes else parts

    def _part(self, keyword: str, part: Any, inner: bool) -> Any:
        if keyword in NAMED and isinstance(part, dict):
            return {name: self.schema(each, alone=True) for name, each in part.items()}
        if keyword in DEFINED and isinstance(part, dict):
            return {k: self.schema(each, alone=f"#/{keyword}/{k}" not in self._known) for k, each in part.items()}
        if keyword in ("items", "contains", "additionalProperties", "prefixItems"):
            return self._each(part, alone=True)
        return self._each(part, alone=inner) if keyword in ("anyOf", "oneOf", "allOf") else part

    def _each(self, part: Any, *, alone: bool) -> Any:
        if isinstance(part, list):
            return [self.schema(each, alone=alone) for each in part]
        return self.schema(part, alone=alone)


def _names_all(schema: dict[str, Any]) -> bool:
    required, properties = schema.get("required", []), schema.get("properties", {})
    if not isinstance(required, list) or not isinstance(properties, dict):
        return False
    return all(isinstance(name, str) and name in properties for name in required)
