"""Members in a file: what it may say, what becomes of what it must not, and who hears of a change."""

import logging
import threading
from pathlib import Path

import pytest

from pilotfish.engine.targets import members as members_module
from pilotfish.engine.targets.members import MAX_FILE, Member, Members, MembersFile, MembersThread, write_members
from pilotfish.errors import InputError
from pilotfish.wire.curve_keys import new_key_pair

LONG = 20.0
ONE, TWO = Member("tcp://one:7070", name="one"), Member("ipc:///run/two", new_key_pair().public, draining=True)
BAD = {
    "": "truncated",
    "[]": "Expected `object`",
    '{"draft_pools": [{"endpoint": "tcp://a:7"}, {"endpoint": "tcp://*:7"}]}': r"wildcard.*draft_pools\[1\]",
    '{"draft_pools": [{"endpoint": "http://a"}]}': "endpoint: 'http://a' is not allowed",
    '{"prefill_pools": [{"endpoint": "tcp://a:7", "key": "short"}]}': "key: 'short'",
    '{"prefill_pools": [{"endpoint": "tcp://a:7", "name": "a\\u001b"}]}': "name: 'a",
    '{"targets": [{"endpoint": "tcp://a:7"}, {"endpoint": "tcp://a:7"}]}': "targets: 'tcp://a:7' is there twice",
    '{"targets": [{"endpoint": "tcp://a:7", "name": "x"}, {"endpoint": "tcp://b:7", "name": "x"}]}': "'x' is there",
    '{"pools": []}': "unknown field `pools`",
    '{"draft_pools": [{"endpoint": "tcp://a:7", "port": 7}]}': "unknown field `port`",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_members(tmp_path / "members.json", Members(draft_pools=(ONE,)))
    return tmp_path / "members.json"


def test_what_is_written_is_read(path: Path) -> None:
    members = Members((ONE, TWO), (TWO,), (ONE,))
    write_members(path, members)
    assert MembersFile(path).members == members and [one.label for one in (ONE, TWO)] == ["one", "ipc:///run/two"]
    assert [file.name for file in path.parent.iterdir()] == ["members.json"]


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_file_of_members_is_refused_in_one_line(text: str, path: Path) -> None:
    path.write_text(text)
    with pytest.raises(InputError, match=f"^members: {path}: .*{BAD[text]}") as refused:
        MembersFile(path)
    assert "\n" not in str(refused.value)


def test_files_that_cannot_be_read_are_refused(path: Path) -> None:
    for given, problem in ((path.parent / "none", "No such file"), (path.parent, "expected a file")):
        with pytest.raises(InputError, match=problem):
            MembersFile(given)
    path.write_bytes(b" " * (MAX_FILE + 1))
    with pytest.raises(InputError, match="at most"):
        MembersFile(path)
    path.chmod(0o666)
    with pytest.raises(InputError, match="written by everyone"):
        MembersFile(path)


def test_changes_are_seen_once(path: Path) -> None:
    file = MembersFile(path)
    assert not file.poll()
    write_members(path, Members(draft_pools=(ONE, TWO)))
    assert file.poll() and file.members.draft_pools == (ONE, TWO) and not file.poll()
    path.write_text(f" {path.read_text()}\n")  # in place, and of the same meaning
    assert not file.poll()


def test_a_link_that_is_turned_is_followed(path: Path, tmp_path: Path) -> None:
    for name, members in (("before", Members()), ("after", Members(targets=(TWO,)))):
        (tmp_path / name).mkdir()
        write_members(tmp_path / name / "members.json", members)
    (tmp_path / "data").symlink_to("before")
    path.unlink()
    path.symlink_to("data/members.json")
    file = MembersFile(path)
    (tmp_path / "new").symlink_to("after")
    (tmp_path / "new").replace(tmp_path / "data")
    assert file.poll() and file.members.targets == (TWO,)


def test_bad_content_changes_nothing_and_is_told_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, good = MembersFile(path), path.read_bytes()
    for text in (*BAD, *BAD):
        path.write_text(text)
        assert [file.poll() for _ in range(3)] == [False] * 3
    path.unlink()
    assert [file.poll() for _ in range(3)] == [False] * 3
    assert file.members == Members(draft_pools=(ONE,)) and len(caplog.records) == 2 * len(BAD) + 1
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    path.write_bytes(good)
    assert not file.poll()  # as before
    write_members(path, Members())
    assert file.poll() and file.members == Members()


def test_the_thread_tells_of_changes_and_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "PERIOD", 0.002)
    monkeypatch.setattr(members_module, "REMINDER", 0.01)
    told, heard = list[Members](), threading.Semaphore(0)

    def tell(members: Members) -> None:
        told.append(members)
        heard.release()
        raise RuntimeError("not now")

    thread = MembersThread(MembersFile(path), tell)
    logging.disable()
    try:
        assert all(heard.acquire(timeout=LONG) for _ in range(2))
        write_members(path, Members(targets=(TWO,)))
        while told[-1].targets != (TWO,):
            assert heard.acquire(timeout=LONG)
    finally:
        logging.disable(logging.NOTSET)
        thread.close()
        thread.close()
    assert told[0] == Members(draft_pools=(ONE,))
