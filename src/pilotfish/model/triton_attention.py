"""Attention of tree rows over KV slots as Triton kernels, for CUDA. The reference is `attention.dense_tree_attention`.

Positions are cut into *splits* of `SPLIT`, whose borders depend on nothing but the position, and a split into blocks:

    position  0 ............ 255 | 256 ........... 511 | 512 ...
    slots     trunk_slots of the row's sequence ... | path_slots of the row ...
                                                    ^ row_trunks

A program of `attend_split` takes one row, one split and all query heads of one KV head, padded to 16 rows of a tensor
core, and runs an online softmax over the split's blocks in position order. `combine_splits` then joins a row's splits,
also in order (split-KV, Flash-Decoding). So a row's bits do not depend on the rows beside it, on the shape of the tree
or on where its keys lie. Sums are in float32, and float32 products are not rounded to TF32. Nothing is tuned at run
time, and one binary serves every width: either could change the order of a sum.
"""

from __future__ import annotations

import torch
import triton

from pilotfish.model.triton_kernels import SPLIT, attend_split, combine_splits

#: Bytes of a block of keys: with as many values, and the next block's of both on their way, it fits any GPU.
BLOCK_BYTES = 16384
#: Of what splits hand over; more rows than fit are attended in turn.
PARTIAL_BYTES = 64 * 2**20
TENSOR_CORE = 16  # rows, and columns, that a product has at least
WARPS, STAGES = 4, 2


def tree_attention(
    q: torch.Tensor,  # [rows, heads, head_dim]
    k: torch.Tensor,  # [rows, kv_heads, head_dim]
    v: torch.Tensor,  # [rows, kv_heads, head_dim]
    k_pool: torch.Tensor,  # [slots + 1, kv_heads, head_dim]
    v_pool: torch.Tensor,  # [slots + 1, kv_heads, head_dim]
    row_slots: torch.Tensor,
    row_sequences: torch.Tensor,
    row_positions: torch.Tensor,
    row_trunks: torch.Tensor,
    trunk_slots: torch.Tensor,
    path_slots: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [heads]
) -> torch.Tensor:
    """Writes k and v to the pools, then attends; arguments and result as of `dense_tree_attention`.

    A row at position p sees positions p - window + 1 .. p (0: all up to p); `softcap` bounds scaled scores s to
    softcap * tanh(s / softcap) (0: none); `sinks` are logits that join the softmax's denominator only. float32 or
    bfloat16, any head_dim that is built for the device (256 and less fit all). Waits for nothing: a CUDA graph
    can record it, once a first call has compiled it.
    """
    slots = row_slots.long()
    k_pool[slots], v_pool[slots] = k, v
    splits = -(-(trunk_slots.shape[1] + path_slots.shape[1]) // SPLIT.value)
    chunk = max(1, PARTIAL_BYTES // (4 * q.shape[1] * splits * q.shape[2]))
    rows = (q.contiguous(), row_sequences, row_positions, row_trunks, path_slots)
    out = torch.empty_like(rows[0])
    for start in range(0, len(q), chunk):
        some = (x[start : start + chunk] for x in (out, *rows))
        _attend(
            *some,
            k_pool=k_pool,
            v_pool=v_pool,
            trunk_slots=trunk_slots,
            splits=splits,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
    return out


def _attend(
    out: torch.Tensor,
    q: torch.Tensor,
    row_sequences: torch.Tensor,
    row_positions: torch.Tensor,
    row_trunks: torch.Tensor,
    path_slots: torch.Tensor,
    *,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    trunk_slots: torch.Tensor,
    splits: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> None:
    """Both kernels over some rows, into `out`."""
    rows, heads, head_dim = q.shape
    tops, masses = (q.new_empty(rows, heads, splits, dtype=torch.float32) for _ in range(2))
    sums = q.new_empty(rows, heads, splits, head_dim, dtype=torch.float32)
    sizes = attention_sizes(heads, k_pool.shape[1], head_dim, q.element_size())
    attend_split[rows, k_pool.shape[1], splits](
        q, k_pool, v_pool, row_sequences, row_positions, row_trunks, trunk_slots, path_slots,
        tops, masses, sums, scale, trunk_slots.shape[1], path_slots.shape[1], splits,
        **sizes, window=window, softcap=softcap, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    combine_splits[rows, heads](
        tops, masses, sums, row_positions, sinks, out, splits,
        heads=heads, head_dim=head_dim, dims=sizes["dims"], window=window, num_warps=1, num_stages=1,
    )  # fmt: skip


def attention_sizes(heads: int, kv_heads: int, head_dim: int, element_size: int) -> dict[str, int]:
    """What `attend_split` is compiled for: powers of two that hold a head and a group of heads, and the positions
    of a block."""
    dims = max(TENSOR_CORE, triton.next_power_of_2(head_dim))
    group = max(TENSOR_CORE, triton.next_power_of_2(heads // kv_heads))
    block = min(64, max(TENSOR_CORE, BLOCK_BYTES // (dims * element_size)))
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dims": dims, "group": group, "block": block}
