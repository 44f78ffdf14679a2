"""Bodies of requests: read, and checked by their types.

msgspec converts and refuses; its sentences are not read. The field to blame is found by walking the type. A field that
nobody knows is left out, unless it could mean something: another API's field, a misspelt one, one that says what an
answer must be.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

import msgspec
from msgspec import Struct
from starlette.requests import ClientDisconnect, Request

from pilotfish.config.server import ServerConfig
from pilotfish.server.conversation import ExactStruct
from pilotfish.server.http_errors import ClientGone, HttpError, bad, bad_request, short
from pilotfish.server.ignored import NAME, Ignored
from pilotfish.server.requests import HARMLESS, HINTS, INSTEAD, UNSUPPORTED, RequestBody

Body = TypeVar("Body", bound=RequestBody)
Converted = TypeVar("Converted", bound=Struct)
_JSON_TYPE = re.compile(r"application/([\w.-]+\+)?json\s*(;.*)?", re.IGNORECASE)
#: Unknown fields of a body up to which each is looked at.
MOST_UNKNOWN = 32
#: How alike a name is to another of which it is a misspelling.
ALIKE = 0.9
#: Types in JSON's words.
_WORDS: dict[Any, str] = {str: "text", int: "an integer", float: "a number", bool: "true or false", NoneType: "null"}


async def read_body(request: Request, kind: type[Body], config: ServerConfig, ignored: Ignored) -> Body:
    """HttpError 408 for a body that takes too long, 413 for one that is too large, 415 for another type than JSON, else
    400 that names the first bad field."""
    content_type = request.headers.get("content-type")
    if content_type and not _JSON_TYPE.fullmatch(content_type.strip()):
        raise HttpError(415, f"content-type: {short(content_type)} is not allowed; expected application/json")
    try:
        async with asyncio.timeout(config.read_timeout):
            body = await _bytes(request, config.max_body_bytes)
    except TimeoutError as error:
        message = f"body: it was not complete after {config.read_timeout:g} s"
        raise HttpError(408, message, "timeout", code="timeout", headers={"connection": "close"}) from error
    fields = kind.normal(_supported(_object(body), kind, ignored), ignored)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError:
        return converted(_pruned("", fields, kind, ignored), kind)


def converted(fields: dict[str, Any], kind: type[Converted]) -> Converted:
    """HttpError 400 names the first bad field."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _blame("", fields, kind) from error


async def _bytes(request: Request, limit: int) -> bytes:
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and (len(stated) > 18 or int(stated) > limit):
        raise _too_large(limit)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
    except ClientDisconnect as error:
        raise ClientGone from error
    return b"".join(parts)


def _too_large(limit: int) -> HttpError:
    """The connection stays open: the HTTP server drops what still comes, and a client that sends first reads this."""
    return HttpError(413, f"body: it is too large; expected at most {limit} bytes", code="request_too_large")


