"""CURVE keys (CurveZMQ, ZeroMQ RFC 26) in files, Z85-encoded (RFC 32). A key file holds both halves of one key:

    public <40 characters>
    secret <40 characters>

An allowlist names a pool's clients, one a line; the weight is the share of a saturated pool, 1 by default:

    # public half                             tenant   weight
    <40 characters>                           search   3
    <40 characters>                           chat

A word that begins with # begins a comment, so `new_key_pair` makes no such key."""

import math
import os
import re
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from pilotfish.errors import InputError, ParameterError
from pilotfish.files import file_text

KEY_LENGTH = 40  # characters of 32 bytes in Z85
_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_PLAIN_START = re.compile(r"[0-9a-zA-Z]")
_TENANT = re.compile(r"[\w.@:/+-]{1,64}")


@dataclass(frozen=True)
class KeyPair:
    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True)
class PoolClient:
    tenant: str
    weight: float


@dataclass(frozen=True)
class PoolKeys:
    own: KeyPair
    allowed: Mapping[str, PoolClient]


@dataclass(frozen=True)
class TargetKeys:
    own: KeyPair
    pool: str


def load_pool_keys(key: Path | None, allow: Path | None) -> PoolKeys | None:
    """InputError for one file without the other."""
    if key is None and allow is None:
        return None
    if key is None:
        raise ParameterError("key", None, "a key file, with --allow")
    if allow is None:
        raise ParameterError("allow", None, "an allowlist, with --key: without one nobody could come")
    return PoolKeys(load_key_pair("key", key), load_allowlist(allow))


def load_target_keys(
    key: Path | None, pool_keys: Sequence[str], pools: int, role: str = "draft"
) -> list[TargetKeys | None]:
    """One for each of `pools` pools, or Nones without keys. `role` is in the options' names."""
    if key is None and not pool_keys:
        return [None] * pools
    if key is None:
        raise ParameterError(f"{role}_key", None, f"a key file, with --{role}-pool-key")
    if len(pool_keys) != pools:
        raise ParameterError(f"{role}_pool_key", list(pool_keys), f"one public key for each of {pools} pools")
    own = load_key_pair(f"{role}_key", key)
    return [TargetKeys(own, public_key(f"{role}_pool_key", text)) for text in pool_keys]


def new_key_pair() -> KeyPair:
    while True:
        public, secret = (half.decode() for half in zmq.curve_keypair())
        if _PLAIN_START.match(public) and _PLAIN_START.match(secret):
            return KeyPair(public, secret)


def write_key_pair(pair: KeyPair, path: Path) -> None:
    """Only its owner can read the file. ParameterError where there is one already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise ParameterError("name", str(path), "a file that does not exist yet") from error
    except OSError as error:
        raise ParameterError("name", str(path), f"a file that can be written ({error.strerror})") from error
    with os.fdopen(descriptor, "w") as file:
        file.write("# A key of Pilotfish. The secret half is for nobody else; give out the public one.\n")
        file.write(f"public {pair.public}\nsecret {pair.secret}\n")


def load_key_pair(name: str, path: Path) -> KeyPair:
    """`name` is the option that named the file. InputError with the line of the fault."""
    halves: dict[str, str] = {}
    for number, words in _lines(name, path):
        if len(words) != 2 or words[0] not in ("public", "secret") or words[0] in halves or not _is_key(words[1]):
            raise InputError(f"{name}: {path}, line {number}: expected `public` or `secret`, each once, and its half")
        halves[words[0]] = words[1]
    if len(halves) != 2 or zmq.curve_public(halves["secret"].encode()).decode() != halves["public"]:
        raise InputError(f"{name}: {path}: expected the two halves of one key, as `pilotfish keys new` writes them")
    if path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        raise InputError(f"{name}: {path} can be read or written by everyone; expected mode 0600, as from `chmod 600`")
    return KeyPair(**halves)


def load_allowlist(path: Path) -> dict[str, PoolClient]:
    """By public half. InputError with the line of the fault, and for no client at all."""
    clients: dict[str, PoolClient] = {}
    for number, words in _lines("allow", path):
        where = f"allow: {path}, line {number}"
        if not 2 <= len(words) <= 3:
            raise InputError(f"{where}: {len(words)} words; expected a public key, a tenant and maybe a weight")
        if not _is_key(words[0]):
            raise InputError(f"{where}: {words[0]!r} is no public key; expected {KEY_LENGTH} characters of Z85")
        if words[0] in clients:
            raise InputError(f"{where}: {words[0]!r} is listed twice")
        if not _TENANT.fullmatch(words[1]):
            raise InputError(f"{where}: tenant {words[1]!r}; expected up to 64 letters, digits or any of _.@:/+-")
        clients[words[0]] = PoolClient(words[1], _weight(where, words[2]) if len(words) == 3 else 1.0)
    if not clients:
        raise InputError(f"allow: {path} lists nobody; expected at least one client's public key and tenant")
    return clients


def public_key(name: str, text: str) -> str:
    if not _is_key(text):
        raise ParameterError(name, text, f"a public key of {KEY_LENGTH} characters, as `pilotfish keys show` prints it")
    return text


def _lines(name: str, path: Path) -> list[tuple[int, list[str]]]:
    """Number and words of each line that has any, up to a comment."""
    lines = enumerate(file_text(name, path).splitlines(), 1)
    numbered = ((number, re.split(r"(?:^|\s)#", line)[0].split()) for number, line in lines)
    return [(number, words) for number, words in numbered if words]


def _is_key(text: str) -> bool:
    """32 bytes in Z85: each five characters must stand for a number of 32 bits."""
    try:
        return bool(_Z85.fullmatch(text) and z85.decode(text.encode()))
    except struct.error:
        return False


def _weight(where: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise InputError(f"{where}: weight {text!r}; expected a positive number")
    return weight
