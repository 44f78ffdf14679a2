"""Attention of flattened tree rows over KV slots, as a transformers attention implementation.

The model is called on one flat batch: `input_ids` [1, rows], `position_ids` [1, rows], no cache of its
own, and a `Placement` that says where each row's keys lie. Registered under the names `pilotfish`,
which takes the device's kernel, and `pilotfish_reference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from transformers import AttentionInterface

BLOCK = 64  # kBlock in kernels.cpp


@dataclass(frozen=True)
class Placement:
    """Where rows write their KV and which slots they attend to. All int32, on the model's device.

    A row at position p attends to positions 0 .. p along its path: those below `row_trunks` lie in its
    sequence's trunk (committed tokens), the others in its own path (tree ancestors and itself).
    Padding rows have position -1 and write to the pool's scratch slot.
    """

    row_slots: torch.Tensor  # [rows]
    row_sequences: torch.Tensor  # [rows]
    row_positions: torch.Tensor  # [rows]
    row_trunks: torch.Tensor  # [rows]
    trunk_slots: torch.Tensor  # [sequences, longest trunk]
    path_slots: torch.Tensor  # [rows, longest path]


@dataclass(frozen=True)
class KVPool:
    """Keys and values of every layer, a token a slot; the last slot is scratch for padding rows."""

    keys: list[torch.Tensor]  # layers x [slots + 1, kv_heads, head_dim]
    values: list[torch.Tensor]  # layers x [slots + 1, kv_heads, head_dim]

    @classmethod
    def zeros(
        cls, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> KVPool:
        def pool() -> list[torch.Tensor]:
            return [_zeros((slots + 1, kv_heads, head_dim), dtype, device) for _ in range(layers)]

        return cls(pool(), pool())


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU from numpy, whose zeros take no memory before they are written; torch writes them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


@dataclass(frozen=True)
class Scoring:
    """How a layer turns queries and keys into weights.

    A row at position p sees the positions p - window + 1 .. p of its path. Scores are q . k * scale, capped at
    softcap * tanh(score / softcap). A sink is one more score of its head, without a value.
    """

    scale: float
    window: int = 0  # 0: all positions
    softcap: float = 0.0  # 0: none
    sinks: torch.Tensor | None = None  # [heads], None: none


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, rows, head_dim]
    key: torch.Tensor,  # [1, kv_heads, rows, head_dim]
    value: torch.Tensor,  # [1, kv_heads, rows, head_dim]
    attention_mask: torch.Tensor | None,  # noqa: ARG001  # None: the placement says who sees whom
    scaling: float,
    placement: Placement,
    kv: KVPool,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # [heads]
    attention: Callable[..., torch.Tensor] | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer where no kernel does. Returns [1, rows, heads, head_dim].

    The loader serves only architectures that say all they want of attention in these arguments.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    attention = attention or _attention_on(query.device)
    scoring = Scoring(scaling, sliding_window or 0, softcap or 0.0, s_aux)
    return attend(attention, layer, q, k, v, scoring, placement, kv).unsqueeze(0), None


def _attention_on(device: torch.device) -> Callable[..., torch.Tensor]:
    """Triton's kernel on CUDA, else the reference; the C++ kernel comes with modules of its own (`native`)."""
    if device.type != "cuda":
        return dense_tree_attention
    from pilotfish.model.triton_attention import tree_attention  # CUDA builds of torch bring Triton, others do not

    return tree_attention


def attend(
    attention: Callable[..., torch.Tensor],  # the kernel or the reference
    layer: int,
    q: torch.Tensor,  # [rows, heads, head_dim]
    k: torch.Tensor,  # [rows, kv_heads, head_dim]
    v: torch.Tensor,  # [rows, kv_heads, head_dim]
    scoring: Scoring,
    placement: Placement,
    kv: KVPool,
) -> torch.Tensor:
    """Attention of one layer at a placement; writes k and v to the pool. Returns [rows, heads, head_dim]."""
    return attention(
        q,
        k,
        v,
        kv.keys[layer],
        kv.values[layer],
        placement.row_slots,
        placement.row_sequences,
        placement.row_positions,
        placement.row_trunks,
        placement.trunk_slots,
        placement.path_slots,
        scoring.scale,
        scoring.window,
        scoring.softcap,
        scoring.sinks,
    )


def dense_tree_attention(
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
    window: int,  # 0: none
    softcap: float,  # 0: none
    sinks: torch.Tensor | None,  # [heads]
) -> torch.Tensor:
    """The reference: every row gathers its own keys in position order. Same signature as the kernel.

    Products and sums run in float64 and are rounded once at the end, so that a row's result does not
    depend on how many rows or padded positions share the call. Works on any device.
    """
    k_pool[row_slots.long()] = k
    v_pool[row_slots.long()] = v
    slots = key_slots(row_sequences, row_positions, row_trunks, trunk_slots, path_slots)
    groups = q.shape[1] // k.shape[1]
    positions = torch.arange(slots.shape[1], device=q.device)
    visible = positions <= row_positions[:, None]
    if window:
        visible &= positions > row_positions[:, None] - window
    keys = k_pool[slots].double().repeat_interleave(groups, dim=2)  # [rows, positions, heads, head_dim]
    values = v_pool[slots].double().repeat_interleave(groups, dim=2)
    values = values.masked_fill(~visible[..., None, None], 0.0)  # another row's may be no numbers
    scores = torch.einsum("rhd,rphd->rhp", q.double(), keys) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().expand(len(q), -1)[..., None]], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(positions)]
    weights = weights.masked_fill(~visible.any(dim=1)[:, None, None], 0.0)  # padding rows see nothing
    return torch.einsum("rhp,rphd->rhd", weights, values).to(q.dtype)


def key_slots(
    row_sequences: torch.Tensor,
    row_positions: torch.Tensor,
    row_trunks: torch.Tensor,
    trunk_slots: torch.Tensor,
    path_slots: torch.Tensor,
) -> torch.Tensor:
    """Slot of each row's key at each position, int64 [rows, positions]; positions after the row's are any."""
    length = int(row_positions.max()) + 1
    positions = torch.arange(max(length, 1), device=row_positions.device)
    trunk = trunk_slots[row_sequences.long()][:, positions.clamp(max=trunk_slots.shape[1] - 1)]
    below = (positions - row_trunks[:, None]).clamp(0, path_slots.shape[1] - 1).long()
    return torch.where(positions < row_trunks[:, None], trunk, path_slots.gather(1, below)).long()


AttentionInterface.register("pilotfish", slot_attention)
AttentionInterface.register("pilotfish_reference", partial(slot_attention, attention=dense_tree_attention))
