"""What a head that gives several levels at once says after a sequence's tokens and nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from block_heads import HIDDEN, VOCAB
from recurrent_rig import Drafted
from support import RowSampling, sampling_of
from torch import Tensor

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import Executor, SequenceRows
from pilotfish.model.heads.executor import HeadSetup
from pilotfish.model.heads.spec import HeadFiles

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


def executor_of(files: HeadFiles, *, eager: bool = False, num_slots: int = 400, vocab: int = VOCAB) -> Executor:
    return files.executor(HeadSetup(CPU, torch.float32, num_slots, eager, vocab))


def sequenced(length: int, slots: Iterable[int], seed: int) -> Drafted:
    return Drafted.random(length, iter(slots), seed, vocab=VOCAB, hidden=HIDDEN)


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
