"""Weights rounded to 8 bits when a model is loaded: a scale for each output."""

from typing import Literal

import torch
from torch import Tensor

from pilotfish.config.fields import Quantization
from pilotfish.errors import ParameterError
from pilotfish.model.experts import stacked_experts
from pilotfish.model.grouped import GroupedLinear, GroupedWeight
from pilotfish.model.kv_planes import refuse_without_fp8


def check_quantization(quantization: Quantization, dtype: torch.dtype, device: torch.device, quant_method: str) -> None:
    """ParameterError if the device cannot multiply such weights, or the checkpoint has a `quant_method` already."""
    if quant_method and quantization != "none":
        raise ParameterError("quantization", quantization, f"none: the model's weights are in {quant_method}")
    if quantization != "fp8":
        return
    refuse_without_fp8("quantization", device, "none or int8")
    if dtype != torch.bfloat16:
        raise ParameterError("quantization", quantization, f"none or int8 with {dtype}; fp8 needs torch.bfloat16")


def quantize(module: torch.nn.Module, quantization: Literal["int8", "fp8"]) -> None:
    """Replaces all linear layers, one at a time; a tied head gets a weight of its own. On CUDA rows of activations meet
    fp8 (e4m3) in fp8, each with a scale of its own. ParameterError for experts."""
    if stacked_experts(module):
        raise ParameterError("quantization", quantization, "none for a mixture of experts")
    kind = torch.int8 if quantization == "int8" else torch.float8_e4m3fn
    for path, linear in list(module.named_modules()):
        if isinstance(linear, torch.nn.Linear):
            module.set_submodule(path, GroupedLinear(rounded(linear.weight.detach(), kind), linear.bias))


def rounded(weight: Tensor, kind: torch.dtype) -> GroupedWeight:
    """[N, K] to int8 or e4m3: the largest of an output's values becomes the largest that the type has."""
    largest = 127.0 if kind == torch.int8 else torch.finfo(kind).max
    scales = weight.abs().amax(dim=1, keepdim=True).float().clamp(min=torch.finfo(torch.float32).tiny) / largest
    values = (weight / scales).clamp(-largest, largest)
    return GroupedWeight((values.round() if kind == torch.int8 else values).to(kind), scales, weight.dtype)
