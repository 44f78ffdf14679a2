"""Bodies by their types: read and checked, and described in the OpenAPI document.

msgspec converts and refuses. Of its sentences only the place is read; what is allowed there is told in our words.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Struct
from starlette.requests import ClientDisconnect, Request

from pilotfish.config import ServerConfig
from pilotfish.server.requests import HARMLESS, UNSUPPORTED, RequestBody
from pilotfish.server.responses import ClientGone, ErrorBody, HttpError, bad, bad_request, short

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
    400."""
    content_type = request.headers.get("content-type")
    if content_type and not _JSON_TYPE.fullmatch(content_type.strip()):
        raise HttpError(415, f"content-type: {short(content_type)} is not allowed; expected application/json")
    try:
        async with asyncio.timeout(config.read_timeout):
            body = await _bytes(request, config.max_body_bytes)
    except TimeoutError as error:
        message = f"body: it was not complete after {config.read_timeout:g} s"
        raise HttpError(408, message, "timeout", code="timeout", headers={"connection": "close"}) from error
    return parse(body, kind)


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


def parse(body: bytes, kind: type[Body]) -> Body:
    """HttpError 400 names the first bad field."""
    fields = _supported(_object(body), kind)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _blame(fields, kind, str(error)) from error


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
    return {
        name: value for name, value in fields.items() if name in names and name not in HARMLESS and value is not None
    }


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


# -- the OpenAPI document


@dataclass(frozen=True)
class Operation:
    """A route of the API, and the types of its bodies."""

    path: str
    description: str
    answer: type[Struct]
    body: type[Struct] | None = None
    event: type[Struct] | None = None  # of a stream
    unavailable: type[Struct] = ErrorBody  # status 503

    @property
    def method(self) -> str:
        return "POST" if self.body else "GET"

    @property
    def tag(self) -> str:
        return "generation" if self.event else "text" if self.body else "server"

    @property
    def failures(self) -> tuple[int, ...]:
        if self.body is not None:
            return 400, 401, 404, 408, 413, 415, 429, 500, 503, 504
        if self.path.startswith("/v1/"):
            return 401, 404, 429, 503
        return () if self.unavailable is ErrorBody else (503,)


def openapi(operations: Mapping[str, Operation], version: str) -> dict[str, Any]:
    """The OpenAPI document."""
    kinds: list[type[Struct]] = [ErrorBody]
    paths: dict[str, Any] = {}
    for name, known in operations.items():
        kinds += [kind for kind in (known.answer, known.body, known.event, known.unavailable) if kind is not None]
        paths[known.path.replace(":path", "")] = {known.method.lower(): _described(name, known)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Pilotfish",
            "description": "OpenAI's API over lossless speculative decoding.",
            "version": version,
        },
        "paths": paths,
        "components": {"schemas": msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")[1]},
    }


def _described(name: str, known: Operation) -> dict[str, Any]:
    def content(kind: type) -> dict[str, Any]:
        return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}

    stream = {} if known.event is None else {"text/event-stream": {"schema": {"type": "string"}}}
    answers: dict[str, Any] = {"200": {"description": "Success", "content": content(known.answer) | stream}}
    for status in known.failures:
        kind = known.unavailable if status == 503 else ErrorBody
        answers[str(status)] = {"description": f"Status {status}", "content": content(kind)}
    described: dict[str, Any] = {
        "tags": [known.tag],
        "summary": name.replace("_", " ").title(),
        "description": known.description,
        "operationId": name,
        "responses": answers,
    }
    if "{name" in known.path:
        parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "title": "Name"}}
        described["parameters"] = [parameter]
    if known.body is not None:
        described["requestBody"] = {"required": True, "content": content(known.body)}
    return described
