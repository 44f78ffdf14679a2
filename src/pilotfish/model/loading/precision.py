import os
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from pilotfish.config.fields import DType
from pilotfish.errors import ParameterError
from pilotfish.model.cpu.native import runs_native
from pilotfish.model.loading.configuration import key_size

#: oneDNN's sets of instructions that have none for products of bfloat16, or convert it only.
_WITHOUT_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")

_KERNELS = "the C++ kernels read half of float32's bytes"
_INSTRUCTIONS = "this device has instructions for its products"
_NEITHER = "PyTorch has no instructions for bfloat16 products here, and the C++ kernels do not run this model"


@dataclass(frozen=True)
class Precision:
    name: Literal["float32", "bfloat16", "float16"]
    why: str  # this one; "" where it was asked for

    @property
    def dtype(self) -> torch.dtype:
        return cast(torch.dtype, getattr(torch, self.name))

    def __str__(self) -> str:
        return f"dtype: {self.name}" + (f" ({self.why})" if self.why else "")


def precision_of(asked: DType, config: Any, device: torch.device, *, eager: bool) -> Precision:
    """ParameterError for bfloat16 that PyTorch would emulate, a hundred times slower than float32, and for float16 on a
    CPU."""
    if asked == "auto":
        return quickest(device, kernels=runs_native(key_size(config), device, eager=eager))
    if asked == "float16" and device.type != "cuda":
        raise ParameterError("dtype", asked, "auto, bfloat16 or float32 on a CPU; float16 needs CUDA")
    if asked == "bfloat16" and not (runs_native(key_size(config), device, eager=eager) or multiplies_bfloat16(device)):
        raise ParameterError("dtype", asked, f"auto or float32: {_NEITHER}")
    return Precision(asked, why="")


def quickest(device: torch.device, *, kernels: bool) -> Precision:
    """Without bfloat16 instructions the kernels widen it to float32 in registers, at float32's speed."""
    if kernels:
        return Precision("bfloat16", _KERNELS)
    return Precision("bfloat16", _INSTRUCTIONS) if multiplies_bfloat16(device) else Precision("float32", _NEITHER)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether PyTorch has instructions for it. On a CPU oneDNN multiplies, limited by its own variable."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    has_instructions = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return has_instructions and limit.upper() not in _WITHOUT_BFLOAT16


def library_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    slow = dtype == torch.bfloat16 and not multiplies_bfloat16(device)
    return torch.float32 if slow else dtype
