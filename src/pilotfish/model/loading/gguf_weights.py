"""Weights of GGUF files."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pilotfish.errors import ModelError
from pilotfish.model.grouped import GroupedWeight
from pilotfish.model.loading.gguf_blocks import BLOCKS, grouped_weight
from pilotfish.model.loading.tensors import GGUFTensor, gguf_index, linked_name, weight_files

_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFWeights:
    """Read from mapped files, as often as one likes."""

    def __init__(self, directory: Path) -> None:
        self.index = gguf_index(directory)
        self._files = weight_files(directory)
        for place, file in enumerate(self._files):
            if not file.exists() or file.name != linked_name(place, file):
                changed = f"{file.resolve()} has changed or gone since {directory} was made of it"
                raise ModelError(f"model: {changed}; give the file again")
        self._maps = [np.memmap(file, np.uint8, "r") for file in self._files]

        self.names: Collection[str] = self.index.keys()

    def outline(self, name: str) -> GroupedWeight | None:
        if (tensor := self.index.get(name)) is None or tensor.kind in _TYPES:
            return None
        block = BLOCKS[tensor.kind]
        row = np.zeros((1, tensor.shape[1] // block.inputs * block.size), np.uint8)
        return grouped_weight(tensor.kind, row, torch.float32)

    def read(self, name: str, dtype: torch.dtype) -> Tensor | GroupedWeight:
        tensor = self.index[name]
        return self._plain(name, tensor, dtype) if tensor.kind in _TYPES else self._grouped(name, tensor, dtype)

    def _plain(self, name: str, tensor: GGUFTensor, dtype: torch.dtype) -> Tensor:
        kind = _TYPES[tensor.kind]
        flat = torch.from_numpy(self._bytes(tensor, int(np.prod(tensor.shape)) * kind.itemsize)).view(kind)
        values = _in_halves(flat.view(tensor.shape), tensor.paired_heads)
        values = (values.float() - 1).to(dtype) if tensor.less_one else values.to(dtype)
        self._refuse_non_finite(name, tensor, values)
        return values

    def _grouped(self, name: str, tensor: GGUFTensor, dtype: torch.dtype) -> GroupedWeight:
        outputs, inputs = tensor.shape
        block = BLOCKS[tensor.kind]
        rows = self._bytes(tensor, outputs * inputs // block.inputs * block.size).reshape(outputs, -1)
        weight = grouped_weight(tensor.kind, _in_halves(torch.from_numpy(rows), tensor.paired_heads).numpy(), dtype)
        for factors in (weight.scales, weight.offsets):
            self._refuse_non_finite(name, tensor, factors)
        return weight

    def _refuse_non_finite(self, name: str, tensor: GGUFTensor, values: Tensor | None) -> None:
        if values is not None and not values.isfinite().all():
            raise ModelError(f"model: tensor {name} in {self._files[tensor.file]} holds NaN or infinity")

    def _bytes(self, tensor: GGUFTensor, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        found = np.array(self._maps[tensor.file][tensor.offset : tensor.offset + size])
        if len(found) < size:
            raise ModelError(f"model: {self._files[tensor.file]} is cut off")
        return found


def _in_halves(rows: Tensor, heads: int) -> Tensor:
    """Of llama.cpp's order of a head's rows transformers'."""
    if not heads:
        return rows
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
