"""A row in a file, which is only appended to:

    u32      bytes of the record          both numbers are little-endian
    u32      its CRC-32
    …        a CapturedRow in msgpack

An interrupted writer leaves a torn last row: readers stop before it."""

import struct
import zlib
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

_HEAD = struct.Struct("<II")
_TOKEN = np.dtype("<u4")


class CapturedRow(Struct, frozen=True, kw_only=True):
    time: float  # when it ended, seconds since the epoch
    prompt: bytes  # token ids, u32 each
    output: bytes
    temperature: float
    tag: str | None
    fingerprint: str  # of the target that wrote the output
    tokenizer: str  # digest of the one that the ids are of, as `core.drafting.vocabulary.text_digest` has it

    @property
    def prompt_tokens(self) -> NDArray[np.uint32]:
        return np.frombuffer(self.prompt, _TOKEN)

    @property
    def output_tokens(self) -> NDArray[np.uint32]:
        return np.frombuffer(self.output, _TOKEN)


_decoder = msgspec.msgpack.Decoder(CapturedRow)


def token_bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, _TOKEN).tobytes()


def framed(row: CapturedRow) -> bytes:
    record = msgspec.msgpack.encode(row)
    return _HEAD.pack(len(record), zlib.crc32(record)) + record


def rows_of(contents: bytes) -> Iterator[CapturedRow]:
    view, place = memoryview(contents), 0
    while place + _HEAD.size <= len(view):
        size, checksum = _HEAD.unpack_from(view, place)
        record = view[place + _HEAD.size : place + _HEAD.size + size]
        if len(record) < size or zlib.crc32(record) != checksum:
            return
        try:
            row = _decoder.decode(record)
        except msgspec.DecodeError:  # a tail of zeros, whose checksum is that of nothing
            return
        yield row
        place += _HEAD.size + size
