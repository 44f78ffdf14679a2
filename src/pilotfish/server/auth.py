"""API keys of options, of the environment, or of a TOML file (docs/security.md). No message or log shows a secret."""

import hashlib
import hmac
import os
import re
import secrets
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from pilotfish.errors import ParameterError
from pilotfish.files import file_bytes
from pilotfish.options import check_options, option
from pilotfish.wire.endpoints import is_loopback

#: Where `pilotfish serve` looks for secrets, joined by commas, beside its options.
ENVIRONMENT = "PILOTFISH_API_KEY"
MAX_LIMIT = 10**9
_SECRET = re.compile(r"[\x21-\x7e]{16,512}")
_NAME = re.compile(r"[A-Za-z0-9_.@:/+-]{1,64}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_BEARER = re.compile(r"bearer +(?P<secret>.+)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Caller:
    name: str
    cache_salt: str | None = field(default=None, repr=False)
    requests_per_minute: Annotated[int, option("", 1, MAX_LIMIT)] | None = None
    tokens_per_minute: Annotated[int, option("", 1, MAX_LIMIT)] | None = None  # of prompts and outputs
    max_concurrency: Annotated[int, option("", 1, MAX_LIMIT)] | None = None  # requests
    admin: bool = False  # whether it may see and change how the server speculates
    capture: bool = False  # whether token ids of its requests may be kept
    digest: bytes = field(default=b"", repr=False, compare=False)  # [32] SHA-256 of its secret

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and _NAME.fullmatch(self.name)):
            raise ParameterError("name", self.name, "1 to 64 of the letters a to z and A to Z, digits and _.@:/+-")
        salt = self.cache_salt
        if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= 256):
            raise _bad_secret("cache_salt", salt, "1 to 256 characters")
        check_options(self)


#: Every caller of a server without keys.
ANONYMOUS = Caller("anonymous")
_FIELDS = ("name", "secret", "sha256", *(item.name for item in fields(Caller)[1:-1]))


class Keyring:
    def __init__(self, owners: Sequence[Caller]) -> None:
        """ParameterError for two keys of one name or one secret."""
        self._owners = tuple(owners)
        names: set[str] = set()
        digests: dict[bytes, str] = {}
        for owner in owners:
            if owner.name in names:
                raise ParameterError("api_keys", owner.name, "a name for each key that no other has")
            names.add(owner.name)
            if (other := digests.setdefault(owner.digest, owner.name)) != owner.name:
                raise ParameterError("api_keys", owner.name, f"a secret of its own, not that of {other!r}")

    def __len__(self) -> int:
        return len(self._owners)

    def caller(self, authorization: str | None, api_key: str | None = None) -> Caller | None:
        """The owner of the key in `Authorization: Bearer SECRET`, else in `x-api-key: SECRET` (Anthropic's clients);
        None for an unknown key.

        Compares the digests of all keys: the time tells neither which key matches nor how much of it."""
        if not self._owners:
            return ANONYMOUS
        bearer = _BEARER.fullmatch((authorization or "").strip())
        secret = api_key if bearer is None else bearer["secret"]
        if secret is None:
            return None
        given = _digest(secret)
        found = [owner for owner in self._owners if hmac.compare_digest(owner.digest, given)]
        return found[0] if found else None


def load_keyring(options: Sequence[str] = (), environment: str = "", file: Path | None = None) -> Keyring:
    """Keys of options, then of the environment, are named key-1, key-2, …. ParameterError for bad keys."""
    given = [("api_key", secret) for secret in options]
    given += [(ENVIRONMENT, secret.strip()) for secret in environment.split(",")] if environment else []
    owners = [Caller(f"key-{i}", digest=_checked_secret(*one)) for i, one in enumerate(given, 1)]
    return Keyring(owners + (load_file(file) if file is not None else []))


def load_file(path: Path) -> list[Caller]:
    """ParameterError with the number of the first bad key; of invalid TOML only the place, as it may hold secrets."""
    text = file_bytes("api_keys", path, check=partial(_check_private, path))
    try:
        document = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:
        place = re.search(r"at line \d+, column \d+|at end of document", str(error))
        raise ParameterError("api_keys", str(path), f"TOML{f', not so {place[0]}' if place else ''}") from None
    tables = document.get("key")
    if document.keys() != {"key"} or not isinstance(tables, list):
        raise ParameterError("api_keys", str(path), "tables [[key]], and nothing beside them")
    return [_owner(f"api_keys: {path}, key {number}", table) for number, table in enumerate(tables, 1)]


def new_secret() -> str:
    return f"pf-{secrets.token_urlsafe(32)}"


def file_entry(name: str, secret: str) -> str:
    return f'[[key]]\nname = "{Caller(name).name}"\nsha256 = "{_digest(secret).hex()}"\n'


def refuse_open(host: str, keys: Keyring, allow_anonymous: bool) -> None:
    """ParameterError for a server without keys that other hosts can reach, unless `allow_anonymous`."""
    if allow_anonymous and keys:
        allowed = "no API keys with it: where there are some, every client needs one"
        raise ParameterError("allow_anonymous", True, allowed)
    if not (is_loopback("host", host) or keys or allow_anonymous):
        allowed = "a loopback address; others need --api-key, --api-keys or --allow-anonymous"
        raise ParameterError("host", host, allowed)


def _bad_secret(field: str, secret: object, allowed: str) -> ParameterError:
    shown = f"({len(str(secret))} characters, not shown)"
    return ParameterError.described(field, f"{field}: {shown} is not allowed; expected {allowed}")


def _check_private(path: Path, facts: os.stat_result) -> None:
    """Readable by its owner alone, or root's and readable by this process's group, as Kubernetes mounts a Secret."""
    of_root = facts.st_uid == 0 and os.geteuid() != 0
    if facts.st_mode & (0o037 if of_root else 0o077):
        raise ParameterError("api_keys", str(path), "a file for its owner alone: mode 0600, as from `chmod 600`")


def _owner(where: str, table: object) -> Caller:
    if not isinstance(table, dict):
        raise ParameterError(where, type(table).__name__, "a table, [[key]]")
    if ("secret" in table) == ("sha256" in table):
        given = [name for name in ("secret", "sha256") if name in table]
        raise ParameterError(where, given, "either `secret` or `sha256`")
    try:
        if unknown := [name for name in table if name not in _FIELDS]:
            raise ParameterError("field", unknown[0], f"one of {', '.join(_FIELDS)}")
        limits = {name: value for name, value in table.items() if name not in ("secret", "sha256")}
        owner = Caller(**{"name": None, **limits})
        secret, sha256 = table.get("secret"), table.get("sha256")
        return replace(owner, digest=_checked_secret("secret", secret) if sha256 is None else _checked_digest(sha256))
    except ParameterError as error:
        raise ParameterError.described(f"{where}, {error.field}", f"{where}, {error}") from error


def _checked_digest(text: object) -> bytes:
    if not (isinstance(text, str) and _SHA256.fullmatch(text)):
        raise _bad_secret("sha256", text, "64 hex digits, as `pilotfish keys api` prints them")
    return bytes.fromhex(text)


def _checked_secret(where: str, secret: object) -> bytes:
    if not (isinstance(secret, str) and _SECRET.fullmatch(secret)):
        raise _bad_secret(where, secret, "16 to 512 printable ASCII characters, no spaces")
    return _digest(secret)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()
