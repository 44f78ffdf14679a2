"""Runs block drafters: one forward at a root gives every slot of its block; nodes below are products with the output
layer alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from pilotfish.core.features.features import Features
from pilotfish.core.scheduling.executor import SequenceRows
from pilotfish.model.batch import EXACT
from pilotfish.model.heads.executors.head_executor import DraftVocab, HeadExecutor, HeadLogits, HeadSetup, filled
from pilotfish.model.heads.executors.roots import KeptRow, RootSlots, kept_rows
from pilotfish.model.heads.modules.block import BlockDecoder, SlotHead
from pilotfish.model.heads.modules.parts import Parts, runs_packed
from pilotfish.model.heads.spec import BlockHead, HeadFiles


class BlockExecutor(HeadExecutor):
    """A committed token's row writes K and V of the position before it. A root's block is computed when its children,
    or those of a node below it, are wanted for the first time."""

    def __init__(self, files: HeadFiles, setup: HeadSetup) -> None:
        head = cast(BlockHead, files.spec.head)
        vocab = DraftVocab.of(files, len(files.tensors["embed_tokens.weight"]), setup)
        super().__init__(files, setup, head.decoder.context, vocab, EXACT)
        packed = runs_packed(setup.device, head.decoder.head_dim, eager=setup.eager)
        parts = Parts(files.tensors, setup.device, setup.dtype, packed=packed)
        self.decoder = BlockDecoder(head, parts, setup.num_slots, eager=setup.eager)
        first = 0 if head.anchored else 1
        self.deepest = head.block - first
        self._slots = RootSlots(self._compute, SlotHead(head, parts, vocab.words), head.block, first)
        self._tokens = np.zeros(setup.num_slots, np.int64)  # by slot, the committed one there

    def run(self, rows: Sequence[SequenceRows]) -> HeadLogits:
        committed = [s for s in rows if len(s.tokens)]
        if committed:
            self._add_context(committed)
        kept = [row for s in rows for row in kept_rows(s)]
        return self._slots.below(kept, self.padded) if kept else HeadLogits(torch.zeros(0, self.vocab.size))

    def _add_context(self, rows: Sequence[SequenceRows]) -> None:
        slots = np.concatenate([s.prefix_slots[s.start :] for s in rows]).astype(np.int64)
        positions = np.concatenate([np.arange(s.start, len(s.prefix_slots)) for s in rows])
        features = np.concatenate([self._features(s) for s in rows])
        self._tokens[slots] = np.concatenate([s.tokens for s in rows])
        self._slots.forget(slots.tolist())
        self.decoder.add_context(*(torch.from_numpy(x).to(self._device) for x in (features, positions, slots)))

    def _features(self, rows: SequenceRows) -> Features:
        if rows.features is None:
            return np.zeros((len(rows.tokens), self.feature_width), np.float32)
        return filled(rows.features)[0]

    def _compute(self, roots: Sequence[KeptRow]) -> Tensor:
        """[roots, block, hidden]"""
        return cast(Tensor, self.decoder(self._tokens[[row.root for row in roots]], [row.prefix for row in roots]))
