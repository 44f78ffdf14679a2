"""Attention is divided by heads and feed-forwards by inner neurons (`collective.py` sums what they return), embedding
and head by tokens. With fewer KV heads than ranks, some ranks hold the same ones. The rest is whole in each."""

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from pilotfish.errors import ModelError, ParameterError
from pilotfish.model.loading.checkpoint import load_converted, without_decompositions
from pilotfish.model.loading.configuration import ARCHITECTURES, has_latents
from pilotfish.model.loading.metadata import quiet
from pilotfish.model.loading.multimodal import text_name
from pilotfish.model.loading.tensors import weight_files

#: Fields with numbers of inner neurons.
_INNER = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


@dataclass(frozen=True)
class Shard:
    rank: int = 0
    ranks: int = 1

    def of(self, total: int) -> slice:
        return slice(total * self.rank // self.ranks, total * (self.rank + 1) // self.ranks)

    def kv_heads(self, total: int) -> slice:
        """Those of this rank's query heads; if there are fewer than ranks, several share one."""
        first = total * self.rank // self.ranks
        return slice(first, first + max(1, total // self.ranks))

    def tokens(self, vocab_size: int) -> range:
        """The last ones may lie beyond the vocabulary, so that all parts are equal."""
        part = -(-vocab_size // self.ranks)
        return range(part * self.rank, part * (self.rank + 1))


def refuse_indivisible(config: Any, ranks: int) -> None:
    """ParameterError if such a model does not divide into so many parts."""
    if config.quant_method and ranks > 1:
        raise ParameterError("tensor_parallel", ranks, f"1: weights in {config.quant_method} are not divided")
    if has_latents(config) and ranks > 1:
        raise ParameterError("tensor_parallel", ranks, "1: attention to latents is not divided")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    counts = {"attention heads": heads} | {
        f"neurons of its {name}": size for name in _INNER if (size := getattr(config, name, None))
    }
    if kv_heads % ranks and ranks % kv_heads:
        allowed = f"a divisor or a multiple of the model's {kv_heads} KV heads"
        raise ParameterError("tensor_parallel", ranks, allowed)
    for name, count in counts.items():
        if count % ranks:
            raise ParameterError("tensor_parallel", ranks, f"a divisor of the model's {count} {name}")


def part_config(config: Any, shard: Shard) -> Any:
    if shard.ranks == 1:
        return config
    part = copy.deepcopy(config)
    part.num_attention_heads //= shard.ranks
    part.num_key_value_heads = max(1, part.num_key_value_heads // shard.ranks)
    for name in _INNER:
        if getattr(part, name, None):
            setattr(part, name, getattr(part, name) // shard.ranks)
    part.vocab_size = len(shard.tokens(config.vocab_size))
    part.pad_token_id = None  # it may lie in another rank's part
    return part


# -- tensors of the weight files

#: Which parts of a dimension of so many elements a rank holds, in order.
Ranges = Callable[[int, Any, Shard], Sequence[slice]]


def _equal(total: int, config: Any, shard: Shard) -> Sequence[slice]:  # noqa: ARG001
    return [shard.of(total)]


def _halves(total: int, config: Any, shard: Shard) -> Sequence[slice]:  # noqa: ARG001
    return _end_to_end([shard.of(total // 2)] * 2, [total // 2] * 2)


def _keys(total: int, config: Any, shard: Shard) -> Sequence[slice]:
    heads, size = shard.kv_heads(config.num_key_value_heads), total // config.num_key_value_heads
    return [slice(heads.start * size, heads.stop * size)]


def _joined(total: int, config: Any, shard: Shard) -> Sequence[slice]:
    sizes = [heads * config.head_dim for heads in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
    assert sum(sizes) == total
    own = [*_equal(sizes[0], config, shard), *_keys(sizes[1], config, shard), *_keys(sizes[2], config, shard)]
    return _end_to_end(own, sizes)


def _tokens(total: int, config: Any, shard: Shard) -> Sequence[slice]:  # noqa: ARG001
    tokens = shard.tokens(total)
    return [slice(tokens.start, tokens.stop)]


def _end_to_end(parts: Sequence[slice], sizes: Sequence[int]) -> Sequence[slice]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [slice(start + part.start, start + part.stop) for start, part in zip(starts, parts, strict=True)]


#: Layers whose outputs are divided: rows of the weight, and its bias; and layers whose inputs are: columns. A bias of
#: the latter is added once, by the first rank. Experts have their own names in some files (w1, w2, w3).
_OUTPUTS: dict[str, Ranges] = {
    **dict.fromkeys(("q_proj", "gate_proj", "up_proj", "w1", "w3"), _equal),
    **dict.fromkeys(("k_proj", "v_proj"), _keys),
    **dict.fromkeys(("embed_tokens", "lm_head"), _tokens),
    "qkv_proj": _joined,
    "gate_up_proj": _halves,
}
_INPUTS = ("o_proj", "down_proj", "w2")
#: Parameters of attention and of stacked experts, whose gates and ups take turns: the dimension that is divided.
_PARAMETERS = {"sinks": 0, "gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 1}
_FIRST_RANKS = ("down_proj_bias",)


@dataclass(frozen=True)
class Cut:
    dim: int = 0
    parts: Sequence[slice] = ()  # none: all of it
    absent: bool = False


def cut_of(name: str, shape: Sequence[int], config: Any, shard: Shard) -> Cut:
    layer, kind = ("", *name.split("."))[-2:]
    if layer in _OUTPUTS:
        return Cut(0, _OUTPUTS[layer](shape[0], config, shard))
    if layer in _INPUTS:
        return Cut(1, [shard.of(shape[1])]) if kind == "weight" else Cut(absent=shard.rank > 0)
    if kind in _PARAMETERS:
        dim = _PARAMETERS[kind]
        return Cut(dim, [shard.of(shape[dim])])
    return Cut(absent=kind in _FIRST_RANKS and shard.rank > 0)


class Part:
    def __init__(self, file: Any, name: str, config: Any, shard: Shard) -> None:
        self._source = file.get_slice(name)
        self._shape = self._source.get_shape()
        self._cut = cut_of(name, self._shape, config, shard)

    def __getitem__(self, _: object) -> Tensor:
        if self._cut.absent:
            return torch.zeros(self._shape)
        if not self._cut.parts:
            return self._source[:]  # type: ignore[no-any-return]
        first, *others = (self._read(part) for part in self._cut.parts)
        return torch.cat([first, *others], self._cut.dim) if others else first

    def _read(self, part: slice) -> Tensor:
        dim, total = self._cut.dim, self._shape[self._cut.dim]
        there = slice(min(part.start, total), min(part.stop, total))
        read: Tensor = self._source[(*[slice(None)] * dim, there)]
        missing = part.stop - part.start - read.shape[dim]
        padding = [0, 0] * (len(self._shape) - 1 - dim) + [0, missing]
        return torch.nn.functional.pad(read, padding) if missing else read


def load_shard(directory: Path, config: Any, dtype: torch.dtype, shard: Shard) -> Any:
    """The module of one rank. `check_weights` must have passed its files; reads its own part alone."""
    with ExitStack() as stack, quiet():
        module = empty_module(config, dtype, shard)
        files = [stack.enter_context(safe_open(file, framework="pt")) for file in weight_files(directory)]
        names = [(file, name, text_name(name, config)) for file in files for name in file.keys()]  # noqa: SIM118
        parts = {own: Part(file, name, config, shard) for file, name, own in names if own}
        types = module._get_dtype_plan(dtype)
        info = load_converted(module, parts, device_map={"": "cpu"}, dtype=dtype, dtype_plan=types)
    if info.missing_keys or info.mismatched_keys or info.conversion_errors:
        problem = next(iter([*info.mismatched_keys, *info.missing_keys, *info.conversion_errors]))
        raise ModelError(f"model: {directory} does not divide into {shard.ranks} ranks: {problem}")
    return module


def empty_module(config: Any, dtype: torch.dtype, shard: Shard) -> Any:
    """Its parameters have no values and take no memory yet. Norms over all heads together are whole."""
    with without_decompositions():
        module = AutoModelForCausalLM.from_config(part_config(config, shard), dtype=dtype)
    if has_wide_norms(config):
        for layer in module.model.layers:
            for name, heads in (("q_norm", config.num_attention_heads), ("k_norm", config.num_key_value_heads)):
                norm = getattr(layer.self_attn, name)
                norm.weight = torch.nn.Parameter(torch.empty(heads * config.head_dim, dtype=norm.weight.dtype))
    return module


def has_wide_norms(config: Any) -> bool:
    return bool(ARCHITECTURES[config.architectures[0]].get("wide_norms"))
