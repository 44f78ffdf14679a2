"""The body of a request: bytes up to a limit, then one of `requests`' types, or one line that names what is wrong."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from pilotfish.config import ServerConfig
from pilotfish.server.failures import ClientGone, HttpError, bad, short
from pilotfish.server.requests import ALLOWED, HARMLESS, UNSUPPORTED

Parsed = TypeVar("Parsed")

_JSON = re.compile(r"application/([\w.-]+\+)?json\s*(;.*)?", re.IGNORECASE)
#: How msgspec says where: `$.messages[0].role`; a key of a mapping is […].
_WHERE = re.compile(r"(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?", re.DOTALL)

_KINDS = {
    "str": "text",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


async def read(request: Request, kind: type[Parsed], config: ServerConfig) -> Parsed:
    """The request's body as `kind`. HttpError 408 for one that takes too long, 413 for one that is too large, 415 for
    another type than JSON, else 400."""
    content_type = request.headers.get("content-type")
    if content_type and not _JSON.fullmatch(content_type.strip()):
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


def parse(body: bytes, kind: type[Parsed]) -> Parsed:
    """HttpError 400 naming the first field that cannot be."""
    fields = _object(body)
    known = _supported(fields, kind)
    try:
        return msgspec.convert(known, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error), known) from error


def _object(body: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(body)
    except RecursionError as error:
        raise HttpError(400, "body: it is nested too deep") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise HttpError(
            400, f"body: it is not JSON in UTF-8, without NaN, infinity and lone surrogates: {error}"
        ) from error
    if not isinstance(fields, dict):
        raise bad("body", fields, "an object")
    return fields


def _supported(fields: dict[str, Any], kind: type) -> dict[str, Any]:
    """The fields that `kind` has and that are not null; HttpError for any other that would change something."""
    names = {field.encode_name for field in msgspec.structs.fields(kind)}
    for name, value in fields.items():
        if name in names or (name in UNSUPPORTED and value in UNSUPPORTED[name]):
            continue
        if name in UNSUPPORTED:
            raise HttpError(400, f"{name}: {short(value)} is not supported; leave it out", param=name)
        raise HttpError(400, f"{name}: there is no such parameter", param=name)
    return {name: value for name, value in fields.items() if name in names - HARMLESS and value is not None}


def _named(message: str, fields: dict[str, Any]) -> HttpError:
    """msgspec's complaint, as field, value and what is allowed."""
    match = _WHERE.fullmatch(message)
    assert match is not None  # any text matches
    what, path = match["what"], match["path"] or ""
    name = path.split(".")[-1].split("[")[0]
    if found := re.match(r"Object (?:contains unknown|missing required) field `(.*)`", what):
        field = f"{path}.{found[1]}" if path else found[1]
        reason = "there is no such parameter" if "unknown" in what else "it is missing"
        return HttpError(400, f"{field}: {reason}", param=field)
    return bad(path or "body", _at(fields, path), ALLOWED.get(name) or _plain(what))


def _plain(what: str) -> str:
    """`Expected `str | array | null`, got `int`` in JSON's words."""
    kinds = what.split(", got")[0].removeprefix("Expected ").replace("`", "").split(" | ")
    return " or ".join(_KINDS.get(kind, kind) for kind in kinds if kind != "null" or len(kinds) == 1)


def _at(value: Any, path: str) -> Any:
    """The value at `messages[0].role`; where a mapping hides the key, the mapping."""
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal():
            value = value[int(part)]
        else:
            break
    return value
