"""Bodies of requests: read, and checked by their types."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import ClientDisconnect, Request

from pilotfish import validation
from pilotfish.config.server import ServerConfig
from pilotfish.errors import ParameterError
from pilotfish.printable import short
from pilotfish.server.http_errors import ClientGone, HttpError, bad, bad_request, http_error
from pilotfish.server.requests import INSTEAD, UNSUPPORTED, RequestBody

Body = TypeVar("Body", bound=RequestBody)
Converted = TypeVar("Converted", bound=Struct)
_JSON_TYPE = re.compile(r"application/([\w.-]+\+)?json\s*(;.*)?", re.IGNORECASE)


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
    return converted(kind.normal(_supported(_object(body), kind)), kind)


def converted(fields: dict[str, Any], kind: type[Converted]) -> Converted:
    """HttpError 400 names the first bad field."""
    try:
        return validation.converted("", fields, kind)
    except ParameterError as error:
        raise http_error(error) from error


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
            instead = f": {INSTEAD[name]}" if name in INSTEAD else ""
            raise bad_request(name, f"{short(value)} is not supported; leave it out{instead}")
        raise bad_request(name, "there is no such parameter")
    return {name: value for name, value in fields.items() if name in names and value is not None}
