"""What the processor at hand can do."""

from __future__ import annotations

import torch


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for products of bfloat16. Without them PyTorch's take a hundred times as long
    as those of float32; our kernels, which widen to float32, do not."""
    if device.type != "cpu":
        return True
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
