import torch
import triton
from torch import Tensor

from pilotfish.model.cuda.products import SplitProduct
from pilotfish.model.cuda.triton_kernels.norms import rms_norm
from pilotfish.model.cuda.triton_kernels.rotary import rotate_heads
from pilotfish.model.kernels import RMSNorm


class InvariantNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self._normed(SplitProduct(x.contiguous()), torch.empty_like(x), None)

    def of_sum(self, residual: Tensor, x: Tensor) -> Tensor:
        return self.of_product(residual, SplitProduct(x.contiguous()))

    def of_product(self, residual: Tensor, product: SplitProduct | None) -> Tensor:
        """Of the residual [rows, size] after the product is added to it."""
        if product is None:
            return self(residual)  # type: ignore[no-any-return]
        return self._normed(product, torch.empty_like(residual), residual)

    def _normed(self, x: SplitProduct, out: Tensor, residual: Tensor | None) -> Tensor:
        size = out.shape[-1] // self.parts
        if out.numel():
            rms_norm[(out.numel() // size,)](
                x.parts, x.scales, x.row_scales, x.bias, residual, self.weight, out, self.eps, out.numel(),
                self.parts, size, x.splits, triton.next_power_of_2(size), num_warps=8 if size > 2048 else 4,
            )  # fmt: skip
        return out


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
