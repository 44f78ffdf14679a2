import torch

from pilotfish.model.cpu.native import runs_native
from pilotfish.model.cpu.native_modules import NativeKernels
from pilotfish.model.cuda.graphs import use_reproducible_products
from pilotfish.model.kernels import Kernels


def kernels_of(device: torch.device, head_dim: int, *, eager: bool) -> Kernels:
    """`eager`: the reference. Builds the C++ kernels if they are not built yet."""
    if device.type == "cuda":
        use_reproducible_products()
    if device.type == "cuda" and not eager:
        from pilotfish.model.cuda.kernels import CUDAKernels  # only CUDA builds of torch bring Triton

        return CUDAKernels(device)
    return NativeKernels(device) if runs_native(head_dim, device, eager=eager) else Kernels(device)
