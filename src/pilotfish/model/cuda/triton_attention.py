"""Attention of tree rows over KV slots as Triton kernels. The reference is `attention.dense_tree_attention`.

Positions are cut into blocks, and blocks into *splits* of `SPLIT`; borders depend on the position alone:

    position  0 ... 63 | 64 ... 127 | 128 ... 191 | 192 ... 255 | 256 ...
    slots     prefix_slots of the row's sequence ...        |path_slots of the row ...
              shared by the rows of a tile          | row by row      ^ row_prefixes

A program of `attend_parts` takes tiles of rows, each of one sequence, a split and all query heads of one KV head, so a
tree or a prompt reads its prefix once; or, from the block in which the prefix ends on, one row and one block. Every
block is summed from zero and joined, in order, by operations that are fused by name; `join_parts_in_order` goes on so
with a row's blocks and splits (split-KV, Flash-Decoding). So a row's bits do not depend on other rows, on the tree's
shape, or on whether a position is prefix or path: nothing is tuned at run time, one binary serves every width, and
float32 products are not rounded to TF32. One exception: values that are not finite reach the rows of their tile, of the
same sequence, that do not see them, as 0 * NaN.
"""

import torch
import triton
from torch import Tensor

from pilotfish.model.attention import AttentionMetadata, Scoring
from pilotfish.model.cuda.triton_kernels.attention import SPLIT, attend_parts, join_parts_in_order, write_kv
from pilotfish.model.kv_planes import LayerKV

#: Bytes of a block of keys: with as many values, and the next block's of both on their way, it fits any GPU.
BLOCK_BYTES = 16384
#: Bytes of the parts' results; more rows than fit are attended in turn.
PARTIAL_BYTES = 64 * 2**20
MATRIX_UNIT = 16  # rows, and columns, that a product has at least
#: Queries of a program, of rows by heads: with twice as many the Hopper binary would spill registers.
QUERIES = 32
WARPS, STAGES = 4, 2
#: Elements of a head that a program joins: of more, registers would not hold `AT_ONCE` splits.
JOINED_DIMS = 64
#: A program of a split looks at one row for each so many positions of the longest prefix, at a tile of rows at most.
#: Most rows begin no tile: with long prefixes, a program for each would mostly hold shared memory and do nothing.
ROW_POSITIONS = 1024


def triton_tree_attention(
    q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, metadata: AttentionMetadata, scoring: Scoring
) -> Tensor:
    """As `dense_tree_attention`, in float32 or bfloat16. Never synchronizes, so a CUDA graph can record it once
    compiled."""
    if kv.key_scales is None and all(x.stride()[1:] == (x.shape[2], 1) for x in (k, v)) and len(k):
        size = k[0].numel()
        write_kv[(len(k),)](
            k, v, metadata.row_slots, kv.keys, kv.values, k.stride(0), v.stride(0), size, triton.next_power_of_2(size)
        )
    else:
        kv.write(metadata.row_slots.long(), k, v)
    return attend_slots(q, kv, metadata, scoring)


def attend_slots(q: Tensor, kv: LayerKV, metadata: AttentionMetadata, scoring: Scoring) -> Tensor:
    """Once the rows' own keys and values are in their slots."""
    sizes = attention_sizes(q.shape[1], kv.keys.shape[1], q.shape[2], q.element_size())
    splits = -(-metadata.longest // SPLIT.value)
    parts = splits + -(-metadata.path_slots.shape[1] // sizes["block"]) + 1
    span = max(1, min(sizes["tile"], metadata.longest // ROW_POSITIONS))
    chunk = max(1, PARTIAL_BYTES // (4 * q.shape[1] * parts * q.shape[2]))
    q = q.contiguous()
    out = torch.empty_like(q)
    for start in range(0, len(q), chunk):
        part = slice(start, start + chunk)
        _attend(out[part], q[part], kv, metadata.rows(part), scoring, splits, parts, span, sizes)
    return out


def _attend(
    out: Tensor,
    q: Tensor,
    kv: LayerKV,
    metadata: AttentionMetadata,
    scoring: Scoring,
    splits: int,
    parts: int,
    span: int,
    sizes: dict[str, int],
) -> None:
    rows, heads, head_dim = q.shape
    positions, prefixes = metadata.row_positions, metadata.row_prefixes
    tops, masses = (q.new_empty(rows, heads, parts, dtype=torch.float32) for _ in range(2))
    sums = q.new_empty(rows, heads, parts, head_dim, dtype=torch.float32)
    attend_parts[triton.cdiv(rows, span), sizes["kv_heads"], splits + (parts - splits) * span](
        q, kv.keys, kv.values, kv.key_scales, kv.value_scales,
        metadata.row_starts, positions, prefixes, metadata.path_slots, metadata.prefix_slots,
        tops, masses, sums, rows, scoring.scale, metadata.path_slots.shape[1], splits, parts, span,
        **sizes, window=scoring.window, softcap=scoring.softcap, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    dims = min(sizes["dims"], JOINED_DIMS)
    join_parts_in_order[rows, heads, triton.cdiv(head_dim, dims)](
        tops, masses, sums, positions, prefixes, scoring.sinks, out, splits, parts,
        heads=heads, head_dim=head_dim, dims=dims, block=sizes["block"], window=scoring.window,
        num_warps=1, num_stages=1,
    )  # fmt: skip


def attention_sizes(heads: int, kv_heads: int, head_dim: int, element_size: int) -> dict[str, int]:
    """Constants of `attend_parts`: powers of two that hold a head and a group of heads, rows of a tile, and positions
    of a block."""
    dims = max(MATRIX_UNIT, triton.next_power_of_2(head_dim))
    group = triton.next_power_of_2(heads // kv_heads)
    block = min(64, max(MATRIX_UNIT, BLOCK_BYTES // (dims * element_size)))
    named = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dims": dims}
    return {**named, "group": group, "tile": max(1, QUERIES // group), "block": block}
