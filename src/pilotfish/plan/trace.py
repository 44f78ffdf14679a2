"""Recorded traffic in Mooncake's format: JSON Lines, one request a line."""

import gzip
import zlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from pilotfish.errors import InputError

#: Tokens of a block that a trace has the hash of.
BLOCK_TOKENS = 512

TokenCount = Annotated[int, Meta(ge=1)]


class TimedRequest(Struct, frozen=True):
    """Equal hashes are blocks that begin with equal prefixes."""

    timestamp: Annotated[float, Meta(ge=0)]  # milliseconds
    input_length: TokenCount
    output_length: TokenCount
    hash_ids: Annotated[list[int], Meta(min_length=1)]


def read_trace(path: Path) -> list[TimedRequest]:
    """A name that ends with .gz is compressed. InputError names the first bad line."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            lines = file.read().splitlines()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"trace: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not lines:
        raise InputError(f"trace: {path} has no rows; one JSON object a line is needed")
    return [_request(line, f"{path}:{i}") for i, line in enumerate(lines, 1)]


def _request(line: bytes, place: str) -> TimedRequest:
    try:
        return msgspec.json.decode(line, type=TimedRequest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        needed = ", ".join(TimedRequest.__struct_fields__)
        raise InputError(f"trace: {place} is not allowed ({error}); expected an object with {needed}") from error
