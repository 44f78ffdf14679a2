"""A process that owns segments and gives them out as a prefill worker does, for `pilotfish bench transfer`."""

from __future__ import annotations

import sys
import threading
from functools import partial

import msgspec
import numpy as np
from msgspec import Struct

from pilotfish.core.prefilling.prefill_messages import Fetch, RemoteMemory, SegmentBytes, SharedMemory
from pilotfish.core.prefilling.segments import LAYOUT_BYTES, SEQUENCE_BYTES, SegmentReference
from pilotfish.engine.processes.process import die_with_parent, keep_freed_memory, name_process
from pilotfish.kv.arena import Arena
from pilotfish.kv.nixl import NixlOffer
from pilotfish.kv.readers import content
from pilotfish.wire.channel import ChannelThread, Received, decode_to_prefill, encode
from pilotfish.wire.curve_keys import PoolClient, PoolKeys, new_key_pair
from pilotfish.wire.sockets import ListeningChannel

MAC_KEY = bytes(32)
OWNER = b"bench"


class OwnerOrder(Struct):
    """What such a process is to own and offer."""

    size: int  # bytes of a segment
    segments: int  # an even number
    nixl: bool = False  # over NIXL alone, else in every other way
    directory: str = ""  # for a socket
    client: str = ""  # public key of who may come


class OwnerTold(Struct):
    """What it has."""

    references: list[SegmentReference]
    shared_memory: SharedMemory | None = None
    remote_memory: RemoteMemory | None = None
    endpoints: dict[str, str] = {}  # by transport
    key: str = ""  # its public key


def filled(size: int, segments: int) -> tuple[Arena, list[SegmentReference]]:
    """An arena with so many random segments: one owner may have half of it."""
    arena, made = Arena(2 * size * segments, size), np.random.default_rng(0)
    references = []
    for number in range(segments):
        place = arena.take(OWNER, size)
        assert place is not None  # the arena has room for so many
        arena.buffer(place)[:] = made.integers(0, 256, size, np.uint8)
        reference = SegmentReference(
            epoch=arena.epoch(place),
            handover=1,
            number=number,
            first=0,
            tokens=1,
            layer=0,
            layers=1,
            place=place,
            size=size,
            sequence=bytes(SEQUENCE_BYTES),
            layout=bytes(LAYOUT_BYTES),
            content=content(arena.buffer(place).data),
        )
        references.append(reference.signed(MAC_KEY))
    return arena, references


def _answer(arena: Arena, thread: ChannelThread, received: Received) -> None:
    message = decode_to_prefill(received.frame)
    assert isinstance(message, Fetch) and message.reference.authentic(MAC_KEY)
    data = arena.view(message.reference)
    assert data is not None
    thread.post(received.peer, encode(SegmentBytes(1, message.reference.number, data)))


def _listen(arena: Arena, endpoint: str, keys: PoolKeys | None = None) -> str:
    channel = ListeningChannel(endpoint, keys)
    thread = ChannelThread(channel)
    thread.start(partial(_answer, arena, thread), lambda: None)
    return channel.endpoint


def main(order: OwnerOrder) -> None:
    arena, references = filled(order.size, order.segments)
    told = OwnerTold(references)
    if order.nixl:
        offer = NixlOffer(arena)
        told.remote_memory = offer.memory
    else:
        keys = PoolKeys(new_key_pair(), {order.client: PoolClient("bench", 1.0)})
        told.shared_memory, told.key = arena.offer(), keys.own.public
        told.endpoints = {
            "ipc": _listen(arena, f"ipc://{order.directory}/segments-{order.size}"),
            "tcp": _listen(arena, "tcp://127.0.0.1:0"),
            "tcp, encrypted": _listen(arena, "tcp://127.0.0.1:0", keys),
        }
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    sys.stdout.buffer.flush()
    threading.Event().wait()


if __name__ == "__main__":
    name_process("segments")
    keep_freed_memory()
    die_with_parent()
    main(msgspec.json.decode(sys.argv[1], type=OwnerOrder))
