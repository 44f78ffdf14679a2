"""out = x · wᵀ with one order of sums for a weight, whatever rows share the call.

The weight is the matrix unit's first operand and rows are its columns, so that every tile runs the same instructions
and a row's sum never depends on the tile's width. K is cut into `splits` parts by the weight's shape alone:

    k      0 ...... span | span ...... 2 span | ...        a part is summed from zero, in order of k;
    sum    (((part 0) + part 1) + part 2) + ...            then the parts are added, in order, in float32

`few_rows` gives each part a program of its own, so that all multiprocessors read weights, and `join_parts` adds them;
in `many_rows` a program does all parts of its tile. Both give the same bits."""

import triton
import triton.language as tl

from pilotfish.model.cuda.triton_kernels.common import as_computed, joined, product_onto, scaled


@triton.jit(do_not_specialize=["rows"])
def few_rows(
    x,  # [rows, inputs]
    weight,  # [outputs, inputs], of x's type or of 8 bits
    parts,  # float32 [splits, rows, outputs]
    rows,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    span: tl.constexpr,  # inputs of a part, a multiple of block_k
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
):
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    m = tl.program_id(1) * block_m + tl.arange(0, block_m)
    split, k = tl.program_id(2), tl.arange(0, block_k)
    real_n, real_m = n < outputs, m < rows
    weights_at = weight + n.to(tl.int64)[:, None] * inputs
    x_at = x + m.to(tl.int64)[None, :] * inputs
    total = tl.zeros([block_n, block_m], tl.float32)
    for low in range(0, span, block_k):
        at = split * span + low + k
        real_k = at < inputs
        column = tl.load(x_at + at[:, None], mask=real_k[:, None] & real_m[None, :], other=0.0)
        if outputs % block_n == 0 and inputs % span == 0:
            tile = tl.load(weights_at + at[None, :])
        else:
            tile = tl.load(weights_at + at[None, :], mask=real_n[:, None] & real_k[None, :], other=0.0)
        total = product_onto(as_computed(tile, column), column, total)
    place = (split * rows + m).to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(parts + place, total, mask=real_n[:, None] & real_m[None, :])


@triton.jit(do_not_specialize=["size"])
def join_parts(
    parts,  # float32 [splits, rows, outputs]
    scales,  # float32 [outputs], of weights of 8 bits; else None
    row_scales,  # float32 [rows], of rows of 8 bits; else None
    bias,  # [outputs] or None
    out,  # [rows, outputs]
    size,  # rows * outputs
    outputs: tl.constexpr,
    splits: tl.constexpr,
    block: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = at < size
    total = joined(parts, scales, row_scales, bias, at, at % outputs, at // outputs, size, splits, real)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])
def many_rows(
    x,  # descriptor of [rows, inputs], blocks [block_m, block_k]
    weight,  # descriptor of [outputs, inputs], blocks [block_n, block_k]
    scales,
    row_scales,
    bias,
    out,  # [rows, outputs]
    rows,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    span: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    group: tl.constexpr,  # tiles of outputs that run beside each other, so that they share rows in the cache
):
    """One flat loop, which the compiler pipelines across the borders of parts."""
    tiles_n, tiles_m = tl.cdiv(outputs, block_n), tl.cdiv(rows, block_m)
    first = tl.program_id(0) // (group * tiles_m) * group
    beside = tl.minimum(tiles_n - first, group)
    within = tl.program_id(0) % (group * tiles_m)
    low_n, low_m = (first + within % beside) * block_n, within // beside * block_m
    total = tl.zeros([block_n, block_m], tl.float32)
    part = tl.zeros([block_n, block_m], tl.float32)
    for low in range(0, tl.cdiv(inputs, span) * span, block_k):
        column = x.load([low_m, low]).T
        part = product_onto(as_computed(weight.load([low_n, low]), column), column, part)
        if (low + block_k) % span == 0:
            total += part
            part = tl.zeros([block_n, block_m], tl.float32)
    n, m = low_n + tl.arange(0, block_n), low_m + tl.arange(0, block_m)
    real_n, real_m = n < outputs, m < rows
    column, row = n[:, None] + tl.zeros_like(m)[None, :], m[None, :] + tl.zeros_like(n)[:, None]
    y = scaled(total, scales, row_scales, bias, column, row, real_n[:, None] & real_m[None, :])
    place = m.to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(out + place, y.to(out.dtype.element_ty), mask=real_n[:, None] & real_m[None, :])


@triton.jit
def quantize_rows(
    x,  # [rows, size]
    codes,  # float8 e4m3 [rows, size]
    scales,  # float32 [rows]
    size: tl.constexpr,
    block: tl.constexpr,
):
    """Each row by itself: its largest magnitude becomes 448, the largest of the type."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    wide = tl.load(x + row * size + i, mask=i < size, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), axis=0), 1e-12) / 448.0
    tl.store(scales + row, scale)
    tl.store(codes + row * size + i, (wide / scale).to(codes.dtype.element_ty), mask=i < size)
