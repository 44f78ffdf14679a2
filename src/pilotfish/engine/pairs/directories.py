"""The directory of a model that is named: itself, a GGUF file, or a published model. Imports torch only to make one."""

import hashlib
import re
from pathlib import Path

from pilotfish.config.cache import cache_folder, made_once
from pilotfish.engine.pairs.published import PUBLISHED, published_file
from pilotfish.errors import ModelError, ParameterError

#: llama.cpp's name of a file of several.
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
#: Raised when other directories would be made of the same files.
VERSION = 3


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
