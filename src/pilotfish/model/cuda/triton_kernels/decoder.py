"""What plain decoders do between their products: each kernel adds the parts of the product before it."""

import triton
import triton.language as tl

from pilotfish.model.cuda.triton_kernels.common import joined


@triton.jit(do_not_specialize=["all_sums"])
def write_heads(
    parts,  # of the product of queries, keys and values
    scales,
    row_scales,
    bias,
    q_norm,  # [head_dim], or None
    k_norm,
    eps,
    positions,  # int32 [rows], -1: padding
    cos,  # [context, head_dim]
    sin,
    slots,  # int32 [rows], where keys and values go; None: into the rows of `k` and `v`
    q,  # [rows, heads, head_dim]
    k,  # [slots or rows, kv_heads, head_dim]
    v,
    all_sums,
    splits: tl.constexpr,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,  # of a head
    block: tl.constexpr,
):
    """A program norms, rotates and writes a head of a row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, block)
    n, real = head * 2 * half + i, i < half
    kind = q.dtype.element_ty
    place = row * ((heads + 2 * kv_heads) * 2 * half) + n
    a = joined(parts, scales, row_scales, bias, place, n, row, all_sums, splits, real)
    b = joined(parts, scales, row_scales, bias, place + half, n + half, row, all_sums, splits, real)
    a, b = a.to(kind).to(tl.float32), b.to(kind).to(tl.float32)
    if head < heads + kv_heads:
        if q_norm is not None:
            a_weight = tl.where(head < heads, tl.load(q_norm + i, mask=real), tl.load(k_norm + i, mask=real))
            beyond = i + half
            b_weight = tl.where(head < heads, tl.load(q_norm + beyond, mask=real), tl.load(k_norm + beyond, mask=real))
            shrink = tl.rsqrt(tl.sum(tl.where(real, tl.fma(a, a, b * b), 0.0), axis=0) / (2 * half) + eps)
            a = ((a * shrink).to(a_weight.dtype).to(tl.float32) * a_weight.to(tl.float32)).to(kind).to(tl.float32)
            b = ((b * shrink).to(b_weight.dtype).to(tl.float32) * b_weight.to(tl.float32)).to(kind).to(tl.float32)
        angle = tl.maximum(tl.load(positions + row), 0).to(tl.int64) * (2 * half) + i
        cos_a, sin_a = tl.load(cos + angle, mask=real).to(tl.float32), tl.load(sin + angle, mask=real).to(tl.float32)
        angle += half
        cos_b, sin_b = tl.load(cos + angle, mask=real).to(tl.float32), tl.load(sin + angle, mask=real).to(tl.float32)
        turned_a = tl.fma(a, cos_a, -(b * sin_a))  # fused by name: there is a binary for few rows and one for many
        b = tl.fma(b, cos_b, a * sin_b)
        a = turned_a
    slot = row if slots is None else tl.load(slots + row).to(tl.int64)
    if head < heads:
        to = q + (row * heads + head) * 2 * half + i
    elif head < heads + kv_heads:
        to = k + (slot * kv_heads + head - heads) * 2 * half + i
    else:
        to = v + (slot * kv_heads + head - heads - kv_heads) * 2 * half + i
    tl.store(to, a.to(kind), mask=real)
    tl.store(to + half, b.to(kind), mask=real)


@triton.jit(do_not_specialize=["all_sums", "count"])
def gate_silu(
    parts,  # of the product of gates, then ups
    scales,
    row_scales,
    bias,
    out,  # [rows, inner]
    all_sums,
    count,  # rows * inner
    inner: tl.constexpr,
    splits: tl.constexpr,
    block: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    n, real = at % inner, at < count
    kind = out.dtype.element_ty
    row = at // inner
    place = row * (2 * inner) + n
    gate = joined(parts, scales, row_scales, bias, place, n, row, all_sums, splits, real)
    up = joined(parts, scales, row_scales, bias, place + inner, n + inner, row, all_sums, splits, real)
    gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
    silu = (gate / (1 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out + at, (silu * up).to(kind), mask=real)
