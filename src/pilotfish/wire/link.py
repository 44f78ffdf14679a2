"""Between a target and its ranks, over a Unix socket on one host: frames, each its length, then its bytes, and batches'
arrays in memory that all of them map. A forward's rows must arrive; a rank that has ended shows at once. Messages are
MessagePack maps.

rank 0     write A     write B         write A         A, B: `BatchMemory`; before rank 0 writes to it again, all have
rank 1           read A done A   read B done B         said that they have read it
"""

import mmap
import os
import socket
import struct
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

_LENGTH = struct.Struct("<Q")
#: Types of a batch's arrays: token ids and kept rows, then the metadata.
TYPES: tuple[np.dtype[Any], ...] = (*[np.dtype(np.int64)] * 2, *[np.dtype(np.int32)] * 6)
#: Bytes at whose multiples arrays begin.
ALIGNMENT = 64
#: Bytes of a batch's arrays that there is room for at first.
FIRST = 1 << 20


class Loaded(Struct, frozen=True, tag="loaded"):
    """From a rank, first: it has its shard."""

    rank: int


class Unusable(Struct, frozen=True, tag="unusable"):
    """From a rank instead: the model cannot be served."""

    rank: int
    reason: str


class Begin(Struct, frozen=True, tag="begin"):
    """To a rank, once all have loaded: make room for so many tokens' KV, and meet the others."""

    slots: int


class ForwardRows(Struct, frozen=True, tag="forward"):
    """To a rank: run these rows, `model.batch.Batch`. Answered by a `Done`, once their arrays have been read."""

    memory: int  # which of the two
    shapes: list[list[int]]  # of the arrays, which are of `TYPES`
    num_kept: int
    longest: int


class Done(Struct, frozen=True, tag="done"):
    """From a rank: it has read a batch's arrays."""


FromRank: TypeAlias = Loaded | Unusable | Done
ToRank: TypeAlias = Begin | ForwardRows
from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


class BatchMemory:
    """Arrays of one batch. It grows; no name leads to it, and it ends with the processes that have it."""

    def __init__(self, descriptor: int | None = None) -> None:
        """None: it is new."""
        self.descriptor = os.memfd_create("pilotfish-batch") if descriptor is None else descriptor
        self._mapped: mmap.mmap | bytes = b""

    def arrays(self, shapes: Sequence[Sequence[int]]) -> list[NDArray[Any]]:
        """Where a batch's arrays are, or go."""
        counts = [*map(prod, shapes)]
        sizes = (-(-n * kind.itemsize // ALIGNMENT) * ALIGNMENT for n, kind in zip(counts, TYPES, strict=True))
        *starts, end = accumulate(sizes, initial=0)
        if end > len(self._mapped):
            if os.fstat(self.descriptor).st_size < end:
                os.ftruncate(self.descriptor, max(FIRST, 1 << end.bit_length()))
            self._mapped = mmap.mmap(self.descriptor, 0)
        return [
            np.frombuffer(self._mapped, kind, count, start).reshape(shape)
            for kind, count, start, shape in zip(TYPES, counts, starts, shapes, strict=True)
        ]

    def close(self) -> None:
        os.close(self.descriptor)


class RankLink:
    """ConnectionError where the other end has gone, TimeoutError where it takes or sends nothing for too long."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    def dial(cls, path: Path) -> "RankLink":
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        return cls(connection)

    def send(self, frame: bytes, timeout: float) -> None:
        self._socket.settimeout(timeout)
        self._socket.sendall(_LENGTH.pack(len(frame)) + frame)  # at once, so that the other end wakes once

    def receive(self, timeout: float | None) -> bytearray:
        """None: wait as long as the other end lives."""
        self._socket.settimeout(timeout)
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._read(length)

    def _read(self, length: int) -> bytearray:
        frame = bytearray(length)
        rest = memoryview(frame)
        while rest:
            read = self._socket.recv_into(rest)
            if not read:
                raise ConnectionResetError("the other end of the link has gone")
            rest = rest[read:]
        return frame

    def lend(self, memories: Sequence[BatchMemory]) -> None:
        socket.send_fds(self._socket, [b"\0"], [memory.descriptor for memory in memories])

    def borrow(self, count: int) -> list[BatchMemory]:
        """What the other end lends; ConnectionResetError for anything else."""
        _, descriptors, _, _ = socket.recv_fds(self._socket, 1, count)
        if len(descriptors) != count:
            raise ConnectionResetError("the other end of the link has gone")
        return [*map(BatchMemory, descriptors)]

    def close(self) -> None:
        self._socket.close()
