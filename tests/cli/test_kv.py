"""`pilotfish kv`: what a directory holds, whether it is whole, its end; the options that name one."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from command_runs import PLAIN, Refused, Run

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS
from pilotfish.kv.directory import object_path
from pilotfish.kv.disk import DiskStore
from pilotfish.kv.objects import KVObject

SHAPE, OBJECT_BYTES = bytes(range(32)), 4000
FILE_BYTES = 352 + OBJECT_BYTES
KEYS = [bytes([first]) * 32 for first in (1, 2)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DiskStore]:
    """Whoever has the directory `tmp_path/kv`, with two objects."""
    store = DiskStore(tmp_path / "kv", 1 << 20, SHAPE, OBJECT_BYTES)
    for key in KEYS:
        store.put(KVObject.of(key, np.arange(OBJECT_TOKENS), np.zeros(OBJECT_BYTES, np.uint8)))
    yield store
    store.close()


@pytest.fixture
def directory(tmp_path: Path, server: DiskStore) -> Path:
    """The directory, which nobody has any longer."""
    os.utime(object_path(tmp_path / "kv", KEYS[0]), (0, 1000))
    os.utime(object_path(tmp_path / "kv", KEYS[1]), (0, 2000))
    server.close()
    return tmp_path / "kv"


def test_ls_as_json(pilotfish: Run, directory: Path) -> None:
    result = pilotfish("kv", "ls", directory, "--json")
    assert (result.code, result.stderr) == (0, "")
    known = {"directory": str(directory), "version": 1, "shape": SHAPE.hex(), "object_bytes": OBJECT_BYTES}
    counts = {"objects": 2, "tokens": 128, "bytes": 2 * FILE_BYTES, "unfinished": 0}
    assert result.rows == [{**known, **counts, "oldest_use": 1000.0, "newest_use": 2000.0, "owner": None}]


def test_ls_for_people(pilotfish: Run, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = pilotfish("kv", "ls", directory)
    assert (result.code, result.stderr) == (0, "")
    shown = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    values = {name: value.strip() for name, value in shown.items()}
    assert values["shape"] == SHAPE.hex() and values["objects"] == "2, of 4.0 kB each" and values["tokens"] == "128"
    assert values["bytes"] == f"{2 * FILE_BYTES} (8.7 kB)" and values["used by"] == "nobody"
    assert values["oldest use"].startswith("19") and values["newest use"] > values["oldest use"]


def test_ls_and_verify_beside_a_live_server(pilotfish: Run, server: DiskStore, tmp_path: Path) -> None:
    assert pilotfish("kv", "ls", tmp_path / "kv", "--json").rows[0]["owner"] == str(os.getpid())
    assert f"process {os.getpid()}" in pilotfish("kv", "ls", tmp_path / "kv").stdout
    assert pilotfish("kv", "verify", tmp_path / "kv").code == 0
    assert server.contains(KEYS[0])


def test_verify_whole_objects(pilotfish: Run, directory: Path) -> None:
    result = pilotfish("kv", "verify", directory)
    assert (result.code, result.stdout, result.stderr) == (0, "2 objects, 0 bad\n", "")
    result = pilotfish("kv", "verify", directory, "--json")
    assert result.code == 0 and result.rows == [{"directory": str(directory), "objects": 2, "bad": []}]


def test_verify_bad_objects(pilotfish: Run, directory: Path) -> None:
    bad = object_path(directory, KEYS[0])
    bad.write_bytes(bad.read_bytes()[:-1] + b"\xff")
    result = pilotfish("kv", "verify", directory)
    assert (result.code, result.stdout, result.stderr) == (1, f"{bad}: checksum\n2 objects, 1 bad\n", "")
    result = pilotfish("kv", "verify", directory, "--remove", "--json")
    assert result.code == 1 and result.rows == [
        {"directory": str(directory), "objects": 2, "bad": [{"file": str(bad), "reason": "checksum", "removed": True}]}
    ]
    assert not bad.exists() and pilotfish("kv", "verify", directory).stdout == "1 objects, 0 bad\n"


def test_purge(pilotfish: Run, directory: Path) -> None:
    result = pilotfish("kv", "purge", directory)
    assert (result.code, result.stdout, result.stderr) == (0, "removed 2 objects, 8.7 kB\n", "")
    result = pilotfish("kv", "purge", directory, "--json")
    assert result.code == 0 and result.rows == [{"directory": str(directory), "objects": 0, "bytes": 0}]
    assert list(directory.iterdir()) == []


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


Line = Callable[..., str]


@pytest.fixture
def line(refused: Refused, llama: Path) -> Line:
    """The one line with which these options are refused."""
    return lambda *options: refused("generate", "--target", llama, *PLAIN, "--prompt", "a", *options)


@pytest.mark.parametrize("name", ["kv-host-memory", "kv-disk-size"])
def test_sizes_that_cannot_be(line: Line, tmp_path: Path, name: str) -> None:
    said = line("--kv-disk", tmp_path / "kv", f"--{name}", "0.0001")
    assert said.startswith(f"{name.replace('-', '_')}: 0.0001 is not allowed; expected at least 0.0")
    assert said.endswith(" GiB: a sequence of 2048 tokens takes that") and not (tmp_path / "kv").exists()


def test_tiers_below_no_prefix_cache_and_sizes_of_no_directory(line: Line) -> None:
    for option, value in (("--kv-host-memory", "1"), ("--kv-disk", "kv")):
        said = line("--no-prefix-cache", option, value)
        assert said == f"prefix_cache: False is not allowed; expected true with {option[2:].replace('-', '_')}"
    assert line("--kv-disk-size", "3") == "kv_disk_size: 3.0 is not allowed; expected 0 without kv_disk"


def test_a_directory_of_others(line: Line, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "'notes.txt'" in line("--kv-disk", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    store = DiskStore(tmp_path / "kv", 1 << 20, bytes(32), 4096)
    in_use, _ = line("--kv-disk", tmp_path / "kv"), store.close()
    assert in_use.endswith(f"a directory that no other process uses; process {os.getpid()} has this one")
    of_others = "of this model with these settings; this one's is of others, and may be purged"
    assert line("--kv-disk", tmp_path / "kv").endswith(of_others)


def test_what_can_be_is_used_and_told_of(generate: Run, tmp_path: Path) -> None:
    result = generate("--prompt", "def f(x):", "--kv-disk", tmp_path / "kv", "--kv-offloading-size", "0.1")
    assert (result.code, result.stderr) == (0, "") and result.rows[0]["stats"]["cached_by_tier"] == {}
    assert (tmp_path / "kv" / "manifest.json").is_file()
