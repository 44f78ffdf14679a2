"""The tensors in the files' headers. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import safe_open

from pilotfish.errors import ModelError
from pilotfish.model.loading.metadata import read_object


@dataclass(frozen=True)
class TensorHeader:
    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors write it: F32, BF16, I64, …


#: Beside the config.json that was made of GGUF files.
GGUF_INDEX = "gguf.json"


class GGUFTensor(msgspec.Struct, frozen=True, array_like=True):
    file: int
    offset: int  # bytes
    shape: tuple[int, ...]  # [outputs, inputs]
    kind: str  # ggml's name of its type
    paired_heads: int = 0  # whose rows lie as llama.cpp rotates them: neighbours, not halves
    less_one: bool = False  # the file's values are larger by one


def linked_name(place: int, file: Path) -> str:
    """Of a GGUF file's link; it tells when another file has taken the place."""
    return f"{place:05}-{(about := file.stat()).st_size}-{about.st_mtime_ns}.gguf"


def gguf_index(directory: Path) -> dict[str, GGUFTensor]:
    """By the modules' names; none: the weights are no GGUF."""
    file = directory / GGUF_INDEX
    return msgspec.json.decode(file.read_bytes(), type=dict[str, GGUFTensor]) if file.is_file() else {}


def weight_files(directory: Path) -> list[Path]:
    """The files that hold weights: safetensors as transformers reads them, or GGUF. ModelError if none, or if the index
    is unreadable."""
    if (directory / GGUF_INDEX).is_file():
        return sorted(directory.glob("*.gguf"))
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise ModelError(f"model: {directory} has no safetensors weights: neither {whole.name} nor {index.name}")
    fields = read_object(index)
    names = fields.get("weight_map")
    if not (isinstance(names, dict) and isinstance(fields.get("metadata"), dict)) or not all(
        isinstance(name, str) for name in names.values()
    ):
        raise ModelError(f"model: {index} lacks weight_map or metadata, which transformers needs")
    for name in names.values():
        if not name.endswith(".safetensors"):
            raise ModelError(f"model: {index} names {name!r}; weights are read from safetensors files alone")
    return [directory / name for name in sorted(set(names.values()))]


def safetensors_headers(file: Path) -> dict[str, TensorHeader]:
    """OSError or SafetensorError for a file that is missing, cut off or damaged."""
    with safe_open(file, framework="np") as opened:  # numpy has no bfloat16, but headers need none
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
        return {name: TensorHeader(file, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
