"""Attention of tree rows over KV slots as Triton kernels. The reference is `attention.dense_tree_attention`.

Positions are cut into *splits* of `SPLIT`, whose borders depend on the position alone, and a split into blocks:

    position  0 ............ 255 | 256 ........... 511 | 512 ...
    slots     prefix_slots of the row's sequence ... | path_slots of the row ...
                                                     ^ row_prefixes

A program of `attend_split` takes one row, one split and all query heads of one KV head, and runs an online softmax over
the split's blocks in order; `combine_splits` joins a row's splits, also in order (split-KV, Flash-Decoding). So a row's
bits do not depend on other rows, on the tree's shape or on where its keys lie: nothing is tuned at run time, one binary
serves every width, and float32 products are not rounded to TF32.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pilotfish.model.attention import AttentionMetadata, Scoring
from pilotfish.model.cuda.triton_kernels.attention import SPLIT, attend_split, combine_splits
from pilotfish.model.kv_planes import LayerKV

#: Bytes of a block of keys: with as many values, and the next block's of both on their way, it fits any GPU.
BLOCK_BYTES = 16384
#: Bytes of the splits' partial results; more rows than fit are attended in turn.
PARTIAL_BYTES = 64 * 2**20
TENSOR_CORE = 16  # rows, and columns, that a product has at least
WARPS, STAGES = 4, 2


def triton_tree_attention(
    q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, metadata: AttentionMetadata, scoring: Scoring
) -> Tensor:
    """As `dense_tree_attention`, in float32 or bfloat16. Never synchronizes, so a CUDA graph can record it once
    compiled."""
    kv.write(metadata.row_slots.long(), k, v)
    splits = -(-(metadata.prefix_slots.shape[1] + metadata.path_slots.shape[1]) // SPLIT.value)
    chunk = max(1, PARTIAL_BYTES // (4 * q.shape[1] * splits * q.shape[2]))
    q = q.contiguous()
    out = torch.empty_like(q)
    for start in range(0, len(q), chunk):
        part = slice(start, start + chunk)
        _attend(out[part], q[part], kv, metadata.rows(part), scoring, splits)
    return out


def _attend(out: Tensor, q: Tensor, kv: LayerKV, metadata: AttentionMetadata, scoring: Scoring, splits: int) -> None:
    rows, heads, head_dim = q.shape
    row_positions, prefix_slots, path_slots = metadata.row_positions, metadata.prefix_slots, metadata.path_slots
    tops, masses = (q.new_empty(rows, heads, splits, dtype=torch.float32) for _ in range(2))
    sums = q.new_empty(rows, heads, splits, head_dim, dtype=torch.float32)
    kv_heads = kv.keys.shape[1]
    sizes = attention_sizes(heads, kv_heads, head_dim, q.element_size())
    attend_split[rows, kv_heads, splits](
        q, kv.keys, kv.values, kv.key_scales, kv.value_scales,
        metadata.row_sequences, row_positions, metadata.row_prefixes, prefix_slots, path_slots,
        tops, masses, sums, scoring.scale, prefix_slots.shape[1], path_slots.shape[1], splits,
        **sizes, window=scoring.window, softcap=scoring.softcap, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    combine_splits[rows, heads](
        tops, masses, sums, row_positions, scoring.sinks, out, splits,
        heads=heads, head_dim=head_dim, dims=sizes["dims"], window=scoring.window, num_warps=1, num_stages=1,
    )  # fmt: skip


def attention_sizes(heads: int, kv_heads: int, head_dim: int, element_size: int) -> dict[str, int]:
    """Constants of `attend_split`: powers of two that hold a head and a group of heads, and positions of a block."""
    dims = max(TENSOR_CORE, triton.next_power_of_2(head_dim))
    group = max(TENSOR_CORE, triton.next_power_of_2(heads // kv_heads))
    block = min(64, max(TENSOR_CORE, BLOCK_BYTES // (dims * element_size)))
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dims": dims, "group": group, "block": block}
