"""The precision that a model runs in on the device at hand. `auto` is the one that it is quick in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from pilotfish.config.fields import DType
from pilotfish.errors import ParameterError
from pilotfish.model.loader import DTYPES, runs_native
from pilotfish.model.native import multiplies_bfloat16

_KERNELS = "the C++ kernels read half of float32's bytes"
_INSTRUCTIONS = "this device has instructions for its products"
_NEITHER = "PyTorch has no instructions for bfloat16 products here, and the C++ kernels do not run this model"


@dataclass(frozen=True)
class Precision:
    name: Literal["float32", "bfloat16"]
    why: str  # this one; "" where it was asked for

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]

    def __str__(self) -> str:
        return f"dtype: {self.name}" + (f" ({self.why})" if self.why else "")


def precision_of(asked: DType, config: Any, device: torch.device, *, eager: bool) -> Precision:
    """For a model with this configuration, as `load_config` gives it. ParameterError for bfloat16 that PyTorch would
    multiply without instructions, a hundred times slower than float32."""
    if asked == "float32":
        return Precision(asked, why="")
    kernels = runs_native(config, device, eager=eager)
    if asked == "auto":
        return quickest(device, kernels=kernels)
    if not (kernels or multiplies_bfloat16(device)):
        raise ParameterError("dtype", asked, f"auto or float32: {_NEITHER}")
    return Precision(asked, why="")


def quickest(device: torch.device, *, kernels: bool) -> Precision:
    """What `auto` stands for, with the C++ kernels or without. The kernels widen bfloat16 to float32 in registers, at
    float32's speed, where the processor has no instructions for it."""
    if kernels:
        return Precision("bfloat16", _KERNELS)
    return Precision("bfloat16", _INSTRUCTIONS) if multiplies_bfloat16(device) else Precision("float32", _NEITHER)


def library_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In which PyTorch's own products are to stand in for ours of `dtype`: float32 where it has no instructions for
    bfloat16."""
    slow = dtype == torch.bfloat16 and not multiplies_bfloat16(device)
    return torch.float32 if slow else dtype
