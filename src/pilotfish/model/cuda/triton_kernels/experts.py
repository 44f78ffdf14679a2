import triton
import triton.language as tl

from pilotfish.model.cuda.triton_kernels.common import as_computed, product_onto


@triton.jit(do_not_specialize=["pairs", "tiles"], do_not_specialize_on_alignment=["planned"])
def plan_tiles(
    chosen,  # int64 [pairs], an expert each
    order,  # int64 [pairs], as both below in `expert_rows`
    planned,  # int64 [3, tiles], zeros: experts, starts and ends
    pairs,
    tiles,
    size: tl.constexpr,  # of a tile
    block: tl.constexpr,
):
    """A program places the pairs of one expert. An expert whose pairs start at s has its tiles from s // size + expert
    on, where those of the expert before have ended, whatever the counts are."""
    expert, lane = tl.program_id(0), tl.arange(0, block)
    start, end = tl.program_id(0).to(tl.int64) * 0, tl.program_id(0).to(tl.int64) * 0
    for low in range(0, pairs, block):
        one = tl.load(chosen + low + lane, mask=low + lane < pairs, other=1 << 30)
        start += tl.sum((one < expert).to(tl.int64), axis=0)
        end += tl.sum((one <= expert).to(tl.int64), axis=0)
    place = start
    for low in range(0, pairs, block):
        mine = (tl.load(chosen + low + lane, mask=low + lane < pairs, other=1 << 30) == expert).to(tl.int64)
        tl.store(order + place + tl.cumsum(mine, axis=0) - 1, (low + lane).to(tl.int64), mask=mine > 0)
        place += tl.sum(mine, axis=0)
    first = start // size + expert
    for number in range(tl.cdiv(end - start, size)):
        tile = planned + first + number
        tl.store(tile, expert.to(tl.int64))
        tl.store(tile + tiles, start + number * size)
        tl.store(tile + 2 * tiles, tl.minimum(start + (number + 1) * size, end))


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
