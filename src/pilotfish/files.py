"""Small files that an operator names, and files that one process writes and others may read, whatever becomes of the
writer."""

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pilotfish.errors import ParameterError

#: Bytes.
MAX_FILE = 1 << 20
#: Flags: neither links nor pipes nor devices are followed, waited for or kept open in children.
SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
#: Suffix of a file that is not whole yet.
UNFINISHED = ".tmp"


def file_bytes(
    field: str, path: Path, most: int = MAX_FILE, check: Callable[[os.stat_result], None] = lambda _: None
) -> bytes:
    """ParameterError, naming `field`, for a file that cannot be read, or of more than `most` bytes. `check` may refuse
    the file that was opened."""
    try:
        with path.open("rb") as file:
            check(os.fstat(file.fileno()))
            data = file.read(most + 1)
    except OSError as error:
        raise ParameterError(field, str(path), f"a file that can be read ({error.strerror})") from error
    if len(data) > most:
        raise ParameterError(field, str(path), f"a file of at most {most} bytes")
    return data


def file_text(field: str, path: Path, form: str = "text") -> str:
    """ParameterError also for a file that is no UTF-8; `form` is what was expected."""
    try:
        return file_bytes(field, path).decode()
    except UnicodeDecodeError as error:
        raise ParameterError(field, str(path), f"{form} in UTF-8") from error


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor, as long as the context lasts. Only its owner can read a new file."""
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_start(path: Path, most: int) -> bytes:
    with opened(path, os.O_RDONLY | SAFELY) as descriptor:
        return os.read(descriptor, most)


def subdirectories(directory: Path, names: re.Pattern[str]) -> list[Path]:
    """With such names; links are none."""
    with os.scandir(directory) as entries:
        found = [entry for entry in entries if names.fullmatch(entry.name)]
    return sorted(directory / entry.name for entry in found if entry.is_dir(follow_symlinks=False))


def write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def write_whole(path: Path, contents: bytes) -> None:
    """Or not at all; flushed to the device. Only the file's owner can read it."""
    unfinished = path.with_name(path.name + UNFINISHED)
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(descriptor)
    unfinished.rename(path)


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
