"""The store on disk: what it gives is what was put under that key for those tokens; anything else is a miss."""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from kv_objects import FILE_BYTES, FORMAT, Clock, bytes_on_disk, equal, failing, files_of, flip, some_kv, store_in

from pilotfish.errors import ParameterError
from pilotfish.kv import disk
from pilotfish.kv.directory import object_path
from pilotfish.kv.disk import DiskStore
from pilotfish.kv.objects import Damage

KV, OTHER = some_kv(), some_kv(1)


def damaged(store: DiskStore) -> dict[Damage, int]:
    return {damage: count for damage, count in store.counts.damaged.items() if count}


def test_what_was_put_is_there_once_and_nobody_else_may_read_it(store: DiskStore, directory: Path) -> None:
    assert not store.contains(KV.key) and store.get(KV.key, KV.tokens) is None
    assert store.put(KV) and store.put(KV)
    assert store.contains(KV.key) and equal(store.get(KV.key, KV.tokens), KV)
    assert store.get(OTHER.key, OTHER.tokens) is None
    assert store.counts.writes == 1 == len(files_of(directory))
    assert store.bytes_used == FILE_BYTES == bytes_on_disk(directory) and damaged(store) == {}
    assert all(path.stat().st_mode & 0o077 == 0 for path in (directory, *directory.rglob("*")))


# -- capacity and order


