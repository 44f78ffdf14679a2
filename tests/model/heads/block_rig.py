"""Sequences of a head that are told features by hand, and what it gives after their tokens and nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from block_heads import HIDDEN, VOCAB
from support import RowSampling, sampling_of
from torch import Tensor

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import NO_NODES, Executor, NodeRows, SequenceRows
from pilotfish.model.heads.executor import HeadSetup
from pilotfish.model.heads.spec import HeadFiles

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


def executor_of(files: HeadFiles, *, eager: bool = False, num_slots: int = 400, vocab: int = VOCAB) -> Executor:
    return files.executor(HeadSetup(CPU, torch.float32, num_slots, eager, vocab))


@dataclass
class Sequenced:
    """A sequence with slots anywhere, and random features of all its tokens."""

    tokens: list[int]
    features: Tensor  # [more than tokens, hidden]
    slots: list[int]  # for its tokens and for nodes
    computed: int = 0

    @classmethod
    def random(cls, length: int, slots: Sequence[int], seed: int, hidden: int = HIDDEN) -> Sequenced:
        rng = np.random.default_rng(seed)
        features = torch.from_numpy(rng.normal(size=(length + 40, hidden)).astype(np.float32))
        return cls(rng.integers(0, VOCAB, length).tolist(), features, list(slots))

    def chunk(self, count: int | None = None, *, kept: bool = True) -> SequenceRows:
        """Rows of its next tokens, all that are left unless `count` is given; the last is kept."""
        start, end = self.computed, len(self.tokens) if count is None else self.computed + count
        self.computed = end
        told = torch.cat((torch.full_like(self.features[:1], torch.nan), self.features))[start:end].numpy()
        slots = np.array(self.slots[:end], np.int32)
        return SequenceRows(start, self.tokens[start:end], slots, NO_NODES, [end - start - 1] if kept else [], told)

    def nodes(self, paths: Sequence[Sequence[int]]) -> SequenceRows:
        """Rows of nodes, each the last token of a path below the root."""
        depths, prefix = np.array([len(path) for path in paths]), np.array(self.slots[: self.computed], np.int32)
        slots = np.zeros((len(paths), depths.max()), np.int32)
        for row, path in enumerate(paths):
            slots[row, : len(path)] = self.slots[self.computed : self.computed + len(path)]
        rows = NodeRows(np.array([path[-1] for path in paths]), depths, slots)
        return SequenceRows(self.computed, [], prefix, rows, [])

    @property
    def known(self) -> Tensor:
        """Features of all that comes before the root."""
        return self.features[: self.computed - 1]


def log_chances(executor: Executor, rows: Sequence[SequenceRows]) -> Tensor:
    """Of every token after each kept row, at temperature 0. float64 [kept rows, vocab]"""
    kept = sum(len(s.kept) + len(s.nodes) for s in rows)
    outcome = executor.execute(rows, sampling_of([RowSampling(GREEDY, 1, 7)] * kept, children=executor.vocab_size))
    told = np.full((kept, executor.vocab_size), -np.inf)
    if not kept:
        return torch.from_numpy(told)
    assert outcome.log_chances is not None
    for row in range(kept):
        told[row, outcome.tokens[row]] = outcome.log_chances[row]
    return torch.from_numpy(told)
