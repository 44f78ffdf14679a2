"""Quantization by torchao. The C++ kernels take its int8 values (`PackedWeight`) and multiply by themselves."""

import logging
import warnings
from typing import Any, Literal

import torch

from pilotfish.config.fields import Quantization
from pilotfish.errors import ParameterError
from pilotfish.model.experts import stacked_experts
from pilotfish.model.kv_planes import refuse_without_fp8
from pilotfish.model.loading.metadata import quiet


def check_quantization(quantization: Quantization, dtype: torch.dtype, device: torch.device) -> None:
    """ParameterError if the device cannot multiply such weights."""
    if quantization != "fp8":
        return
    refuse_without_fp8("quantization", device, "none or int8")
    if dtype != torch.bfloat16:
        raise ParameterError("quantization", quantization, f"none or int8 with {dtype}; fp8 needs torch.bfloat16")


def refuse_twice(quantization: Quantization, packed: str) -> None:
    if quantization != "none":
        raise ParameterError("quantization", quantization, f"none: the model's weights are in {packed}")


def quantize(module: torch.nn.Module, quantization: Literal["int8", "fp8"]) -> None:
    """Replaces the weights of all linear layers, in place and one at a time; a tied head gets a weight of its own. One
    scale an output channel; fp8 (e4m3) also one a row of activations. ParameterError for experts."""
    if stacked_experts(module):
        raise ParameterError("quantization", quantization, "none for a mixture of experts")
    ao = load_torchao()
    config = (
        ao.Int8WeightOnlyConfig(set_inductor_config=False)
        if quantization == "int8"
        else ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow(), set_inductor_config=False)
    )
    left = _left_by_fp8(module) if quantization == "fp8" else set()
    for linear in module.modules():
        if isinstance(linear, torch.nn.Linear) and linear not in left:
            ao.quantize_(linear, config)
            vars(linear).pop("extra_repr", None)  # a cycle that would keep the weight of a replaced layer for a while


def _left_by_fp8(module: torch.nn.Module) -> set[Any]:
    """Of layers that one product joins all, if torchao leaves one for its size: a product's weights have one type."""
    joined = [[getattr(one, f"{x}_proj") for x in "qkv"] for one in module.modules() if hasattr(one, "q_proj")]
    return {x for each in joined for x in each if any(size % 16 for one in each for size in one.weight.shape)}


def load_torchao() -> Any:
    """Lazily: the import takes seconds and about 70 MiB, and logs much."""
    with quiet("torchao", "torch.utils._pytree", level=logging.ERROR), warnings.catch_warnings(action="ignore"):
        import torchao.quantization

    return torchao.quantization