def test_what_is_being_written_counts(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, most = store_in(directory, 2.5), 0
    true_rename = Path.rename

    def rename(self: Path, target: Path) -> Path:
        nonlocal most
        most = max(most, bytes_on_disk(directory))
        return true_rename(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    assert all(store.put(some_kv(seed)) for seed in range(5))
    assert most == 2 * FILE_BYTES
    store.close()


def test_less_capacity_than_before(directory: Path) -> None:
    store = store_in(directory)
    for seed in range(4):
        store.put(some_kv(seed))
        os.utime(object_path(directory, some_kv(seed).key), (0, 10 * (4 - seed)))
    assert store.get(some_kv(3).key, some_kv(3).tokens)  # it is used last now
    store.close()
    store = store_in(directory, 2)
    assert [seed for seed in range(4) if store.contains(some_kv(seed).key)] == [0, 3]
    assert store.counts.evictions == 2 and bytes_on_disk(directory) == 2 * FILE_BYTES
    store.close()


def test_a_capacity_below_one_object(directory: Path) -> None:
    with pytest.raises(ParameterError, match=rf"^kv_disk_size: '{FILE_BYTES - 1} bytes' .* at least {FILE_BYTES} byt"):
        DiskStore(directory, FILE_BYTES - 1, FORMAT)
    assert not directory.exists()


# -- what is wrong with a file


def replace(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replaced(path: Path) -> None:
        path.unlink()
        make(path)

    return replaced


@pytest.mark.parametrize(
    ("harm", "damage"),
    [
        (flip, Damage.CHECKSUM),
        (lambda path: FORMAT.write(path, OTHER), Damage.KEY),
        (replace(os.mkfifo), Damage.KIND),
        (replace(lambda path: path.symlink_to("/dev/zero")), Damage.KIND),
    ],
)
def test_a_damaged_file_is_a_miss_and_removed(
    store: DiskStore, directory: Path, harm: Callable[[Path], None], damage: Damage
) -> None:
    store.put(KV)
    harm(object_path(directory, KV.key))
    assert store.get(KV.key, KV.tokens) is None
    assert damaged(store) == {damage: 1} and files_of(directory) == []
    assert not store.contains(KV.key) and store.bytes_used == 0
    assert store.put(KV) and equal(store.get(KV.key, KV.tokens), KV)


def test_other_tokens_are_a_miss(store: DiskStore) -> None:
    store.put(KV)
    assert store.get(KV.key, OTHER.tokens) is None and damaged(store) == {Damage.TOKENS: 1}
    store.put(KV)
    assert store.get(KV.key, KV.tokens[:-1]) is None


def test_a_directory_in_place_of_an_object_takes_room_until_it_is_gone(store: DiskStore, directory: Path) -> None:
    store.put(KV)
    path = object_path(directory, KV.key)
    replace(Path.mkdir)(path)
    assert store.get(KV.key, KV.tokens) is None and damaged(store) == {Damage.KIND: 1}
    assert not store.contains(KV.key) and store.bytes_used == FILE_BYTES and store.counts.failed == 1
    path.rmdir()
    assert store.put(KV) and store.bytes_used == FILE_BYTES


@pytest.mark.parametrize(
    ("error", "kept"), [(OSError(errno.EIO, ""), False), (OSError(errno.EMFILE, ""), True), (MemoryError(), True)]
)
def test_a_file_that_cannot_be_read_is_a_miss(
    store: DiskStore, directory: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kept: bool
) -> None:
    store.put(KV)
    monkeypatch.setattr(os, "readv", Mock(side_effect=error))
    assert store.get(KV.key, KV.tokens) is None
    assert (store.counts.failed, store.contains(KV.key)) == (1, kept)
    assert bytes_on_disk(directory) == store.bytes_used == kept * FILE_BYTES


# -- what the disk refuses


class FullDisk:
    """A disk with room for `left` more bytes: `os.write` fails as the system's does, removals give room back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
        self.left, self.tries = left, 0
        true_write, true_unlink = os.write, Path.unlink

        def write(descriptor: int, data: memoryview) -> int:
            self.tries += 1
            if self.left == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            count = true_write(descriptor, data[: self.left])
            self.left -= count
            return count

        def unlink(path: Path, missing_ok: bool = False) -> None:
            size = path.stat().st_size if path.exists() else 0
            true_unlink(path, missing_ok)
            self.left += size

        monkeypatch.setattr(os, "write", write)
        monkeypatch.setattr(Path, "unlink", unlink)


def test_a_disk_that_others_fill_takes_new_objects_for_old(
    store: DiskStore, directory: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(some_kv(0))
    store.put(some_kv(1))
    full = FullDisk(monkeypatch, left=200)
    assert store.put(some_kv(2))
    assert [seed for seed in range(3) if store.contains(some_kv(seed).key)] == [1, 2]
    assert store.counts.failed == 1 and bytes_on_disk(directory) == store.bytes_used == 2 * FILE_BYTES
    assert store.put(some_kv(3)) and store.counts.failed == 1  # the disk was not filled up once more
    clock.now, full.left = disk.REST, 10 * FILE_BYTES
    assert store.put(some_kv(4)) and store.bytes_used == 3 * FILE_BYTES


def test_a_full_disk_rests(store: DiskStore, directory: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    full = FullDisk(monkeypatch, left=FILE_BYTES - 1)
    assert not store.put(KV) and files_of(directory) == []
    tries = full.tries
    clock.now = disk.REST - 1
    assert not store.put(OTHER) and full.tries == tries and store.counts.failed == 1
    clock.now, full.left = disk.REST, FILE_BYTES
    assert store.put(KV) and equal(store.get(KV.key, KV.tokens), KV)


def test_a_disk_kept_full_costs_one_object(store: DiskStore, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        store.put(some_kv(seed))
    monkeypatch.setattr(os, "write", failing(errno.EDQUOT))
    assert not store.put(some_kv(3)) and not store.put(some_kv(4))
    assert (store.counts.failed, store.counts.evictions) == (2, 1)
    assert bytes_on_disk(directory) == store.bytes_used == 2 * FILE_BYTES


def test_a_disk_that_lets_nothing_go_keeps_to_its_capacity(
    store: DiskStore, directory: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(4):
        store.put(some_kv(seed))
    monkeypatch.setattr(Path, "unlink", failing(errno.EROFS))
    assert not store.put(some_kv(4)) and not store.put(some_kv(5))
    assert store.counts.failed == 1 and store.bytes_used == bytes_on_disk(directory) == 4 * FILE_BYTES
    assert sum(store.contains(some_kv(seed).key) for seed in range(4)) == 3
    monkeypatch.undo()
    clock.now = disk.REST
    assert store.put(some_kv(6)) and store.bytes_used == bytes_on_disk(directory) == 4 * FILE_BYTES


def test_a_disk_that_cannot_be_written_is_read(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(KV)
    monkeypatch.setattr(os, "utime", failing(errno.EROFS))
    assert equal(store.get(KV.key, KV.tokens), KV)


# -- other threads, other processes


def test_lookups_do_not_wait_for_a_read_that_hangs(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(KV)
    store.put(OTHER)
    hangs, go_on, true_readv = threading.Event(), threading.Event(), os.readv
    found = list[object]()

    def readv(descriptor: int, buffers: list[memoryview]) -> int:
        hangs.set()
        go_on.wait()
        return true_readv(descriptor, buffers)

    monkeypatch.setattr(os, "readv", readv)
    reader = threading.Thread(target=lambda: found.append(store.get(KV.key, KV.tokens)))
    reader.start()
    hangs.wait()
    assert store.contains(KV.key) and store.contains(OTHER.key) and not store.contains(some_kv(2).key)
    assert store.bytes_used == 2 * FILE_BYTES
    go_on.set()
    reader.join()
    assert equal(found[0], KV)


WRITER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from kv_objects import some_kv, store_in
store = store_in(Path(sys.argv[1]))
store.put(some_kv(0))
{before}
store.put(some_kv(1))
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("before", "left"),
    [
        (f"Path.rename = lambda *_: {KILLED}", FILE_BYTES),
        (f"true = os.write; os.write = lambda fd, data: (true(fd, data[:9]), {KILLED})", 9),
    ],
)
def test_a_writer_that_is_killed_leaves_what_the_next_removes(directory: Path, before: str, left: int) -> None:
    script = WRITER.format(tests=str(Path(__file__).parents[1]), before=before)
    ended = subprocess.run([sys.executable, "-c", script, directory], check=False)
    assert ended.returncode == -signal.SIGKILL
    (unfinished,) = directory.glob("*/*.tmp")
    assert unfinished.stat().st_size == left
    store = store_in(directory)
    assert store.contains(KV.key) and not store.contains(OTHER.key)
    assert bytes_on_disk(directory) == store.bytes_used == FILE_BYTES
    assert equal(store.get(KV.key, KV.tokens), KV) and store.get(OTHER.key, OTHER.tokens) is None
    assert store.put(OTHER) and equal(store.get(OTHER.key, OTHER.tokens), OTHER)
    store.close()


def test_opening_removes_what_is_ours_and_wrong_and_nothing_else(directory: Path, tmp_path: Path) -> None:
    store = store_in(directory)
    store.put(KV)
    store.close()
    parent, elsewhere = object_path(directory, KV.key).parent, tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = "00" if parent.name != "00" else "11"
    (directory / other).symlink_to(elsewhere)
    foreign = [parent / "notes", directory / "notes", directory / "notes.kv", elsewhere / f"{other * 32}.kv"]
    wrong = [parent / f"{'ab' * 32}.kv", parent / f"{parent.name}{'ab' * 31}.tmp", parent / f"{parent.name * 32}.kv"]
    for path in [*foreign, *wrong]:
        path.write_bytes(bytes(FILE_BYTES + (path == wrong[2])))
    link = object_path(directory, OTHER.key)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(foreign[0])  # of the right size
    store = store_in(directory)
    assert [path for path in [*foreign, *wrong, link] if path.exists()] == foreign
    assert store.bytes_used == FILE_BYTES and equal(store.get(KV.key, KV.tokens), KV)
    store.close()
