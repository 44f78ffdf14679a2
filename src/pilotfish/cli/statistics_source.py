"""Statistics that a server gives as JSON: asked for, or read from a file that holds its answer."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from pilotfish.errors import InputError, ParameterError

T = TypeVar("T")

#: Where a server listens unless it is told otherwise.
LOCAL = "http://127.0.0.1:8000"
#: Seconds that a server may take for an answer.
PATIENCE = 20.0
#: Bytes of an answer.
MOST_BYTES = 64 << 20


def statistics_from_file(kind: type[T], path: Path) -> T:
    """InputError where the file cannot be read, or holds something else."""
    try:
        body = path.read_bytes()
    except OSError as error:
        raise InputError(f"from: {path} cannot be read: {error.strerror}") from error
    return _decoded(kind, body, str(path))


def statistics_from_server(kind: type[T], url: str, route: str, api_key_env: str = "") -> T:
    """The answer to GET `route`, with the key that the environment variable `api_key_env` holds. InputError where
    there is no such answer."""
    base = _base(url)
    request = urllib.request.Request(base + route, headers=_headers(api_key_env))
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            body: bytes = response.read(MOST_BYTES)
    except urllib.error.HTTPError as error:
        error.close()
        raise InputError(f"url: {base}{route} answers HTTP {error.code}{_HINTS.get(error.code, '')}") from error
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise InputError(f"url: {base} cannot be reached: {getattr(reason, 'strerror', None) or reason}") from error
    return _decoded(kind, body, base + route)


def _base(url: str) -> str:
    try:
        address = urlsplit(url)
    except ValueError:  # an IPv6 address without its end
        address = urlsplit("")
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ParameterError("url", url, "an http:// or https:// URL")
    return url.rstrip("/").removesuffix("/v1")


_HINTS = {
    401: "; --api-key-env names a variable that holds a key",
    404: "; this server keeps no such statistics",
}


def _headers(api_key_env: str) -> dict[str, str]:
    if not api_key_env:
        return {}
    if not (key := os.environ.get(api_key_env)):
        raise ParameterError("api_key_env", api_key_env, "an environment variable that holds a key")
    return {"authorization": f"Bearer {key}"}


def _decoded(kind: type[T], body: bytes, place: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{place} holds no such statistics: {error}") from error
