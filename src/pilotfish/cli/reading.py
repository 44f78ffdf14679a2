import os
import re
import tomllib
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import datetime
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import typer

from pilotfish.errors import InputError, ParameterError, UnknownOptionError
from pilotfish.files import file_bytes, file_text

T = TypeVar("T")

#: Default URL of a server.
LOCAL = "http://127.0.0.1:8000"
#: Seconds for a server's answer.
PATIENCE = 20.0
#: Most bytes of an answer, or of a file that holds one.
MOST_BYTES = 64 << 20
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_HINTS = {401: "; --api-key-env names a variable that holds a key", 404: "; this server keeps no such statistics"}

ApiKeyEnvOption = Annotated[
    str, typer.Option(metavar="NAME", help="Environment variable that holds the server's API key.")
]
UrlOption = Annotated[str | None, typer.Option(help=f"Of the server.  [default: {LOCAL}]")]


def from_file(route: str) -> Any:
    return typer.Option("--from", help=f"A file that holds the answer to GET {route} instead.")


def read_toml(field: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file_text(field, path))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{field}: {path} is not TOML: {error}") from error


def with_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """For an eager option: a TOML file gives defaults by options' names; UnknownOptionError for others."""
    if path is None:
        return None
    given = {name.replace("-", "_"): value for name, value in read_toml("config", path).items()}
    known = sorted({str(one.name) for one in context.command.params} - {"config_file", "json"})
    for name in given:
        if name not in known:
            raise UnknownOptionError(name, known)
    context.default_map = {**(context.default_map or {}), **given}
    return path


def moment_of(text: str, now: float) -> float:
    """Seconds since the epoch: `now`, an age as 90m or 7d, or an ISO time, local without a zone; else ValueError."""
    if text == "now":
        return now
    if age := re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", text, re.ASCII):
        return now - float(age[1]) * SECONDS[age[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (OverflowError, OSError) as error:
        raise ValueError(text) from error


def read_statistics(
    kind: type[T], route: str, urls: Sequence[str | None], files: Sequence[Path | None], api_key_env: str
) -> list[T]:
    """Answers to GET `route` from files or servers, with the key in `api_key_env`; InputError for invalid ones."""
    held, asked = [file for file in files if file is not None], [url for url in urls if url is not None]
    if held and asked:
        raise InputError("from: it cannot be combined with --url; give one of them")
    if held:
        return [_decoded(kind, file_bytes("from", file, MOST_BYTES), str(file)) for file in held]
    return [_asked(kind, url, route, api_key_env) for url in asked or [LOCAL]]


def _asked(kind: type[T], url: str, route: str, api_key_env: str) -> T:
    base = server_url("url", url)
    headers = key_headers(api_key_env)
    try:
        body = fetched(base + route, headers)
    except urllib.error.HTTPError as error:
        error.close()
        raise InputError(f"url: {base}{route} answers HTTP {error.code}{_HINTS.get(error.code, '')}") from error
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise InputError(f"url: {base} cannot be reached: {getattr(reason, 'strerror', None) or reason}") from error
    return _decoded(kind, body, base + route)


def fetched(url: str, headers: Mapping[str, str]) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers)), timeout=PATIENCE) as response:
        body: bytes = response.read(MOST_BYTES)
        return body


def server_url(field: str, url: str) -> str:
    """Without the path of its API."""
    try:
        address = urlsplit(url)
    except ValueError:  # an IPv6 address without its end
        address = urlsplit("")
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ParameterError(field, url, "an http:// or https:// URL")
    return url.rstrip("/").removesuffix("/v1")


def key_headers(api_key_env: str) -> dict[str, str]:
    if api_key_env and not os.environ.get(api_key_env):
        raise ParameterError("api_key_env", api_key_env, "an environment variable that holds a key")
    return {"authorization": f"Bearer {os.environ[api_key_env]}"} if api_key_env else {}


def _decoded(kind: type[T], body: bytes, place: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{place} holds no such statistics: {error}") from error
