"""`pilotfish kv`: what a directory holds, whether it is whole, its end; the options that name one."""

import os
from pathlib import Path

import pytest
from command_runs import Refused, Run
from kv_objects import FILE_BYTES, OBJECT_BYTES, SHAPE, directory_with, flip, path_of, store_in

from pilotfish.kv.disk import DiskStore
from pilotfish.kv.objects import ObjectFormat


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """With two objects, which nobody has any longer."""
    return directory_with(tmp_path / "kv", 2, 1000)


def test_ls(pilotfish: Run, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = pilotfish("kv", "ls", directory, "--json")
    assert (result.code, result.stderr) == (0, "")
    known = {"directory": str(directory), "version": 1, "shape": SHAPE.hex(), "object_bytes": OBJECT_BYTES}
    counts = {"objects": 2, "tokens": 128, "bytes": 2 * FILE_BYTES, "unfinished": 0}
    assert result.rows == [{**known, **counts, "oldest_use": 1000.0, "newest_use": 2000.0, "owner": None}]
    monkeypatch.setenv("COLUMNS", "200")
    result = pilotfish("kv", "ls", directory)
    assert (result.code, result.stderr) == (0, "")
    shown = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    values = {name: value.strip() for name, value in shown.items()}
    assert values["shape"] == SHAPE.hex() and values["objects"] == "2, of 1.0 kB each" and values["tokens"] == "128"
    assert values["bytes"] == f"{2 * FILE_BYTES} (2.7 kB)" and values["used by"] == "nobody"
    assert values["oldest use"].startswith("19") and values["newest use"] > values["oldest use"]


def test_beside_a_live_server_nothing_is_removed(pilotfish: Run, refused: Refused, directory: Path) -> None:
    store = store_in(directory)
    assert pilotfish("kv", "ls", directory, "--json").rows[0]["owner"] == str(os.getpid())
    assert f"process {os.getpid()}" in pilotfish("kv", "ls", directory).stdout
    os.truncate(path_of(directory, 0), 9)
    for command in (["purge"], ["verify", "--remove"]):
        line = refused("kv", *command, directory)
        assert f"directory that no other process uses; process {os.getpid()} has this one" in line
    assert all(path_of(directory, seed).exists() for seed in range(2))
    store.close()


def test_verify_and_purge(pilotfish: Run, directory: Path) -> None:
    def said(*arguments: object) -> tuple[int, str]:
        result = pilotfish("kv", *arguments, directory)
        assert result.stderr == ""
        return result.code, result.stdout.replace(str(directory), "DIR")

    bad = path_of(directory, 0)
    name = f"DIR/{bad.relative_to(directory)}"
    assert said("verify") == (0, "2 objects, 0 bad\n")
    assert said("verify", "--json") == (0, '{"directory": "DIR", "objects": 2, "bad": []}\n')
    flip(bad)
    assert said("verify") == (1, f"{name}: checksum\n2 objects, 1 bad\n")
    removed = f'[{{"file": "{name}", "reason": "checksum", "removed": true}}]'
    assert said("verify", "--remove", "--json") == (1, f'{{"directory": "DIR", "objects": 2, "bad": {removed}}}\n')
    assert not bad.exists() and said("verify") == (0, "1 objects, 0 bad\n")
    assert said("purge") == (0, "removed 1 objects, 1.4 kB\n") and list(directory.iterdir()) == []
    assert said("purge", "--json") == (0, '{"directory": "DIR", "objects": 0, "bytes": 0}\n')


@pytest.mark.parametrize("command", ["ls", "verify", "purge"])
def test_bad_usage_is_one_line(refused: Refused, tmp_path: Path, command: str) -> None:
    (tmp_path / "thesis\n.tex").touch()
    for arguments, message in (
        ([], "Missing argument"),
        ([tmp_path / "nowhere"], "No such file or directory"),
        ([tmp_path], r"this one holds 'thesis\n.tex'"),
    ):
        assert message in refused("kv", command, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis\n.tex"]


# -- --kv-host-memory and --kv-disk: what cannot be is one line, and leaves a directory as it was


def test_a_size_of_no_directory(line: Refused) -> None:
    assert line("--kv-disk-size", "3") == "kv_disk_size: 3.0 is not allowed; expected 0 without kv_disk"


def test_a_directory_of_others(line: Refused, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "'notes.txt'" in line("--kv-disk", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    store = DiskStore(tmp_path / "kv", 1 << 20, ObjectFormat(bytes(32), 4096))
    in_use, _ = line("--kv-disk", tmp_path / "kv"), store.close()
    assert in_use.endswith(f"a directory that no other process uses; process {os.getpid()} has this one")
    of_others = "of this model with these settings; this one's is of others, and may be purged"
    assert line("--kv-disk", tmp_path / "kv").endswith(of_others)


def test_what_can_be_is_used_and_told_of(generate: Run, tmp_path: Path) -> None:
    result = generate("--prompt", "def f(x):", "--kv-disk", tmp_path / "kv", "--kv-offloading-size", "0.1")
    assert (result.code, result.stderr) == (0, "") and result.rows[0]["stats"]["cached_by_tier"] == {}
    assert (tmp_path / "kv" / "manifest.json").is_file()
