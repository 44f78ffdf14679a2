"""Folders of captured rows: what is written is read, within bounds, whatever happens to the files."""

import math
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from pilotfish.errors import ParameterError
from pilotfish.operate.capture import store as store_module
from pilotfish.operate.capture.folder import ClaimedFolder, found_rows, partition_of, partitions
from pilotfish.operate.capture.rows import CapturedRow, framed, rows_of, token_bytes
from pilotfish.operate.capture.store import FILE_SECONDS, CaptureStore, Retention
from pilotfish.operate.capture.upkeep import purge_before, purge_client, read_rows_of, summarize_partitions

WEEK = 7 * 86400.0
START = 1_764_000_000.0


def row(time: float = START, prompt: tuple[int, ...] = (1, 2, 3), output: tuple[int, ...] = (4, 5)) -> CapturedRow:
    tokens = {"prompt": token_bytes(prompt), "output": token_bytes(output)}
    return CapturedRow(time=time, **tokens, temperature=0.8, tag="chat", fingerprint="f", tokenizer="t")


@dataclass
class Server:
    """Whoever writes into a folder."""

    path: Path
    bytes: int = 1 << 30
    now: float = START
    store: CaptureStore = field(init=False)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.store = CaptureStore(ClaimedFolder(self.path), Retention(WEEK, self.bytes), lambda: self.now)

    def add(self, client: str = "search", *rows: CapturedRow) -> CapturedRow:
        self.store.add(client, rows or (row(self.now),))
        return row(self.now)

    def rows(self) -> list[CapturedRow]:
        return [found for file in found_rows(self.path) for found in read_rows_of(file)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "captured")
    yield made
    made.store.close()


@pytest.fixture
def left(tmp_path: Path) -> Server:
    """One that has ended after a row."""
    made = Server(tmp_path / "captured")
    made.add()
    made.store.close()
    return made


tokens = st.lists(st.integers(0, 2**32 - 1), max_size=20).map(tuple)


@given(st.lists(st.builds(row, st.floats(0, 2e9), tokens, tokens), max_size=5), st.data())
def test_what_stands_before_a_torn_row_is_read(rows: list[CapturedRow], data: st.DataObject) -> None:
    frames = [framed(one) for one in rows]
    whole = b"".join(frames)
    assert list(rows_of(whole)) == rows
    cut = data.draw(st.integers(0, len(whole)))
    ends = [sum(map(len, frames[: i + 1])) for i in range(len(frames))]
    assert list(rows_of(whole[:cut])) == rows[: sum(end <= cut for end in ends)]
    assert list(rows_of(whole[:cut] + bytes(100)))[: len(rows)] == rows[: sum(end <= cut for end in ends)]


def test_a_damaged_row_ends_what_is_read() -> None:
    first, second, third = (bytearray(framed(row(prompt=(n,)))) for n in range(3))
    second[-1] ^= 1
    assert list(rows_of(bytes(first + second + third))) == [row(prompt=(0,))]


def test_rows_come_back_and_only_their_owner_can_read_them(server: Server) -> None:
    server.add("search", row(prompt=(7, 70_000)), row(output=(9,)))
    server.add("chat")
    assert sorted(list(one.prompt_tokens) for one in server.rows()) == [[1, 2, 3], [1, 2, 3], [7, 70_000]]
    assert len(partitions(server.path)) == 2
    for found in [server.path, *server.path.rglob("*")]:
        assert stat.S_IMODE(found.stat().st_mode) == (0o700 if found.is_dir() else 0o600)
        assert "search" not in found.name and (found.is_dir() or b"search" not in found.read_bytes())
    assert partition_of("search", b"a") != partition_of("search", b"b")


def test_a_file_ends_with_its_hour_and_its_bytes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in (0.0, FILE_SECONDS - 1, FILE_SECONDS):
        server.now = START + seconds
        server.add()
    assert [len(list(read_rows_of(file))) for file in found_rows(server.path)] == [2, 1]
    monkeypatch.setattr(store_module, "FILE_BYTES", 2 * len(framed(row())))
    server.add()
    server.add()
    assert [len(list(read_rows_of(file))) for file in found_rows(server.path)] == [2, 2, 1]


def test_no_row_of_a_file_is_older_than_it_says(server: Server) -> None:
    for now in (START, START - 500.0, START - 400.0, START + 5.0):  # the clock was set back
        server.now = now
        server.add()
    for file in found_rows(server.path):
        assert all(file.begun <= one.time < file.begun + FILE_SECONDS for one in read_rows_of(file))


def test_what_is_too_old_goes(server: Server) -> None:
    server.add()
    server.now += FILE_SECONDS
    server.add("chat")
    server.now = START + WEEK
    server.store.tidy()
    assert [one.time for one in server.rows()] == [START + FILE_SECONDS]
    assert len(partitions(server.path)) == 1, "an empty partition goes too"
    server.add()
    assert len(server.rows()) == 2


