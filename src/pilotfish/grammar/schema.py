"""JSON schemas that llguidance enforces wholly: keywords that it would ignore are refused by name, those that it
enforces in part are made exact. Alone it lets impossible dates, escaped duplicate keys and endless white space pass."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec

_DECLARED = msgspec.toml.decode(Path(__file__).with_name("schema.toml").read_bytes())
#: Keywords that hold one schema, a list of them, or schemas by name.
ONE = {"additionalProperties", "items", "additionalItems"}
MANY = {"allOf", "anyOf", "oneOf", "prefixItems"}
NAMED = {"properties", "patternProperties", "$defs", "definitions"}
#: Keywords that hold no schema, and annotations, as all that begin with x-.
PLAIN, ANNOTATIONS = set(_DECLARED["keywords"]["plain"]), set(_DECLARED["keywords"]["annotations"])
#: Keywords without meaning at the root.
ROOT_ANNOTATIONS = {"$id", "id"}
#: Depth of nested schemas; nesting of JSON, which llguidance reads to 128, is twice as deep.
MAX_DEPTH = 48
TOO_DEEP = f"the schema is nested more than {MAX_DEPTH} deep"
#: Characters of a pattern.
MAX_PATTERN = 1 << 12
#: Patterns of formats: RFC 3339, 5321 (without quotes), 1123, 4291, 3986 (ASCII), 9562. Parts are bounded.
FORMATS: Mapping[str, str] = _DECLARED["formats"]

#: Separators of JSON. One space, or a line's end and an indent, so that an output cannot be white
#: space for ever; or, compact, what Python and the templates of models write, so that nothing is left to choose there.
LOOSE = {"whitespace_pattern": r" |\n[ \t]{0,32}"}
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: No \u: it would write a name, or half a character, in a way that no rule about texts sees.
_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
OPTIONS = "x-guidance"

_decoder = json.JSONDecoder()


class SchemaError(ValueError):
    pass


def enforced(text: str, *, compact: bool) -> str:
    try:
        schema = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise SchemaError(f"the schema is no JSON: {error}") from error
    except RecursionError as error:
        raise SchemaError(TOO_DEEP) from error
    return json.dumps(_Checker(schema).checked() | _options(compact), ensure_ascii=False)


def embedded(grammar: str, *, compact: bool) -> tuple[str, int]:
    """A grammar with its schemas (behind %json) enforced, and its length without them."""
    parts, end, without = list[str](), 0, 0
    for found in re.finditer(r"%json\s*(?=\{)", grammar):
        if found.start() < end:
            continue  # within a schema
        try:
            schema, after = _decoder.raw_decode(grammar, found.end())
        except ValueError:
            continue  # within a text, or llguidance will say why
        except RecursionError as error:
            raise SchemaError(TOO_DEEP) from error
        style = schema.pop(OPTIONS, None)
        options = _options(compact or style == COMPACT)
        if style not in (None, COMPACT):
            raise SchemaError(f"{OPTIONS} is not supported")
        checked = json.dumps(_Checker(schema).checked() | options, ensure_ascii=False)
        parts += [grammar[end : found.end()], checked]
        without += found.end() - end
        end = after
    return "".join([*parts, grammar[end:]]), without + len(grammar) - end


def _options(compact: bool) -> dict[str, Any]:
    return {OPTIONS: (COMPACT if compact else LOOSE) | _ESCAPES}


class _Checker:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._places: set[str] = set()  # JSON pointers of all schemas
        self._anchors: set[str] = set()
        self._refs: list[str] = []

    def checked(self) -> dict[str, Any]:
        if self._root is False:
            raise SchemaError("nothing matches the schema false")
        schema = self._schema({} if self._root is True else self._root, "", 0)
        for ref in self._refs:
            pointer = unquote(ref.removeprefix("#"))
            if not ref.startswith("#") or (pointer not in self._places and pointer not in self._anchors):
                expected = "expected # and the place of a schema in this one"
                raise SchemaError(f"$ref: {_short(ref)} is not supported; {expected}")
        return dict(schema)

    def _schema(self, schema: Any, place: str, depth: int) -> Any:
        self._places.add(place)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise SchemaError(f"{place or 'the root'} is no schema: {_short(schema)}; expected an object")
        if depth > MAX_DEPTH:
            raise SchemaError(TOO_DEEP)
        self._check_keywords(schema, place)
        kept = {key: value for key, value in schema.items() if key not in ANNOTATIONS | ROOT_ANNOTATIONS}
        kept = {key: value for key, value in kept.items() if not key.startswith("x-")}
        whole = {key: self._value(key, value, f"{place}/{_escaped(key)}", depth) for key, value in kept.items()}
        return _exact(whole, place)

    def _value(self, key: str, value: Any, place: str, depth: int) -> Any:
        if key in NAMED and isinstance(value, dict):
            return {name: self._schema(one, f"{place}/{_escaped(name)}", depth + 1) for name, one in value.items()}
        if (key in MANY or key == "items") and isinstance(value, list):
            return [self._schema(one, f"{place}/{i}", depth + 1) for i, one in enumerate(value)]
        if key in ONE:
            return self._schema(value, place, depth + 1)
        if key == "$ref" and isinstance(value, str):
            self._refs.append(value)
        if key == "$anchor" and isinstance(value, str):
            self._anchors.add(value)
        return value

    def _check_keywords(self, schema: Mapping[str, Any], place: str) -> None:
        known = ONE | MANY | NAMED | PLAIN | ANNOTATIONS | (ROOT_ANNOTATIONS if not place else set())
        unknown = sorted(key for key in schema if key not in known and (key == OPTIONS or not key.startswith("x-")))
        unknown = [key for key in unknown if (key, schema[key]) != ("uniqueItems", False)]
        if "additionalItems" in schema and not isinstance(schema.get("items"), list):
            unknown.append("additionalItems")
        if unknown:
            keywords = "keyword" if len(unknown) == 1 else "keywords"
            at = f" (at {place})" if place else ""
            raise SchemaError(f"not supported in a schema: the {keywords} {', '.join(unknown)}{at}")


def _exact(schema: dict[str, Any], place: str) -> dict[str, Any]:
    schema.pop("uniqueItems", None)  # false, or it had been refused
    for pattern in (schema.get("pattern"), *(schema.get("patternProperties") or ())):
        if isinstance(pattern, str) and len(pattern) > MAX_PATTERN:
            raise SchemaError(f"a pattern of {len(pattern)} characters is too long; at most {MAX_PATTERN} are allowed")
    if "format" in schema:
        name = schema.pop("format")
        if not isinstance(name, str) or name not in FORMATS:
            raise SchemaError(f"format: {_short(name)} is not supported; expected one of {', '.join(FORMATS)}")
        text = {"pattern": f"^(?:{FORMATS[name]})$"}
        if "pattern" in schema:
            schema["allOf"] = [*schema.get("allOf", []), text]
        else:
            schema |= text
    if "minProperties" in schema:
        _limit_properties(schema, place)
    return schema


def _limit_properties(schema: dict[str, Any], place: str) -> None:
    """An output may repeat names that no schema lists; they count once."""
    least, required = schema["minProperties"], schema.get("required")
    if isinstance(least, int) and isinstance(required, list) and least <= len(set(map(str, required))):
        del schema["minProperties"]
    elif isinstance(least, int) and least > 1:
        where = f" (at {place})" if place else ""
        raise SchemaError(f"minProperties above 1 is only supported where so many properties are required{where}")


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"
