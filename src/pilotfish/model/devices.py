import torch

from pilotfish.errors import ParameterError
from pilotfish.model.cpu.native import runs_native
from pilotfish.model.cpu.native_modules import NativeKernels
from pilotfish.model.cuda.graphs import use_reproducible_products
from pilotfish.model.fused import LibraryKernels
from pilotfish.model.kernels import Kernels


def kernels_of(device: torch.device, head_dim: int, *, eager: bool) -> Kernels:
    """`eager`: the reference. Builds the C++ kernels if they are not built yet."""
    if device.type == "cuda":
        use_reproducible_products()
        if device.index is not None:
            torch.cuda.set_device(device)  # where Triton launches, whatever tensors it is given
    if device.type == "cuda" and not eager:
        _refuse_unserved(device, head_dim)
        try:
            from pilotfish.model.cuda.kernels import CUDAKernels  # only CUDA builds of torch bring Triton
        except ImportError as error:
            raise ParameterError("device", str(device), f"Triton beside PyTorch, or --eager; here: {error}") from error
        return CUDAKernels(device)
    return NativeKernels(device) if runs_native(head_dim, device, eager=eager) else LibraryKernels(device)


def _refuse_unserved(device: torch.device, head_dim: int) -> None:
    capability, most = torch.cuda.get_device_capability(device), 256
    if capability < (8, 0):
        told = ".".join(map(str, capability))
        raise ParameterError("device", str(device), f"a GPU of capability 8.0 or more, or --eager; this has {told}")
    if head_dim > most:
        raise ParameterError("device", str(device), f"--eager for heads of {head_dim}: the kernels take {most} at most")
