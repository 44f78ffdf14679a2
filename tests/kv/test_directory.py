"""A directory is taken if it is empty or ours, of this format and shape, and nobody else's now; refused in one line."""

import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from kv_objects import OBJECT_BYTES, OTHER_SHAPE, SHAPE, equal, failing, some_kv, store_in
from support import descriptors

from pilotfish.errors import ParameterError
from pilotfish.kv import directory as directories
from pilotfish.kv.directory import DAMAGED, LOCK, MANIFEST, owner
from pilotfish.kv.disk import DiskStore
from pilotfish.kv.objects import Damage, ObjectFormat
from pilotfish.kv.upkeep import purge


def refusal(open_it: Callable[[], object]) -> str:
    with pytest.raises(ParameterError) as refused:
        open_it()
    assert refused.value.field == "kv_disk" and "\n" not in str(refused.value)
    return str(refused.value)


def test_an_empty_directory_becomes_ours(directory: Path) -> None:
    directory.mkdir()
    store_in(directory).close()
    assert sorted(path.name for path in directory.iterdir()) == [LOCK, MANIFEST]
    written = json.loads((directory / MANIFEST).read_text())
    assert written == {"holds": "pilotfish kv", "version": 1, "shape": SHAPE.hex(), "object_bytes": OBJECT_BYTES}
    assert (directory / LOCK).read_text().split() == [str(os.getpid())]
    store_in(directory).close()


def test_nobody_opens_it_twice(directory: Path) -> None:
    store = store_in(directory)
    line = refusal(lambda: store_in(directory))
    assert line.endswith(f"expected a directory that no other process uses; process {os.getpid()} has this one")
    assert owner(directory) == str(os.getpid())
    store.close()
    assert owner(directory) is None
    store_in(directory).close()


