"""A prefill worker's memory for segments: places of one size in a nameless file that processes of the host may map.

    0    16 bytes   nonce: which arena it is
    16   u64        bytes of a place            numbers are of this machine's byte order
    24   u64        places
    32   u64 × …    epoch of each place
    …    …          places, from the next page on

A place's epoch rises when it is freed, before it can be taken again: a reader that copies a segment and then finds the
epoch unchanged has copied nothing that was written later."""

import fcntl
import mmap
import os
import secrets
import stat
import struct
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from pilotfish.core.prefilling.prefill_messages import SharedMemory
from pilotfish.core.prefilling.segments import SegmentReference
from pilotfish.errors import EngineError, SegmentError
from pilotfish.files import opened

NONCE_BYTES = 16
_HEAD = struct.Struct(f"={NONCE_BYTES}sQQ")
#: The file keeps its size, so all of it can be read for as long as it is mapped.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class ArenaPlan:
    nonce: bytes
    place_bytes: int
    places: int

    HEAD_BYTES = _HEAD.size

    @classmethod
    def read(cls, head: bytes) -> "ArenaPlan":
        """ValueError for fewer than HEAD_BYTES."""
        if len(head) != cls.HEAD_BYTES:
            raise ValueError("this is no memory for segments")
        return cls(*_HEAD.unpack(head))

    @property
    def head(self) -> bytes:
        return _HEAD.pack(self.nonce, self.place_bytes, self.places)

    @property
    def size(self) -> int:
        return self.place_at(self.places)

    def epoch_at(self, place: int) -> int:
        return self.HEAD_BYTES + 8 * place

    def place_at(self, place: int) -> int:
        first = -(-self.epoch_at(self.places) // mmap.PAGESIZE) * mmap.PAGESIZE
        return first + place * self.place_bytes

    def check(self, reference: SegmentReference) -> None:
        if reference.place >= self.places or reference.size > self.place_bytes:
            raise SegmentError("out_of_range", f"there is no place {reference.place} of {reference.size} bytes")

    def epochs(self, memory: Bytes) -> NDArray[np.uint64]:
        return memory[self.epoch_at(0) : self.epoch_at(self.places)].view(np.uint64)


@dataclass
class _Place:
    owner: bytes
    size: int


class Arena:
    """Any thread may call its methods."""

    def __init__(self, size: int, segment_bytes: int) -> None:
        """EngineError where no place fits into `size` bytes, or there is no such memory."""
        self.segment_bytes = segment_bytes
        self.plan = ArenaPlan(secrets.token_bytes(NONCE_BYTES), segment_bytes, size // segment_bytes)
        if not self.plan.places:
            raise EngineError(f"segments: {size} bytes of memory have no room for one of {segment_bytes}")
        self._descriptor, self.memory = _shared_memory(self.plan.size)  # [plan.size]
        self.memory[: ArenaPlan.HEAD_BYTES] = np.frombuffer(self.plan.head, np.uint8)
        self._epochs = self.plan.epochs(self.memory)
        self._lock = threading.Lock()  # around the next three
        self._free = list(reversed(range(self.plan.places)))  # the last used is taken first: it is in caches
        self._taken: dict[int, _Place] = {}
        self._held = Counter[bytes]()

    def offer(self) -> SharedMemory:
        return SharedMemory(os.getpid(), self._descriptor, self.plan.nonce, self.plan.size)

    def take(self, owner: bytes, size: int) -> int | None:
        """None if the owner has as many as are free: one that stalls has half of them, two have a third each."""
        if not 1 <= size <= self.plan.place_bytes:
            raise EngineError(f"segments: {size} bytes; 1 to {self.plan.place_bytes} fit into a place")
        with self._lock:
            if self._held[owner] >= len(self._free):
                return None
            place = self._free.pop()
            self._taken[place] = _Place(owner, size)
            self._held[owner] += 1
        return place

    def buffer(self, place: int) -> Bytes:
        """Memory of a taken place, for its segment. [size]"""
        first = self.plan.place_at(place)
        return self.memory[first : first + self._taken[place].size]

    def epoch(self, place: int) -> int:
        return int(self._epochs[place])

    def free(self, place: int) -> None:
        """References to its segment are void from now on. EngineError for a place that is not taken."""
        with self._lock:
            taken = self._taken.pop(place, None)
            if taken is None:
                raise EngineError(f"segments: place {place} freed twice")
            self._epochs[place] += 1
            self._held -= Counter({taken.owner: 1})
            self._free.append(place)

    def view(self, reference: SegmentReference) -> memoryview | None:
        """In place, until the place is freed; None if the segment is gone."""
        with self._lock:
            taken = self._taken.get(reference.place)
            if taken is None or (taken.size, self.epoch(reference.place)) != (reference.size, reference.epoch):
                return None
            return self.buffer(reference.place).data.toreadonly()

    def close(self) -> None:
        """Nothing more is taken or seen here; processes that have mapped the memory may still read it."""
        with self._lock:
            self._free, self._taken = [], {}
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1


def _shared_memory(size: int) -> tuple[int, Bytes]:
    descriptor = os.memfd_create("pilotfish segments", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        return descriptor, np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
    except OSError as error:
        os.close(descriptor)
        raise EngineError(f"segments: no shared memory of {size} bytes: {error.strerror}") from error


class SharedMemoryReader:
    """Reads segments out of a worker's memory on this host, also after the worker has ended. For one thread."""

    transport = "shm"

    def __init__(self, offer: SharedMemory) -> None:
        """OSError or ValueError where the memory cannot be had: on another host, of another user, or gone."""
        self.memory = _mapped(offer)
        self.plan = ArenaPlan.read(self.memory[: ArenaPlan.HEAD_BYTES].tobytes())
        if (self.plan.nonce, self.plan.size) != (offer.nonce, offer.size):
            raise ValueError("this is no memory, or not that memory, for segments")
        self._epochs = self.plan.epochs(self.memory)
        self._copy = np.empty(self.plan.place_bytes, np.uint8)

    def read(self, reference: SegmentReference) -> Bytes:
        """A checked copy, valid until the next call. SegmentError where it differs from its reference. [size]"""
        self.plan.check(reference)
        first, data = self.plan.place_at(reference.place), self._copy[: reference.size]
        self._check_epoch(reference)
        np.copyto(data, self.memory[first : first + reference.size])
        self._check_epoch(reference)
        check_content(reference, data.data)
        return data

    def close(self) -> None:
        self.plan, self.memory = ArenaPlan(b"", 0, 0), np.zeros(0, np.uint8)
        self._epochs = self.memory.view(np.uint64)

    def _check_epoch(self, reference: SegmentReference) -> None:
        check_epoch(reference, int(self._epochs[reference.place]))


def check_epoch(reference: SegmentReference, epoch: int) -> None:
    if epoch != reference.epoch:
        raise SegmentError("stale", f"place {reference.place} was freed: epoch {epoch}, not {reference.epoch}")


def check_content(reference: SegmentReference, data: memoryview) -> None:
    if len(data) != reference.size or content(data) != reference.content:
        raise SegmentError("content", f"number {reference.number} came damaged")


def content(data: memoryview) -> int:
    return isal_zlib.crc32(data)


def _mapped(offer: SharedMemory) -> Bytes:
    """Maps, read-only, a file that its process can no longer shorten: reading it never fails. [size]"""
    path = Path(f"/proc/{offer.pid}/fd/{offer.descriptor}")
    if not str(path.readlink()).startswith("/memfd:"):
        raise ValueError(f"{path} is no shared memory")  # and opening it might do something
    with opened(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK) as descriptor:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != offer.size:
            raise ValueError(f"{path} has not the size that was told")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ValueError(f"{path} may change its size")
        return np.frombuffer(mmap.mmap(descriptor, offer.size, prot=mmap.PROT_READ), np.uint8)
