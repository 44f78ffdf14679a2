"""One forward over the rows of many sequences. Anything that runs on a device runs from here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pilotfish.core.tree import TokenTree
from pilotfish.model.attention import AttentionMetadata, KVPool
from pilotfish.model.buckets import EXACT, Buckets, bucket, library_buckets
from pilotfish.model.graphs import CudaRecorder, GraphCache
from pilotfish.model.loader import LoadedModel


@dataclass(frozen=True)
class NodeRows:
    """Tree nodes that get a row each, parents first. A node may have ancestors without a row here: those were computed
    earlier, and only their slots matter."""

    tokens: NDArray[np.integer]  # [n]
    depths: NDArray[np.integer]  # [n], from 1
    paths: NDArray[np.int32]  # [n, deepest], slots from below the root down to the node's own, then anything

    @classmethod
    def of(cls, tree: TokenTree, slots: Mapping[int, int], nodes: Sequence[int] | None = None) -> NodeRows:
        """`nodes` of `tree`, each after its ancestors, or all; `slots` of every node on a path to one of them."""
        nodes = list(tree.nodes()) if nodes is None else list(nodes)
        depths = np.array(tree.depths)[nodes]
        paths = np.zeros((len(nodes), int(depths.max(initial=0))), np.int32)
        parents, own = np.array(tree.parents), np.zeros(len(tree) + 1, np.int32)
        own[list(slots)] = list(slots.values())
        at = np.array(nodes, np.int64)
        for depth in range(paths.shape[1], 0, -1):  # from the deepest level up, all paths that reach it together
            reaching = depths >= depth
            paths[reaching, depth - 1] = own[at[reaching]]
            at[reaching] = parents[at[reaching]]
        return cls(np.array(tree.tokens, np.int64)[nodes], depths.astype(np.int64), paths)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def deepest(self) -> int:
        return int(self.paths.shape[1])

    @property
    def slots(self) -> NDArray[np.int32]:
        """The nodes' own. [n]"""
        own: NDArray[np.int32] = self.paths[np.arange(len(self)), self.depths - 1]
        return own


NO_NODES = NodeRows(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 0), np.int32))


@dataclass(frozen=True)
class SequenceRows:
    """One sequence's rows: committed tokens [start, start + len(tokens)), then nodes of a tree.

    position   0 ...... start ...... trunk - 1 | trunk ......
    slots      trunk_slots                     | nodes.paths
    rows                [ tokens ............. | nodes ..... ]
    """

    start: int
    tokens: Sequence[int]
    trunk_slots: NDArray[np.int32]  # [start + len(tokens)]
    nodes: NodeRows
    kept: Sequence[int]  # offsets in `tokens`, ascending, of rows whose logits are wanted; those of nodes always are

    @property
    def num_rows(self) -> int:
        return len(self.tokens) + len(self.nodes)


class Runner:
    """Runs a loaded model over a pool of KV slots.

    A row's logits do not depend on the rows that share its forward: with the C++ kernels by how they
    reduce, otherwise because rows are padded to a few fixed counts (`buckets`; bfloat16 on CUDA excepted).
    """

    def __init__(self, model: LoadedModel, num_slots: int, *, graphs: bool = True) -> None:
        """`graphs` False: a model that CUDA graphs can record is run without them."""
        shape = model.shape
        self.model = model
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
        """The forward itself; see `forward`."""
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
            metadata=batch.placement,
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
    placement: AttentionMetadata

    @classmethod
    def build(cls, sequences: Sequence[SequenceRows], buckets: Buckets, scratch: int) -> list[Batch]:
        """One batch, or several in order: a row's ancestors come before it, so their KV is there when it runs."""
        padded = buckets.pad_rows(sum(s.num_rows for s in sequences))
        ids, slots = np.zeros(padded, np.int64), np.full(padded, scratch, np.int32)
        positions, trunks = np.full(padded, -1, np.int32), np.zeros(padded, np.int32)
        owners = np.zeros(padded, np.int32)
        trunk_width = bucket(max(len(s.trunk_slots) for s in sequences), buckets.trunk)
        trunk_slots = np.zeros((bucket(len(sequences), buckets.sequences), trunk_width), np.int32)
        deepest = max(max(s.nodes.deepest for s in sequences), 1)
        path_slots = np.zeros((padded, bucket(deepest, buckets.path)), np.int32)
        keep: list[int] = []
        row = 0
        for i, s in enumerate(sequences):
            trunk, nodes = len(s.trunk_slots), s.nodes
            chunk, end = slice(row, row + len(s.tokens)), row + s.num_rows
            trunk_slots[i, :trunk] = s.trunk_slots
            ids[chunk], slots[chunk] = s.tokens, s.trunk_slots[s.start :]
            positions[chunk] = np.arange(s.start, trunk)
            owners[row:end], trunks[row:end] = i, trunk
            keep.extend(row + offset for offset in s.kept)
            if nodes.deepest:
                tree = slice(chunk.stop, end)
                ids[tree], slots[tree] = nodes.tokens, nodes.slots
                positions[tree] = trunk - 1 + nodes.depths
                path_slots[tree, : nodes.deepest] = nodes.paths
                keep.extend(range(chunk.stop, end))
            row = end
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
        placement = AttentionMetadata(slots, owners, positions, trunks, torch.from_numpy(trunk_slots), path_slots)
        return cls(ids, position_ids, torch.tensor(kept + padding, dtype=torch.int64), len(kept), placement)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.input_ids, self.position_ids, self.keep, *vars(self.placement).values())

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The same with each tensor changed."""
        input_ids, position_ids, keep, *placement = map(change, self.tensors())
        return Batch(input_ids, position_ids, keep, self.num_kept, AttentionMetadata(*placement))