def test_a_lock_file_that_was_replaced_is_not_the_lock(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking it a purge may have removed the file, and another process made a new one."""
    store_in(directory).close()
    true_try, tries = directories.try_lock, 0

    def try_lock(descriptor: int, *kind: int) -> bool:
        nonlocal tries
        tries += 1
        if tries == 1:
            (directory / LOCK).unlink()
        return true_try(descriptor, *kind)

    monkeypatch.setattr(directories, "try_lock", try_lock)
    store = store_in(directory)
    assert tries == 2 and owner(directory) is not None
    store.close()


# -- refused


@pytest.mark.parametrize(("shape", "object_bytes"), [(OTHER_SHAPE, OBJECT_BYTES), (SHAPE, OBJECT_BYTES + 1)])
def test_another_shape(directory: Path, shape: bytes, object_bytes: int) -> None:
    store_in(directory).close()
    line = refusal(lambda: DiskStore(directory, 1 << 20, ObjectFormat(shape, object_bytes)))
    assert line.startswith(f"kv_disk: {str(directory)!r} is not allowed")
    assert "of this model with these settings" in line
    store_in(directory).close()  # nor did it keep the lock


KV = some_kv()
#: What a manifest may hold that is none of ours.
DAMAGES = (
    ["", "{", "[]", '{"name": "an app"}', '{"holds": "pilotfish kv"}', "\xff", '{"holds": "cheese", "version": 1}']
    + ['{"holds": "pilotfish kv", "version": 2, "colours": ["red"]}', "\0" * 200]
    + [
        json.dumps({"holds": "pilotfish kv", "version": 1, "shape": shape, "object_bytes": object_bytes})
        for shape, object_bytes in (("ab", 5), ("x" * 64, 5), ("ab" * 32, 0), ("ab" * 32, "5"))
    ]
    + [json.dumps({"holds": "pilotfish kv", "version": 2, "shape": "ab" * 32, "object_bytes": 5})]
)


@pytest.mark.parametrize("contents", [*DAMAGES, None])
def test_what_is_damaged_is_begun_anew(directory: Path, contents: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """With the objects that are whole: each is known by its own header. None: the manifest is gone. Or it is purged."""
    store = store_in(directory)
    assert store.put(KV)
    store.close()
    if contents is None:
        (directory / MANIFEST).unlink()
    else:
        (directory / MANIFEST).write_text(contents, "latin-1")
    for _ in range(2):
        store = store_in(directory)
        assert equal(store.get(KV.key, KV.tokens), KV)
        store.close()
        assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith("; it is begun anew") and str(directory) in caplog.messages[0]
    kept = directory / DAMAGED
    assert not kept.exists() if contents is None else kept.read_text("latin-1") == contents
    (directory / MANIFEST).write_text("")
    purge(directory)
    assert list(directory.iterdir()) == []


def test_a_manifest_that_is_no_file_is_begun_anew(directory: Path) -> None:
    store_in(directory).close()
    (directory / MANIFEST).unlink()
    (directory / MANIFEST).mkdir()
    store_in(directory).close()
    assert (directory / MANIFEST).is_file() and (directory / DAMAGED).is_dir()


def test_objects_of_others_are_misses_in_what_is_begun_anew(directory: Path) -> None:
    other = DiskStore(directory, 1 << 20, ObjectFormat(OTHER_SHAPE, OBJECT_BYTES))
    assert other.put(KV)
    other.close()
    (directory / MANIFEST).write_text("{")
    store = store_in(directory)
    assert store.get(KV.key, KV.tokens) is None and store.counts.damaged[Damage.SHAPE] == 1
    store.close()


@pytest.mark.parametrize(
    ("names", "contents"),
    [((LOCK, MANIFEST, foreign), "{}") for foreign in ("icon.png", "4g", "src", LOCK)]
    + [((MANIFEST,), contents) for contents in DAMAGES],
)
def test_a_manifest_of_others_is_refused(directory: Path, names: Sequence[str], contents: str) -> None:
    """Nor is a lock one of ours by its name."""
    directory.mkdir()
    for name in names:
        (directory / name).write_text(contents, "latin-1")
    assert f"its {MANIFEST} is not ours" in refusal(lambda: store_in(directory))
    kept = {path.name: path.read_text("latin-1") for path in directory.iterdir()}
    assert kept == dict.fromkeys(names, contents)


def test_an_unwritable_directory_of_ours(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_in(directory).close()
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    assert "(Permission denied)" in refusal(lambda: store_in(directory))


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("elsewhere")])
def test_a_manifest_or_lock_that_is_no_file_hangs_nobody(directory: Path, make: Callable[[Path], None]) -> None:
    directory.mkdir()
    make(directory / MANIFEST)
    refusal(lambda: store_in(directory))
    directory = directory.with_name("other")
    directory.mkdir()
    make(directory / LOCK)
    if (directory / LOCK).is_fifo():  # locks as well as a file
        store_in(directory).close()
    else:
        refusal(lambda: store_in(directory))


def test_files_of_others(directory: Path) -> None:
    directory.mkdir()
    (directory / "thesis.tex").touch()
    assert "this one holds 'thesis.tex'" in refusal(lambda: store_in(directory))
    assert [path.name for path in directory.iterdir()] == ["thesis.tex"]


def test_what_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "(File exists)" in refusal(lambda: store_in(tmp_path / "file"))
    assert "(Not a directory)" in refusal(lambda: store_in(tmp_path / "file" / "kv"))
    assert "(No such file or directory)" in refusal(lambda: store_in(tmp_path / "no" / "kv"))
    assert "(File name too long)" in refusal(lambda: store_in(tmp_path / ("x" * 300)))
    refusal(lambda: store_in(Path("/proc/kv")))


def test_a_directory_that_everyone_may_write(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o777)
    assert "chmod o-w" in refusal(lambda: store_in(directory))


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A directory that this process may only read: root becomes somebody else for the test."""
    with tempfile.TemporaryDirectory() as name:
        directory, user = Path(name), os.geteuid()
        directory.chmod(0o555)
        if user == 0:
            os.seteuid(65534)
        yield directory
        os.seteuid(user)
        directory.chmod(0o755)


def test_an_unwritable_directory(as_nobody: Path) -> None:
    assert "readable and writable (Permission denied)" in refusal(lambda: store_in(as_nobody))
    assert "(Permission denied)" in refusal(lambda: store_in(as_nobody / "kv"))


# -- interrupted


def test_a_directory_that_got_no_manifest_is_empty(directory: Path) -> None:
    directory.mkdir()
    (directory / LOCK).touch()
    (directory / f"{MANIFEST}.tmp").write_text('{"hol')
    store_in(directory).close()
    assert sorted(path.name for path in directory.iterdir()) == [LOCK, MANIFEST]


def test_a_failure_gives_the_directory_back(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    assert "(No space left on device)" in refusal(lambda: store_in(directory))
    monkeypatch.undo()
    monkeypatch.setattr("pilotfish.kv.disk.found_files", failing(errno.ENOSPC))
    assert "(No space left on device)" in refusal(lambda: store_in(directory))
    monkeypatch.undo()
    assert owner(directory) is None and descriptors() == before


def test_a_full_disk_keeps_nobody_from_their_directory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_in(directory).close()
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    store_in(directory).close()
