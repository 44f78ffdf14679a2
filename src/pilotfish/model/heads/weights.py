"""Imports torch for values only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from pilotfish.errors import ModelError
from pilotfish.model.loading.metadata import one_line, read_object
from pilotfish.model.loading.tensors import TensorHeader, safetensors_headers

if TYPE_CHECKING:
    from torch import Tensor

_INDEX = "model.safetensors.index.json"
#: Files of tensors, the first that is there.
SAFETENSORS = ("model.safetensors", "medusa_lm_head.safetensors")
PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt")
#: Fields of config.json that only heads have.
_OF_HEADS = ("speculators_model_type", "eagle_config", "dflash_config", "medusa_num_heads", "target_layer_ids")
#: How names of tensors begin that only heads have.
_BEGINNINGS = ("midlayer.", "fc.", "mtp.", "mtp_layers.", "model.mtp_layers.", "0.0.linear.", "blocks.0.layers.")


def is_head(directory: Path) -> bool:
    """False also for unreadable files: loading them as a model gives the reason."""
    try:
        fields = read_object(directory / "config.json") if (directory / "config.json").is_file() else {}
        if any(fields.get(name) is not None for name in _OF_HEADS):
            return True
        files = tensor_files(directory)
        if any(file.name.startswith("medusa_lm_head") for file in files):
            return True
        names = read_tensor_headers(files)
    except (ModelError, OSError):
        return False
    return any(name.startswith(_BEGINNINGS) or name.endswith(".eh_proj.weight") for name in names)


def tensor_files(directory: Path) -> list[Path]:
    if (directory / SAFETENSORS[0]).is_file() or not (directory / _INDEX).is_file():
        found = [directory / name for name in SAFETENSORS + PICKLED if (directory / name).is_file()]
        return found[:1]
    names = read_object(directory / _INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"head: {directory / _INDEX} lacks weight_map")
    return [directory / name for name in sorted(set(names.values()))]


def read_tensor_headers(files: Iterable[Path]) -> dict[str, TensorHeader]:
    headers: dict[str, TensorHeader] = {}
    for file in files:
        try:
            headers |= _pickled_headers(file) if file.name in PICKLED else safetensors_headers(file)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"head: tensors in {file} cannot be read: {one_line(error)}") from error
    return headers


_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "bool": "BOOL"}


def _pickled_headers(file: Path) -> dict[str, TensorHeader]:
    return {
        name: TensorHeader(file, tuple(tensor.shape), _DTYPES.get(str(tensor.dtype)[6:], str(tensor.dtype)[6:]))
        for name, tensor in _unpickled(file).items()
    }


def _unpickled(file: Path) -> Mapping[str, Tensor]:
    import torch

    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle's, zip's and torch's errors have no common base
        raise ModelError(f"head: tensors in {file} cannot be read: {one_line(error)}") from error
    if not isinstance(tensors, dict) or not all(isinstance(x, str) for x in tensors):
        raise ModelError(f"head: {file} holds something else than tensors by name")
    for name, x in tensors.items():
        dense = isinstance(x, torch.Tensor) and not x.is_nested and x.layout == torch.strided
        if not dense or x.device.type != "cpu":
            raise ModelError(f"head: {file} holds {name}, which is no dense tensor with values")
    return tensors


def read_tensors(headers: Mapping[str, TensorHeader], names: Iterable[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted({headers[name].file for name in names}):
        own = [name for name in names if headers[name].file == file]
        if file.name in PICKLED:
            mapped = _unpickled(file)
            tensors |= {name: mapped[name].clone() for name in own}
            continue
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in own}
    return tensors


def read_rows(header: TensorHeader, name: str, rows: Sequence[int]) -> Tensor:
    """[len(rows), …]; other rows are not read."""
    import torch

    if header.file.name in PICKLED:
        return _unpickled(header.file)[name][list(rows)]
    with safe_open(header.file, framework="pt") as opened:
        part = opened.get_slice(name)
        return torch.cat([part[row : row + 1] for row in rows])
