"""transformers' attention implementation `pilotfish`: flattened tree rows over KV slots. The model runs on one flat
batch, `input_ids` and `position_ids` [1, rows], without a cache of its own."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AttentionInterface

from pilotfish.core.scheduling.executor import LayerProgress
from pilotfish.model.kv_planes import KVPool, LayerKV
from pilotfish.model.tables import Tables


@dataclass(frozen=True)
class AttentionMetadata(Tables):
    """Slots that rows write their KV to, and slots that they attend to. All int32, on the model's device.

    A row attends to positions 0 to its own: those below `row_prefixes` lie in its sequence's prefix, the others in its
    path (tree ancestors and itself). Padding rows have position -1 and write to the pool's scratch slot.
    """

    row_slots: Tensor  # [rows]
    row_starts: Tensor  # [rows], where in `prefix_slots` its sequence's prefix begins, which tells sequences apart
    row_positions: Tensor  # [rows]
    row_prefixes: Tensor  # [rows], tokens of the sequence's prefix
    path_slots: Tensor  # [rows, longest path]
    prefix_slots: Tensor  # [tokens of all prefixes, or more], one prefix after another
    longest: int = field(kw_only=True)  # tokens of the longest prefix, or more

    def rows(self, part: slice | list[int]) -> "AttentionMetadata":
        *of_rows, prefix_slots = self.tensors()
        return AttentionMetadata(*[*(x[part] for x in of_rows), prefix_slots], longest=self.longest)


_NOBODY = torch.zeros(0, dtype=torch.int32)
#: Of a forward without attention.
NO_ROWS = AttentionMetadata(_NOBODY, _NOBODY, _NOBODY, _NOBODY, _NOBODY[:, None], _NOBODY, longest=0)


@dataclass(frozen=True)
class Scoring:
    """A row at position p sees the positions p - window + 1 .. p. Scores are q . k * scale, capped at
    softcap * tanh(score / softcap). A sink is one more score of its head, without a value."""

    scale: float
    window: int = 0  # 0: all positions
    softcap: float = 0.0  # 0: none
    sinks: Tensor | None = None  # [heads], None: none


#: Attention of one layer, by any of the kernels: queries [rows, heads, head_dim], keys and values [rows, kv_heads,
#: head_dim] -> [rows, heads, head_dim]. Writes keys and values to the pool first, and reads all of them from there.
TreeAttention = Callable[[Tensor, Tensor, Tensor, LayerKV, AttentionMetadata, Scoring], Tensor]


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, rows, head_dim]
    key: Tensor,  # [1, kv_heads, rows, head_dim]
    value: Tensor,  # [1, kv_heads, rows, head_dim]
    attention_mask: Tensor | None,  # noqa: ARG001  # None: the metadata says who sees whom
    scaling: float,
    metadata: AttentionMetadata,
    kv: KVPool,
    attend: TreeAttention,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [heads]
    progress: LayerProgress | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Returns [1, rows, heads, head_dim]."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    window = sliding_window or getattr(module, "sliding_window", None) or 0  # Qwen2-MoE's modules do not pass it
    scoring = Scoring(scaling, window, softcap or 0.0, s_aux)
    attended = attend(q, k, v, kv[layer], metadata, scoring)
    if progress is not None:
        progress.wrote(layer)
    return attended.unsqueeze(0), None


def dense_tree_attention(
    q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, metadata: AttentionMetadata, scoring: Scoring
) -> Tensor:
    """The reference on any device. Rows gather their keys in position order; sums run in float64 and are rounded once,
    so a row's result does not depend on how many rows or padded positions share the call."""
    kv.write(metadata.row_slots.long(), k, v)
    slots = key_slots(metadata)
    groups = q.shape[1] // k.shape[1]
    positions = torch.arange(slots.shape[1], device=q.device)
    visible = positions <= metadata.row_positions[:, None]
    if scoring.window:
        visible &= positions > metadata.row_positions[:, None] - scoring.window
    keys, values = (x.repeat_interleave(groups, dim=2) for x in kv.read(slots))  # [rows, positions, heads, head_dim]
    values = values.masked_fill(~visible[..., None, None], 0.0)  # another row's may be NaN
    scores = torch.einsum("rhd,rphd->rhp", q.double(), keys) * scoring.scale
    if scoring.softcap:
        scores = scoring.softcap * (scores / scoring.softcap).tanh()
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if scoring.sinks is not None:
        scores = torch.cat([scores, scoring.sinks.double().expand(len(q), -1)[..., None]], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(positions)]
    weights = weights.masked_fill(~visible.any(dim=1)[:, None, None], 0.0)  # padding rows see nothing
    return torch.einsum("rhp,rphd->rhd", weights, values).to(q.dtype)


def key_slots(metadata: AttentionMetadata) -> Tensor:
    """int64 [rows, positions]; arbitrary above the row's position."""
    prefix_slots, path_slots, prefixes = metadata.prefix_slots, metadata.path_slots, metadata.row_prefixes[:, None]
    length = int(metadata.row_positions.max()) + 1
    positions = torch.arange(max(length, 1), device=prefixes.device)
    prefix = prefix_slots[(metadata.row_starts[:, None] + positions).clamp(max=len(prefix_slots) - 1)]
    below = (positions - prefixes).clamp(0, path_slots.shape[1] - 1).long()
    return torch.where(positions < prefixes, prefix, path_slots.gather(1, below)).long()


AttentionInterface.register("pilotfish", slot_attention)
