"""Reading segments out of a prefill worker's memory. A segment that differs from its reference is an error."""

import fcntl
import mmap
import os
import stat
from pathlib import Path
from typing import Protocol

import numpy as np
from isal import isal_zlib

from pilotfish.core.prefilling.prefill_messages import SharedMemory
from pilotfish.core.prefilling.segments import SegmentReference
from pilotfish.errors import SegmentError
from pilotfish.files import opened
from pilotfish.kv.arena import SEALS, ArenaPlan, Bytes


class SegmentReader(Protocol):
    """Reads one worker's memory; used by one thread at a time."""

    transport: str

    def read(self, reference: SegmentReference) -> Bytes:
        """A checked copy, valid until the next call. SegmentError where it cannot be had in time. [size]"""

    def close(self) -> None: ...


class SharedMemoryReader:
    """Of a worker on this host; still readable after the worker has ended."""

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
