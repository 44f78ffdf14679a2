"""Sequences over the slots of a head, with features of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from recurrent_formulas import HIDDEN, VOCAB
from torch import Tensor

from pilotfish.core.scheduling.executor import NO_NODES, NodeRows, SequenceRows
from pilotfish.model.heads.executor import HeadExecutor, HeadSetup
from pilotfish.model.heads.spec import HeadFiles

SLOTS = 600


def executor_of(files: HeadFiles, *, eager: bool, vocab_size: int | None = None) -> HeadExecutor:
    return files.executor(HeadSetup(torch.device("cpu"), torch.float32, SLOTS, eager, vocab_size))


def free_slots(seed: int = 0) -> Iterator[int]:
    return iter(np.random.default_rng(seed).permutation(SLOTS).tolist())


@dataclass
class Drafted:
    tokens: list[int]
    features: NDArray[np.float32]  # [tokens - 1 or more, HIDDEN]
    free: Iterator[int]
    slots: list[int] = field(default_factory=list)
    node_slots: dict[tuple[int, ...], int] = field(default_factory=dict)  # by the tokens of a path

    @classmethod
    def random(
        cls, length: int, free: Iterator[int], seed: int = 0, *, vocab: int = VOCAB, hidden: int = HIDDEN
    ) -> Drafted:
        rng = np.random.default_rng(seed)
        features = rng.normal(size=(length + 16, hidden)).astype(np.float32)
        return cls(rng.integers(0, vocab, length).tolist(), features, free)

    def chunk(self, end: int | None = None) -> SequenceRows:
        """Tokens that have no row yet, up to `end`; the last is kept, unless it is the first."""
        start, end = len(self.slots), len(self.tokens) if end is None else end
        self.slots += [next(self.free) for _ in range(end - start)]
        unknown = np.full((1, self.features.shape[1]), np.nan, np.float32)
        before = np.concatenate([unknown, self.features])[start:end]
        slots = np.array(self.slots, np.int32)
        kept = [end - start - 1] if end > 1 else []
        return SequenceRows(start, self.tokens[start:end], slots, NO_NODES, kept, before)

    def level(self, paths: Sequence[tuple[int, ...]]) -> SequenceRows:
        """Nodes; where they had their rows before, again in the same slots."""
        for above in (path[:depth] for path in paths for depth in range(1, len(path) + 1)):
            if above not in self.node_slots:
                self.node_slots[above] = next(self.free)
        depths = np.array([len(path) for path in paths])
        slots = np.zeros((len(paths), max(depths)), np.int32)
        for row, path in enumerate(paths):
            slots[row, : len(path)] = [self.node_slots[path[: i + 1]] for i in range(len(path))]
        nodes = NodeRows(np.array([path[-1] for path in paths]), depths, slots)
        return SequenceRows(len(self.slots), [], np.array(self.slots, np.int32), nodes, ())

    def commit(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.node_slots.clear()

    @property
    def known(self) -> Tensor:
        return torch.from_numpy(self.features[: len(self.tokens) - 1])


def logits(executor: HeadExecutor, *rows: SequenceRows) -> Tensor:
    return executor.forward(rows).values
