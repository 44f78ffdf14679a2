"""A directory of objects: what lies where, for whom it was written, and who has it now.

DIR/lock                    locked (flock) by the process that has the directory; holds its id
DIR/manifest.json           format, shape and object size of everything here
DIR/manifest.json.damaged   the last one that could not be read
DIR/4f/4fd0….kv             the object with the key 4fd0…
DIR/4f/4fd0….tmp            one that is being written, or that nobody finished
"""

import errno
import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec

from pilotfish.core.cache.prefix_keys import KEY_BYTES, Key
from pilotfish.errors import ParameterError
from pilotfish.files import SAFELY, UNFINISHED, opened, read_start, subdirectories, try_lock, write_whole
from pilotfish.kv.objects import FORMAT_VERSION, ObjectFormat
from pilotfish.printable import one_line

logger = logging.getLogger(__name__)

MANIFEST, LOCK = "manifest.json", "lock"
DAMAGED = f"{MANIFEST}.damaged"
_OBJECT = ".kv"
_NEW_MANIFEST = MANIFEST + UNFINISHED
_BEFORE_MANIFEST = {LOCK, _NEW_MANIFEST, DAMAGED}  # names that a directory without a manifest may hold
#: All of ours beside objects. The lock is last: a directory without one may be taken.
_NAMES = (_NEW_MANIFEST, DAMAGED, MANIFEST, LOCK)
#: A lock's content.
_OWNER = re.compile(rb"\d+ *\n")
_SUBDIRECTORY = re.compile(r"[0-9a-f]{2}")
_FILE = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})({re.escape(_OBJECT)}|{re.escape(UNFINISHED)})")
#: How often, and after how many seconds, a lock is tried again: a look for the owner holds it for a moment.
_TRIES, _PAUSE = 5, 0.05
#: Bytes that are read of a manifest or a lock.
_MAX_SMALL_FILE = 4096
OURS = "an empty directory, or one that Pilotfish keeps KV in"


class FoundFile(msgspec.Struct, frozen=True, gc=False):  # there may be a million
    parent: str
    name: str
    key: Key
    whole: bool  # by its name and place: not one that nobody finished, or that another directory should hold
    size: int  # bytes; -1: it is no regular file
    used_at: float  # seconds since 1970

    @property
    def path(self) -> Path:
        return Path(self.parent, self.name)


def object_path(directory: Path, key: Key) -> Path:
    name = key.hex()
    return directory / name[:2] / (name + _OBJECT)


def found_files(directory: Path) -> Iterator[FoundFile]:
    for parent in subdirectories(directory, _SUBDIRECTORY):
        place = str(parent)
        for entry in os.scandir(place):
            if match := _FILE.fullmatch(entry.name):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # removed meanwhile
                    continue
                size = status.st_size if stat.S_ISREG(status.st_mode) else -1
                whole = match[2] == _OBJECT and match[1].startswith(parent.name)
                yield FoundFile(place, entry.name, bytes.fromhex(match[1]), whole, size, status.st_mtime)


def remove_rest(directory: Path) -> None:
    """All of ours but files of objects."""
    for parent in subdirectories(directory, _SUBDIRECTORY):
        with suppress(OSError):  # it holds files of others
            parent.rmdir()
    for name in _NAMES:
        (directory / name).unlink(missing_ok=True)


class _Versioned(msgspec.Struct, frozen=True, tag_field="holds", tag="pilotfish kv"):
    version: int


class _Manifest(_Versioned, frozen=True, tag_field="holds", tag="pilotfish kv"):
    shape: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    object_bytes: Annotated[int, msgspec.Meta(gt=0)]


class DamagedDirectoryError(ParameterError):
    """The manifest is gone, damaged or of another format. The directory's owner may begin it anew."""


def read_manifest(field: str, directory: Path) -> ObjectFormat | None:
    """None of an empty directory. ParameterError, naming `field`, of one that is not ours; DamagedDirectoryError."""
    with refusing(field, directory):
        names = {entry.name for entry in os.scandir(directory)}
        if not names - _BEFORE_MANIFEST:
            return None
        kind = DamagedDirectoryError if _is_ours(directory, names) else ParameterError
        if MANIFEST not in names:
            raise kind(field, str(directory), f"{OURS}; this one holds {min(names - _BEFORE_MANIFEST)!r}")
        path = directory / MANIFEST
        contents = b"" if path.is_dir() else read_start(path, _MAX_SMALL_FILE)
    try:
        return _decoded(contents)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise kind(field, str(directory), f"{OURS}; its {MANIFEST} is not ours: {error}") from error


