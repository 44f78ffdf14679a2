"""Small objects and their store, for tests."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS, prefix_keys, root_key
from pilotfish.kv.directory import object_path
from pilotfish.kv.disk import DiskStore
from pilotfish.kv.objects import KVObject, ObjectFormat

OBJECT_BYTES = 1000
SHAPE, OTHER_SHAPE = bytes(range(32)), bytes(32)
FORMAT = ObjectFormat(SHAPE, OBJECT_BYTES)
FILE_BYTES = FORMAT.file_bytes


def some_kv(seed: int = 0, object_bytes: int = OBJECT_BYTES) -> KVObject:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 1 << 32, OBJECT_TOKENS, np.uint32)
    (key,) = prefix_keys(root_key(SHAPE, None), tokens)
    return KVObject.of(key, tokens, rng.integers(0, 256, object_bytes, np.uint8))


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def store_in(directory: Path, objects: float = 4, clock: Callable[[], float] | None = None) -> DiskStore:
    """A store with room for so many objects."""
    return DiskStore(directory, int(objects * FILE_BYTES), FORMAT, clock or Clock())


def path_of(directory: Path, seed: int) -> Path:
    """Of the object of that seed."""
    return object_path(directory, some_kv(seed).key)


def directory_with(directory: Path, objects: int, seconds: int) -> Path:
    """The objects 0, 1 and so on, used at `seconds`, twice that and so on, which nobody has any longer."""
    store = store_in(directory)
    for seed in range(objects):
        store.put(some_kv(seed))
        os.utime(path_of(directory, seed), (0, seconds * (seed + 1)))
    store.close()
    return directory


def files_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*"))


def bytes_on_disk(directory: Path) -> int:
    return sum(path.stat(follow_symlinks=False).st_size for path in files_of(directory))


def equal(a: object, b: KVObject) -> bool:
    if not isinstance(a, KVObject) or (a.key, a.checksum) != (b.key, b.checksum):
        return False
    return np.array_equal(a.tokens, b.tokens) and np.array_equal(a.data, b.data)


def failing(code: int) -> Callable[..., Any]:
    """Instead of a function of the system, which refuses."""

    def fails(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fails


def flip(path: Path, bit: int = 8 * 700) -> None:
    """Turns over one bit of a file; when it was last used stays."""
    contents, used_at = bytearray(path.read_bytes()), path.stat().st_mtime_ns
    contents[bit // 8] ^= 1 << bit % 8
    path.write_bytes(contents)
    os.utime(path, ns=(used_at, used_at))
