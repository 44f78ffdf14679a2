"""The tier on disk: objects in files, a bounded number of bytes of them, used longest ago evicted first."""

import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS, Key
from pilotfish.errors import ParameterError
from pilotfish.kv.directory import found_files, object_path, own_for, refusing
from pilotfish.kv.objects import Damage, KVObject, ObjectFormat

REST = 30.0  # seconds without writes after one failed
_FULL = {errno.ENOSPC, errno.EDQUOT}  # the disk is full by others' files: making room of our own may help
_OUR_LACK = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # resources that this process lacks: no fault of the file


@dataclass
class DiskCounts:
    writes: int = 0
    evictions: int = 0
    damaged: dict[Damage, int] = field(default_factory=lambda: dict.fromkeys(Damage, 0))
    failed: int = 0  # reads, writes and removals that the system refused


class DiskStore:
    """One thread calls `get` and `put`, which may wait for the disk for ever; `contains`, `bytes_used` and `counts`
    never wait. A bad file is a miss, and removed. Others may remove files at any time."""

    def __init__(
        self, directory: Path, capacity_bytes: int, objects: ObjectFormat, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Takes the directory; makes it if its parent is there. ParameterError where it cannot be used."""
        self.counts = DiskCounts()
        self._format = objects
        if capacity_bytes < self._format.file_bytes:
            allowed = f"at least {self._format.file_bytes} bytes, which {OBJECT_TOKENS} tokens take"
            raise ParameterError("kv_disk_size", f"{capacity_bytes} bytes", allowed)
        self.capacity = self._limit = capacity_bytes
        self._clock, self._resume_at = clock, clock()
        self._lock = threading.Lock()  # around the two below; never held while the disk is asked
        self._keys: OrderedDict[Key, None] = OrderedDict()  # used longest ago first
        self._stuck: set[Key] = set()  # their files could not be removed, and still take room
        self._directory = directory
        self._owned = own_for("kv_disk", directory, self._format)
        with refusing("kv_disk", directory), ExitStack() as undo:
            undo.callback(self.close)
            self._rebuild()
            undo.pop_all()

    def close(self) -> None:
        self._owned.close()

    def contains(self, key: Key) -> bool:
        with self._lock:
            return key in self._keys

    @property
    def newest(self) -> Key | None:
        with self._lock:
            return next(reversed(self._keys), None)

    @property
    def bytes_used(self) -> int:
        with self._lock:
            return (len(self._keys) + len(self._stuck)) * self._format.file_bytes

    def get(self, key: Key, tokens: Sequence[int] | NDArray[np.integer]) -> KVObject | None:
        if not self.contains(key):
            return None
        try:
            found = self._format.read(object_path(self._directory, key), key)
        except FileNotFoundError:
            self._forget(key)
            return None
        except (OSError, MemoryError) as error:
            self.counts.failed += 1
            if isinstance(error, OSError) and error.errno not in _OUR_LACK:
                self._remove(key)
            return None
        if isinstance(found, KVObject) and not np.array_equal(found.tokens, np.asarray(tokens)):
            found = Damage.TOKENS
        if isinstance(found, Damage):
            self.counts.damaged[found] += 1
            self._remove(key)
            return None
        self._touch(key)
        return found

    def try_read(self, key: Key) -> None:
        """Reads like `get`, to measure the time; does not count as use."""
        with suppress(OSError):
            self._format.read(object_path(self._directory, key), key)

    def put(self, kv: KVObject) -> bool:
        """Whether the object is here now. A full disk is tried again with less of ours; other failures stop writes."""
        if self.contains(kv.key) and self._touch(kv.key):
            return True
        if self._clock() >= self._resume_at:
            self._limit = self.capacity
        for again in (True, False):
            if not self._make_room():
                return False
            try:
                self._write(kv)
                return True
            except OSError as error:
                self.counts.failed += 1
                self._rest(self.bytes_used if again and error.errno in _FULL else 0)
        return False

    def _write(self, kv: KVObject) -> None:
        path = object_path(self._directory, kv.key)
        try:
            self._format.write(path, kv)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._format.write(path, kv)
        self.counts.writes += 1
        with self._lock:
            self._keys[kv.key] = None
            self._stuck.discard(kv.key)

    def _make_room(self) -> bool:
        needed = self._format.file_bytes
        while self.bytes_used + needed > self._limit:
            if needed > self._limit or not self._evict():
                return False
        return True

    def _evict(self) -> bool:
        if not self._keys:
            return False
        if not self._remove(next(iter(self._keys))):
            self._rest(0)
            return False
        self.counts.evictions += 1
        return True

    def _rest(self, limit: int) -> None:
        self._limit, self._resume_at = limit, self._clock() + REST

    def _touch(self, key: Key) -> bool:
        """Mark as used now, for evictions before and after a restart; whether the file is there."""
        try:
            os.utime(object_path(self._directory, key))
        except FileNotFoundError:
            self._forget(key)
            return False
        except OSError:  # a file that can be read, on a disk that cannot be written
            self.counts.failed += 1
        with self._lock:
            self._keys.move_to_end(key)
        return True

    def _remove(self, key: Key) -> bool:
        try:
            object_path(self._directory, key).unlink(missing_ok=True)
        except OSError:
            self.counts.failed += 1
            with self._lock:
                self._stuck.add(key)
        self._forget(key)
        return key not in self._stuck

    def _forget(self, key: Key) -> None:
        with self._lock:
            self._keys.pop(key, None)

    def _rebuild(self) -> None:
        for found in sorted(found_files(self._directory), key=lambda file: file.used_at):
            if found.whole and found.size == self._format.file_bytes:
                self._keys[found.key] = None
            else:
                with suppress(OSError):
                    found.path.unlink()
        while self.bytes_used > self.capacity and self._evict():
            pass
