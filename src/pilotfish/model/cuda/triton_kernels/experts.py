import triton
import triton.language as tl

from pilotfish.model.cuda.triton_kernels.common import as_computed, product_onto


@triton.jit
def expert_rows(
    x,  # [rows, inputs]
    weights,  # [experts, outputs, inputs]
    biases,  # [experts, outputs] or None
    out,  # [pairs, outputs]
    order,  # int64 [pairs], of rows and choices, by expert
    tile_experts,  # int64 [tiles]
    tile_starts,  # int64 [tiles], in `order`
    tile_ends,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    choices: tl.constexpr,  # of a row of x
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
):
    """A program multiplies a block of an expert's weight with a tile of its pairs; sums run over all inputs in order,
    as in `products.few_rows`."""
    tile = tl.program_id(1)
    start, end = tl.load(tile_starts + tile), tl.load(tile_ends + tile)
    if start >= end:
        return
    expert, k = tl.load(tile_experts + tile), tl.arange(0, block_k)
    n, place = tl.program_id(0) * block_n + tl.arange(0, block_n), start + tl.arange(0, block_m)
    real_n, real_m = n < outputs, place < end
    pair = tl.load(order + place, mask=real_m, other=0)
    weights_at = weights + (expert * outputs + n)[:, None] * inputs
    x_at = x + (pair // choices)[None, :] * inputs
    total = tl.zeros([block_n, block_m], tl.float32)
    for low in range(0, inputs, block_k):
        at = low + k
        real_k = at < inputs
        column = tl.load(x_at + at[:, None], mask=real_k[:, None] & real_m[None, :], other=0.0)
        block = tl.load(weights_at + at[None, :], mask=real_n[:, None] & real_k[None, :], other=0.0)
        total = product_onto(as_computed(block, column), column, total)
    if biases is not None:
        total += tl.load(biases + expert * outputs + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
    to = pair[None, :] * outputs + n[:, None]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=real_n[:, None] & real_m[None, :])
