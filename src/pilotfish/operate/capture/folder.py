"""A folder of captured rows:

DIR/capture.json          marks the folder, and holds its format
DIR/salt                  random bytes that turn a client's name into a partition's
DIR/salt.damaged          the salt was replaced then: owners of older rows are unknown
DIR/lock                  locked (flock) by the server that writes
DIR/9c0e…/                a partition: rows of one client
DIR/9c0e…/1764100000000-0.rows    those from this millisecond on, of an hour at most

Directories have mode 0700 and files 0600. Readers and removers need no lock: the writer opens a file for each row, and
begins another one where it is gone."""

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pilotfish.errors import ParameterError
from pilotfish.files import SAFELY, read_start, subdirectories, try_lock, write_whole

logger = logging.getLogger(__name__)

MANIFEST, SALT, LOCK = "capture.json", "salt", "lock"
DAMAGED = ".damaged"
FORMAT_VERSION = 1
FIELD = "capture"
SALT_BYTES = 32
#: Files allowed in a folder without a manifest.
_BEFORE_MANIFEST = {
    *(LOCK, SALT, f"{SALT}.tmp", f"{SALT}{DAMAGED}", f"{SALT}{DAMAGED}.tmp", f"{MANIFEST}.tmp", f"{MANIFEST}{DAMAGED}")
}
_PARTITION = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(r"(\d{13})-(\d{1,6})\.rows")
_OURS = "an empty folder, or one of captured rows"


class _CaptureManifest(msgspec.Struct, frozen=True, tag_field="holds", tag="pilotfish capture"):
    version: int


@dataclass(frozen=True)
class CaptureFile:
    path: Path
    begun: float  # seconds since the epoch: no row in it is older
    number: int  # of those that begin at the same time
    size: int  # bytes, as they were when it was found


class ClaimedFolder:
    def __init__(self, path: Path) -> None:
        """Makes the folder if its parent exists. ParameterError for one that cannot be used."""
        self.path = path
        with refusing(path), ExitStack() as undo:
            path.mkdir(mode=0o700, exist_ok=True)
            self._begin()
            self._lock = _locked(path)
            undo.callback(self.release)
            self.salt = _salt(path)
            if not _has_manifest(path):
                _begin_manifest(path)
            undo.pop_all()

    def release(self) -> None:
        os.close(self._lock)

    def _begin(self) -> None:
        names = set(os.listdir(self.path))  # noqa: PTH208
        if names - _BEFORE_MANIFEST:
            _has_manifest(self.path)
        elif not names:
            self.path.chmod(0o700)
        facts = self.path.stat()
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise ParameterError(FIELD, str(self.path), "a folder of this user alone: mode 0700, as from `chmod 700`")


def check_folder(path: Path) -> None:
    """ParameterError for another folder, or another format."""
    with refusing(path):
        _has_manifest(path)


def _has_manifest(path: Path) -> bool:
    """False for our folder without a manifest, which a writer then adds. ParameterError as `check_folder`."""
    try:
        contents = (path / MANIFEST).read_bytes()
        version = msgspec.json.decode(contents, type=_CaptureManifest).version
    except (FileNotFoundError, IsADirectoryError, msgspec.DecodeError, UnicodeDecodeError) as error:
        if _is_ours(path):
            return False
        raise ParameterError(FIELD, str(path), f"{_OURS}; this one has no {MANIFEST} of ours") from error
    if version != FORMAT_VERSION:
        raise ParameterError(FIELD, str(path), f"{_OURS} in format {FORMAT_VERSION}; this one is of format {version}")
    return True


def _is_ours(path: Path) -> bool:
    names = set(os.listdir(path))  # noqa: PTH208
    others = names - _BEFORE_MANIFEST - {MANIFEST}
    return LOCK in names and all(_PARTITION.fullmatch(name) for name in others)


def read_salt(path: Path) -> bytes:
    """OSError where it is missing, ParameterError where it is not ours."""
    salt = read_start(path / SALT, SALT_BYTES + 1)
    if len(salt) != SALT_BYTES:
        raise ParameterError(FIELD, str(path), f"{_OURS}; the salt of this one is damaged")
    return salt


def untold_until(path: Path) -> float:
    """Seconds since the epoch: of older rows the clients are unknown. 0: all are known."""
    with suppress(FileNotFoundError):
        return (path / (SALT + DAMAGED)).stat(follow_symlinks=False).st_mtime
    return 0.0


def partition_of(client: str, salt: bytes) -> str:
    """Without the salt nobody can guess the client by trying names."""
    return hmac.new(salt, client.encode(), hashlib.sha256).hexdigest()[:32]


def found_rows(path: Path, partition: str | None = None) -> list[CaptureFile]:
    parents = [path / partition] if partition is not None else partitions(path)
    return sorted((file for parent in parents for file in _files(parent)), key=lambda file: (file.begun, file.number))


def partitions(path: Path) -> list[Path]:
    return subdirectories(path, _PARTITION)


def remove(file: CaptureFile) -> None:
    file.path.unlink(missing_ok=True)
    with suppress(OSError):  # it holds others, or a server has begun another one
        file.path.parent.rmdir()


def row_file(parent: Path, time: float, number: int) -> Path:
    return parent / f"{int(time * 1000):013d}-{number}.rows"


def _files(parent: Path) -> Iterator[CaptureFile]:
    with suppress(FileNotFoundError), os.scandir(parent) as entries:  # removed meanwhile
        for entry in entries:
            if match := _FILE.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield CaptureFile(parent / entry.name, int(match[1]) / 1000, int(match[2]), status.st_size)


def _locked(path: Path) -> int:
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | SAFELY, 0o600)
    if not try_lock(descriptor):
        os.close(descriptor)
        raise ParameterError(FIELD, str(path), "a folder that no other server writes into")
    return descriptor


def _salt(path: Path) -> bytes:
    try:
        return read_salt(path)
    except (FileNotFoundError, ParameterError):
        if partitions(path):
            write_whole(path / (SALT + DAMAGED), b"")
            logger.warning("capture: %s: its salt is damaged; of rows until now nobody can tell whose they are", path)
    salt = secrets.token_bytes(SALT_BYTES)
    write_whole(path / SALT, salt)
    return salt


def _begin_manifest(path: Path) -> None:
    if (path / MANIFEST).exists():
        (path / MANIFEST).rename(path / (MANIFEST + DAMAGED))
        logger.warning("capture: %s: its %s is damaged; it is written anew", path, MANIFEST)
    write_whole(path / MANIFEST, msgspec.json.encode(_CaptureManifest(FORMAT_VERSION)))


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ParameterError(FIELD, str(path), f"{_OURS} that can be used ({error.strerror or error})") from error
