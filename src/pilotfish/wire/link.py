"""Frames between a target and its ranks, over a Unix socket on one host: each its length, then its bytes. A forward's
rows must arrive; a rank that has ended shows at once. Messages are MessagePack maps, arrays bare bytes."""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec import Struct

_LENGTH = struct.Struct("<Q")


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


class Array(Struct, frozen=True, array_like=True):
    shape: list[int]
    data: bytes  # in C order, of a dtype that its use implies


class ForwardRows(Struct, frozen=True, tag="forward"):
    """To a rank: run these rows, `model.batch.Batch`."""

    arrays: list[Array]
    num_kept: int
    longest: int


FromRank: TypeAlias = Loaded | Unusable
ToRank: TypeAlias = Begin | ForwardRows
from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


class RankLink:
    """ConnectionError where the other end has gone, TimeoutError where it takes or sends nothing for too long."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    def dial(cls, path: Path) -> RankLink:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        return cls(connection)

    def send(self, frame: bytes, timeout: float) -> None:
        self._socket.settimeout(timeout)
        self._socket.sendall(_LENGTH.pack(len(frame)))
        self._socket.sendall(frame)

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

    def close(self) -> None:
        self._socket.close()
