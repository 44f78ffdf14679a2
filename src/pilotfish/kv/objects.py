"""The KV of `OBJECT_TOKENS` consecutive tokens, and its file. Files of a shape all have the same size:

    0    8 bytes   magic
    8    u32       version of the format         all numbers are little-endian
    12   u32       tokens: 64
    16   u64       bytes of data
    24   32 bytes  shape
    56   32 bytes  key
    88   u32       checksum of key, tokens and data (`KVObject.checksum`)
    92   u32       CRC-32 of the bytes before
    96   u32 × 64  tokens
    352  …         data

A file is written below another name and then renamed, so below its own name it is whole. It is not flushed to the
device: whatever a power failure leaves there is found by its checksums."""

import errno
import os
import stat
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS, Key
from pilotfish.files import SAFELY, UNFINISHED, opened, write_all

FORMAT_VERSION = 1

_MAGIC = b"PFISHKV\n"
_FIELDS = struct.Struct("<8sIIQ32s32sI")
_CRC = struct.Struct("<I")
_TOKENS_AT = _FIELDS.size + _CRC.size
_DATA_AT = _TOKENS_AT + 4 * OBJECT_TOKENS
#: Errors of opening a link, a socket, or a path through a file with `SAFELY`.
_NO_FILE = {errno.ELOOP, errno.ENXIO, errno.ENOTDIR}

TokenIds = NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class KVObject:
    key: Key  # names all tokens up to the last of these
    tokens: TokenIds  # [OBJECT_TOKENS]
    data: NDArray[np.uint8]  # [object bytes]
    checksum: int

    @classmethod
    def of(cls, key: Key, tokens: Sequence[int] | NDArray[np.integer], data: NDArray[np.uint8]) -> "KVObject":
        """`data` is kept, not copied."""
        ids = np.array(tokens, np.uint32)
        return cls(key, ids, data, checksum(key, ids, data))

    def intact(self, expected_tokens: Sequence[int] | NDArray[np.integer]) -> bool:
        same = np.array_equal(self.tokens, np.asarray(expected_tokens))
        return same and self.checksum == checksum(self.key, self.tokens, self.data)


def checksum(key: Key, tokens: TokenIds, data: NDArray[np.uint8]) -> int:
    """CRC-32, against accidents only. ISA-L computes it about as fast as memory is copied, without the GIL."""
    named = isal_zlib.crc32(tokens.astype("<u4", copy=False).data, isal_zlib.crc32(key))
    return isal_zlib.crc32(data.data, named)


class Damage(StrEnum):
    KIND = "kind"  # it is no regular file
    SIZE = "size"
    HEADER = "header"  # its checksum, or it is of another format
    SHAPE = "shape"
    KEY = "key"  # it is another object's file
    CHECKSUM = "checksum"
    TOKENS = "tokens"  # whole, but of others than were asked for


@dataclass(frozen=True)
class ObjectFormat:
    """`shape` is a digest of all that shapes the KV."""

    shape: bytes  # 32
    object_bytes: int

    @property
    def file_bytes(self) -> int:
        return _DATA_AT + self.object_bytes

    def write(self, path: Path, kv: KVObject) -> None:
        """Write a whole file or none. OSError where that fails."""
        unfinished = path.with_suffix(UNFINISHED)
        try:
            with opened(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | SAFELY) as descriptor:
                write_all(descriptor, memoryview(self._head(kv)))
                write_all(descriptor, kv.data.data)
            unfinished.rename(path)
        except OSError:
            with suppress(OSError):
                unfinished.unlink()
            raise

    def read(self, path: Path, key: Key) -> KVObject | Damage:
        """The object, every byte verified, or its damage. OSError where the file cannot be read."""
        try:
            with opened(path, os.O_RDONLY | SAFELY) as descriptor:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    return Damage.KIND
                if status.st_size != self.file_bytes:
                    return Damage.SIZE
                contents = np.empty(self.file_bytes, np.uint8)
                return self._parse(key, contents) if _read_all(descriptor, contents.data) else Damage.SIZE
        except OSError as error:
            if error.errno in _NO_FILE:
                return Damage.KIND
            raise

    def _head(self, kv: KVObject) -> bytes:
        fields = _FIELDS.pack(_MAGIC, FORMAT_VERSION, OBJECT_TOKENS, self.object_bytes, self.shape, kv.key, kv.checksum)
        return fields + _CRC.pack(zlib.crc32(fields)) + kv.tokens.astype("<u4", copy=False).tobytes()

    def _parse(self, key: Key, contents: NDArray[np.uint8]) -> KVObject | Damage:
        fields = contents[: _FIELDS.size].tobytes()
        magic, version, count, object_bytes, shape, of_key, checksum = _FIELDS.unpack(fields)
        known = (magic, version, count, object_bytes) == (_MAGIC, FORMAT_VERSION, OBJECT_TOKENS, self.object_bytes)
        if not known or _CRC.unpack(contents[_FIELDS.size : _TOKENS_AT].tobytes()) != (zlib.crc32(fields),):
            return Damage.HEADER
        if shape != self.shape:
            return Damage.SHAPE
        if of_key != key:
            return Damage.KEY
        tokens = contents[_TOKENS_AT:_DATA_AT].view("<u4").astype(np.uint32)
        kv = KVObject(key, tokens, contents[_DATA_AT:], checksum)
        return kv if kv.intact(tokens) else Damage.CHECKSUM


def _read_all(descriptor: int, into: memoryview) -> bool:
    while into:
        count = os.readv(descriptor, [into])
        if not count:
            return False
        into = into[count:]
    return True
