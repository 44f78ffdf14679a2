"""One forward over the rows of many sequences. Anything that runs on a device runs from here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pilotfish.core.tree import TokenTree
from pilotfish.model.attention import KVPool, Placement
from pilotfish.model.linears import library_padding
from pilotfish.model.loader import LoadedModel


@dataclass(frozen=True)
class SequenceRows:
    """One sequence's rows: committed tokens [start, start + len(tokens)), then nodes of a tree.

        position   0 ...... start ...... trunk - 1 | trunk ......
        slots      trunk_slots                     | node_slots
        rows                [ tokens ............. | tree ...... ]

    Nodes of `tree` without a row here (the draft's, computed earlier) have slots all the same.
    """

    start: int
    tokens: Sequence[int]
    trunk_slots: NDArray[np.int32]  # [start + len(tokens)]
    tree: TokenTree
    nodes: Sequence[int]  # nodes that get a row, each after its ancestors
    node_slots: dict[int, int]  # slot of every node on a path to one of `nodes`
    kept: Sequence[int]  # offsets in `tokens`, ascending, of rows whose logits are wanted; those of nodes always are

    @property
    def num_rows(self) -> int:
        return len(self.tokens) + len(self.nodes)


class Runner:
    """Runs a loaded model over a pool of KV slots.

    A row's logits do not depend on the rows that share its forward: with the C++ kernels by how they
    reduce, otherwise because rows are padded to a few fixed counts (`linears.LIBRARY_BUCKETS`).
    """

    def __init__(self, model: LoadedModel, num_slots: int) -> None:
        shape = model.shape
        self.model = model
        self.num_slots = num_slots
        self.kv = KVPool.zeros(shape.layers, num_slots, shape.kv_heads, shape.head_dim, model.dtype, model.device)

    def forward(self, sequences: Sequence[SequenceRows]) -> torch.Tensor:
        """Write KV and return logits, float32 [kept rows, vocab]: of each sequence in order the committed rows
        in `kept`, then its nodes."""
        return self.run(self.prepare(sequences))

    def prepare(self, sequences: Sequence[SequenceRows]) -> Batch:
        """The tensors of a forward, on the model's device."""
        return Batch.build(sequences, self.padded, self.num_slots).to(self.model.device)

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """The forward itself; see `forward`."""
        output = self.model.module(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            logits_to_keep=batch.keep,
            use_cache=False,
            placement=batch.placement,
            kv=self.kv,
        )
        return output.logits[0, : batch.num_kept].float()  # type: ignore[no-any-return]

    def padded(self, rows: int) -> int:
        """Rows that a forward of `rows` runs."""
        return rows if self.model.native else rows + library_padding(rows)


@dataclass(frozen=True)
class Batch:
    """Sequences flattened into the tensors of one forward."""

    input_ids: torch.Tensor  # int64 [rows]
    position_ids: torch.Tensor  # int64 [rows]
    keep: torch.Tensor  # int64 [kept rows], padded like rows
    num_kept: int
    placement: Placement

    @classmethod
    def build(cls, sequences: Sequence[SequenceRows], padded_rows: Callable[[int], int], scratch: int) -> Batch:
        rows = sum(s.num_rows for s in sequences)
        padded = padded_rows(rows)
        ids, slots = np.zeros(padded, np.int64), np.full(padded, scratch, np.int32)
        positions, trunks = np.full(padded, -1, np.int32), np.zeros(padded, np.int32)
        owners = np.zeros(padded, np.int32)
        trunk_slots = np.zeros((len(sequences), max(len(s.trunk_slots) for s in sequences)), np.int32)
        width = max((s.tree.depths[node] for s in sequences for node in s.nodes), default=1)
        path_slots = np.zeros((padded, width), np.int32)
        keep: list[int] = []
        row = 0
        for i, s in enumerate(sequences):
            trunk, chunk = len(s.trunk_slots), slice(row, row + len(s.tokens))
            trunk_slots[i, :trunk] = s.trunk_slots
            ids[chunk], slots[chunk] = s.tokens, s.trunk_slots[s.start :]
            positions[chunk] = np.arange(s.start, trunk)
            owners[row : row + s.num_rows] = i
            trunks[row : row + s.num_rows] = trunk
            keep.extend(row + offset for offset in s.kept)
            row += len(s.tokens)
            for node in s.nodes:
                path = s.tree.path(node)
                ids[row], slots[row] = s.tree.tokens[node], s.node_slots[node]
                positions[row] = trunk + len(path) - 1
                path_slots[row, : len(path)] = [s.node_slots[n] for n in path]
                keep.append(row)
                row += 1
        kept = np.array(keep + [0] * (padded_rows(len(keep)) - len(keep)), np.int64)
        arrays = (slots, owners, positions, trunks, trunk_slots, path_slots)
        placement = Placement(*(torch.from_numpy(array) for array in arrays))
        position_ids = torch.from_numpy(np.maximum(positions, 0).astype(np.int64))
        return cls(torch.from_numpy(ids), position_ids, torch.from_numpy(kept), len(keep), placement)

    def to(self, device: torch.device) -> Batch:
        if device.type == "cpu":
            return self
        p = self.placement
        tensors = (p.row_slots, p.row_sequences, p.row_positions, p.row_trunks, p.trunk_slots, p.path_slots)
        placement = Placement(*(t.to(device) for t in tensors))
        return Batch(
            self.input_ids.to(device), self.position_ids.to(device), self.keep.to(device), self.num_kept, placement
        )
