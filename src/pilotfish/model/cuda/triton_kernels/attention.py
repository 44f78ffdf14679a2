"""Kernels of `triton_attention`."""

import triton
import triton.language as tl

from pilotfish.model.cuda.triton_kernels.common import as_computed, product

SPLIT = tl.constexpr(256)  # positions
AT_ONCE = tl.constexpr(8)  # splits that `join_parts_in_order` loads together


@triton.jit(do_not_specialize=["k_stride", "v_stride"], do_not_specialize_on_alignment=["slots"])
def write_kv(
    k,  # [rows, size], rows `k_stride` apart
    v,
    slots,  # int32 [rows]
    k_pool,  # [slots, size]
    v_pool,
    k_stride,
    v_stride,
    size: tl.constexpr,
    block: tl.constexpr,
):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    to, real = tl.load(slots + row).to(tl.int64) * size + i, i < size
    tl.store(k_pool + to, tl.load(k + row * k_stride + i, mask=real), mask=real)
    tl.store(v_pool + to, tl.load(v + row * v_stride + i, mask=real), mask=real)


@triton.jit(
    do_not_specialize=["rows", "path_width", "splits", "parts", "span"],
    do_not_specialize_on_alignment=["row_starts", "row_positions", "row_prefixes", "path_slots", "prefix_slots"],
)
def attend_parts(
    q,  # [rows, heads, head_dim]
    k_pool,
    v_pool,
    key_scales,  # float32 [slots, kv_heads], of pools of 8 bits; else None
    value_scales,
    row_starts,
    row_positions,
    row_prefixes,
    path_slots,
    prefix_slots,
    tops,  # float32 [rows, heads, parts]: a part's highest score
    masses,  # float32 [rows, heads, parts]: its sum of exp(score - top)
    sums,  # float32 [rows, heads, parts, head_dim]: and of exp(score - top) * value
    rows,
    scale,
    path_width,
    splits,
    parts,
    span,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    group: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
):
    """Queries, of `tile` rows by `group` heads, are columns; keys and values are the matrix unit's first operand. Of
    splits, a program does those of `span` rows that no row before, of the same sequence and tile, has in its tile."""
    kv_head, part, begin = tl.program_id(1), tl.program_id(2), tl.program_id(0) * span
    alone, column = part >= splits, tl.arange(0, tile * group)
    begin += tl.where(alone, (part - splits) % span, 0)
    part = tl.where(alone, splits + (part - splits) // span, part)
    for i in tl.range(tl.minimum(tl.where(alone, 1, span), rows - begin), disable_licm=True):
        first_row = begin + i
        prefix_start, prefix = tl.load(row_starts + first_row), tl.load(row_prefixes + first_row)
        before = tl.load(row_starts + first_row - 1, mask=first_row % tile != 0, other=-1)
        border, own = prefix // block * block, tl.load(row_positions + first_row)
        low = tl.where(alone, border + (part - splits) * block, part * SPLIT)
        high = tl.where(alone, tl.minimum(low + block, own + 1), tl.minimum(low + SPLIT, border))
        if (low < high) & (alone | (before != prefix_start)):  # so padding rows, without prefix, end here
            row, in_group = first_row + column // group, column % group
            same = _same_sequence(row_starts, first_row, rows, column // group, tile)
            of_tile = tl.where(alone, column < group, same & (row // tile == first_row // tile))
            position = tl.load(row_positions + row, mask=of_tile, other=-1)
            first = tl.where(position < 0, 2147483647, _first_visible(position, window))
            last, earliest = tl.max(position, axis=0), tl.min(first, axis=0)
            start, end = tl.maximum(low, earliest // block * block), tl.minimum(high, last + 1)
            if start < end:
                prefix_row = prefix_slots + prefix_start
                path_row = path_slots + first_row.to(tl.int64) * path_width

                head = kv_head * (heads // kv_heads) + in_group
                dim = tl.arange(0, dims)
                real_dim, real_column = dim < head_dim, of_tile & (in_group < heads // kv_heads)
                place = row.to(tl.int64) * heads + head
                real = real_dim[:, None] & real_column[None, :]
                query = tl.load(q + place[None, :] * head_dim + dim[:, None], mask=real, other=0.0)

                top = tl.full([tile * group], float("-inf"), tl.float32)
                mass = tl.zeros([tile * group], tl.float32)
                total = tl.zeros([dims, tile * group], tl.float32)
                for block_start in range(start, end, block):
                    at = block_start + tl.arange(0, block)
                    stored = (at >= earliest) & (at <= last)
                    slot = tl.load(prefix_row + at, mask=stored & (at < prefix), other=0)
                    slot += tl.load(path_row + (at - prefix), mask=stored & (at >= prefix), other=0)
                    entry = slot.to(tl.int64) * kv_heads + kv_head
                    where, read = entry[:, None] * head_dim + dim[None, :], stored[:, None] & real_dim[None, :]
                    keys = as_computed(tl.load(k_pool + where, mask=read, other=0.0), query)
                    values = as_computed(tl.load(v_pool + where, mask=read, other=0.0), query)
                    scores = product(keys, query) * scale
                    if key_scales is not None:
                        scores *= tl.load(key_scales + entry, mask=stored, other=0.0)[:, None]
                    if softcap != 0:
                        scores = softcap * _tanh(scores / softcap)
                    visible = (at[:, None] >= first[None, :]) & (at[:, None] <= position[None, :])
                    scores = tl.where(visible, scores, float("-inf"))
                    block_top = tl.max(scores, axis=0)
                    weights = tl.exp(scores - _finite(block_top)[None, :])
                    block_mass = tl.sum(weights, axis=0)
                    if value_scales is not None:
                        weights *= tl.load(value_scales + entry, mask=stored, other=0.0)[:, None]
                    block_sums = product(tl.trans(values), weights.to(values.dtype))
                    higher = tl.maximum(top, block_top)
                    shrink, block_shrink = tl.exp(top - _finite(higher)), tl.exp(block_top - _finite(higher))
                    mass = tl.fma(mass, shrink, block_mass * block_shrink)
                    total = tl.fma(total, shrink[None, :] + tl.zeros_like(total), block_sums * block_shrink[None, :])
                    top = higher

                to = place * parts + part
                tl.store(tops + to, top, mask=real_column)
                tl.store(masses + to, mass, mask=real_column)
                tl.store(sums + to[None, :] * head_dim + dim[:, None], total, mask=real)


@triton.jit(
    do_not_specialize=["splits", "parts"], do_not_specialize_on_alignment=["row_positions", "row_prefixes", "sinks"]
)
def join_parts_in_order(
    tops,
    masses,
    sums,
    row_positions,
    row_prefixes,
    sinks,
    out,  # [rows, heads, head_dim]
    splits,
    parts,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    block: tl.constexpr,
    window: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position, border = tl.load(row_positions + row), tl.load(row_prefixes + row) // block
    dim = tl.program_id(2) * dims + tl.arange(0, dims)
    first = _first_visible(position, window)
    at = (row * heads + head) * parts
    top, mass, total = float("-inf"), 0.0, tl.zeros([dims], tl.float32)
    begin, end = first // SPLIT, (position + SPLIT) // SPLIT
    # First splits without path blocks, loaded together. Joining what is masked off changes nothing, not even a -0.0.
    whole = tl.minimum(border * block // SPLIT, end)
    for several in range(begin // AT_ONCE, (whole + AT_ONCE - 1) // AT_ONCE):
        loaded = ()
        for i in tl.static_range(AT_ONCE):
            split = several * AT_ONCE + i
            real, place = (split >= begin) & (split < whole), at + split
            split_top = tl.load(tops + place, mask=real, other=float("-inf"))
            split_mass = tl.load(masses + place, mask=real, other=0.0)
            split_total = tl.load(sums + place * head_dim + dim, mask=real & (dim < head_dim), other=-0.0)
            loaded += (split_top, split_mass, split_total)
        for i in tl.static_range(AT_ONCE):
            top, mass, total = _joined(top, mass, total, loaded[3 * i], loaded[3 * i + 1], loaded[3 * i + 2])
    for split in range(tl.maximum(begin, whole), end):
        split_top, split_mass, split_total = float("-inf"), 0.0, tl.zeros([dims], tl.float32)
        low = tl.maximum(split * SPLIT, first // block * block)
        if low < tl.minimum(tl.minimum(split * SPLIT + SPLIT, border * block), position + 1):
            split_top, split_mass = tl.load(tops + at + split), tl.load(masses + at + split)
            split_total = tl.load(sums + (at + split) * head_dim + dim, mask=dim < head_dim, other=0.0)
        last = tl.minimum((split + 1) * (SPLIT // block), position // block + 1)
        for number in range(tl.maximum(border, low // block), last):
            place = at + splits + number - border
            part = tl.load(sums + place * head_dim + dim, mask=dim < head_dim, other=0.0)
            split_top, split_mass, split_total = _joined(
                split_top, split_mass, split_total, tl.load(tops + place), tl.load(masses + place), part
            )
        top, mass, total = _joined(top, mass, total, split_top, split_mass, split_total)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
        higher = tl.maximum(top, sink)
        shrink = tl.exp(top - higher)
        mass = mass * shrink + tl.exp(sink - higher)
        total = total * shrink
    result = total / tl.where(mass > 0, mass, 1.0)  # padding rows have no mass, and give zeros
    tl.store(out + (row * heads + head) * head_dim + dim, result.to(out.dtype.element_ty), mask=dim < head_dim)


@triton.jit
def _joined(top, mass, total, other_top, other_mass, other_total):
    """With the very operations of `attend_parts`: fused by name."""
    higher = tl.maximum(top, other_top)
    shrink, other_shrink = tl.exp(top - _finite(higher)), tl.exp(other_top - _finite(higher))
    mass = tl.fma(mass, shrink, other_mass * other_shrink)
    total = tl.fma(total, shrink + tl.zeros_like(total), other_total * other_shrink)
    return higher, mass, total


@triton.jit
def _same_sequence(row_starts, first_row, rows, place, tile: tl.constexpr):
    """Whether all rows from the first to the `place`-th after it are of one sequence."""
    start = tl.load(row_starts + first_row)
    end = 0  # rows until another sequence begins
    going = True
    for i in tl.static_range(tile):
        other = tl.load(row_starts + first_row + i, mask=first_row + i < rows, other=-1)
        going = going & (other == start)
        end += going.to(tl.int32)
    return place < end


@triton.jit
def _finite(top):
    return tl.where(top == float("-inf"), 0.0, top)


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
