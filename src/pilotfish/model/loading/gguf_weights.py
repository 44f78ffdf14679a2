"""Modules whose weights stay in the codes of their files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pilotfish.errors import ModelError
from pilotfish.model.grouped import GroupedLinear, GroupedWeight, joined
from pilotfish.model.loading.gguf_blocks import BLOCKS, grouped_weight
from pilotfish.model.loading.shards import Shard, empty_module
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

    def read(self, name: str, dtype: torch.dtype) -> Tensor | GroupedWeight:
        if (tensor := self.index.get(name)) is None:
            raise ModelError(f"model: {self._files[0]} lacks tensor {name}, which its config.json needs")
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


def load_gguf(directory: Path, config: Any, dtype: torch.dtype) -> Any:
    """Linear layers keep their codes; a tied head gets those of the embedding, whose rows are dense."""
    module, weights = empty_module(config, dtype, Shard()), GGUFWeights(directory)
    module.tie_weights()
    for name, parameter in list(module.named_parameters()):
        found, path = weights.read(name, dtype), name.removesuffix(".weight")
        if found.shape != parameter.shape:
            raise ModelError(f"model: {directory}: config.json does not fit tensor {name} {list(found.shape)}")
        owner = module.get_submodule(path) if path != name else None
        if isinstance(found, GroupedWeight) and isinstance(owner, torch.nn.Linear):
            module.set_submodule(path, GroupedLinear(found, owner.bias))
        else:
            parameter.data = found if isinstance(found, Tensor) else found.dequantized()
    if config.tie_word_embeddings and isinstance(head := weights.read(_embedding(module), dtype), GroupedWeight):
        module.lm_head = GroupedLinear(head)
    return module


def _embedding(module: Any) -> str:
    embedding = module.get_input_embeddings()
    return next(f"{name}.weight" for name, part in module.named_modules() if part is embedding)


def dequantize(module: Any) -> None:
    """For devices without products of codes."""
    for path, part in list(module.named_modules()):
        if isinstance(part, GroupedLinear):
            linear = torch.nn.Linear(part.in_features, part.out_features, bias=False, device="meta")
            linear.weight, linear.bias = torch.nn.Parameter(part.weight.dequantized(), requires_grad=False), part.bias
            module.set_submodule(path, linear)
    if module.config.tie_word_embeddings:
        module.lm_head.weight = module.get_input_embeddings().weight


def gguf_bytes(directory: Path, module: Any, size: int, *, packed: bool) -> int:
    """Of all weights of a model on `meta`, `size` bytes an element where they are dense. Queries, keys and values are
    joined; of a tied head that is dense, packing makes a copy."""
    index, total, together = gguf_index(directory), 0, dict[str, list[GGUFTensor]]()
    for name, parameter in module.named_parameters():
        tensor, path = index[name], name.removesuffix(".weight")
        linear = path != name and isinstance(module.get_submodule(path), torch.nn.Linear)
        if linear and tensor.kind in BLOCKS:
            joint = path[:-6] if path.endswith(("q_proj", "k_proj", "v_proj")) else path
            together.setdefault(joint, []).append(tensor)
        else:
            total += size * parameter.numel()
    if module.config.tie_word_embeddings:
        head = index[_embedding(module)]
        total += _joined_bytes([head]) if head.kind in BLOCKS else size * module.lm_head.weight.numel() * packed
    return total + sum(map(_joined_bytes, together.values()))


def _joined_bytes(tensors: Sequence[GGUFTensor]) -> int:
    rows = [np.zeros((1, t.shape[1] // BLOCKS[t.kind].inputs * BLOCKS[t.kind].size), np.uint8) for t in tensors]
    both = joined([grouped_weight(t.kind, row, torch.float32) for t, row in zip(tensors, rows, strict=True)])
    return both.nbytes // len(both) * sum(tensor.shape[0] for tensor in tensors)
