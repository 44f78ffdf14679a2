from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from pilotfish.core.sampling.constraint import Constraint
from pilotfish.errors import ParameterError
from pilotfish.server.bodies.requests import GenerationRequest, JsonObject, JsonOfSchema
from pilotfish.server.http_errors import bad, bad_request

#: Keywords whose values are schemas by name.
NAMED = frozenset({"properties", "patternProperties"})
DEFINED = frozenset({"$defs", "definitions"})
#: Keywords whose schemas are about the same value as the schema that they stand in.
SAME = frozenset({"$ref", "anyOf", "oneOf", "allOf", "if"})
#: Keywords that say what else an object may have.
SAID = frozenset({"additionalProperties", "unevaluatedProperties"})


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Objects get no properties that their schema does not name, unless it allows them: else a model may go on with
    properties of its own. OpenAI's strict schemas must say so, and vLLM reads every schema so.

        {"properties": {"a": …}}                                       closed
        {"allOf": [{"properties": {"a": …}}, {"$ref": "#/$defs/B"}]}   open, and so is B: each names only some of them
    """
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


FIELD = "structured_outputs"  # of SamplingParams
#: Fields of `structured_outputs` that say which outputs are allowed. All but the last have an older name: guided_json.
KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True)
class Wanted:
    field: str
    kind: str  # of KINDS
    value: Any = True
    compact: bool = True  # JSON without optional white space, which a model may write for long

    def constraint(self) -> Constraint:
        with blaming(self.field):
            match self.kind:
                case "json" | "json_object":
                    return Constraint.json(self.schema(), compact=self.compact)
                case "choice":
                    return Constraint.choice(self.value)
                case "regex":
                    return Constraint.regex(self.value)
            return Constraint.grammar(self.value)

    def schema(self) -> dict[str, Any]:
        if self.kind == "json_object":
            return {"type": "object"}
        if isinstance(self.value, dict):
            return closed(self.value)
        try:
            return closed(msgspec.json.decode(self.value, type=dict[str, Any]))
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise bad(self.field, self.value, "a JSON schema, as an object or as its text") from error


def wanted(body: GenerationRequest) -> Wanted | None:
    """HttpError names the second of two fields that both give a constraint."""
    older = [(kind, getattr(body, f"guided_{kind}")) for kind in KINDS[:-1]]
    guided = [Wanted(f"guided_{kind}", kind, value) for kind, value in older if value is not None]
    given = [*_of_format(body), *_of_structured(body), *guided]
    if len(given) > 1:
        raise bad_request(given[1].field, f"it cannot be combined with {given[0].field}")
    return given[0] if given else None


def _of_format(body: GenerationRequest) -> Iterator[Wanted]:
    if isinstance(body.response_format, JsonOfSchema):
        yield Wanted("response_format", "json", body.response_format.json_schema.schema)
    elif isinstance(body.response_format, JsonObject):
        yield Wanted("response_format", "json_object")


def _of_structured(body: GenerationRequest) -> Iterator[Wanted]:
    if (given := body.structured_outputs) is None:
        return
    kinds = [kind for kind in KINDS if getattr(given, kind) is not None]
    if not kinds:
        raise bad_request(FIELD, f"one of {', '.join(KINDS[:-1])} and {KINDS[-1]} is needed")
    compact = given.disable_any_whitespace is not False
    yield from (Wanted(f"{FIELD}.{kind}", kind, getattr(given, kind), compact) for kind in kinds)


@contextmanager
def blaming(field: str) -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise bad_request(field, "it is nested too deep") from error
    except ParameterError as error:
        if error.field != FIELD:
            raise
        problem = str(error).removeprefix(FIELD).removeprefix(":").strip()
        raise ParameterError.described(field, f"{field}: {problem}") from error
