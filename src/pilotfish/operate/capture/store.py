import errno
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from pilotfish.errors import ParameterError
from pilotfish.files import SAFELY, opened, write_all
from pilotfish.operate.capture.folder import ClaimedFolder, found_rows, partition_of, read_salt, remove, row_file
from pilotfish.operate.capture.rows import CapturedRow, framed

#: Limits of a file, in bytes and time: a row beyond them begins another file.
FILE_BYTES = 8 << 20
FILE_SECONDS = 3600.0
#: The part of the room that is freed at a time, so that few rows wait for it.
FREED = 16


@dataclass(frozen=True)
class Retention:
    """No row stays longer; whole files are removed, so that some rows go up to an hour earlier."""

    seconds: float
    bytes: int


@dataclass
class _OpenFile:
    path: Path
    begun: float


class CaptureStore:
    """For one thread. Every method may raise OSError; the next call may succeed all the same."""

    def __init__(self, folder: ClaimedFolder, retention: Retention, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since the epoch, as rows have them."""
        self._folder, self._retention, self._clock = folder, retention, clock
        self._current: dict[str, _OpenFile] = {}  # by partition
        self._bytes = sum(file.size for file in found_rows(folder.path))

    def close(self) -> None:
        self._folder.release()

    def add(self, client: str, rows: Sequence[CapturedRow]) -> None:
        data, partition = b"".join(map(framed, rows)), partition_of(client, self._folder.salt)
        self._make_room(len(data))
        current, time = self._current.get(partition), rows[0].time
        in_hour = current is not None and current.begun <= time < current.begun + FILE_SECONDS
        if current is None or not in_hour or _size(current.path) + len(data) > FILE_BYTES:
            current = self._begin(partition, time)
        try:
            _append(current.path, data)
        except FileNotFoundError:  # it was purged
            _append(self._begin(partition, time).path, data)
        self._bytes += len(data)

    def tidy(self) -> None:
        """Remove old rows, and count the rest anew: others may have removed files too."""
        files = found_rows(self._folder.path)
        end = self._clock() - self._retention.seconds
        for file in files:
            if file.begun <= end:
                remove(file)
        self._bytes = sum(file.size for file in files if file.begun > end)
        self._make_room(0)

    def _make_room(self, size: int) -> None:
        if size > self._retention.bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        if self._bytes + size <= self._retention.bytes:
            return
        files = found_rows(self._folder.path)
        left, most = sum(file.size for file in files), self._retention.bytes - max(size, self._retention.bytes // FREED)
        for file in files:
            if left <= most:
                break
            remove(file)
            left -= file.size
        self._bytes = left

    def _begin(self, partition: str, time: float) -> _OpenFile:
        """OSError where the folder is no longer the one that was claimed."""
        self._check_salt()
        parent = self._folder.path / partition
        parent.mkdir(mode=0o700, exist_ok=True)
        for path in (row_file(parent, time, number) for number in count()):
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFELY, 0o600))
                break
        self._current[partition] = _OpenFile(path, int(time * 1000) / 1000)
        return self._current[partition]

    def _check_salt(self) -> None:
        """A client could not purge partitions of another salt."""
        with suppress(ParameterError):
            if read_salt(self._folder.path) == self._folder.salt:
                return
        raise OSError(errno.ESTALE, "the folder is another one than at the start")


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat(follow_symlinks=False).st_size
    return 0


def _append(path: Path, data: bytes) -> None:
    with opened(path, os.O_WRONLY | os.O_APPEND | SAFELY) as descriptor:
        size = os.fstat(descriptor).st_size
        try:
            write_all(descriptor, memoryview(data))
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
