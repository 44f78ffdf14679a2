"""Segments in an arena, and processes that own one, for tests. Run as a program it is such a process: it tells of its
memory and of one segment, then rewrites that for every line that it is told; with `nixl` over NIXL too."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np

from pilotfish.core.prefilling.prefill_messages import RemoteMemory, SharedMemory
from pilotfish.core.prefilling.segments import SegmentReference
from pilotfish.errors import SegmentError
from pilotfish.kv.arena import Arena, SharedMemoryReader, content
from pilotfish.kv.nixl import NixlOffer, NixlReader

PLACES, SEGMENT_BYTES = 4, 1 << 16


def fill(arena: Arena, place: int, seed: int) -> bytes:
    """Write something random into a taken place."""
    buffer = arena.buffer(place)
    buffer[:] = np.random.default_rng(seed).integers(0, 256, len(buffer), np.uint8)
    return bytes(buffer)


def referred(arena: Arena, place: int) -> SegmentReference:
    buffer = arena.buffer(place)
    own = {"epoch": arena.epoch(place), "place": place, "size": len(buffer), "content": content(buffer.data)}
    part = {"number": 0, "first": 0, "tokens": 1, "layer": 0, "layers": 1}
    return SegmentReference(handover=1, sequence=bytes(16), layout=bytes(16), **own, **part)


def put(arena: Arena, size: int, seed: int = 0) -> SegmentReference:
    place = arena.take(b"somebody", size)
    assert place is not None
    fill(arena, place, seed)
    return referred(arena, place)


def expected_of(reference: SegmentReference) -> np.ndarray:
    """What an owner has written: the n-th segment in its place was made from the seed n."""
    return np.random.default_rng(reference.epoch).integers(0, 256, reference.size, np.uint8)


def reason(reader: SharedMemoryReader | NixlReader, reference: SegmentReference) -> str:
    """Why the segment cannot be read."""
    try:
        reader.read(reference)
    except SegmentError as error:
        assert str(error).startswith("segment: ")
        return error.reason
    raise AssertionError("it was read")


class Told(msgspec.Struct):
    shared_memory: SharedMemory
    remote_memory: RemoteMemory | None
    reference: SegmentReference


class Owner:
    def __init__(self, *arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, str(Path(__file__)), *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
        told = self._told()
        self.shared_memory, self.remote_memory, self.reference = told.shared_memory, told.remote_memory, told.reference

    def rewrite(self) -> SegmentReference:
        """It frees its segment and writes another one in the same place."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        return self._told().reference

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def _told(self) -> Told:
        assert self.process.stdout is not None
        return msgspec.json.decode(self.process.stdout.readline(), type=Told)


def main(*arguments: str) -> None:
    arena = Arena(PLACES * SEGMENT_BYTES, SEGMENT_BYTES)
    nixl = NixlOffer(arena) if arguments == ("nixl",) else None
    reference = put(arena, SEGMENT_BYTES)
    while True:
        told = Told(arena.offer(), nixl and nixl.memory, reference)
        sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
        sys.stdout.buffer.flush()
        if not sys.stdin.readline():
            return
        arena.free(reference.place)
        reference = put(arena, SEGMENT_BYTES, arena.epoch(reference.place))


if __name__ == "__main__":
    main(*sys.argv[1:])
