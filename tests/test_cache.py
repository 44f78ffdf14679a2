"""What is made once is made again where it is damaged, and by whoever is sooner."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sizes import in_soak

from pilotfish.config.cache import made_once


def a_file(path: Path) -> None:
    path.write_text("whole")


def a_folder(path: Path) -> None:
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "weights").write_text("whole")
    (path / "config").write_text("{}")


def contents(path: Path) -> dict[str, str]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {file.name: file.read_text() for file in files}


def cut(path: Path) -> None:
    file = path if path.is_file() else path / "inner" / "weights"
    os.truncate(file, 2)


def spoil_note(path: Path) -> None:
    path.with_name(f"{path.name}.sizes").write_text('{"x": ')


def lose_note(path: Path) -> None:
    path.with_name(f"{path.name}.sizes").unlink()


@pytest.mark.parametrize("damage", [cut, spoil_note, lose_note])
@pytest.mark.parametrize("make", [a_file, a_folder])
def test_it_is_made_once_and_again_where_it_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None], damage: Callable[[Path], None]
) -> None:
    path, made = tmp_path / "kind" / "it", list[Path]()

    def write(place: Path) -> None:
        made.append(place)
        make(place)

    for _ in range(2):
        assert made_once(path, write) == path and len(made) == 1
    whole = contents(path)
    damage(path)
    for _ in range(2):
        assert contents(made_once(path, write)) == whole and len(made) == 2
    said = [message for name, _, message in caplog.record_tuples if name == "pilotfish.config.cache"]
    assert [message.endswith("is damaged; it is made anew") for message in said] == [True] * (damage is not lose_note)
    assert sorted(file.name for file in path.parent.iterdir()) == ["it", "it.sizes"]


@pytest.mark.parametrize("make", [a_file, a_folder])
def test_two_make_it_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "it"

    def write(place: Path) -> None:
        made_once(path, make)
        make(place)

    assert contents(made_once(path, write)) == contents(made_once(path, make))


def test_what_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    def fail(place: Path) -> None:
        place.write_text("half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        made_once(tmp_path / "it", fail)
    assert list(tmp_path.iterdir()) == []


@in_soak
def test_kernels_that_were_cut_short_are_built_anew(tmp_path: Path) -> None:
    """Building takes a minute: the compiler's part is played by a copy."""
    script = """
import shutil, sys
from pathlib import Path
from pilotfish.model.cpu import native
whole = next(Path(sys.argv[1]).glob("*.so"))
native._build = lambda library: shutil.copy(whole, library)
print(native.load_kernels())
"""
    from pilotfish.config.cache import cache_folder
    from pilotfish.model.cpu.native import build_digest, load_kernels

    assert load_kernels()
    built = cache_folder("kernels") / build_digest()
    place = tmp_path / "kernels" / build_digest() / "pilotfish_kernels.so"
    for damaged in (False, True):
        if damaged:
            os.truncate(place, place.stat().st_size // 2)
        command = [sys.executable, "-c", script, built]
        environment = {**os.environ, "PILOTFISH_CACHE": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.stdout, done.returncode) == ("True\n", 0)
        assert ("is damaged; it is made anew" in done.stderr) == damaged
    assert json.loads(place.with_name(f"{place.name}.sizes").read_text()) == {".": place.stat().st_size}