def _object(body: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(body)
    except RecursionError as error:
        raise HttpError(400, "body: it is nested too deep") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        problem = f"it is not JSON in UTF-8, without NaN, infinity and lone surrogates: {error}"
        raise HttpError(400, f"body: {problem}") from error
    if not isinstance(fields, dict):
        raise bad("body", fields, "an object")
    return fields


# -- what nobody knows


def _supported(fields: dict[str, Any], kind: type[RequestBody], ignored: Ignored) -> dict[str, Any]:
    """Fields of `kind` that are not null. HttpError for others that mean something."""
    names = set(kind.__struct_fields__)
    unknown = [name for name, value in fields.items() if name not in names and value is not None]
    for name in unknown:
        if len(unknown) > MOST_UNKNOWN:
            raise bad_request(name, "there is no such parameter")
        _leave_out(name, fields[name], names, ignored)
    return {name: value for name, value in fields.items() if name in names and value is not None}


def _leave_out(name: str, value: Any, names: set[str], ignored: Ignored) -> None:
    if name in UNSUPPORTED or name in HINTS:
        if value in (UNSUPPORTED.get(name) or HINTS[name]):
            return
        instead = f": {INSTEAD[name]}" if name in INSTEAD else ""
        error = bad_request(name, f"{short(value)} is not supported; leave it out{instead}")
        if name in UNSUPPORTED:
            raise error
        ignored.leave_out(error)
        return
    unknown = bad_request(name, "there is no such parameter")
    if not NAME.fullmatch(name) or name in _meaningful():
        raise unknown
    if meant := get_close_matches(name.lower().replace("-", "_"), names, 1, ALIKE):
        raise bad_request(name, f"there is no such parameter; expected {meant[0]}")
    ignored.leave_out(unknown)


@cache
def _meaningful() -> set[str]:
    """Fields of all APIs: in a body of another one they may have been meant."""
    kinds, names = [RequestBody], set[str]()
    for kind in kinds:
        kinds += kind.__subclasses__()
        names.update(kind.__struct_fields__)
    return names - set(HARMLESS)


def _pruned(path: str, value: Any, kind: Any, ignored: Ignored) -> Any:
    """The value without unknown fields of its objects."""
    options = _options(kind)
    if isinstance(value, list):
        inner = next((get_args(option)[0] for option in options if get_origin(option) in (list, Sequence)), None)
        if inner is None:
            return value
        return [_pruned(f"{path}[{i}]", item, inner, ignored) for i, item in enumerate(value)]
    struct = _struct_of(value, [option for option in options if _is_struct(option)])
    return value if struct is None else _without_unknown(path, value, struct, ignored)


def _struct_of(value: Any, structs: list[type[Struct]]) -> type[Struct] | None:
    """Which of them an object is."""
    if not isinstance(value, dict) or not structs:
        return None
    config = structs[0].__struct_config__
    if config.tag is None:
        return structs[0]
    tag = value.get(cast(str, config.tag_field))
    return next((struct for struct in structs if struct.__struct_config__.tag == tag), None)


def _without_unknown(path: str, value: dict[str, Any], struct: type[Struct], ignored: Ignored) -> dict[str, Any]:
    if issubclass(struct, ExactStruct):
        return value
    known, kept = {field.name: field.type for field in msgspec.structs.fields(struct)}, {}
    for name, item in value.items():
        place = f"{path}.{name}" if path else name
        if name in known or name == struct.__struct_config__.tag_field or not NAME.fullmatch(name):
            kept[name] = _pruned(place, item, known.get(name, Any), ignored)
        elif item is not None:
            ignored.leave_out(bad_request(place, "there is no such parameter"))
    return kept


# -- whom to blame


def _blame(path: str, value: Any, kind: Any) -> HttpError:
    """The error for the innermost part of `value` that is not allowed by its type in `kind`."""
    for inner_path, inner_value, inner_kind in _parts(path, value, kind):
        if inner_value is msgspec.UNSET:
            return bad_request(inner_path, "it is missing")
        if inner_kind is None:
            return bad_request(inner_path, "there is no such parameter")
        if not _fits(inner_value, inner_kind):
            return _blame(inner_path, inner_value, inner_kind)
    return bad(path or "body", value, _allowed(kind))


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _parts(path: str, value: Any, kind: Any) -> Iterator[tuple[str, Any, Any]]:
    """Path, value and type of the parts of an object or a list. UNSET: a value that is missing; None: the type of an
    unknown name."""
    options = _options(kind)
    for option in options:
        if isinstance(value, list) and get_origin(option) in (list, Sequence):
            i = _first_misfit(value, option)
            yield f"{path}[{i}]", value[i], get_args(option)[0]
    if isinstance(value, dict):
        prefix = f"{path}." if path else ""
        for name, item, inner_kind in _fields(value, [option for option in options if _is_struct(option)]):
            yield prefix + name, item, inner_kind


def _is_struct(option: Any) -> bool:
    return isinstance(option, type) and issubclass(option, Struct)


def _fields(value: dict[str, Any], structs: list[type[Struct]]) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and type of the fields that an object should have and of those that it has. Of structs with tags,
    after the tag itself, only those of the one that it names count."""
    known: dict[str, Any] = {}
    tags = {struct.__struct_config__.tag: struct for struct in structs}
    if structs and None not in tags:
        tag = cast(str, structs[0].__struct_config__.tag_field)
        yield tag, value.get(tag, msgspec.UNSET), cast(Any, Literal)[tuple(tags)]
        structs, known = [tags[value[tag]]], {tag: Any}
    for struct in structs:
        fields = msgspec.structs.fields(struct)
        known |= {field.name: field.type for field in fields}
        for name, item in value.items():
            yield name, item, known.get(name)
        missing = (field for field in fields if field.required and field.name not in value)
        yield from ((field.name, msgspec.UNSET, field.type) for field in missing)


def _first_misfit(items: list[Any], kind: Any) -> int:
    """The index of the first item that is not allowed in a list of type `kind`, by bisection: a body may hold
    millions."""
    low, high = 0, len(items)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(items[low:middle], kind) else (low, middle)
    return low


def _options(kind: Any) -> tuple[Any, ...]:
    """The types of a union, without their constraints."""
    if get_origin(kind) is Annotated:
        return _options(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return tuple(option for each in get_args(kind) for option in _options(each))
    return (kind,)


def _allowed(kind: Any) -> str:
    """The type in words: its description, the values of a literal, or JSON's types."""
    origin = get_origin(kind) or kind
    if origin is Annotated:
        return str(get_args(kind)[1].description)
    if origin in (Union, UnionType):
        return " or ".join(_allowed(each) for each in get_args(kind) if each is not NoneType)
    if origin is Literal:
        *first, last = get_args(kind)
        return f"{', '.join(first)} or {last}" if first else str(last)
    return "a list" if origin in (list, Sequence) else _WORDS.get(origin, "an object")
