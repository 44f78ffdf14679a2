"""The commands of `pilotfish kv` on a directory of objects. Only those that remove files own it meanwhile."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS
from pilotfish.errors import ParameterError
from pilotfish.kv.directory import FoundFile, OwnedDirectory, found_files, owner, read_manifest, refusing, remove_rest
from pilotfish.kv.objects import FORMAT_VERSION, Damage, ObjectFormat

FIELD = "directory"  # the commands' argument, as errors name it


@dataclass(frozen=True)
class DirectorySummary:
    version: int
    shape: str  # hexadecimal
    object_bytes: int
    objects: int
    tokens: int
    bytes: int  # of their files
    unfinished: int  # files that are being written, or that the next server removes
    oldest_use: float | None  # seconds since 1970; None without objects
    newest_use: float | None
    owner: str | None  # a process


@dataclass(frozen=True)
class BadFile:
    file: str
    reason: str  # a `Damage`, or the system's error
    removed: bool


@dataclass(frozen=True)
class Verification:
    objects: int
    bad: list[BadFile]


@dataclass(frozen=True)
class Purged:
    objects: int
    bytes: int  # of their files


def summary(directory: Path) -> DirectorySummary:
    layout = _manifest(directory)
    with refusing(FIELD, directory):
        found = list(found_files(directory))
        process = owner(directory)
    objects = [file for file in found if file.whole]
    uses = [file.used_at for file in objects]
    return DirectorySummary(
        FORMAT_VERSION,
        layout.shape.hex(),
        layout.object_bytes,
        len(objects),
        len(objects) * OBJECT_TOKENS,
        sum(max(file.size, 0) for file in objects),
        len(found) - len(objects),
        min(uses, default=None),
        max(uses, default=None),
        process,
    )


def verify(
    directory: Path, *, remove: bool, watched: Callable[[Sequence[FoundFile]], Iterable[FoundFile]] = iter
) -> Verification:
    """Reads every object. `watched` hands on the files that it gets, and may report them."""
    with closing(OwnedDirectory(FIELD, directory)) if remove else nullcontext(), refusing(FIELD, directory):
        objects = _manifest(directory)
        files = [file for file in found_files(directory) if file.whole]
        bad = [
            BadFile(str(file.path), reason, removed=remove and _removed(file.path))
            for file in watched(files)
            if (reason := _damage(objects, file))
        ]
        return Verification(len(files), bad)


def purge(directory: Path) -> Purged:
    with closing(OwnedDirectory(FIELD, directory)), refusing(FIELD, directory):
        removed = [file for file in found_files(directory) if _removed(file.path)]
        remove_rest(directory)
    objects = [file for file in removed if file.whole]
    return Purged(len(objects), sum(file.size for file in objects))


def _manifest(directory: Path) -> ObjectFormat:
    if manifest := read_manifest(FIELD, directory):
        return manifest
    raise ParameterError(FIELD, str(directory), "a directory that Pilotfish keeps KV in; this one is empty")


def _damage(objects: ObjectFormat, file: FoundFile) -> str | None:
    """A file's damage; None also for a file that its owner evicts meanwhile."""
    try:
        found = objects.read(file.path, file.key)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror or type(error).__name__
    return found.value if isinstance(found, Damage) else None


def _removed(path: Path) -> bool:
    with suppress(OSError):
        path.unlink()
        return True
    return False
