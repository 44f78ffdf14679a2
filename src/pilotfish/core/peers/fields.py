"""Fields that several protocols share, with limits so that a decoded message can be handled."""

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from pilotfish.printable import printable

MAX_FRAME = 1 << 24  # bytes of one frame
MAX_TEXT = 1024  # characters of a text for people
#: A peer's address: for who listens the other side's incarnation and key, for who dials the number of a pool.
Peer: TypeAlias = bytes

Index: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
Id: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 53)]
AnyId: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 53)]  # 0: of none
Count: TypeAlias = Annotated[int, Meta(ge=0)]
Length: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 31)]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
Tokens: TypeAlias = Annotated[list[Index], Meta(max_length=1 << 22)]
Milliseconds: TypeAlias = Annotated[float, Meta(ge=0.0, lt=1e9)]
Microseconds: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 53)]  # by the sender's own clock, of any origin
#: Bytes of a salt's digest.
SALT_BYTES = 16
SaltDigest: TypeAlias = Annotated[bytes, Meta(min_length=SALT_BYTES, max_length=SALT_BYTES)]


def salt_digest(salt: str | None, key: bytes) -> bytes | None:
    """Tells two tenants' salts apart, and no more. Without `key` the salt can be guessed."""
    if salt is None:
        return None
    return hashlib.blake2b(salt.encode(errors="surrogatepass"), key=key, digest_size=SALT_BYTES).digest()


class Readable(Struct, frozen=True):
    """Its Text fields are for people: control characters in them are escaped."""

    def __post_init__(self) -> None:
        for name in _texts(type(self)):
            text = getattr(self, name)
            if text is not None and not text.isprintable():
                msgspec.structs.force_setattr(self, name, printable(text)[:MAX_TEXT])


@cache
def _texts(kind: type[Readable]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.type in (Text, Text | None))


class Echo(Struct, frozen=True):
    sent: Microseconds  # when this message was
    heard: Microseconds | None = None  # `sent` of the last message of the other side's that had an echo
    held: Microseconds = 0  # between that message's arrival and `sent`


class Error(Readable, tag="error", frozen=True):
    """A frame was of no use. Sent seldom: `count` is the number of such frames."""

    code: Text  # which rule was broken, of `peer.CODES`
    about: Text  # the type of the frame; "": it has none
    reason: Text
    count: Annotated[int, Meta(ge=1)] = 1  # since the last Error of this code
    session: AnyId = 0
    generation: AnyId = 0


@dataclass(frozen=True)
class Outgoing:
    peer: Peer
    message: Struct


@dataclass(frozen=True)
class Notice:
    level: int  # of `logging`
    text: str
