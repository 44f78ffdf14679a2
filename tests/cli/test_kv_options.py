"""--kv-host-memory and --kv-disk: what cannot be is one line and exit code 2, and leaves a directory as it was."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from command_runs import PLAIN, Refused, Run

from pilotfish.kv.disk import DiskStore

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


def test_a_directory_that_cannot_be(line: Line, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, why in (("file", "File exists"), ("no/kv", "No such file or directory")):
        said = line("--kv-disk", tmp_path / name)
        assert said.startswith(f"kv_disk: '{tmp_path / name}' is not allowed") and why in said


def test_a_directory_that_cannot_be_written(line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, access = tmp_path / "kv", os.access
    directory.mkdir()

    def readable(path: str | Path, mode: int, **how: bool) -> bool:
        return not (mode & os.W_OK and Path(path) == directory) and access(path, mode, **how)

    monkeypatch.setattr(os, "access", readable)
    assert "(Permission denied)" in line("--kv-disk", directory)
    assert not list(directory.iterdir())


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
