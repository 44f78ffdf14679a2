import triton
from torch import Tensor

from pilotfish.model.cuda.triton_kernels.rotary import rotate_heads


def rotated(x: Tensor, cos: Tensor, sin: Tensor, per_angle: int) -> Tensor:
    """As `Kernels.rotate`, in place if a row's heads are end to end."""
    x = x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
    heads, head_dim = x.shape[1:]
    half = cos.shape[1] * per_angle // 2
    if len(x):
        rotate_heads[(len(x),)](
            x, cos.contiguous(), sin.contiguous(), x.stride(0), heads, head_dim, half, per_angle,
            triton.next_power_of_2(heads * half), num_warps=4,
        )  # fmt: skip
    return x
