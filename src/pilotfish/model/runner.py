"""One forward over the rows of many sequences. Anything that runs on a device runs from here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pilotfish.core.tree import TokenTree
from pilotfish.model.attention import KVPool, Placement
from pilotfish.model.buckets import EXACT, Buckets, bucket, library_buckets
from pilotfish.model.graphs import CudaRecorder, GraphCache
from pilotfish.model.loader import LoadedModel
from pilotfish.model.pacer import Pacer


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
    reduce, otherwise because rows are padded to a few fixed counts (`buckets`; bfloat16 on CUDA excepted).
    """

    def __init__(self, model: LoadedModel, num_slots: int, *, graphs: bool = True, pacer: Pacer | None = None) -> None:
        """`graphs` False: a model that CUDA graphs can record is run without them. `pacer` holds back each forward."""
        shape = model.shape
        self.model = model
        self.pacer = pacer
        self.num_slots = num_slots
        self.kv = KVPool.zeros(shape.layers, num_slots, shape.kv_heads, shape.head_dim, model.dtype, model.device)
        self.buckets = EXACT if model.native else library_buckets(model.device, model.dtype)
        self._forward: Callable[[Batch], torch.Tensor] = self._run_model
        if graphs and model.recordable:
            self._forward = GraphCache(self._run_model, CudaRecorder(), model.device)

    def forward(self, sequences: Sequence[SequenceRows]) -> torch.Tensor:
        """Write KV and return logits, float32 [kept rows, vocab]: of each sequence in order the committed rows
        in `kept`, then its nodes."""
        return self.run(self.prepare(sequences))

    def prepare(self, sequences: Sequence[SequenceRows]) -> list[Batch]:
        """The tensors of a forward, in host memory; of several forwards, where there are more rows than the
        largest bucket takes."""
        return Batch.build(sequences, self.buckets, self.num_slots)

    @torch.inference_mode()
    def run(self, batches: Sequence[Batch]) -> torch.Tensor:
        """The forward itself; see `forward`. Paced, it returns no earlier than the emulated device would."""
        if self.pacer is None:
            return self._run(batches)
        began = self.pacer.now()
        logits = self._run(batches)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        self.pacer.hold(began, sum(batch.num_rows for batch in batches))
        return logits

    def _run(self, batches: Sequence[Batch]) -> torch.Tensor:
        logits = [self._forward(batch)[: batch.num_kept].float() for batch in batches]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _run_model(self, batch: Batch) -> torch.Tensor:
        """Logits of the kept rows, padding included. [kept rows, vocab]."""
        batch = batch.map(lambda tensor: tensor.to(self.model.device))
        output = self.model.module(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            logits_to_keep=batch.keep,
            use_cache=False,
            placement=batch.placement,
            kv=self.kv,
        )
        return output.logits[0]  # type: ignore[no-any-return]

    def padded(self, rows: int) -> int:
        """Rows that forwards of `rows` run."""
        return self.buckets.pad_rows(rows)


@dataclass(frozen=True)
class Batch:
    """Sequences flattened into the tensors of one forward."""

    input_ids: torch.Tensor  # int64 [rows]
    position_ids: torch.Tensor  # int64 [rows]
    keep: torch.Tensor  # int64 [kept rows], padded like rows
    num_kept: int
    placement: Placement

    @classmethod
    def build(cls, sequences: Sequence[SequenceRows], buckets: Buckets, scratch: int) -> list[Batch]:
        """One batch, or several in order: a row's ancestors come before it, so their KV is there when it runs."""
        padded = buckets.pad_rows(sum(s.num_rows for s in sequences))
        ids, slots = np.zeros(padded, np.int64), np.full(padded, scratch, np.int32)
        positions, trunks = np.full(padded, -1, np.int32), np.zeros(padded, np.int32)
        owners = np.zeros(padded, np.int32)
        trunk_width = bucket(max(len(s.trunk_slots) for s in sequences), buckets.trunk)
        trunk_slots = np.zeros((bucket(len(sequences), buckets.sequences), trunk_width), np.int32)
        longest = max((s.tree.depths[node] for s in sequences for node in s.nodes), default=1)
        path_slots = np.zeros((padded, bucket(longest, buckets.path)), np.int32)
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
        rows = (ids, np.maximum(positions, 0).astype(np.int64), slots, owners, positions, trunks, path_slots)
        size = buckets.rows[-1] if buckets.rows else padded
        cuts = range(0, padded, size)
        return [cls._cut(rows, trunk_slots, keep, slice(cut, cut + size), buckets) for cut in cuts]

    @classmethod
    def _cut(
        cls,
        rows: Sequence[NDArray[np.generic]],
        trunk_slots: NDArray[np.int32],
        keep: list[int],
        cut: slice,
        buckets: Buckets,
    ) -> Batch:
        """The batch of some of the rows."""
        kept = [row - cut.start for row in keep if cut.start <= row < cut.stop]
        padding = [0] * (bucket(len(kept), buckets.rows) - len(kept))
        ids, position_ids, slots, owners, positions, trunks, path_slots = (torch.from_numpy(x[cut]) for x in rows)
        placement = Placement(slots, owners, positions, trunks, torch.from_numpy(trunk_slots), path_slots)
        return cls(ids, position_ids, torch.tensor(kept + padding, dtype=torch.int64), len(kept), placement)

    @property
    def num_rows(self) -> int:
        """Without padding."""
        return int((self.placement.row_positions >= 0).sum())

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.input_ids, self.position_ids, self.keep, *vars(self.placement).values())

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The same with each tensor changed."""
        input_ids, position_ids, keep, *placement = map(change, self.tensors())
        return Batch(input_ids, position_ids, keep, self.num_kept, Placement(*placement))
