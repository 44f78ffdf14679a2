"""Runs P-EAGLE's heads: behind a root, in the forward of its own row, a chain of rows of the mask gives all levels.

position   0 ......... p - 1    p       p + 1 ... p + depth - 1
embedding  tokens               root    mask ....
state      features             its own the mask's
KV         in slots of tokens           in slots of the forward's chains: nobody sees it later
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from pilotfish.core.scheduling.executor import NO_NODES, NodeRows, SequenceRows
from pilotfish.model.batch import Batch
from pilotfish.model.heads.executors.head_executor import HeadExecutor, HeadLogits, HeadSetup
from pilotfish.model.heads.executors.roots import KeptRow, RootSlots, kept_rows
from pilotfish.model.heads.modules.block import BLOCKS
from pilotfish.model.heads.modules.parts import Parts
from pilotfish.model.heads.modules.recurrent import RecurrentRows
from pilotfish.model.heads.modules.tap import Project
from pilotfish.model.heads.spec import HeadFiles, MaskedHead


class MaskedExecutor(HeadExecutor):
    """Nodes have no rows: those of one depth have the same children. A committed token without a feature has the
    mask's state in its place."""

    def __init__(self, files: HeadFiles, setup: HeadSetup) -> None:
        head = cast(MaskedHead, files.spec.head)
        chains = BLOCKS * (head.depth - 1)
        self.rows = RecurrentRows(files, replace(setup, num_slots=setup.num_slots + chains))
        super().__init__(files, setup, head.decoder.context, self.rows.vocab, self.rows.buckets)
        self.deepest = head.depth
        self._slots = RootSlots(self._chains_below, self._logits, head.depth, 0)
        self._mask_token, self._own = head.mask_token, setup.num_slots + np.arange(chains, dtype=np.int32)
        parts = Parts(files.tensors, setup.device, setup.dtype, packed=self.rows.packed)
        project = Project.of(head.projection, parts, files.spec.target_hidden)
        self._mask = project(parts.tensor("mask_hidden").flatten(0, 1))  # [1, hidden]

    def run(self, rows: Sequence[SequenceRows]) -> HeadLogits:
        committed = [structs.replace(s, nodes=NO_NODES) for s in rows if len(s.tokens)]
        fresh = self._commit(committed) if committed else {}
        kept = [row for s in rows for row in kept_rows(s)]
        return self._slots.below(kept, self.padded, fresh) if kept else HeadLogits(torch.zeros(0, self.vocab.size))

    def _commit(self, rows: Sequence[SequenceRows]) -> dict[int, Tensor]:
        """States of the roots among them, by slot, [depth, hidden] each."""
        for s in rows:
            self._slots.forget(s.prefix_slots[s.start :].tolist())
        roots = [row for s in rows for row in kept_rows(s)]
        own, below = self._forward(rows, roots)
        states = torch.cat((own[:, None], below), dim=1)
        return {row.root: state for row, state in zip(roots, states.unbind(), strict=True)}

    def _chains_below(self, roots: Sequence[KeptRow]) -> Tensor:
        """Of roots whose rows were run before, which are asked for nodes below them alone. [roots, depth, hidden]"""
        below = self._forward((), roots)[1]
        return torch.cat((torch.full_like(below[:, :1], torch.nan), below), dim=1)

    def _forward(self, committed: Sequence[SequenceRows], roots: Sequence[KeptRow]) -> tuple[Tensor, Tensor]:
        """What `lm_head` gets of kept rows, [kept, hidden], and of the chains below roots, [roots, chain, hidden]."""
        forwards = [self._chains(roots[first : first + BLOCKS]) for first in range(0, max(len(roots), 1), BLOCKS)]
        forwards[0] = [*committed, *forwards[0]]
        outputs = torch.cat([self._outputs(rows) for rows in forwards])
        kept = sum(len(s.kept) for s in committed)
        return outputs[:kept], outputs[kept:].view(len(roots), self.deepest - 1, outputs.shape[1])

    def _chains(self, roots: Sequence[KeptRow]) -> list[SequenceRows]:
        """Each row of a chain is a node below the one above it."""
        length = self.deepest - 1
        tokens, depths = np.full(length, self._mask_token), np.arange(1, length + 1)
        own = self._own[: len(roots) * length].reshape(-1, 1, length)
        paths = np.broadcast_to(own, (len(roots), length, length))
        return [
            SequenceRows(len(root.prefix), (), root.prefix, NodeRows(tokens, depths, slots), ())
            for root, slots in zip(roots, paths, strict=True)
        ]

    def _outputs(self, rows: Sequence[SequenceRows]) -> Tensor:
        """[kept rows, hidden]"""
        batches = Batch.build(rows, self.buckets, self.num_slots + len(self._own))
        states, outputs, first = self._states_before(rows, sum(len(batch.input_ids) for batch in batches)), [], 0
        for batch in batches:
            end = first + len(batch.input_ids)
            outputs.append(self.rows(batch, states[first:end]).outputs[: batch.num_kept])
            first = end
        return torch.cat(outputs)

    def _states_before(self, rows: Sequence[SequenceRows], padded: int) -> Tensor:
        """Features where they are known, else the mask's. [padded, hidden]"""
        states, row = self._mask.repeat(padded, 1), 0
        for s in rows:
            if s.features is not None:
                known = np.flatnonzero(np.isfinite(s.features).all(axis=1))
                told = torch.from_numpy(s.features[known]).to(self._device, states.dtype)
                states[torch.from_numpy(row + known).to(self._device)] = told
            row += s.num_rows
        return states

    def _logits(self, states: Tensor, which: Tensor, _tokens: Tensor) -> HeadLogits:
        return HeadLogits(self.rows.module.lm_head(states).index_select(0, which).float())
