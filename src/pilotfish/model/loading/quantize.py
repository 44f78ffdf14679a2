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
    for linear in module.modules():
        if isinstance(linear, torch.nn.Linear):
            ao.quantize_(linear, config)
            vars(linear).pop("extra_repr", None)  # a cycle that would keep the weight of a replaced layer for a while


def load_torchao() -> Any:
    """Lazily: the import takes seconds and about 70 MiB, and logs much."""
    with quiet("torchao", "torch.utils._pytree", level=logging.ERROR), warnings.catch_warnings(action="ignore"):
        import torchao.quantization

    return torchao.quantization
