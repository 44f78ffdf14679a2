"""Unknown fields are left out, unless they could mean something: another API's, a misspelt one, a constraint."""

import asyncio
import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from msgspec import Struct
from starlette.requests import ClientDisconnect, Request

from pilotfish.config.server import ServerConfig
from pilotfish.conversation import ExactStruct
from pilotfish.printable import short
from pilotfish.server.bodies.ignored import NAME, Ignored
from pilotfish.server.bodies.requests import HARMLESS, HINTS, INSTEAD, UNSUPPORTED, WITHIN_MESSAGES, RequestBody
from pilotfish.server.http_errors import ClientGone, HttpError, bad, bad_request
from pilotfish.validation import converted, is_struct, options_of, struct_of, types_of

Body = TypeVar("Body", bound=RequestBody)
MOST_UNKNOWN = 32  # unknown fields of a body that are looked at
MOST_ITEMS = 10_000  # items of a list that are looked at
#: How alike a misspelt name is to the right one.
ALIKE = 0.88
_JSON_TYPE = re.compile(r"application/([\w.-]+\+)?json\s*(;.*)?", re.IGNORECASE)


async def read_body(request: Request, kind: type[Body], config: ServerConfig, ignored: Ignored) -> Body:
    """HttpError 408 for a slow body, 413 for a large one, 415 for no JSON; 400 or ParameterError names a bad field."""
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
        return converted("", _pruned("", fields, kind, ignored), kind)


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
    """The connection stays open: the server drops the rest, so that a client that sends first can read this answer."""
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


def _supported(fields: dict[str, Any], kind: type[RequestBody], ignored: Ignored) -> dict[str, Any]:
    names = set(kind.__struct_fields__)
    unknown = [name for name, value in fields.items() if name not in names and value is not None]
    for name in unknown:
        if len(unknown) > MOST_UNKNOWN:
            raise bad_request(name, "there is no such parameter")
        _leave_out(name, fields[name], names, ignored)
    return {name: value for name, value in fields.items() if name in names and value is not None}


def _leave_out(name: str, value: Any, names: set[str], ignored: Ignored) -> None:
    if name not in UNSUPPORTED and name not in HINTS:
        _leave_out_unknown(name, name, names, ignored)
    elif value not in (UNSUPPORTED.get(name) or HINTS[name]):
        instead = f": {INSTEAD[name]}" if name in INSTEAD else ""
        error = bad_request(name, f"{short(value)} is not supported; leave it out{instead}")
        if name in UNSUPPORTED:
            raise error
        ignored.leave_out(error)


def _leave_out_unknown(path: str, name: str, known: Collection[str], ignored: Ignored) -> None:
    unknown = bad_request(path, "there is no such parameter")
    if not NAME.fullmatch(name):
        raise unknown
    plain = {_plain(one): one for one in known}
    if meant := get_close_matches(_plain(name), plain, 1, ALIKE):
        raise bad_request(path, f"there is no such parameter; expected {plain[meant[0]]}")
    if path == name and _plain(name) in _meaningful():
        raise unknown
    ignored.leave_out(unknown)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


@cache
def _meaningful() -> set[str]:
    """Fields of all APIs, in plain letters: a client may have meant them in another API's body."""
    kinds, names = [RequestBody], set[str]()
    for kind in kinds:
        kinds += kind.__subclasses__()
        names.update(map(_plain, kind.__struct_fields__))
    return names - set(map(_plain, HARMLESS))


def _pruned(path: str, value: Any, kind: Any, ignored: Ignored) -> Any:
    options = options_of(kind)
    if isinstance(value, list):
        inner = next((get_args(option)[0] for option in options if get_origin(option) in (list, Sequence)), Any)
        if len(value) > MOST_ITEMS or not any(map(is_struct, options_of(inner))):
            return value
        return [_pruned(f"{path}[{i}]", item, inner, ignored) for i, item in enumerate(value)]
    struct = struct_of(value, list(filter(is_struct, options))) if isinstance(value, dict) else None
    return value if struct is None else _without_unknown(path, value, struct, ignored)


def _without_unknown(path: str, value: dict[str, Any], struct: type[Struct], ignored: Ignored) -> dict[str, Any]:
    if issubclass(struct, ExactStruct):
        return value
    known, kept = types_of(struct), {}
    for name, item in value.items():
        place = f"{path}.{name}" if path else name
        if name in known:
            kept[name] = _pruned(place, item, known[name], ignored)
        elif name in WITHIN_MESSAGES and item not in UNSUPPORTED[name]:
            raise bad_request(place, f"{short(item)} is not supported; leave it out")
        elif item is not None and not ignored.is_told(place):
            _leave_out_unknown(place, name, known, ignored)
    return kept
