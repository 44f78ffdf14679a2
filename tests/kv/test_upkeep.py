"""What is said of a directory, and what is removed from it: ours alone, and only if nobody has it."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from kv_objects import FILE_BYTES, OBJECT_BYTES, SHAPE, directory_with, failing, flip, path_of, store_in

from pilotfish.errors import ParameterError
from pilotfish.kv.directory import FoundFile
from pilotfish.kv.upkeep import BadFile, DirectorySummary, Purged, purge, summary, verify


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """With the objects 0, 1 and 2, used at seconds 100, 200 and 300."""
    return directory_with(tmp_path / "kv", 3, 100)


def everything(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_the_summary(directory: Path) -> None:
    path_of(directory, 0).with_suffix(".tmp").touch()
    (path_of(directory, 0).parent / "notes").touch()
    before = everything(directory)
    assert summary(directory) == DirectorySummary(
        1, SHAPE.hex(), OBJECT_BYTES, 3, 192, 3 * FILE_BYTES, 1, 100.0, 300.0, None
    )
    assert everything(directory) == before


def test_a_directory_without_objects(tmp_path: Path) -> None:
    store_in(tmp_path / "kv").close()
    held = summary(tmp_path / "kv")
    assert (held.objects, held.bytes, held.oldest_use, held.newest_use) == (0, 0, None, None)
    assert verify(tmp_path / "kv", remove=False).objects == 0


@pytest.mark.parametrize("what", [summary, partial(verify, remove=False)])
def test_an_empty_directory_is_not_ours(tmp_path: Path, what: Callable[[Path], object]) -> None:
    with pytest.raises(ParameterError, match=r"^directory: .*this one is empty"):
        what(tmp_path)


@pytest.mark.usefixtures("store")
def test_bad_objects_are_named_and_kept(directory: Path) -> None:
    first, second, third = (path_of(directory, seed) for seed in range(3))
    flip(first)
    second.rename(second.with_name(second.name.replace("e", "f", 1)))
    third.unlink()
    third.symlink_to("/dev/zero")
    result = verify(directory, remove=False)
    assert sorted(bad.reason for bad in result.bad) == ["checksum", "key", "kind"] and result.objects == 3
    assert BadFile(str(first), "checksum", removed=False) in result.bad
    assert all(Path(bad.file).is_symlink() or Path(bad.file).exists() for bad in result.bad)


def test_bad_objects_are_removed(directory: Path) -> None:
    path_of(directory, 3).parent.mkdir(exist_ok=True)
    path_of(directory, 3).mkdir()
    flip(path_of(directory, 0))
    result = verify(directory, remove=True)
    assert sorted((bad.reason, bad.removed) for bad in result.bad) == [("checksum", True), ("kind", False)]
    assert [path_of(directory, seed).exists() for seed in range(4)] == [False, True, True, True]
    store_in(directory).close()  # nor is it owned any longer


def test_what_the_owner_evicts_meanwhile_is_not_bad(directory: Path) -> None:
    def evicted(files: Sequence[FoundFile]) -> Iterator[FoundFile]:
        path_of(directory, 1).unlink()
        yield from files

    result = verify(directory, remove=False, watched=evicted)
    assert (result.objects, result.bad) == (3, [])


def test_a_file_that_cannot_be_read_is_bad(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "readv", failing(errno.EIO))
    assert {bad.reason for bad in verify(directory, remove=False).bad} == {"Input/output error"}


def test_a_purge_removes_all_that_is_ours(directory: Path) -> None:
    path_of(directory, 0).with_suffix(".tmp").write_bytes(b"half")
    assert purge(directory) == Purged(3, 3 * FILE_BYTES)
    assert list(directory.iterdir()) == []
    assert purge(directory) == Purged(0, 0) and list(directory.iterdir()) == []
    store_in(directory).close()


def test_a_purge_removes_nothing_else(directory: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / f"{'00' * 32}.kv").touch()
    (directory / "00").symlink_to(elsewhere)
    kept = [path_of(directory, 0).with_name("notes"), directory / "notes", elsewhere / f"{'00' * 32}.kv"]
    for path in kept[:2]:
        path.touch()
    purge(directory)
    assert sorted(everything(directory)) == sorted(kept[:2]) and kept[2].exists()


@pytest.mark.parametrize("contents", ["", '{"holds": "pilotfish kv", "version": 2}'])
def test_a_purge_is_refused_where_the_format_is_unknown_and_others_keep_files(directory: Path, contents: str) -> None:
    (directory / "manifest.json").write_text(contents)
    (directory / "notes").touch()
    before = everything(directory)
    with pytest.raises(ParameterError):
        purge(directory)
    assert everything(directory) == before
