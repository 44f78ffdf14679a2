"""Runs parallel heads: they keep the feature of the token before each root, and no KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from pilotfish.core.scheduling.executor import SequenceRows
from pilotfish.model.batch import EXACT
from pilotfish.model.heads.executors.head_executor import DraftVocab, HeadExecutor, HeadLogits, HeadSetup, filled
from pilotfish.model.heads.executors.roots import KeptRow, RootStates, kept_rows
from pilotfish.model.heads.modules.parallel import DepthLogits
from pilotfish.model.heads.modules.parts import Parts, runs_packed
from pilotfish.model.heads.spec import HeadFiles, ParallelHead

#: Roots whose features are kept. Nodes below others get no children.
ROOTS = 4096


class ParallelExecutor(HeadExecutor):
    """The head of index d gives the children of nodes at depth d."""

    def __init__(self, files: HeadFiles, setup: HeadSetup) -> None:
        head = cast(ParallelHead, files.spec.head)
        known = files.spec.draft_vocab if files.d2t is None else int(files.d2t.max()) + 1
        vocab = DraftVocab.of(files, known if setup.vocab_size is None else setup.vocab_size, setup)
        super().__init__(files, setup, files.spec.context, vocab, EXACT)
        self.deepest = head.heads
        parts = Parts(files.tensors, setup.device, setup.dtype, packed=runs_packed(setup.device, 0, eager=setup.eager))
        self.heads = [DepthLogits(head, parts, i, vocab.words) for i in range(head.heads)]
        self._features = RootStates(ROOTS)  # [hidden] each, of the token before the root
        self._dtype = setup.dtype

    def run(self, rows: Sequence[SequenceRows]) -> HeadLogits:
        for s in rows:
            self._keep_features(s)
        kept = [row for s in rows for row in kept_rows(s)]
        return self._below(kept) if kept else HeadLogits(torch.zeros(0, self.vocab.size))

    def _keep_features(self, rows: SequenceRows) -> None:
        """Of the roots among committed tokens."""
        slots = rows.prefix_slots[rows.start :].tolist()
        self._features.forget(slots)
        if not rows.kept:
            return
        assert rows.features is not None
        features, unknown = filled(rows.features)
        above = self._features.get(int(rows.prefix_slots[rows.start - 1])) if rows.start else None
        for offset in rows.kept:
            told = torch.from_numpy(features[offset]).to(self._device, self._dtype)
            self._features.put(slots[offset], above if offset < unknown and above is not None else told)

    def _below(self, kept: Sequence[KeptRow]) -> HeadLogits:
        """Each head runs once over the distinct roots that it is wanted for."""
        depths, roots = np.array([row.depth for row in kept]), np.array([row.root for row in kept])
        features = {root: self._features.get(root) for root in roots.tolist()}
        known = np.array([features[root] is not None for root in roots.tolist()]) & (depths < len(self.heads))
        values = torch.full((len(kept), self.vocab.size), torch.nan, device=self._device)
        for depth in np.unique(depths[known]).tolist():
            of_depth = np.flatnonzero(known & (depths == depth))
            distinct, which = np.unique(roots[of_depth], return_inverse=True)
            logits = self.heads[depth](torch.stack([cast(Tensor, features[root]) for root in distinct.tolist()]))
            on_device = (torch.from_numpy(x).to(self._device) for x in (of_depth, which))
            place, source = on_device
            values[place] = logits[source]
        return HeadLogits(values)