def test_the_oldest_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(framed(row()))
    monkeypatch.setattr(store_module, "FILE_BYTES", size)
    server = Server(tmp_path / "captured", bytes=10 * size)
    for number in range(25):
        server.now = START + number
        server.add("search" if number % 2 else "chat")
        assert sum(file.size for file in found_rows(server.path)) <= server.bytes
    times = [one.time - START for one in server.rows()]
    assert times == list(range(15, 25))
    with pytest.raises(OSError):
        server.add("search", row(prompt=tuple(range(1000))))
    assert len(server.rows()) == 10


def test_what_was_torn_is_not_written_behind(left: Server) -> None:
    (file,) = found_rows(left.path)
    os.truncate(file.path, file.size - 1)
    left.begin()
    left.add()
    assert len(left.rows()) == 1


def test_a_failed_write_leaves_nothing_behind(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.add()
    write = os.write

    def half(descriptor: int, data: memoryview) -> int:
        if len(data) < len(framed(row())):
            raise OSError(28, "No space left on device")
        return write(descriptor, data[: len(data) // 2])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", half)
        assert "No space" in refused(OSError, server.add)
    server.add()
    assert len(server.rows()) == 2


# -- purging beside the writer


def test_purging_beside_a_server(server: Server) -> None:
    server.add("search")
    server.add("chat")
    gone = purge_client(server.path, "search")
    assert gone.files == 1 and gone.bytes == len(framed(row()))
    assert [one.name for one in summarize_partitions(server.path)] == [partition_of("chat", server.store._folder.salt)]
    server.add("search")
    assert len(server.rows()) == 2
    assert purge_client(server.path, "nobody").files == 0
    assert purge_before(server.path, math.inf).files == 2 and server.rows() == []
    server.add("search")
    assert len(server.rows()) == 1


def test_nothing_older_stays(server: Server) -> None:
    for seconds in (0.0, 60.0, FILE_SECONDS, 2 * FILE_SECONDS):
        server.now = START + seconds
        server.add()
    purge_before(server.path, START + FILE_SECONDS + 1)
    assert [one.time for one in server.rows()] == [START + 2 * FILE_SECONDS]


# -- folders that cannot be used


def test_one_server_has_a_folder(server: Server) -> None:
    assert "no other server" in refused(ParameterError, ClaimedFolder, server.path)
    server.store.close()
    server.begin()


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    assert "no capture.json" in refused(ParameterError, ClaimedFolder, tmp_path)
    assert os.listdir(tmp_path) == ["mine.txt"]  # noqa: PTH208
    assert "No such file" in refused(ParameterError, ClaimedFolder, tmp_path / "absent" / "captured")
    assert "capture" in refused(ParameterError, ClaimedFolder, tmp_path / "mine.txt")


@pytest.mark.parametrize("salt", [None, b"short"])
def test_a_damaged_salt_is_made_anew(left: Server, salt: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    """Of rows before nobody can tell whose they are: they are not taken for none of a client."""
    (left.path / "salt").unlink()
    if salt is not None:
        (left.path / "salt").write_bytes(salt)
    left.begin()
    (warning,) = caplog.messages
    assert "its salt is damaged" in warning
    left.now = time.time() + 2
    left.add()
    assert len(left.rows()) == 2
    with pytest.raises(ParameterError, match="nobody can tell whose they are; purge those first, with --before"):
        purge_client(left.path, "search")
    assert purge_before(left.path, time.time() + 1).files == 1
    assert purge_client(left.path, "search").files == 1 and left.rows() == []
    left.store.close()
    left.begin()
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("manifest", [None, b"", b'{"holds": "pilotfish cap'])
def test_a_damaged_manifest_is_renewed(left: Server, manifest: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    (left.path / "capture.json").unlink()
    if manifest is not None:
        (left.path / "capture.json").write_bytes(manifest)
    assert len(summarize_partitions(left.path)) == 1
    left.begin()
    left.add()
    assert len(left.rows()) == 2 and purge_client(left.path, "search").files > 0
    assert len(caplog.messages) == (manifest is not None)
    if manifest is not None:
        assert (left.path / "capture.json.damaged").read_bytes() == manifest


def test_folders_of_another_mode_or_format_or_with_files_of_others_are_refused(left: Server) -> None:
    left.path.chmod(0o750)
    assert "mode 0700" in refused(ParameterError, left.begin)
    left.path.chmod(0o700)
    (left.path / "capture.json").write_text('{"holds": "pilotfish capture", "version": 9}')
    assert "format 9" in refused(ParameterError, left.begin)
    (left.path / "mine.txt").write_text("x")
    for manifest in ("", "{}"):
        (left.path / "capture.json").write_text(manifest)
        before = sorted(os.listdir(left.path))  # noqa: PTH208
        assert "no capture.json of ours" in refused(ParameterError, left.begin)
        assert sorted(os.listdir(left.path)) == before  # noqa: PTH208


def test_nothing_goes_into_a_folder_that_took_its_place(server: Server) -> None:
    server.add()
    server.path.rename(server.path.with_name("moved"))
    with pytest.raises(FileNotFoundError):
        server.add()
    server.path.mkdir(0o700)
    (server.path / "salt").write_bytes(bytes(32))
    assert "another one" in refused(OSError, server.add)
    assert partitions(server.path) == []