def _is_ours(directory: Path, names: set[str]) -> bool:
    if LOCK not in names or not all(_SUBDIRECTORY.fullmatch(name) for name in names.difference(_NAMES)):
        return False
    return bool(_OWNER.fullmatch(read_start(directory / LOCK, _MAX_SMALL_FILE)))


def _decoded(contents: bytes) -> ObjectFormat:
    version = msgspec.json.decode(contents, type=_Versioned).version
    if version != FORMAT_VERSION:
        raise msgspec.DecodeError(f"format {version}, not {FORMAT_VERSION}, is for another Pilotfish")
    manifest = msgspec.json.decode(contents, type=_Manifest)
    return ObjectFormat(bytes.fromhex(manifest.shape), manifest.object_bytes)


class OwnedDirectory:
    def __init__(self, field: str, path: Path) -> None:
        self.path = path
        with suppress(DamagedDirectoryError):
            read_manifest(field, path)  # before a lock is left in another program's directory
        with refusing(field, path):
            if path.stat().st_mode & stat.S_IWOTH:
                raise ParameterError(field, str(path), "a directory that others cannot write to, as after `chmod o-w`")
            if not os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            self._lock = os.fdopen(self._locked(field), "rb")

    def close(self) -> None:
        self._lock.close()

    def _locked(self, field: str) -> int:
        path = self.path / LOCK
        for _ in range(_TRIES):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | SAFELY, 0o600)
            if try_lock(descriptor) and _is_still(descriptor, path):
                with suppress(OSError):  # of a full disk: the lock holds without it
                    os.pwrite(descriptor, f"{os.getpid():<10}\n".encode(), 0)
                return descriptor
            os.close(descriptor)
            time.sleep(_PAUSE)
        allowed = f"a directory that no other process uses; process {owner(self.path)} has this one"
        raise ParameterError(field, str(self.path), allowed)


def own_for(field: str, directory: Path, objects: ObjectFormat) -> OwnedDirectory:
    """Made if its parent exists. ParameterError, naming `field`, where it cannot be owned."""
    with refusing(field, directory), ExitStack() as undo:
        directory.mkdir(mode=0o700, exist_ok=True)
        owned = OwnedDirectory(field, directory)
        undo.callback(owned.close)
        written = _set_aside(field, directory)
        if written is None:
            manifest = _Manifest(FORMAT_VERSION, objects.shape.hex(), objects.object_bytes)
            # flushed to the device, unlike an object: without it the directory is not recognized as ours
            write_whole(directory / MANIFEST, msgspec.json.encode(manifest) + b"\n")
        elif written != objects:
            allowed = f"{OURS} of this model with these settings; this one's is of others, and may be purged"
            raise ParameterError(field, str(directory), allowed)
        undo.pop_all()
    return owned


def _set_aside(field: str, directory: Path) -> ObjectFormat | None:
    try:
        return read_manifest(field, directory)
    except DamagedDirectoryError as error:
        with suppress(FileNotFoundError):
            (directory / MANIFEST).rename(directory / DAMAGED)
        logger.warning("%s; it is begun anew", error)
        return None


def owner(directory: Path) -> str | None:
    """The process that owns the directory, as the lock says; None if there is none."""
    with suppress(FileNotFoundError), opened(directory / LOCK, os.O_RDONLY | SAFELY) as descriptor:
        if not try_lock(descriptor, fcntl.LOCK_SH):
            return one_line(os.read(descriptor, _MAX_SMALL_FILE).decode(errors="replace"))
    return None


def _is_still(descriptor: int, path: Path) -> bool:
    """Whether the file has its name yet: a purge takes it away."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


@contextmanager
def refusing(field: str, directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        allowed = f"{OURS}, readable and writable ({error.strerror or error})"
        raise ParameterError(field, str(directory), allowed) from error
