"""Runs EAGLE's and MTP's heads: rows take the target's features, or the state that the row above them left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.core.features.features import Features
from pilotfish.core.scheduling.executor import SequenceRows
from pilotfish.model.batch import Batch
from pilotfish.model.heads.executors.head_executor import HeadExecutor, HeadLogits, HeadSetup, filled
from pilotfish.model.heads.modules.recurrent import RecurrentRows
from pilotfish.model.heads.spec import HeadFiles, RecurrentHead
from pilotfish.model.kv_planes import zeros


class RecurrentExecutor(HeadExecutor):
    """Beside KV a slot keeps the state of its row. A node comes in a later forward than its parent; where that one is
    computed again in the same forward, its state of before counts."""

    def __init__(self, files: HeadFiles, setup: HeadSetup) -> None:
        decoder = cast(RecurrentHead, files.spec.head).decoder
        self.rows = RecurrentRows(files, setup)
        super().__init__(files, setup, decoder.context, self.rows.vocab, self.rows.buckets)
        self.kv = self.rows.kv
        self.states = zeros((setup.num_slots + 1, decoder.hidden), setup.dtype, setup.device)

    def run(self, rows: Sequence[SequenceRows]) -> HeadLogits:
        batches = Batch.build(rows, self.buckets, self.num_slots)
        padded = sum(len(batch.input_ids) for batch in batches)
        entering = StatesBefore.of(rows, padded, self.feature_width, self.num_slots)
        logits, first = [], 0
        for batch in batches:
            end = first + len(batch.input_ids)
            logits.append(self._step(batch, entering.span(first, end)))
            first = end
        return HeadLogits(logits[0] if len(logits) == 1 else torch.cat(logits))

    def _step(self, batch: Batch, entering: StatesBefore) -> Tensor:
        """Logits, float32 [kept rows, draft vocab]."""
        step = self.rows(batch, self._states_before(entering))
        self.states.index_copy_(0, batch.metadata.row_slots.long().to(self._device), step.states)
        return cast(Tensor, self.rows.module.lm_head(step.outputs)[: batch.num_kept].float())

    def _states_before(self, entering: StatesBefore) -> Tensor:
        """[rows, hidden]"""
        states = self.states.index_select(0, torch.from_numpy(entering.slots).to(self._device))
        if len(entering.places):
            features = torch.from_numpy(entering.features).to(self._device, states.dtype)
            states.index_copy_(0, torch.from_numpy(entering.places).to(self._device), features)
        return states


@dataclass(frozen=True)
class StatesBefore:
    """What rows of a forward take for the state of the token before: what its slot keeps, or a feature."""

    slots: NDArray[np.int32]  # [rows], any where a feature takes its place, and of padding
    places: NDArray[np.int64]  # [known], rows that take a feature, ascending
    features: Features  # [known, width]

    @classmethod
    def of(cls, sequences: Sequence[SequenceRows], padded: int, width: int, scratch: int) -> StatesBefore:
        """Of sequences `without_first`, `padded` rows. Where the features of tokens begin unknown, the state of the
        token before goes on."""
        slots, row = np.full(padded, scratch, np.int32), 0
        places, features = [np.zeros(0, np.int64)], [np.zeros((0, width), np.float32)]
        for s in sequences:
            count, end = len(s.tokens), row + s.num_rows
            if count:
                told, unknown = filled(np.full((count, width), np.nan) if s.features is None else s.features)
                kept = unknown if s.start else 0  # nothing before: zeros
                slots[row : row + kept] = s.prefix_slots[s.start - 1]
                places.append(np.arange(row + kept, row + count))
                features.append(told[kept:])
            if len(s.nodes):
                slots[row + count : end] = _parents(s)
            row = end
        return cls(slots, np.concatenate(places), np.concatenate(features))

    def span(self, first: int, end: int) -> StatesBefore:
        """Of the rows [first, end)."""
        a, b = np.searchsorted(self.places, (first, end))
        return StatesBefore(self.slots[first:end], self.places[a:b] - first, self.features[a:b])


def _parents(rows: SequenceRows) -> NDArray[np.int32]:
    """Slots of the nodes' parents. [nodes]"""
    nodes = rows.nodes
    above = nodes.paths[np.arange(len(nodes)), np.maximum(nodes.depths - 2, 0)]
    return np.where(nodes.depths > 1, above, rows.prefix_slots[-1])
