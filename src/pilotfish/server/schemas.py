"""Bodies of requests: read, and checked by their types.

msgspec converts and refuses. Of its sentences only the place is read; what is allowed there is told in our words.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Struct
from starlette.requests import ClientDisconnect, Request

from pilotfish.config import ServerConfig
from pilotfish.server.http_errors import ClientGone, HttpError, bad, bad_request, short
from pilotfish.server.requests import UNSUPPORTED, RequestBody

Body = TypeVar("Body", bound=RequestBody)
_JSON_TYPE = re.compile(r"application/([\w.-]+\+)?json\s*(;.*)?", re.IGNORECASE)
#: msgspec's sentences end in a place such as $.messages[0].role; within a mapping they end in [...].
_SENTENCE = re.compile(r"(?P<problem>.*?)(?: - at `\$(?P<path>[^`]*)`)?", re.DOTALL)
_FIELD = re.compile(r"Object (?P<what>missing required|contains unknown) field `(?P<name>.*)`", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
#: Types in JSON's words.
_WORDS: dict[Any, str] = {str: "text", int: "an integer", float: "a number", bool: "true or false", NoneType: "null"}


async def read_body(request: Request, kind: type[Body], config: ServerConfig) -> Body:
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
    fields = _supported(_object(body), kind)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _blame(fields, kind, str(error)) from error


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


def _supported(fields: dict[str, Any], kind: type[Struct]) -> dict[str, Any]:
    """Fields of `kind` that are not null. HttpError for other fields, unless their value changes nothing."""
    names = set(kind.__struct_fields__)
    for name, value in fields.items():
        if name in names or (name in UNSUPPORTED and value in UNSUPPORTED[name]):
            continue
        if name in UNSUPPORTED:
            raise bad_request(name, f"{short(value)} is not supported; leave it out")
        raise bad_request(name, "there is no such parameter")
    return {name: value for name, value in fields.items() if name in names and value is not None}


def _blame(fields: Any, kind: Any, sentence: str) -> HttpError:
    """The error for the part of `fields` at which msgspec's sentence points."""
    found = _SENTENCE.fullmatch(sentence)
    assert found is not None
    value, path = fields, found["path"] or ""
    for name, index in _STEP.findall(path):
        value, kind = (value[int(index)], _item_type(kind)) if index else (value[name], _field_type(kind, name))
    where = path.removeprefix(".").removesuffix("[...]")
    if about := _FIELD.fullmatch(found["problem"]):
        problem = "it is missing" if about["what"] == "missing required" else "there is no such parameter"
        return bad_request(f"{where}.{about['name']}".removeprefix("."), problem)
    return bad(where, value, _allowed(kind))


def _item_type(kind: Any) -> Any:
    return next(get_args(option)[0] for option in _options(kind) if get_origin(option) in (list, Sequence))


def _field_type(kind: Any, name: str) -> Any:
    struct = next(option for option in _options(kind) if isinstance(option, type) and issubclass(option, Struct))
    return next(field.type for field in msgspec.structs.fields(struct) if field.name == name)


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
