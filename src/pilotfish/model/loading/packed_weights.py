"""Modules whose weights stay in the codes of their files."""

from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from pilotfish.errors import ModelError
from pilotfish.model.grouped import GroupedLinear, GroupedWeight, dense, joined
from pilotfish.model.loading.checkpoint import load_converted, read_headers
from pilotfish.model.loading.configuration import has_latents
from pilotfish.model.loading.gguf_weights import GGUFWeights
from pilotfish.model.loading.metadata import quiet
from pilotfish.model.loading.packed_tensors import dense_headers, packed_tensors
from pilotfish.model.loading.schemes import Scheme, scheme_of
from pilotfish.model.loading.shards import Shard, empty_module
from pilotfish.model.loading.tensors import GGUF_INDEX, weight_files


class PackedWeights(Protocol):
    """Of a checkpoint, by the names that they would have if it were dense."""

    names: Collection[str]

    def outline(self, name: str) -> GroupedWeight | None:
        """Some outputs of it, without values; None for one that is dense."""

    def read(self, name: str, dtype: torch.dtype) -> Tensor | GroupedWeight:
        """ModelError, naming the tensor, for values that are none."""


class SafetensorsWeights:
    def __init__(self, directory: Path, scheme: Scheme) -> None:
        files = weight_files(directory)
        self._headers = read_headers(files)
        self._packed = packed_tensors(self._headers, scheme)
        self._files = {file: safe_open(file, framework="pt") for file in files}
        self.names: Collection[str] = dense_headers(self._headers, self._packed).keys()

    def outline(self, name: str) -> GroupedWeight | None:
        if (packed := self._packed.get(name)) is None:
            return None
        return packed.weight({part: self._headers[own][1] for part, own in packed.names.items()}, torch.float32)

    def read(self, name: str, dtype: torch.dtype) -> Tensor | GroupedWeight:
        if (packed := self._packed.get(name)) is None:
            return self._tensor(name)
        parts = {part: self._tensor(own) for part, own in packed.names.items()}
        weight = packed.weight(parts, dtype)
        for problem in packed.problems(parts, weight):
            raise ModelError(f"model: {self._headers[packed.names['codes']][0]}: tensor {problem}")
        if len(packed.shape) == 2:
            return weight
        return weight.dequantized().view(len(parts["codes"]), -1, packed.inputs).transpose(1, 2)

    def _tensor(self, name: str) -> Tensor:
        return self._files[self._headers[name][0]].get_tensor(name)  # type: ignore[no-any-return,no-untyped-call]


def packed_weights(directory: Path) -> PackedWeights | None:
    """None: they are dense."""
    if (directory / GGUF_INDEX).is_file():
        return GGUFWeights(directory)
    scheme = scheme_of(directory)
    return None if scheme is None else SafetensorsWeights(directory, scheme)


def load_packed(directory: Path, config: Any, dtype: torch.dtype) -> Any:
    """Linear layers keep their codes; rows of embeddings and experts are dense. A tied head of GGUF has codes too."""
    module, weights = empty_module(config, dtype, Shard()), packed_weights(directory)
    assert weights is not None
    kept = {name: path for name, path in _linears(module) if weights.outline(name) is not None}
    failed = list[ModelError]()
    parts = {name: _Dense(weights, name, dtype, failed) for name in weights.names if name not in kept}
    with quiet():
        types = module._get_dtype_plan(dtype)
        info = load_converted(module, parts, device_map={"": "cpu"}, dtype=dtype, dtype_plan=types)
    wrong = [*(name for name, *_ in info.mismatched_keys), *info.missing_keys - kept.keys(), *info.conversion_errors]
    for error in (*failed, *(_misfit(directory, name) for name in wrong)):
        raise error
    for name in info.unexpected_keys:
        if name.endswith(".bias") and f"{name[:-5]}.weight" in kept and dense(weights.read(name, dtype)).any():
            raise ModelError(f"model: {directory}: tensor {name} is not zero, and the model has no such bias")
    for name, path in kept.items():
        linear, weight = module.get_submodule(path), weights.read(name, dtype)
        if not isinstance(weight, GroupedWeight) or weight.shape != linear.weight.shape:
            raise _misfit(directory, name)
        module.set_submodule(path, GroupedLinear(weight, linear.bias))
    if (tied := _tied(module, weights)) and isinstance(head := weights.read(tied, dtype), GroupedWeight):
        module.lm_head = GroupedLinear(head)
    return module


def _misfit(directory: Path, name: str) -> ModelError:
    return ModelError(f"model: {directory}: config.json does not fit tensor {name}")


class _Dense:
    """Read when it is asked for."""

    def __init__(self, weights: PackedWeights, name: str, dtype: torch.dtype, failed: list[ModelError]) -> None:
        self._weights, self._name, self._dtype, self._failed = weights, name, dtype, failed

    def __getitem__(self, _: object) -> Tensor:
        try:
            found = self._weights.read(self._name, self._dtype)
        except ModelError as error:  # of which transformers would keep the traceback
            self._failed.append(error)
            raise
        return dense(found)


def _linears(module: Any) -> Iterator[tuple[str, str]]:
    """Names of their weights, and their paths."""
    return ((f"{path}.weight", path) for path, part in module.named_modules() if isinstance(part, torch.nn.Linear))


def _tied(module: Any, weights: PackedWeights) -> str | None:
    """The embedding, if its codes are those of the head too."""
    embedding = module.get_input_embeddings()
    if not (module.config.tie_word_embeddings and isinstance(weights, GGUFWeights)):
        return None
    return next(f"{name}.weight" for name, part in module.named_modules() if part is embedding)


def dequantize(module: Any) -> None:
    """For devices without products of codes."""
    tied = module.config.tie_word_embeddings and isinstance(module.lm_head, GroupedLinear)
    for path, part in list(module.named_modules()):
        if isinstance(part, GroupedLinear):
            linear = torch.nn.Linear(part.in_features, part.out_features, bias=False, device="meta")
            linear.weight, linear.bias = torch.nn.Parameter(part.weight.dequantized(), requires_grad=False), part.bias
            module.set_submodule(path, linear)
    if tied:
        module.lm_head.weight = module.get_input_embeddings().weight


def saved_bytes(directory: Path, module: Any, size: int, *, packed: bool) -> int:
    """By how much the weights of a model on `meta` are smaller than if all were dense, `size` bytes an element. Packing
    joins queries, keys and values, and makes a copy of a tied head that is dense. Attention to latents has a part that
    is dense; without packing all of it is."""
    weights, together = packed_weights(directory), defaultdict[str, list[str]](list)
    assert weights is not None
    unpacked = ("kv_b_proj" if packed else ".self_attn.") if has_latents(module.config) else "none"
    for name, path in ((name, path) for name, path in _linears(module) if unpacked not in path):
        joint = path[:-6] if packed and path.endswith(("q_proj", "k_proj", "v_proj")) else path
        together[joint].append(name)
    if tied := _tied(module, weights):
        together["tied"] = [tied]
    saved = 0
    for joint, names in together.items():
        outlines = [found for name in names if (found := weights.outline(name)) is not None]
        if len(outlines) == len(names):
            rows, both = sum(len(module.get_parameter(name)) for name in names), joined(outlines)
            saved += rows * (both.shape[1] * size * (packed or joint != "tied") - both.nbytes // len(both))
    return saved
