"""Linear layers whose rows' bits do not depend on their company (`triton_kernels/products.py`). The reference is
`kernels.JoinedLinear`."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pilotfish.model.cuda.triton_kernels.products import few_rows, join_parts, many_rows, quantize_rows
from pilotfish.model.experts import Affine
from pilotfish.model.grouped import GroupedWeight

#: Programs that keep every multiprocessor of the largest cards reading weights.
PROGRAMS = 256
#: Up to so many rows each part of a sum is a program of its own.
FEW = 64
#: Inputs of a block; parts are whole multiples of it.
BLOCK_K = 128
#: Bytes that a row of an operand must be a multiple of for the copy engine.
ALIGNMENT = 16
JOIN = 1024  # sums of a program
FP8 = torch.float8_e4m3fn
#: Shared memory of AMD's cards holds fewer blocks that are on their way.
STAGES = 2 if torch.version.hip else 3
#: Rows, and outputs, of a tile of many rows: cards before Hopper would spill registers with more.
TILE = 128 if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0) else 64


@dataclass(frozen=True)
class OrderedWeight:
    """Values [outputs, inputs] of the rows' type, or of 8 bits with `scales` float32 [outputs]: int8 is widened, and
    beside e4m3 rows get 8 bits too."""

    values: Tensor
    scales: Tensor | None

    @classmethod
    def of(cls, *weights: Any) -> "OrderedWeight":
        values = [getattr(weight, "codes", weight) for weight in weights]
        scales = [weight.scales.flatten() for weight in weights if isinstance(weight, GroupedWeight)]
        joined = torch.cat(values) if len(values) > 1 else values[0].contiguous()
        return cls(joined, torch.cat(scales) if scales else None)

    @cached_property
    def splits(self) -> int:
        """Parts of a row's sum, by the shape alone: the fewest equal ones that give `PROGRAMS`."""
        outputs, inputs = self.values.shape
        blocks, tiles = triton.cdiv(inputs, BLOCK_K), triton.cdiv(outputs, FEW)
        divisors = [count for count in range(1, blocks + 1) if blocks % count == 0]
        return next((count for count in divisors if tiles * count >= PROGRAMS), blocks)

    @property
    def span(self) -> int:
        return int(triton.cdiv(self.values.shape[1], BLOCK_K)) // self.splits * BLOCK_K


@dataclass(frozen=True)
class SplitProduct:
    """A product whose parts the kernel that takes it adds. Of many rows it is joined, and has no `splits`."""

    parts: Tensor  # float32 [splits, rows, outputs]; or [rows, outputs] of the rows' type
    splits: int = 0
    scales: Tensor | None = None  # as OrderedWeight's
    row_scales: Tensor | None = None  # float32 [rows], of rows of 8 bits
    bias: Tensor | None = None

    @property
    def sums(self) -> int:
        """Rows times outputs."""
        return self.parts.numel() // max(self.splits, 1)


class InvariantLinear(torch.nn.Module):
    def __init__(self, *affines: Affine) -> None:
        super().__init__()
        self.weight = OrderedWeight.of(*(affine.weight for affine in affines))
        biases = [affine.bias for affine in affines if affine.bias is not None]
        self.bias = torch.cat(biases) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]"""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = rows.new_empty(len(rows), len(self.weight.values))
        if len(rows):
            product = self.split_product(rows)
            out = product.parts if product.splits == 0 else _joined(out, product)
        return out.view(*x.shape[:-1], out.shape[1])

    def split_product(self, rows: Tensor) -> SplitProduct:
        """Of contiguous rows, at least one."""
        out = rows.new_empty(len(rows) if self._copied_by_blocks(rows) else 0, len(self.weight.values))
        rows, row_scales = quantized(rows) if self.weight.values.dtype == FP8 else (rows, None)
        if len(out):
            return SplitProduct(_many(out, rows, self.weight, row_scales, self.bias))
        return SplitProduct(_few(rows, self.weight), self.weight.splits, self.weight.scales, row_scales, self.bias)

    def _copied_by_blocks(self, rows: Tensor) -> bool:
        operands = (rows, self.weight.values)
        aligned = not any((x.stride(0) * x.element_size() | x.data_ptr()) % ALIGNMENT for x in operands)
        return len(rows) > FEW and aligned and rows.dtype != torch.float32


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [rows, size] in e4m3, and the scale of each, float32 [rows]."""
    codes, scales = torch.empty_like(rows, dtype=FP8), rows.new_empty(len(rows), dtype=torch.float32)
    quantize_rows[(len(rows),)](rows, codes, scales, rows.shape[1], triton.next_power_of_2(rows.shape[1]), num_warps=8)
    return codes, scales


def _few(x: Tensor, weight: OrderedWeight) -> Tensor:
    rows, (outputs, inputs) = len(x), weight.values.shape
    block_m = min(FEW, max(16, triton.next_power_of_2(rows)))
    block_k = BLOCK_K if block_m <= 32 and x.dtype != FP8 else BLOCK_K // 2
    block_k = 32 if x.dtype == torch.float32 else block_k
    parts = x.new_empty(weight.splits, rows, outputs, dtype=torch.float32)
    few_rows[triton.cdiv(outputs, FEW), triton.cdiv(rows, block_m), weight.splits](
        x, weight.values, parts, rows, outputs, inputs, weight.span, FEW, block_m, block_k,
        num_warps=4, num_stages=STAGES,
    )  # fmt: skip
    return parts


def _joined(out: Tensor, product: SplitProduct) -> Tensor:
    join_parts[(triton.cdiv(product.sums, JOIN),)](
        product.parts, product.scales, product.row_scales, product.bias, out,
        product.sums, out.shape[1], product.splits, JOIN, num_warps=4,
    )  # fmt: skip
    return out


def _many(out: Tensor, x: Tensor, weight: OrderedWeight, row_scales: Tensor | None, bias: Tensor | None) -> Tensor:
    rows, (outputs, inputs), block_k = len(x), weight.values.shape, BLOCK_K // 2
    blocks = [TensorDescriptor.from_tensor(each, [TILE, block_k]) for each in (x, weight.values)]
    many_rows[(triton.cdiv(outputs, TILE) * triton.cdiv(rows, TILE),)](
        *blocks, weight.scales, row_scales, bias, out, rows, outputs, inputs, weight.span, TILE, TILE, block_k, 8,
        num_warps=8, num_stages=STAGES,
    )  # fmt: skip
    return out
