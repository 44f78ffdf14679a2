"""Kernels of `triton_attention`."""

from __future__ import annotations

import triton
import triton.language as tl

from pilotfish.model.cuda.triton_kernels.common import as_computed, product

SPLIT = tl.constexpr(256)  # positions


@triton.jit(
    do_not_specialize=["prefix_width", "path_width", "splits"],
    do_not_specialize_on_alignment=["row_sequences", "row_positions", "row_prefixes", "prefix_slots", "path_slots"],
)
def attend_split(
    q,
    k_pool,
    v_pool,
    key_scales,  # float32 [slots, kv_heads], of pools of 8 bits; else None
    value_scales,
    row_sequences,
    row_positions,
    row_prefixes,
    prefix_slots,
    path_slots,
    tops,  # float32 [rows, heads, splits]: a split's highest score
    masses,  # float32 [rows, heads, splits]: its sum of exp(score - top)
    sums,  # float32 [rows, heads, splits, head_dim]: and of exp(score - top) * value
    scale,
    prefix_width,
    path_width,
    splits,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    group: tl.constexpr,
    block: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    position = tl.load(row_positions + row)
    first = _first_visible(position, window)
    start = tl.maximum(split * SPLIT, first // block * block)
    end = tl.minimum(split * SPLIT + SPLIT, position + 1)
    if start >= end:
        return
    prefix = tl.load(row_prefixes + row)
    prefix_row = prefix_slots + tl.load(row_sequences + row).to(tl.int64) * prefix_width
    path_row = path_slots + row * path_width

    in_group = tl.arange(0, group)
    head = kv_head * (heads // kv_heads) + in_group
    dim = tl.arange(0, dims)
    real_head, real_dim = in_group < heads // kv_heads, dim < head_dim
    real = real_head[:, None] & real_dim[None, :]
    query = tl.load(q + (row * heads + head)[:, None] * head_dim + dim[None, :], mask=real, other=0.0)

    top = tl.full([group], float("-inf"), tl.float32)
    mass = tl.zeros([group], tl.float32)
    total = tl.zeros([group, dims], tl.float32)
    for low in range(start, end, block):
        at = low + tl.arange(0, block)
        visible = (at >= first) & (at <= position)
        slot = tl.load(prefix_row + at, mask=visible & (at < prefix), other=0)
        slot += tl.load(path_row + (at - prefix), mask=visible & (at >= prefix), other=0)
        entry = slot.to(tl.int64) * kv_heads + kv_head
        where = entry[:, None] * head_dim + dim[None, :]
        stored = visible[:, None] & real_dim[None, :]
        keys = as_computed(tl.load(k_pool + where, mask=stored, other=0.0), query)
        values = as_computed(tl.load(v_pool + where, mask=stored, other=0.0), query)
        scores = product(query, tl.trans(keys)) * scale
        if key_scales is not None:
            scores *= tl.load(key_scales + entry, mask=visible, other=0.0)[None, :]
        if softcap != 0:
            scores = softcap * _tanh(scores / softcap)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))  # each block has a visible position: never -inf
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        mass = mass * shrink + tl.sum(weights, axis=1)
        if value_scales is not None:
            weights *= tl.load(value_scales + entry, mask=visible, other=0.0)[None, :]
        total = total * shrink[:, None] + product(weights.to(values.dtype), values)
        top = higher

    place = (row * heads + head) * splits + split
    tl.store(tops + place, top, mask=real_head)
    tl.store(masses + place, mass, mask=real_head)
    tl.store(sums + place[:, None] * head_dim + dim[None, :], total, mask=real)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["row_positions", "sinks"])
def combine_splits(
    tops,
    masses,
    sums,
    row_positions,
    sinks,
    out,  # [rows, heads, head_dim]
    splits,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    window: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(row_positions + row)
    dim = tl.arange(0, dims)
    top, mass = float("-inf"), 0.0
    total = tl.zeros([dims], tl.float32)
    for split in range(_first_visible(position, window) // SPLIT, (position + SPLIT) // SPLIT):
        place = (row * heads + head) * splits + split
        split_top = tl.load(tops + place)
        higher = tl.maximum(top, split_top)
        shrink, split_shrink = tl.exp(top - higher), tl.exp(split_top - higher)
        part = tl.load(sums + place * head_dim + dim, mask=dim < head_dim, other=0.0)
        mass = mass * shrink + tl.load(masses + place) * split_shrink
        total = total * shrink + part * split_shrink
        top = higher
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
        higher = tl.maximum(top, sink)
        shrink = tl.exp(top - higher)
        mass = mass * shrink + tl.exp(sink - higher)
        total = total * shrink
    result = total / tl.where(mass > 0, mass, 1.0)  # padding rows have no mass, and give zeros
    tl.store(out + (row * heads + head) * head_dim + dim, result.to(out.dtype.element_ty), mask=dim < head_dim)


@triton.jit
def _first_visible(position, window: tl.constexpr):
    if window:
        return tl.maximum(position - window + 1, 0)
    return position * 0


@triton.jit
def _tanh(x):
    """Within 1e-7; Triton's own comes from a library of the device's vendor."""
    shrunk = tl.exp(-2 * tl.abs(x))
    magnitude = (1 - shrunk) / (1 + shrunk)
    return tl.where(x < 0, -magnitude, magnitude)
